// pread and pwrite on a few threads, for machines that refuse io_uring: the same transfers, more CPU time.
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "offload/engines.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

// Each thread has one request in flight; more threads than this only contend for the kernel's locks.
constexpr int kMostThreads = 16;

class ThreadsEngine final : public IoEngine {
 public:
  explicit ThreadsEngine(const EngineSetup& setup) : files_(setup.files.begin(), setup.files.end()) {
    const int wanted = std::clamp(setup.depth, 1, kMostThreads);
    // Only the compute thread handles signals.
    sigset_t all, old;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = 0;
    try {
      while (static_cast<int>(threads_.size()) < wanted) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& refused) {
      error = refused.code().value();
    }
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
    if (threads_.empty()) throw disk_error(error, "cannot start an I/O thread", "threads engine");
  }
  ~ThreadsEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    asked_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int depth() const override { return static_cast<int>(threads_.size()); }

  void submit(const IoRequest& request) override {
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(request);
    }
    asked_.notify_one();
  }

  void wait(std::vector<IoResult>& results) override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return woken_ || !results_.empty(); });
    woken_ = false;
    results.insert(results.end(), results_.begin(), results_.end());
    results_.clear();
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    finished_.notify_one();
  }

  std::string description() const override { return fmt::format("pread/pwrite on {} threads", depth()); }

 private:
  void work() {
    ::pthread_setname_np(::pthread_self(), "lm-io-pool");
    std::unique_lock lock(mutex_);
    for (;;) {
      asked_.wait(lock, [this] { return stop_ || !requests_.empty(); });
      if (requests_.empty()) return;  // submitted requests are completed even when stopping
      const IoRequest request = requests_.front();
      requests_.pop_front();
      lock.unlock();
      const int64_t result = transfer(request);
      lock.lock();
      results_.push_back({request.id, result});
      finished_.notify_one();
    }
  }

  int64_t transfer(const IoRequest& request) const {
    const int descriptor = files_[static_cast<size_t>(request.file)].descriptor;
    const auto bytes = static_cast<size_t>(request.bytes);
    const ssize_t moved = request.direction == IoDirection::kRead
                              ? ::pread(descriptor, request.memory, bytes, request.offset)
                              : ::pwrite(descriptor, request.memory, bytes, request.offset);
    return moved >= 0 ? moved : -errno;
  }

  const std::vector<IoFile> files_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;  // guards all below
  std::condition_variable asked_, finished_;
  std::deque<IoRequest> requests_;
  std::vector<IoResult> results_;
  bool woken_ = false;
  bool stop_ = false;
};

}  // namespace

std::unique_ptr<IoEngine> make_threads_engine(const EngineSetup& setup) {
  return std::make_unique<ThreadsEngine>(setup);
}

}  // namespace lm
