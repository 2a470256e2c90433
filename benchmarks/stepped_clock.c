/* A wall clock that can be stepped for some processes only.

   Preloaded into the processes of a run (LD_PRELOAD). The file in ALIGNER_STEPPED_CLOCK contains the
   offset of the pretended wall clock in nanoseconds, as a 64-bit integer; it may change at any time.
   As in the kernel, a step forward ends waits whose deadline has passed by it. CLOCK_MONOTONIC is not
   changed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t second = 1000000000;
static const int64_t look = 20000000; /* how often a wait looks whether the clock was stepped */
static const int64_t since_boot_at_most = 1000000000LL * 1000000000LL;
static volatile int64_t no_offset = 0, *offset = &no_offset;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_sem_timedwait)(sem_t *, const struct timespec *);
static int (*real_mutex_timedlock)(pthread_mutex_t *, const struct timespec *);
static int (*real_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

__attribute__((constructor)) static void load(void) {
  if (real_clock_gettime) return;
  real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  real_sem_timedwait = dlsym(RTLD_NEXT, "sem_timedwait");
  real_mutex_timedlock = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  real_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!real_cond_timedwait) real_cond_timedwait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  const char *path = getenv("ALIGNER_STEPPED_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (page != MAP_FAILED) offset = page;
}

static int64_t nanoseconds(const struct timespec *moment) {
  return moment->tv_sec * second + moment->tv_nsec;
}

static struct timespec moment_of(int64_t nanoseconds) {
  return (struct timespec){nanoseconds / second, nanoseconds % second};
}

static int64_t real_now(void) {
  struct timespec now;
  load();
  real_clock_gettime(CLOCK_REALTIME, &now);
  return nanoseconds(&now);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  load();
  int failed = real_clock_gettime(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    *now = moment_of(nanoseconds(now) + *offset);
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  (void)zone;
  int64_t moment = real_now() + *offset;
  now->tv_sec = moment / second;
  now->tv_usec = moment % second / 1000;
  return 0;
}

time_t time(time_t *now) {
  time_t moment = (real_now() + *offset) / second;
  if (now) *now = moment;
  return moment;
}

/* The next real moment at which a wait is to look at the clock; 0 once the deadline has passed. */
static int64_t next_look(int64_t deadline) {
  int64_t now = real_now(), left = deadline - *offset - now;
  if (left <= 0) return 0;
  return now + (left < look ? left : look);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
  for (int64_t moment;;) {
    if (!sem_trywait(semaphore)) return 0;
    if (!(moment = next_look(nanoseconds(until)))) break;
    struct timespec real = moment_of(moment);
    if (!real_sem_timedwait(semaphore, &real)) return 0;
    if (errno != ETIMEDOUT) return -1;
  }
  errno = ETIMEDOUT;
  return -1;
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
  for (int64_t moment;;) {
    int failed = pthread_mutex_trylock(mutex);
    if (failed != EBUSY) return failed;
    if (!(moment = next_look(nanoseconds(until)))) return ETIMEDOUT;
    struct timespec real = moment_of(moment);
    failed = real_mutex_timedlock(mutex, &real);
    if (failed != ETIMEDOUT) return failed;
  }
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                           const struct timespec *until) {
  load();
  /* A condition may count by the monotonic clock, whose numbers are small. */
  if (nanoseconds(until) < since_boot_at_most)
    return real_cond_timedwait(condition, mutex, until);
  int64_t moment = next_look(nanoseconds(until));
  struct timespec real = moment_of(moment ? moment : real_now());
  int failed = real_cond_timedwait(condition, mutex, &real);
  /* Not yet the deadline: a wakeup for no reason, which a caller has to expect. */
  return failed == ETIMEDOUT && next_look(nanoseconds(until)) ? 0 : failed;
}
