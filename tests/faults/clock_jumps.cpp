// For LD_PRELOAD: a wall clock that jumps by an hour and by ten years, forth and back, every few
// milliseconds. The monotonic clocks go on as they are.
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

namespace {

constexpr time_t kHour = 3600, kYears = 10L * 365 * 24 * kHour;
constexpr time_t kJumps[] = {0, kHour, -kHour, kYears, -kYears};
constexpr long kEveryNs = 7'000'000;

int real_clock(clockid_t clock, timespec* time) {
  static const auto real = reinterpret_cast<int (*)(clockid_t, timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));
  return real(clock, time);
}

time_t jump() {
  timespec now = {};
  real_clock(CLOCK_MONOTONIC, &now);
  const long count = now.tv_sec * (1'000'000'000 / kEveryNs) + now.tv_nsec / kEveryNs;
  return kJumps[count % (sizeof kJumps / sizeof *kJumps)];
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) {
  const int result = real_clock(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += jump();
  return result;
}

int gettimeofday(timeval* time, void* /*zone*/) {
  timespec now = {};
  const int result = clock_gettime(CLOCK_REALTIME, &now);
  *time = {now.tv_sec, now.tv_nsec / 1000};
  return result;
}

time_t time(time_t* out) {
  timespec now = {};
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}

}  // extern "C"
