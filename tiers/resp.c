/* GETs and SETs of many records on one socket: no Python a page, and its lock given away once for all of them.
 *
 * Built at first use (native.py). Blocking sockets, Linux; the socket's own limits (SO_RCVTIMEO) bound each wait.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

enum { SHORTEST_REPLY = 5, LONGEST_LINE = 32 };

/* Why a call ended. */
enum { ALL, OTHER_ANSWER, NO_LINE_END, CLOSED, BROKEN };

/* Fill `parts` from the socket. 0, or CLOSED or BROKEN (errno says how). */
static int fill(int fd, struct iovec *parts, int count) {
  while (count) {
    if (!parts->iov_len) {
      ++parts, --count;
      continue;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t got = recvmsg(fd, &message, MSG_WAITALL);
    if (got == 0) return CLOSED;
    if (got < 0) {
      if (errno == EINTR) continue;
      return BROKEN;
    }
    while (count && (size_t)got >= parts->iov_len) got -= (ssize_t)parts->iov_len, ++parts, --count;
    if (got) parts->iov_base = (uint8_t *)parts->iov_base + got, parts->iov_len -= (size_t)got;
  }
  return ALL;
}

/* kvt_records of records.c. */
typedef void check_t(uint64_t n, const uint8_t *keys, const uint64_t (*where)[2], const uint64_t (*sizes)[2],
                     const uint8_t *start, uint64_t payload, uint64_t trailer, int whole, uint8_t *good);

enum { NONE, FILLED, WHOLE };

/* Commands of a fetch: the i-th lies in `texts` between ends[i - 1] (0 for the first) and ends[i]. `asked` of them were
 * sent; those from `limit` on are not to be. `window`: how many answers may be under way. */
struct asking {
  const uint8_t *texts;
  const uint64_t *ends;
  uint64_t asked, limit, window;
};

/* Send more, half a window at a time, before answer `at` is read. ALL, or BROKEN. */
static int ask(int fd, struct asking *asking, uint64_t at) {
  if (asking->asked - at > asking->window / 2 || asking->asked >= asking->limit) return ALL;
  uint64_t stop = at + asking->window < asking->limit ? at + asking->window : asking->limit;
  uint64_t from = asking->asked ? asking->ends[asking->asked - 1] : 0, to = asking->ends[stop - 1];
  while (from < to) {
    ssize_t sent = send(fd, asking->texts + from, to - from, MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR) return BROKEN;
    if (sent > 0) from += (uint64_t)sent;
  }
  asking->asked = stop;
  return ALL;
}

/* Of CLOCK_MONOTONIC. */
static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Receive answers first ... first + n - 1 of the GETs of `asking`, whose records are where[i] (payload, trailer) of
 * sizes[i] bytes each, and ask for more meanwhile. ahead: room for 64 bytes, of which *held were read already; brought up
 * to date. got[i]: NONE, there is no value; FILLED, the record was filled; WHOLE, and `check` found it right for the i-th
 * key of 32 bytes, while it was in the core's cache (`check` may be null; `start` is for it). *answered: how many. Returns
 * ALL, which are fewer than n, but one at least, where `until` has passed; or OTHER_ANSWER: the next one is something else
 * (its beginning, or nothing, is in `ahead`); or why the socket is of no more use, with *code the errno of BROKEN.
 */
int kvt_resp_get(int fd, struct asking *asking, uint64_t first, uint64_t n, uint64_t until, const uint64_t (*where)[2],
                 const uint64_t (*sizes)[2], check_t *check, const uint8_t *keys, const uint8_t *start, uint8_t *ahead,
                 uint64_t *held, uint8_t *got, uint64_t *answered, int *code) {
  *code = 0;
  for (*answered = 0; *answered < n; ++*answered) {
    uint64_t at = *answered;
    if (at && now_ns() >= until) return ALL;
    if (ask(fd, asking, first + at)) return *code = errno, BROKEN;
    uint64_t left = asking->asked - first - at - 1; /* answers that are due behind this one */
    char line[LONGEST_LINE];
    uint64_t length = (uint64_t)snprintf(line, sizeof line, "$%llu\r\n", (unsigned long long)(sizes[at][0] + sizes[at][1]));
    /* A reply has 5 bytes at least; once those are the beginning of this line, all of it is sure to come. */
    while (*held < length) {
      if (memcmp(ahead, line, *held)) break;
      uint64_t want = (*held < SHORTEST_REPLY ? SHORTEST_REPLY : length) - *held;
      struct iovec more = {ahead + *held, want};
      int ended = fill(fd, &more, 1);
      if (ended) return *code = errno, ended;
      *held += want;
    }
    if (*held >= SHORTEST_REPLY && !memcmp(ahead, "$-1\r\n", SHORTEST_REPLY)) {
      *held -= SHORTEST_REPLY;
      memmove(ahead, ahead + SHORTEST_REPLY, *held);
      got[at] = NONE;
      continue;
    }
    if (*held < length || memcmp(ahead, line, length)) return OTHER_ANSWER;
    uint64_t early = *held - length; /* of the value */
    if (early > sizes[at][0]) return OTHER_ANSWER;
    uint8_t *payload = (uint8_t *)where[at][0];
    memcpy(payload, ahead + length, early);
    /* Behind the value, its line's end, and of the next line what is sure to come. */
    uint64_t next = SHORTEST_REPLY * left < length ? SHORTEST_REPLY * left : length;
    uint8_t tail[2 + LONGEST_LINE];
    struct iovec parts[] = {
        {payload + early, sizes[at][0] - early}, {(uint8_t *)where[at][1], sizes[at][1]}, {tail, 2 + next}};
    int ended = fill(fd, parts, 3);
    if (ended) return *code = errno, ended;
    if (tail[0] != '\r' || tail[1] != '\n') return NO_LINE_END;
    memcpy(ahead, tail + 2, next);
    *held = next;
    got[at] = FILLED;
    if (check) {
      uint8_t good;
      check(1, keys + 32 * at, where + at, sizes + at, start, 0, 0, 1, &good);
      if (good) got[at] = WHOLE;
    }
  }
  return ALL;
}

enum { PAGES_AT_ONCE = 256 }; /* three parts each: Linux takes 1,024 in one call */

/* Send n records where[i] (payload, trailer) of sizes[i] bytes, with text before, between and behind them (n > 0): text i is
 * what lies in `texts` between ends[i - 1] (0 for the first) and ends[i]. ALL, or BROKEN with *code the errno. */
int kvt_resp_put(int fd, uint64_t n, const uint8_t *texts, const uint64_t *ends, const uint64_t (*where)[2],
                 const uint64_t (*sizes)[2], int *code) {
  struct iovec parts[3 * PAGES_AT_ONCE + 1];
  *code = 0;
  for (uint64_t i = 0; i < n; i += PAGES_AT_ONCE) {
    uint64_t stop = i + PAGES_AT_ONCE < n ? i + PAGES_AT_ONCE : n;
    int count = 0, first = 0;
    for (uint64_t at = i; at < stop + (stop == n); ++at) { /* text n is the last */
      uint64_t start = at ? ends[at - 1] : 0;
      parts[count++] = (struct iovec){(void *)(texts + start), ends[at] - start};
      if (at == n) break;
      for (int part = 0; part < 2; ++part) parts[count++] = (struct iovec){(void *)where[at][part], sizes[at][part]};
    }
    while (first < count) {
      struct msghdr message = {.msg_iov = parts + first, .msg_iovlen = (size_t)(count - first)};
      ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
      if (sent < 0) {
        if (errno == EINTR) continue;
        return *code = errno, BROKEN;
      }
      while (first < count && (size_t)sent >= parts[first].iov_len) sent -= (ssize_t)parts[first++].iov_len;
      if (sent) parts[first].iov_base = (uint8_t *)parts[first].iov_base + sent, parts[first].iov_len -= (size_t)sent;
    }
  }
  return ALL;
}
