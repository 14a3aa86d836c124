// A test double for the clock on the wall, preloaded into the ranks: it jumps when it is told to. The monotonic clock, by
// which everything should wait, goes on as it is.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>

static atomic_long ahead;  // seconds

void double_jump(long seconds) { atomic_fetch_add(&ahead, seconds); }

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*next)(clockid_t, struct timespec*);
  if (next == NULL) next = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int result = next(clock, now);
  if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += atomic_load(&ahead);
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec exact;
  const int result = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return result;
}

time_t time(time_t* seconds) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (seconds != NULL) *seconds = exact.tv_sec;
  return exact.tv_sec;
}
