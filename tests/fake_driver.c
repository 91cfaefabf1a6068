/* A CUDA driver for tests without a GPU: it moves what it is asked to at once, and says what it was asked. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct { int type; int id; } Location;
typedef struct { int order; Location src, dst; unsigned flags; } Attributes;
typedef struct {
  size_t src_x, src_y; int src_type; const void *src_host; uint64_t src_device; void *src_array; size_t src_pitch;
  size_t dst_x, dst_y; int dst_type; void *dst_host; uint64_t dst_device; void *dst_array; size_t dst_pitch;
  size_t width, height;
} Copy2D;

int fake_version, fake_init_code, fake_code, fake_sleep_us, fake_context_code;
long long fake_fail_index;
/* Events, numbered from 1: the context that each was made in, the stream that it was last recorded on (+ 1). */
uint64_t event_context[256], event_stream[256], event_flags[256];
int events_made, events_destroyed, fake_query_code;
char fake_missing[64], fake_asked[8192];
int seen_abi, seen_order, seen_flags, seen_hints, seen_calls;
uint64_t seen_num_attrs, seen_first, seen_stream, seen_context, seen_count, seen_address, seen_value, seen_mem_flags;
static _Thread_local uint64_t stack[8];
static _Thread_local int depth;

size_t attributes_size(void) { return sizeof(Attributes); }
size_t attributes_flags(void) { return offsetof(Attributes, flags); }
size_t copy2d_size(void) { return sizeof(Copy2D); }
size_t copy2d_src_device(void) { return offsetof(Copy2D, src_device); }
size_t copy2d_dst_device(void) { return offsetof(Copy2D, dst_device); }
size_t copy2d_height(void) { return offsetof(Copy2D, height); }

void fake_reset(void) {
  fake_version = 13000; fake_init_code = fake_code = fake_sleep_us = fake_context_code = 0; fake_fail_index = -1;
  fake_missing[0] = fake_asked[0] = 0; seen_abi = seen_order = seen_flags = seen_hints = seen_calls = 0;
  seen_num_attrs = seen_first = seen_stream = seen_context = seen_count = 0;
  seen_address = seen_value = seen_mem_flags = 0; events_made = events_destroyed = fake_query_code = 0;
}
int fake_depth(void) { return depth; }

int cuInit(unsigned flags) { return flags ? 1 : fake_init_code; }
static int error_name(int code, const char **text) {
  if (code == 1) { *text = "CUDA_ERROR_INVALID_VALUE"; return 0; }
  *text = NULL; return 1;
}
static int error_string(int code, const char **text) {
  if (code == 1) { *text = "invalid argument"; return 0; }
  *text = NULL; return 1;
}
static int ctx_current(uint64_t *ctx) { *ctx = depth ? stack[depth - 1] : 0; return 0; }
static int ctx_push(uint64_t ctx) { stack[depth++] = ctx; return 0; }
static int ctx_set(uint64_t ctx) { stack[depth ? depth - 1 : depth++] = ctx; return 0; }
static int ctx_pop(uint64_t *ctx) { if (!depth) return 201; *ctx = stack[--depth]; return 0; }
/* 0x1000 and 0x3000 (capturing) are streams of context 0xa, 0x2000 of context 0xb. */
static int stream_ctx(uint64_t stream, uint64_t *ctx) { *ctx = stream == 0x2000 ? 0xb : 0xa; return fake_context_code; }
static int is_capturing(uint64_t stream, int *status) { *status = stream == 0x3000; return 0; }

static int move(void **dst, void **src, size_t *sizes, size_t n, Attributes *a, size_t *first, size_t num, size_t *fail,
                uint64_t stream) {
  ctx_current(&seen_context);
  seen_calls++; seen_count = n; seen_order = a->order; seen_flags = (int)a->flags; seen_num_attrs = num;
  seen_hints = a->src.type | a->src.id | a->dst.type | a->dst.id; seen_first = first[0]; seen_stream = stream;
  if (fake_sleep_us) usleep(fake_sleep_us);
  if (fake_code) { if (fail) *fail = (size_t)fake_fail_index; return fake_code; }
  for (size_t i = 0; i < n; ++i) memcpy(dst[i], src[i], sizes[i]);
  return 0;
}
static int batch_12080(void **d, void **s, size_t *z, size_t n, Attributes *a, size_t *f, size_t num, size_t *fail,
                       uint64_t stream) { seen_abi = 12080; return move(d, s, z, n, a, f, num, fail, stream); }
static int batch_13000(void **d, void **s, size_t *z, size_t n, Attributes *a, size_t *f, size_t num,
                       uint64_t stream) { seen_abi = 13000; return move(d, s, z, n, a, f, num, NULL, stream); }
static int copy_2d(const Copy2D *c, uint64_t stream) {
  seen_stream = stream; seen_calls++;
  if (fake_code) return fake_code;
  if (c->src_type != 4 || c->dst_type != 4 || c->src_x | c->src_y | c->dst_x | c->dst_y) return 1;
  for (size_t i = 0; i < c->height; ++i)
    memcpy((char *)c->dst_device + i * c->dst_pitch, (char *)c->src_device + i * c->src_pitch, c->width);
  return 0;
}
static int wait_32(uint64_t stream, uint64_t address, uint32_t value, unsigned flags) {
  seen_stream = stream; seen_address = address; seen_value = value; seen_mem_flags = flags; return fake_code;
}
static int write_32(uint64_t stream, uint64_t address, uint32_t value, unsigned flags) {
  seen_stream = stream; seen_address = address; seen_value = value; seen_mem_flags = flags;
  if (!fake_code) *(uint32_t *)address = value;
  return fake_code;
}
static int device_pointer(uint64_t *alias, uint64_t host, unsigned flags) {
  *alias = host + 0x100000; return flags ? 1 : fake_code;
}
int seen_capture_mode = -1;
static int exchange_mode(int *mode) { int was = 0; seen_capture_mode = *mode; *mode = was; return fake_code; }
static int for_the_submitter(void) { return 1; }

static int event_create(uint64_t *event, unsigned flags) {
  if (fake_sleep_us) usleep(fake_sleep_us);
  if (fake_code) return fake_code;
  if (!depth) return 201;
  *event = (uint64_t)++events_made;
  event_context[*event] = stack[depth - 1]; event_stream[*event] = 0; event_flags[*event] = flags;
  return 0;
}
static int event_destroy(uint64_t event) {
  if (fake_sleep_us) usleep(fake_sleep_us);
  if (!depth) return 201;
  event_context[event] = 0; events_destroyed++;
  return fake_code;
}
static int event_record(uint64_t event, uint64_t stream) {
  uint64_t context = depth ? stack[depth - 1] : 0;
  if (fake_sleep_us) usleep(fake_sleep_us);
  if (stream > 2) stream_ctx(stream, &context);
  event_stream[event] = stream + 1;
  return event_context[event] == context ? fake_code : 400;
}
static int event_query(uint64_t event) {
  if (fake_sleep_us) usleep(fake_sleep_us);
  return !depth ? 201 : event_context[event] == stack[depth - 1] ? fake_query_code : 400;
}
static int stream_wait_event(uint64_t stream, uint64_t event, unsigned flags) {
  if (fake_sleep_us) usleep(fake_sleep_us);
  seen_stream = stream; seen_value = event; seen_flags = (int)flags;
  return event_context[event] ? fake_code : 400; /* of any context, other than for a record */
}
static int driver_version(int *version) { *version = fake_version; return 0; }

int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status);
static const struct { const char *name; int since; void *address; } table[] = {
  {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
  {"cuGetErrorName", 6000, error_name}, {"cuGetErrorString", 6000, error_string}, {"cuInit", 2000, cuInit},
  {"cuDriverGetVersion", 2020, driver_version},
  {"cuCtxGetCurrent", 4000, ctx_current}, {"cuCtxPushCurrent", 4000, ctx_push}, {"cuCtxPopCurrent", 4000, ctx_pop},
  {"cuStreamGetCtx", 9020, stream_ctx}, {"cuStreamIsCapturing", 10000, is_capturing},
  {"cuMemcpyBatchAsync", 13000, batch_13000}, {"cuMemcpyBatchAsync", 12080, batch_12080},
  {"cuMemcpy2DAsync", 3020, copy_2d}, {"cuStreamWaitValue32", 11070, wait_32},
  {"cuStreamWriteValue32", 11070, write_32}, {"cuMemHostGetDevicePointer", 3020, device_pointer},
  {"cuThreadExchangeStreamCaptureMode", 10010, exchange_mode}, {"cuStreamWaitEvent", 3020, stream_wait_event},
  {"cuCtxSetCurrent", 4000, ctx_set}, {"cuEventQuery", 2000, event_query},
  {"cuMemcpyAsync", 4000, for_the_submitter}, {"cuMemsetD8Async", 3020, for_the_submitter},
  {"cuEventRecord", 2000, event_record}, {"cuEventCreate", 2000, event_create},
  {"cuEventDestroy", 4000, event_destroy}, {"cuLaunchKernel", 4000, for_the_submitter},
};
int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status) {
  size_t used = strlen(fake_asked);
  if (used + 64 < sizeof fake_asked) snprintf(fake_asked + used, 64, "%s:%d\n", name, version);
  *address = NULL;
  if (flags || version > fake_version) return 1;
  if (status) *status = 1;
  if (!strcmp(name, fake_missing)) return 0;
  for (size_t i = 0; i < sizeof table / sizeof *table; ++i)
    if (!strcmp(name, table[i].name) && version >= table[i].since) {
      *address = table[i].address;
      if (status) *status = 0;
      return 0;
    }
  return 0;
}
int cuGetProcAddress(const char *name, void **address, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, address, version, flags, NULL);
}
