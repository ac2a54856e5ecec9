#include "offload/io_queue.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "offload/io_worker.h"

namespace lm {
namespace {

constexpr std::chrono::seconds kPatience{60};

}  // namespace

struct IoQueue::State {
  State(const IoFiles& s, int64_t b, IoRetry r) : space(s), block(b), retry(r) {}

  void run(const std::function<std::unique_ptr<IoEngine>()>& make_engine);
  // Gives the worker what has become ready; false when it is time to stop.
  bool take(IoWorker& worker);
  void publish(IoWorker& worker, std::vector<Transfer*>& complete);
  Ticket ask(IoDirection direction, const Extent& extent, std::byte* memory, int64_t bytes,
             const std::string& what, std::span<const Ticket> after);
  // Until `over`. A disk that answers nothing for a minute is slow or stuck; memory that it may still write
  // to cannot be given up, so the wait goes on, and says so.
  template <class Over>
  void patiently(std::unique_lock<std::mutex>& lock, const Over& over);
  void check() const {
    if (failure) throw Error(*failure);
  }

  const IoFiles& space;
  const int64_t block;
  const IoRetry retry;
  std::function<void(const IoSpan&)> span_hook;
  std::thread thread;

  mutable std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::unordered_map<Ticket, std::unique_ptr<Transfer>> active;
  std::vector<Transfer*> ready;  // not yet given to the worker
  Ticket next = 1;
  IoEngine* engine = nullptr;  // while the thread may be waiting in it
  bool woken = false;          // since the thread last took what is ready
  bool started = false, stop = false;
  std::optional<Error> failure;
  IoCounters counters;
  std::string description;
};

template <class Over>
void IoQueue::State::patiently(std::unique_lock<std::mutex>& lock, const Over& over) {
  int64_t moved = counters.read_bytes + counters.written_bytes;
  while (!changed.wait_for(lock, kPatience, over)) {
    const int64_t now = counters.read_bytes + counters.written_bytes;
    if (std::exchange(moved, now) != now || active.empty()) continue;
    const Transfer& first = *active.begin()->second;
    log_warning("SLOW-29", std::string("no transfer has ended for ") + std::to_string(kPatience.count()) +
                               " s; waiting for the " +
                               (first.direction == IoDirection::kRead ? "read" : "write") + " of " +
                               first.what + " at " + space.path(first.parts.front().file));
  }
}

bool IoQueue::State::take(IoWorker& worker) {
  const std::lock_guard lock(mutex);
  for (Transfer* transfer : ready) worker.add(transfer);
  ready.clear();
  woken = false;
  return !stop;
}

void IoQueue::State::publish(IoWorker& worker, std::vector<Transfer*>& complete) {
  if (span_hook) {
    for (const Transfer* t : complete)
      span_hook({.direction = t->direction,
                 .what = t->what,
                 .start_ns = t->start_ns,
                 .end_ns = t->end_ns,
                 .bytes = t->bytes});
  }
  {
    const std::lock_guard lock(mutex);
    counters.retries = worker.retries();
    counters.busy_seconds = worker.busy_seconds();
    for (Transfer* transfer : complete) {
      (transfer->direction == IoDirection::kRead ? counters.read_bytes : counters.written_bytes) +=
          transfer->bytes;
      for (Transfer* follower : transfer->followers) {
        if (--follower->waits_for == 0) ready.push_back(follower);
      }
      active.erase(transfer->ticket);
    }
    if (complete.empty()) return;
  }
  complete.clear();
  changed.notify_all();
}

void IoQueue::State::run(const std::function<std::unique_ptr<IoEngine>()>& make_engine) {
  ::pthread_setname_np(::pthread_self(), "lm-io");
  std::optional<IoWorker> worker;
  std::optional<Error> error;
  try {
    worker.emplace(space, make_engine(), block, retry);
    {
      const std::lock_guard lock(mutex);
      engine = &worker->engine();
      description = engine->description();
      started = true;
    }
    changed.notify_all();
    std::vector<Transfer*> complete;
    while (take(*worker)) {
      worker->submit();
      worker->wait(complete);
      publish(*worker, complete);
    }
  } catch (const Error& e) {
    error = e;
  } catch (const std::exception& e) {
    error = Error(Exit::kInternal,
                  {.area = "BUG-70", .what = e.what(), .place = "I/O thread", .next = "", .kept = ""});
  }
  {
    const std::lock_guard lock(mutex);
    engine = nullptr;
    if (worker) counters.retries = worker->retries();
  }
  if (worker) worker->settle();  // before anyone hears of the failure and frees memory
  {
    const std::lock_guard lock(mutex);
    failure = error;
    active.clear();
    ready.clear();
  }
  changed.notify_all();
}

IoQueue::IoQueue(const IoFiles& space, std::function<std::unique_ptr<IoEngine>()> make_engine, int64_t block,
                 IoRetry retry)
    : state_(std::make_unique<State>(space, block, retry)) {
  LM_CHECK(block > 0 && block % space.alignment() == 0, "io.block is not a multiple of the alignment");
  // Signals belong to the compute thread.
  sigset_t all, old;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    state_->thread = std::thread([state = state_.get(), make = std::move(make_engine)] { state->run(make); });
  } catch (const std::system_error& refused) {
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw Error(Exit::kHostMemory, {.area = "IO-17",
                                    .what = std::string("cannot start the I/O thread: ") + refused.what(),
                                    .place = "",
                                    .next = "raise the limits on processes (ulimit -u) and memory",
                                    .kept = ""});
  }
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->started || state_->failure; });
  if (!state_->started) {
    const Error error = *state_->failure;
    lock.unlock();
    state_->thread.join();
    throw Error(error);
  }
}

IoQueue::~IoQueue() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    if (state_->engine != nullptr) state_->engine->wake();
  }
  state_->thread.join();
}

void IoQueue::set_span_hook(std::function<void(const IoSpan&)> hook) {
  const std::lock_guard lock(state_->mutex);
  LM_CHECK(state_->next == 1, "the hook is set before the first transfer");
  state_->span_hook = std::move(hook);
}

Ticket IoQueue::State::ask(IoDirection direction, const Extent& extent, std::byte* memory, int64_t bytes,
                           const std::string& what, std::span<const Ticket> after) {
  const int64_t alignment = space.alignment();
  LM_CHECK(bytes >= 0 && bytes % alignment == 0 && bytes <= extent.bytes,
           what + ": " + std::to_string(bytes) + " bytes of an extent of " + std::to_string(extent.bytes));
  LM_CHECK(reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(alignment) == 0,
           what + ": unaligned memory");
  auto transfer = std::make_unique<Transfer>();
  transfer->direction = direction;
  transfer->bytes = bytes;
  transfer->what = what;
  int64_t done = 0;
  for (const ExtentPiece& piece : extent.pieces) {
    const int64_t part = std::min(piece.bytes, bytes - done);
    if (part == 0) break;
    transfer->parts.push_back(
        {.file = piece.file, .offset = piece.offset, .bytes = part, .memory = memory + done, .started = 0});
    done += part;
  }
  LM_CHECK(done == bytes, what + ": the extent's pieces are shorter than the extent");

  const std::lock_guard lock(mutex);
  check();
  if (bytes == 0) return 0;
  for (Ticket earlier : after)
    LM_CHECK(earlier < next, what + ": comes after a transfer that was not asked for");
  const Ticket ticket = next++;
  Transfer* const asked = transfer.get();
  asked->ticket = ticket;
  active.emplace(ticket, std::move(transfer));
  for (Ticket earlier : after) {
    const auto found = active.find(earlier);
    if (found == active.end()) continue;
    found->second->followers.push_back(asked);
    ++asked->waits_for;
  }
  if (asked->waits_for > 0) return ticket;
  ready.push_back(asked);
  if (!woken && engine != nullptr) {
    woken = true;
    engine->wake();
  }
  return ticket;
}

Ticket IoQueue::read(const Extent& from, std::byte* to, int64_t bytes, const std::string& what,
                     std::span<const Ticket> after) {
  return state_->ask(IoDirection::kRead, from, to, bytes, what, after);
}

Ticket IoQueue::write(const Extent& to, const std::byte* from, int64_t bytes, const std::string& what,
                      std::span<const Ticket> after) {
  // The engine's requests carry one kind of pointer; a write only reads through it.
  return state_->ask(IoDirection::kWrite, to, const_cast<std::byte*>(from), bytes, what, after);
}

void IoQueue::wait(Ticket ticket) {
  std::unique_lock lock(state_->mutex);
  LM_CHECK(ticket < state_->next, "wait for a transfer that was not asked for");
  state_->patiently(lock, [&] { return state_->failure || !state_->active.contains(ticket); });
  state_->check();
}

bool IoQueue::done(Ticket ticket) const {
  const std::lock_guard lock(state_->mutex);
  state_->check();
  LM_CHECK(ticket < state_->next, "question about a transfer that was not asked for");
  return !state_->active.contains(ticket);
}

void IoQueue::drain() {
  std::unique_lock lock(state_->mutex);
  const Ticket last = state_->next - 1;  // of those asked for so far
  state_->patiently(lock, [&] {
    return state_->failure || std::none_of(state_->active.begin(), state_->active.end(),
                                           [&](const auto& entry) { return entry.first <= last; });
  });
  state_->check();
}

IoCounters IoQueue::counters() const {
  const std::lock_guard lock(state_->mutex);
  return state_->counters;
}

std::string IoQueue::description() const {
  const std::lock_guard lock(state_->mutex);
  return state_->description;
}

}  // namespace lm
