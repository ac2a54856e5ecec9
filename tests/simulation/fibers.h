// Threads of a simulation: all of them run in the caller's thread, one at a time, each until it naps, and the
// time is a number that goes on to the next one's wake. The same program runs in the same order each time.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <tuple>
#include <vector>

namespace lm::test {

class Fibers {
 public:
  Fibers() = default;
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;
  // What has not ended is never run again; its objects are not destroyed.
  ~Fibers() = default;

  // Begins `work` at the present time. An owner's fibers are stopped and frozen together.
  void start(int owner, std::function<void()> work);
  // Until all have ended or been stopped, or the next one wakes after `until`. Gives whether the former.
  bool run(double until);
  double now() const { return now_; }
  // Of the fiber that runs; -1: none does.
  int owner() const { return running_ == nullptr ? -1 : running_->owner; }
  // Of the fiber that runs; returns at once if none does.
  void nap(double seconds);
  // Never run again. Does not return to one of its own.
  void stop(int owner);
  // Not run before.
  void freeze(int owner, double until);

 private:
  struct Fiber {
    int owner = 0;
    bool ended = false;
    std::function<void()> work;
    ucontext_t context{};
    std::unique_ptr<std::byte[]> stack;
    // What the C++ runtime keeps per thread of exceptions that are being handled.
    void* caught = nullptr;
    unsigned uncaught = 0;
  };
  struct Wake {
    double time = 0;
    uint64_t number = 0;  // earlier ones first
    Fiber* fiber = nullptr;
    bool operator>(const Wake& other) const {
      return std::tie(time, number) > std::tie(other.time, other.number);
    }
  };
  struct Owner {
    bool stopped = false;
    double frozen_until = 0;
  };
  Owner& owner_of(int owner);
  void switch_to(Fiber& fiber);
  void back();
  static void enter(unsigned high, unsigned low);

  double now_ = 0;
  uint64_t wakes_ = 0;
  std::vector<Owner> owners_;  // from -1 on
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::priority_queue<Wake, std::vector<Wake>, std::greater<>> next_;
  Fiber* running_ = nullptr;
  ucontext_t caller_{};
};

}  // namespace lm::test
