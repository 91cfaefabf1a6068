/* A thread that hands whole transfers to the driver without Python.
 *
 * kvtransfer builds this file at first use with the C compiler that Triton needs anyway. It links against nothing but
 * the C library: the driver's entry points come in as pointers. A job is an array of commands and the pages that they
 * are about; the worker runs jobs in the order in which they were given. It holds no Python object and never takes the
 * GIL, so neither a forward that is being launched nor a busy Python thread delays a transfer, or is delayed by it.
 */
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { NONE, WAIT, RECORD, PACE, PAGES, LAUNCH, CHUNK, COPY, ZERO };
enum { MADE, QUEUED, RUNNING, ENDED };
enum { NOT_READY = 600, OUT_OF_MEMORY = 2, INVALID_VALUE = 1 }; /* CUresult */
enum { NAP_NS = 20000, SPIN_NS = 100000, EXPECTED_NS = 1000000 };

typedef struct {
  uint64_t batch_version;
  void *batch; /* cuMemcpyBatchAsync of batch_version */
  int (*wait)(void *stream, void *event, unsigned flags);
  int (*record)(void *event, void *stream);
  int (*query)(void *event);
  int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                unsigned shared, void *stream, void **params, void **extra);
  int (*copy)(uint64_t dst, uint64_t src, size_t bytes, void *stream);
  int (*zero)(uint64_t dst, unsigned char value, size_t bytes, void *stream);
  int (*wait_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);
  int (*set_context)(void *context);
  int (*exchange_capture_mode)(int *mode);
  void *attributes, *any_order_attributes; /* CUmemcpyAttributes[1] */
  void *context;
  uint64_t word; /* where the GPU finds a 0, or 0: see copy_pages */
} driver_t;

typedef struct { uint64_t op, stream, a[6]; } command_t;

typedef struct { uint64_t host, ring, bytes; } piece_t; /* offsets within a page on both sides */

/* Pages ids[first .. first + count) between host slots and a packed ring slot, in pieces; neighbours are merged. */
typedef struct {
  const int64_t *ids;
  uint64_t first, count, host, host_stride, ring, ring_stride;
  const piece_t *pieces;
  uint64_t num_pieces;
  const uint64_t *cuts; /* ascending host addresses that no copy may span */
  uint64_t num_cuts, load, any_order, most; /* most: descriptors a driver call; 0: all at once */
} pages_t;

typedef struct job {
  const command_t *commands;
  uint64_t count;
  volatile uint32_t *progress;   /* chunks that have been submitted */
  const volatile uint32_t *stop; /* not 0: nothing more after the chunk under way */
  volatile uint64_t state, code, failed_at;
  struct job *next;
} job_t;

typedef struct {
  driver_t driver;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  job_t *first, *last;
  int closing;
  uint64_t expected_until; /* stay awake until then */
  uint64_t *dst, *src, room; /* descriptors of one batch */
  size_t *sizes;
} worker_t;

typedef int (*batch_12080_t)(void *, void *, void *, size_t, void *, void *, size_t, void *, void *);
typedef int (*batch_13000_t)(void *, void *, void *, size_t, void *, void *, size_t, void *);

static int reserve(worker_t *w, uint64_t count) {
  if (count <= w->room) return 0;
  free(w->dst), free(w->src), free(w->sizes);
  w->dst = malloc(count * sizeof *w->dst);
  w->src = malloc(count * sizeof *w->src);
  w->sizes = malloc(count * sizeof *w->sizes);
  w->room = w->dst && w->src && w->sizes ? count : 0;
  return w->room ? 0 : OUT_OF_MEMORY;
}

/* How many of the cuts lie at or below the address. */
static uint64_t part(const pages_t *p, uint64_t address) {
  uint64_t low = 0, high = p->num_cuts;
  while (low < high) {
    uint64_t middle = (low + high) / 2;
    if (p->cuts[middle] <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* Writes the descriptors of p to w's arrays; returns how many. */
static uint64_t describe(worker_t *w, const pages_t *p) {
  uint64_t n = 0, at = 0;
  for (uint64_t i = 0; i < p->count; ++i) {
    uint64_t host = p->host + (uint64_t)p->ids[p->first + i] * p->host_stride, ring = p->ring + i * p->ring_stride;
    for (uint64_t k = 0; k < p->num_pieces; ++k) {
      uint64_t h = host + p->pieces[k].host, r = ring + p->pieces[k].ring, bytes = p->pieces[k].bytes;
      uint64_t d = p->load ? r : h, s = p->load ? h : r, here = p->num_cuts ? part(p, h) : 0;
      if (n && w->dst[n - 1] + w->sizes[n - 1] == d && w->src[n - 1] + w->sizes[n - 1] == s && at == here) {
        w->sizes[n - 1] += bytes;
      } else {
        w->dst[n] = d, w->src[n] = s, w->sizes[n] = bytes;
        ++n;
      }
      at = here;
    }
  }
  return n;
}

/* The copy engine goes on with one stream while that has copies for it, and a small copy of others that once had to wait
 * for a kernel stays out until it has none. A wait, which has passed already, lets them in between two chunks. */
static int copy_pages(worker_t *w, const pages_t *p, void *stream) {
  const driver_t *d = &w->driver;
  size_t first = 0, failed = (size_t)-1;
  void *attributes = p->any_order ? d->any_order_attributes : d->attributes;
  int code = reserve(w, p->count * p->num_pieces);
  if (code) return code;
  uint64_t n = describe(w, p), step = p->most ? p->most : n;
  if (n && d->word) code = d->wait_value(stream, d->word, 0, 0);
  for (uint64_t at = 0; at < n && !code; at += step) {
    uint64_t count = n - at < step ? n - at : step;
    uint64_t *dst = w->dst + at, *src = w->src + at;
    size_t *sizes = w->sizes + at;
    if (d->batch_version == 12080)
      code = ((batch_12080_t)d->batch)(dst, src, sizes, count, attributes, &first, 1, &failed, stream);
    else
      code = ((batch_13000_t)d->batch)(dst, src, sizes, count, attributes, &first, 1, stream);
  }
  return code;
}

/* Until the event has passed, or the job is to stop: keeps the queues short, so that there is something to stop. */
static int pace(const driver_t *d, void *event, const job_t *job) {
  struct timespec nap = {0, NAP_NS};
  int code;
  while ((code = d->query(event)) == NOT_READY && !__atomic_load_n(job->stop, __ATOMIC_ACQUIRE)) nanosleep(&nap, NULL);
  return code == NOT_READY ? 0 : code;
}

static int run_command(worker_t *w, const command_t *c, job_t *job) {
  const driver_t *d = &w->driver;
  void *stream = (void *)c->stream;
  switch (c->op) {
    case NONE: return 0;
    case WAIT: return d->wait(stream, (void *)c->a[0], 0);
    case RECORD: return d->record((void *)c->a[0], stream);
    case PACE: return pace(d, (void *)c->a[0], job);
    case PAGES: return copy_pages(w, (const pages_t *)c->a[0], stream);
    case LAUNCH: {
      const uint32_t *s = (const uint32_t *)c->a[1]; /* grid x, y, z, block, shared */
      return d->launch((void *)c->a[0], s[0], s[1], s[2], s[3], 1, 1, s[4], stream, (void **)c->a[2], NULL);
    }
    case CHUNK: __atomic_store_n(job->progress, (uint32_t)c->a[0], __ATOMIC_RELEASE); return 0;
    case COPY: return d->copy(c->a[0], c->a[1], c->a[2], stream);
    case ZERO: return d->zero(c->a[0], 0, c->a[1], stream);
    default: return INVALID_VALUE;
  }
}

static void run(worker_t *w, job_t *job) {
  int between = 1; /* two chunks: only there may a job stop */
  for (uint64_t i = 0; i < job->count; ++i) {
    job->failed_at = i;
    if (between && __atomic_load_n(job->stop, __ATOMIC_ACQUIRE)) return;
    int code = run_command(w, &job->commands[i], job);
    if (code) {
      job->code = (uint64_t)code;
      return;
    }
    between = job->commands[i].op == CHUNK || job->commands[i].op == PACE;
  }
  job->failed_at = job->count;
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Under the lock, as a wait is: until there may be a job. Where one is expected the thread stays awake. */
static void await_job(worker_t *w) {
  if (now_ns() >= w->expected_until) {
    pthread_cond_wait(&w->changed, &w->lock);
    return;
  }
  pthread_mutex_unlock(&w->lock);
  while (!__atomic_load_n(&w->first, __ATOMIC_ACQUIRE) && !__atomic_load_n(&w->closing, __ATOMIC_ACQUIRE) &&
         now_ns() < __atomic_load_n(&w->expected_until, __ATOMIC_RELAXED))
    sched_yield(); /* it may have woken up on the core of the thread that will give the job */
  pthread_mutex_lock(&w->lock);
}

static void *work(void *argument) {
  worker_t *w = argument;
  int relaxed = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED: other threads' graph captures are not this thread's business */
  int code = w->driver.set_context(w->driver.context);
  if (!code) code = w->driver.exchange_capture_mode(&relaxed);
  pthread_mutex_lock(&w->lock);
  for (;;) {
    while (!w->first && !w->closing) await_job(w);
    job_t *job = w->first;
    if (!job) break;
    __atomic_store_n(&w->first, job->next, __ATOMIC_RELEASE);
    if (!w->first) w->last = NULL;
    __atomic_store_n(&w->expected_until, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&w->lock);
    __atomic_store_n(&job->state, RUNNING, __ATOMIC_RELAXED);
    if (code) job->code = (uint64_t)code;
    else run(w, job);
    __atomic_store_n(&job->state, ENDED, __ATOMIC_RELEASE); /* the last access: its owner may free it now */
    pthread_mutex_lock(&w->lock);
  }
  pthread_mutex_unlock(&w->lock);
  return NULL;
}

/* A worker with its thread, or NULL. */
void *kvt_open(const driver_t *driver) {
  worker_t *w = calloc(1, sizeof *w);
  if (!w) return NULL;
  w->driver = *driver;
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->changed, NULL);
  if (pthread_create(&w->thread, NULL, work, w)) {
    free(w);
    return NULL;
  }
  return w;
}

/* The job, and all that its commands point to, must live until its state is ENDED. */
void kvt_give(void *worker, job_t *job) {
  worker_t *w = worker;
  job->next = NULL;
  pthread_mutex_lock(&w->lock);
  __atomic_store_n(&job->state, QUEUED, __ATOMIC_RELAXED);
  if (w->last) w->last->next = job;
  else __atomic_store_n(&w->first, job, __ATOMIC_RELEASE);
  w->last = job;
  pthread_cond_signal(&w->changed);
  pthread_mutex_unlock(&w->lock);
}

/* A job will be given within EXPECTED_NS, most likely: the thread wakes up meanwhile. Or (0) none will after all. */
void kvt_expect(void *worker, int expected) {
  worker_t *w = worker;
  pthread_mutex_lock(&w->lock);
  __atomic_store_n(&w->expected_until, expected ? now_ns() + EXPECTED_NS : 0, __ATOMIC_RELAXED);
  if (expected) pthread_cond_signal(&w->changed);
  pthread_mutex_unlock(&w->lock);
}

/* Ends the thread after the jobs that it was given, and frees the worker. */
void kvt_close(void *worker) {
  worker_t *w = worker;
  pthread_mutex_lock(&w->lock);
  __atomic_store_n(&w->closing, 1, __ATOMIC_RELEASE);
  pthread_cond_signal(&w->changed);
  pthread_mutex_unlock(&w->lock);
  pthread_join(w->thread, NULL);
  pthread_mutex_destroy(&w->lock);
  pthread_cond_destroy(&w->changed);
  free(w->dst), free(w->src), free(w->sizes), free(w);
}

/* Holds its caller (with the GIL or without) until progress reaches `wanted`, the job has ended, or the time is up. A
 * chunk takes about as long to submit as a nap takes to end, and the caller has a forward to launch: it spins first. */
void kvt_await(const job_t *job, uint32_t wanted, uint64_t most_ns) {
  struct timespec nap = {0, NAP_NS};
  uint64_t begun = now_ns();
  while (__atomic_load_n(job->progress, __ATOMIC_ACQUIRE) < wanted &&
         __atomic_load_n(&job->state, __ATOMIC_ACQUIRE) != ENDED) {
    uint64_t passed = now_ns() - begun;
    if (passed >= most_ns) return;
    if (passed >= SPIN_NS) nanosleep(&nap, NULL);
  }
}
