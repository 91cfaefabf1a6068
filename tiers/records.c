/* Checks of many records in one call: is each sealed for its key, is its payload what the trailer says (record.py has
 * the format). Says "good" or "look closer", never why: Python explains what is not good.
 *
 * Built at first use (native.py). Little-endian machines.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* --- XXH3, 64 bits, seed 0, for more than 240 bytes: its published specification, without the other lengths. */

enum { STRIPE = 64, LANES = 8, SECRET = 192, STRIPES = (SECRET - STRIPE) / 8, SHORTEST = 241 };
#define P32_1 0x9E3779B1ull
#define P32_2 0x85EBCA77ull
#define P32_3 0xC2B2AE3Dull
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define P64_5 0x27D4EB2F165667C5ull

static const uint8_t secret[SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static uint64_t word(const void *at) {
  uint64_t out;
  memcpy(&out, at, 8);
  return out;
}

static uint32_t half(const void *at) {
  uint32_t out;
  memcpy(&out, at, 4);
  return out;
}

/* Take in `count` stripes of `data`; then, if `whole`, stir: `count` was a block's. */
typedef void absorb_t(uint64_t *acc, const uint8_t *data, const uint8_t *keys, uint64_t count, int whole);

static void absorb_plain(uint64_t *acc, const uint8_t *data, const uint8_t *keys, uint64_t count, int whole) {
  for (; count; --count, data += STRIPE, keys += 8)
    for (int i = 0; i < LANES; ++i) {
      uint64_t value = word(data + 8 * i), mixed = value ^ word(keys + 8 * i);
      acc[i ^ 1] += value;
      acc[i] += (mixed & 0xffffffff) * (mixed >> 32);
    }
  for (int i = 0; whole && i < LANES; ++i)
    acc[i] = (acc[i] ^ acc[i] >> 47 ^ word(secret + SECRET - STRIPE + 8 * i)) * P32_1;
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx2"))) static inline

WIDE __m256i load(const void *at) { return _mm256_loadu_si256(at); }

WIDE __m256i taken(__m256i acc, const uint8_t *data, const uint8_t *keys) {
  __m256i value = load(data), mixed = _mm256_xor_si256(value, load(keys));
  __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
  return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(value, 0x4e))); /* neighbours change places */
}

WIDE __m256i stirred(__m256i acc, const uint8_t *keys) {
  __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), load(keys));
  __m256i prime = _mm256_set1_epi64x(P32_1), high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"))) static void absorb_wide(uint64_t *acc, const uint8_t *data, const uint8_t *keys,
                                                        uint64_t count, int whole) {
  __m256i one = load(acc), two = load(acc + 4);
  for (; count; --count, data += STRIPE, keys += 8) {
    __builtin_prefetch(data + 8 * STRIPE);
    one = taken(one, data, keys), two = taken(two, data + 32, keys + 32);
  }
  if (whole) one = stirred(one, secret + SECRET - STRIPE), two = stirred(two, secret + SECRET - STRIPE + 32);
  _mm256_storeu_si256((void *)acc, one);
  _mm256_storeu_si256((void *)(acc + 4), two);
}
#endif

/* xxh3_64 of `size` bytes: more than 240. */
static uint64_t xxh3(const uint8_t *data, uint64_t size) {
  absorb_t *absorb = absorb_plain;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) absorb = absorb_wide;
#endif
  uint64_t acc[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
  uint64_t blocks = (size - 1) / (STRIPES * STRIPE), rest = size - 1 - blocks * STRIPES * STRIPE;
  const uint8_t *at = data;
  for (; blocks; --blocks, at += STRIPES * STRIPE) absorb(acc, at, secret, STRIPES, 1);
  absorb(acc, at, secret, rest / STRIPE, 0);
  absorb(acc, data + size - STRIPE, secret + SECRET - STRIPE - 7, 1, 0);
  uint64_t out = size * P64_1;
  for (int i = 0; i < LANES; i += 2) {
    unsigned __int128 product =
        (unsigned __int128)(acc[i] ^ word(secret + 11 + 8 * i)) * (acc[i + 1] ^ word(secret + 19 + 8 * i));
    out += (uint64_t)product ^ (uint64_t)(product >> 64);
  }
  out = (out ^ out >> 37) * 0x165667919E3779F9ull;
  return out ^ out >> 32;
}

/* --- records */

enum { BLOCK = 4096, MOST = 16 * BLOCK, KEY_AT = 32, KEY = 32, PAYLOAD_AT = 120, OWN_AT = 248, HAS_CHECKSUM = 2 };

/* Whether the trailer is sealed for `key` and fits a payload of `room` bytes; then what it says of the payload. */
static int sealed(const uint8_t *trailer, uint64_t size, uint64_t room, const uint8_t *key, const uint8_t *start,
                  uint64_t *payload, uint64_t *checksum) {
  uint8_t image[MOST]; /* what is checked is what is read, whoever writes meanwhile */
  if (size < BLOCK || size > MOST) return 0;
  memcpy(image, trailer, size);
  *payload = word(image + PAYLOAD_AT), *checksum = word(image + PAYLOAD_AT + 8);
  uint64_t own = word(image + OWN_AT);
  if (memcmp(image, start, 12) || half(image + 12) != size || !(half(image + 16) & HAS_CHECKSUM) ||
      memcmp(image + KEY_AT, key, KEY) || *payload > room || room - *payload >= BLOCK)
    return 0;
  memset(image + OWN_AT, 0, 8);
  return xxh3(image, size) == own;
}

/* good[i]: whether record i (payload and trailer at where[i], of sizes[i] bytes) is sealed for the i-th key of 32 bytes
 * and, if `whole`, its payload has the checksum that the trailer names. `start`: the 12 bytes that a trailer of this
 * version begins with; `payload` and `trailer`: the lengths that are asked for, 0 for any. 0 says too: too short or too
 * long for this code. */
void kvt_records(uint64_t n, const uint8_t *keys, const uint64_t (*where)[2], const uint64_t (*sizes)[2],
                 const uint8_t *start, uint64_t payload, uint64_t trailer, int whole, uint8_t *good) {
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t size, checksum;
    good[i] = 0;
    if (trailer && sizes[i][1] != trailer) continue;
    if (!sealed((const uint8_t *)where[i][1], sizes[i][1], sizes[i][0], keys + KEY * i, start, &size, &checksum)) continue;
    if (payload && size != payload) continue;
    good[i] = !whole || (size >= SHORTEST && xxh3((const uint8_t *)where[i][0], size) == checksum);
  }
}

/* --- records as one piece */

/* Copy n records to `to`, each payload and trailer behind it, one every `stride` bytes. */
void kvt_pack(uint64_t n, const uint64_t (*where)[2], const uint64_t (*sizes)[2], uint8_t *to, uint64_t stride) {
  for (uint64_t i = 0; i < n; ++i) {
    memcpy(to + i * stride, (const void *)where[i][0], sizes[i][0]);
    memcpy(to + i * stride + sizes[i][0], (const void *)where[i][1], sizes[i][1]);
  }
}

/* Copy n records from where they lie as one piece, from[i], to where[i]; then good[i] as kvt_records says it of the copy. */
void kvt_unpack(uint64_t n, const uint64_t *from, const uint8_t *keys, const uint64_t (*where)[2],
                const uint64_t (*sizes)[2], const uint8_t *start, uint8_t *good) {
  for (uint64_t i = 0; i < n; ++i) {
    const uint8_t *record = (const uint8_t *)from[i];
    memcpy((void *)where[i][0], record, sizes[i][0]);
    memcpy((void *)where[i][1], record + sizes[i][0], sizes[i][1]);
    kvt_records(1, keys + KEY * i, where + i, sizes + i, start, 0, 0, 1, good + i);
  }
}
