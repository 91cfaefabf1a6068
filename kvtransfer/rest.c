/* Where the engine's thread rests: outside Python, until it is woken, or something that it watches is over.
 *
 * Each time a thread of Python wakes up it asks for the GIL, and beside a forward that is being launched and a thread
 * that computes each such turn may cost the forward 5 ms. So what there is to look at between the begin and the end of a
 * transfer is looked at here.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { ENDED = 3 };       /* state of a job of submitter.c */
enum { NOT_READY = 600 }; /* CUresult */
enum { NAP_NS = 200000 }; /* a chunk takes 600 us; the caller is told so much late at most */
static const uint64_t FOREVER = UINT64_MAX;

typedef struct watch {
  const volatile uint64_t *state, *code; /* of the job: ENDED when the worker is through, and not 0 if it failed */
  const volatile uint32_t *stop;         /* not 0: it does no more */
  void *event;                           /* its last one */
  uint64_t until_ns;                     /* of CLOCK_MONOTONIC: over then, whatever has passed */
  volatile uint64_t over;                /* off the list */
  struct watch *next;
} watch_t;

typedef struct {
  int (*query)(void *event);
  pthread_mutex_t lock;
  pthread_cond_t changed;
  watch_t *first; /* anybody adds to it; only the thread that rests takes off */
  int woken;
} rest_t;

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int is_over(const rest_t *r, const watch_t *w, uint64_t now) {
  if (now >= w->until_ns) return 1;
  if (__atomic_load_n(w->state, __ATOMIC_ACQUIRE) != ENDED) return 0;
  return *w->code || *w->stop || r->query(w->event) != NOT_READY;
}

static void take_off(rest_t *r, watch_t *w) {
  pthread_mutex_lock(&r->lock);
  for (watch_t **at = &r->first; *at; at = &(*at)->next)
    if (*at == w) {
      *at = w->next;
      break;
    }
  pthread_mutex_unlock(&r->lock);
  __atomic_store_n(&w->over, 1, __ATOMIC_RELEASE);
}

/* How many were over. The driver is asked without the lock: it may be busy, and who wakes this thread must not wait. */
static int look(rest_t *r) {
  int found = 0;
  pthread_mutex_lock(&r->lock);
  watch_t *w = r->first;
  pthread_mutex_unlock(&r->lock);
  for (uint64_t now = now_ns(); w;) {
    watch_t *next = w->next;
    if (is_over(r, w, now)) take_off(r, w), ++found;
    w = next;
  }
  return found;
}

void *kvt_rest_open(void *query) {
  rest_t *r = calloc(1, sizeof *r);
  pthread_condattr_t clock;
  if (!r) return NULL;
  r->query = (int (*)(void *))query;
  pthread_mutex_init(&r->lock, NULL);
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_cond_init(&r->changed, &clock);
  pthread_condattr_destroy(&clock);
  return r;
}

/* Nobody rests there any more. */
void kvt_rest_close(void *rest) {
  rest_t *r = rest;
  pthread_mutex_destroy(&r->lock);
  pthread_cond_destroy(&r->changed);
  free(r);
}

void kvt_rest_wake(void *rest) {
  rest_t *r = rest;
  pthread_mutex_lock(&r->lock);
  r->woken = 1;
  pthread_cond_signal(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

/* The watch, and all that it points to, must live until it is over or forgotten. */
void kvt_rest_watch(void *rest, watch_t *w) {
  rest_t *r = rest;
  pthread_mutex_lock(&r->lock);
  w->next = r->first;
  r->first = w;
  pthread_cond_signal(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

/* By the thread that rests. */
void kvt_rest_forget(void *rest, watch_t *w) { take_off(rest, w); }

/* Holds its caller (without the GIL) until somebody woke it, since it last returned, a watch is over, or so long. */
void kvt_rest(void *rest, uint64_t most_ns) {
  rest_t *r = rest;
  uint64_t begun = now_ns(), until = most_ns < FOREVER - begun ? begun + most_ns : FOREVER;
  pthread_mutex_lock(&r->lock);
  while (!r->woken) {
    pthread_mutex_unlock(&r->lock);
    int found = look(r);
    pthread_mutex_lock(&r->lock);
    uint64_t now = now_ns(), next = r->first && now + NAP_NS < until ? now + NAP_NS : until;
    if (found || now >= until) break;
    if (r->woken) break;
    if (next == FOREVER) {
      pthread_cond_wait(&r->changed, &r->lock);
    } else {
      struct timespec at = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)};
      pthread_cond_timedwait(&r->changed, &r->lock, &at);
    }
  }
  r->woken = 0;
  pthread_mutex_unlock(&r->lock);
}
