// What lets the executables start beside the C++ library of GCC 11 (RHEL 9 and its kin), as the wheel's tag
// promises (cmake/package.py).
//
// GCC 12's library has condition_variable::wait twice, and a program that is compiled with it asks for the
// new one, which differs in noexcept alone. Every call of ours comes here (the linker's --wrap) and goes to
// the old one, which all libraries have.
#include <condition_variable>
#include <mutex>

extern "C" {
void older_wait(std::condition_variable* condition, std::unique_lock<std::mutex>* lock);
void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(  // NOLINT: the linker's name
    std::condition_variable* condition, std::unique_lock<std::mutex>* lock) {
  older_wait(condition, lock);
}
}
__asm__(".symver older_wait, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
