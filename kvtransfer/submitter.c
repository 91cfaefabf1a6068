/* The whole of a transfer in one call that needs no Python: copy batches, waits, records, kernel launches.
 *
 * kvtransfer builds this file at first use with the C compiler that Triton needs anyway. It links against nothing:
 * the driver's entry points come in as pointers. One thread runs a list of commands at a time; `progress` counts
 * the chunks whose events have been recorded, and `stop` ends the list between two chunks.
 */
#include <stddef.h>
#include <stdint.h>

enum { WAIT, RECORD, BATCH, LAUNCH, COPY_2D, CHUNK };

typedef struct {
  uint64_t batch_version;
  void *batch; /* cuMemcpyBatchAsync of batch_version */
  int (*wait)(void *stream, void *event, unsigned flags);
  int (*record)(void *event, void *stream);
  int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                unsigned shared, void *stream, void **params, void **extra);
  int (*copy_2d)(const void *copy, void *stream);
  void *attributes, *any_order_attributes; /* CUmemcpyAttributes[1] */
} driver_t;

typedef struct {
  uint64_t op;
  uint64_t stream;
  uint64_t a[6];
} command_t;

typedef int (*batch_12080_t)(void *, void *, void *, size_t, void *, void *, size_t, void *, void *);
typedef int (*batch_13000_t)(void *, void *, void *, size_t, void *, void *, size_t, void *);

static int batch(const driver_t *d, const command_t *c) {
  size_t first = 0, failed = (size_t)-1;
  void *attributes = c->a[4] ? d->any_order_attributes : d->attributes;
  void *dst = (void *)c->a[0], *src = (void *)c->a[1], *sizes = (void *)c->a[2], *stream = (void *)c->stream;
  if (c->a[3] == 0) return 0;
  if (d->batch_version == 12080)
    return ((batch_12080_t)d->batch)(dst, src, sizes, c->a[3], attributes, &first, 1, &failed, stream);
  return ((batch_13000_t)d->batch)(dst, src, sizes, c->a[3], attributes, &first, 1, stream);
}

/* Runs commands[0..n). Returns 0, or the CUresult of the first that failed, whose index goes to *failed_at. */
int kvt_submit(const driver_t *d, const command_t *commands, size_t n, volatile uint32_t *progress,
               const volatile uint32_t *stop, uint64_t *failed_at) {
  for (size_t i = 0; i < n; ++i) {
    const command_t *c = &commands[i];
    void *stream = (void *)c->stream;
    int code = 0;
    switch (c->op) {
      case WAIT: code = d->wait(stream, (void *)c->a[0], 0); break;
      case RECORD: code = d->record((void *)c->a[0], stream); break;
      case BATCH: code = batch(d, c); break;
      case LAUNCH: {
        const uint32_t *s = (const uint32_t *)c->a[1]; /* grid x, y, z, block, shared */
        code = d->launch((void *)c->a[0], s[0], s[1], s[2], s[3], 1, 1, s[4], stream, (void **)c->a[2], NULL);
        break;
      }
      case COPY_2D: code = d->copy_2d((const void *)c->a[0], stream); break;
      case CHUNK:
        __atomic_store_n(progress, (uint32_t)c->a[0], __ATOMIC_RELEASE);
        if (__atomic_load_n(stop, __ATOMIC_ACQUIRE)) { *failed_at = i; return 0; }
        break;
      default: code = 1;
    }
    if (code) { *failed_at = i; return code; }
  }
  *failed_at = n;
  return 0;
}
