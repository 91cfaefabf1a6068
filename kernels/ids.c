/* Passes over lists of ids, with Python's lock kept: a numpy operation on more than 500 elements gives it away, and
 * beside a thread that computes in Python each such gift costs up to 5 ms.
 *
 * Built at first use (native.py). Ids are int64, checked or produced by kvt_ids first.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GOOD, OUT_OF_RANGE, TWICE, NO_MEMORY };

/* Copies n ids (of `width` 4 or 8 signed bytes) to out. `distinct`: none may be there twice. Ids that go up are distinct; others are marked in `limit` bits. */
int kvt_ids(const void *ids, int width, uint64_t n, int64_t limit, int distinct, int64_t *out) {
  const int32_t *narrow = ids;
  const int64_t *wide = ids;
  int goes_up = 1;
  for (uint64_t i = 0; i < n; ++i) {
    int64_t id = width == 4 ? narrow[i] : wide[i];
    if (id < 0 || id >= limit) return OUT_OF_RANGE;
    if (i && id <= out[i - 1]) goes_up = 0;
    out[i] = id;
  }
  if (!distinct || goes_up) return GOOD;
  uint64_t *seen = calloc((uint64_t)limit / 64 + 1, sizeof *seen);
  if (!seen) return NO_MEMORY;
  int code = GOOD;
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t *word = seen + out[i] / 64, bit = (uint64_t)1 << (out[i] % 64);
    if (*word & bit) {
      code = TWICE;
      break;
    }
    *word |= bit;
  }
  free(seen);
  return code;
}

/* Runs in which a (and b, where given) go up by one: out = {runs, runs of at least `least`, ids in those}. */
void kvt_runs(const int64_t *a, const int64_t *b, uint64_t n, uint64_t least, uint64_t *out) {
  uint64_t length = 0;
  out[0] = out[1] = out[2] = 0;
  for (uint64_t i = 0; i < n; ++i) {
    ++length;
    if (i + 1 < n && a[i + 1] - a[i] == 1 && (!b || b[i + 1] - b[i] == 1)) continue;
    ++out[0];
    if (length >= least) ++out[1], out[2] += length;
    length = 0;
  }
}

/* Whether every id has a place in a table of `size`. */
int kvt_within(const int64_t *ids, uint64_t n, uint64_t size) {
  for (uint64_t i = 0; i < n; ++i)
    if ((uint64_t)ids[i] >= size) return 0;
  return 1;
}

/* The largest table[id]; 0 for no ids. */
int64_t kvt_most(const int64_t *table, const int64_t *ids, uint64_t n) {
  int64_t most = n ? table[ids[0]] : 0;
  for (uint64_t i = 1; i < n; ++i)
    if (table[ids[i]] > most) most = table[ids[i]];
  return most;
}

/* table[id] = value. */
void kvt_mark(int64_t *table, const int64_t *ids, uint64_t n, int64_t value) {
  for (uint64_t i = 0; i < n; ++i) table[ids[i]] = value;
}

/* Whether flags[id] is set for every id. */
int kvt_all_set(const uint8_t *flags, const int64_t *ids, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i)
    if (!flags[ids[i]]) return 0;
  return 1;
}

/* to[i] = ids[i]. */
void kvt_copy(int64_t *to, const int64_t *ids, uint64_t n) { memcpy(to, ids, n * sizeof *to); }
