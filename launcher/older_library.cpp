// Lets the executables start beside the C++ library of GCC 11 (RHEL 9 and its kin), as the wheel's tag
// promises (cmake/package.py).
//
// GCC 12's library has a second version of condition_variable::wait, which programs compiled with it ask for.
// Our calls find this one under its name, which does what both do. Any thread.
#include <pthread.h>

#include <condition_variable>
#include <mutex>

extern "C" {
// Hidden: LibTorch has its own.
__attribute__((visibility("hidden"))) void older_wait(
    std::condition_variable* condition,
    std::unique_lock<std::mutex>* lock) __asm__("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");

void older_wait(std::condition_variable* condition, std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(condition->native_handle(), lock->mutex()->native_handle());
}
}
