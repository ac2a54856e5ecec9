// A thread that calls a function again and again.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace lm {

class Periodic {
 public:
  // `look` is called whenever `every` has been waited out, until it gives false or this ends. Declare it
  // behind what `look` uses.
  Periodic(std::chrono::duration<double> every, std::function<bool()> look)
      : thread_([this, every, look = std::move(look)] {
          std::unique_lock lock(mutex_);
          while (!leave_.wait_for(lock, every, [this] { return leaving_; })) {
            lock.unlock();
            if (!look()) return;
            lock.lock();
          }
        }) {}
  ~Periodic() {
    {
      const std::lock_guard lock(mutex_);
      leaving_ = true;
    }
    leave_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable leave_;
  bool leaving_ = false;
  std::thread thread_;
};

}  // namespace lm
