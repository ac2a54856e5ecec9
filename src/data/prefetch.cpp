#include "data/prefetch.h"

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace lm {

Prefetch::Prefetch(BatchSource& loader, std::function<double()> clock)
    : loader_(loader), clock_(std::move(clock)), position_(loader.position()) {}

Prefetch::~Prefetch() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

// At the first step, so that a process which only makes a trainer has no thread.
void Prefetch::start() {
  // Only the compute thread handles signals.
  sigset_t all, old;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& refused) {
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw Error(Exit::kHostMemory, {.area = "DATA-24",
                                    .what = std::string("cannot start the data thread: ") + refused.what(),
                                    .place = "",
                                    .next = "raise the limits on processes (ulimit -u) and memory"});
  }
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

void Prefetch::begin() {
  {
    const std::lock_guard lock(mutex_);
    LM_CHECK(state_ == State::kIdle, "one step ahead");
    from_ = position_;
    state_ = State::kWanted;
  }
  changed_.notify_all();
}

void Prefetch::settle(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [this] { return state_ != State::kWanted; });
}

ReadyStep Prefetch::next(bool more) {
  const double start = clock_();
  if (!thread_.joinable()) this->start();
  std::unique_lock lock(mutex_);
  if (state_ == State::kIdle) {
    lock.unlock();
    begin();
    lock.lock();
  }
  settle(lock);
  state_ = State::kIdle;
  std::optional<ReadyStep> ready = std::exchange(ready_, std::nullopt);
  const std::exception_ptr failure = std::exchange(failure_, nullptr);
  lock.unlock();
  if (failure) std::rethrow_exception(failure);
  ready->waited_seconds = clock_() - start;
  position_ = ready->position;
  if (more) begin();
  return std::move(*ready);
}

void Prefetch::restore(const LoaderPosition& position) {
  std::unique_lock lock(mutex_);
  settle(lock);
  state_ = State::kIdle;
  ready_.reset();
  failure_ = nullptr;
  position_ = position;
  loader_.restore(position);
}

ReadyStep Prefetch::assemble(const LoaderPosition& from) {
  loader_.restore(from);
  ReadyStep out;
  out.batches = loader_.next();
  out.position = loader_.position();
  out.epoch = loader_.epochs();
  return out;
}

void Prefetch::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return leaving_ || state_ == State::kWanted; });
    if (leaving_) return;
    const LoaderPosition from = from_;
    lock.unlock();
    std::optional<ReadyStep> ready;
    std::exception_ptr failure;
    try {
      ready = assemble(from);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    ready_ = std::move(ready);
    failure_ = std::exchange(failure, nullptr);
    state_ = State::kReady;
    changed_.notify_all();
  }
}

}  // namespace lm
