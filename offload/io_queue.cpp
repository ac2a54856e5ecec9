#include "offload/io_queue.h"

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
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

std::string seconds_text(std::chrono::microseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(time.count()) / 1e6);
  return text;
}

}  // namespace

struct IoQueue::State {
  State(IoFiles& s, std::function<std::unique_ptr<IoEngine>()> make, int64_t b, IoRetry r)
      : space(s), make_engine(std::move(make)), block(b), retry(r) {}

  void start();
  // Ends the thread and drops the requested transfers; false if it hangs.
  bool end();
  void run();
  // Gives the worker the ready transfers; false when it is time to stop.
  bool take(IoWorker& worker);
  void publish(IoWorker& worker, std::vector<Transfer*>& complete);
  Ticket ask(IoDirection direction, const Extent& extent, std::byte* memory, int64_t bytes,
             const std::string& what, std::span<const Ticket> after);
  // Waits until `over`, or until no request has completed for too long; warns after half of that time.
  template <class Over>
  void patiently(std::unique_lock<std::mutex>& lock, const Over& over);
  // The first transfer with a part in a file that has unanswered requests; null if there is none.
  const Transfer* unanswered(size_t* part) const;
  Error silence(const Transfer& transfer, size_t part, std::chrono::microseconds time) const;
  void check() const {
    if (failure) throw Error(*failure);
  }

  IoFiles& space;
  const std::function<std::unique_ptr<IoEngine>()> make_engine;
  const int64_t block;
  const IoRetry retry;
  std::function<void(const IoSpan&)> span_hook;
  std::thread thread;

  mutable std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::unordered_map<Ticket, std::unique_ptr<Transfer>> active;
  std::vector<Transfer*> ready;  // not yet given to the worker
  Ticket next = 1;
  IoEngine* engine = nullptr;        // while the thread may be waiting in it
  const IoWorker* worker = nullptr;  // likewise
  int64_t answers = 0;               // results so far
  std::optional<Error> cause;        // of the end, set before the requests in flight are waited for
  bool hangs = false, ended = false;
  bool woken = false;  // since the thread last took what is ready
  bool started = false, stop = false;
  std::optional<Error> failure;
  IoCounters counters, before;  // and those of earlier threads
  std::string description;
};

template <class Over>
void IoQueue::State::patiently(std::unique_lock<std::mutex>& lock, const Over& over) {
  // Counts elapsed slices of waiting, not the clock, so that time in which the process was stopped does not
  // count.
  const std::chrono::microseconds slice = std::clamp<std::chrono::microseconds>(
      std::chrono::microseconds(retry.silence) / 16, std::chrono::milliseconds(1), std::chrono::seconds(1));
  std::chrono::microseconds silent{0};
  int64_t seen = answers;
  while (!hangs && !changed.wait_for(lock, slice, over)) {
    size_t part = 0;
    const Transfer* const transfer = unanswered(&part);
    if (std::exchange(seen, answers) != answers || transfer == nullptr) {
      silent = {};
      continue;
    }
    const bool half = silent < retry.silence / 2;
    silent += slice;
    if (half && silent >= retry.silence / 2)
      log_warning("SLOW-29", std::string(silence(*transfer, part, silent).what()));
    if (silent < retry.silence) continue;
    // The I/O thread waits for the requests in flight; from here on no other thread waits for it.
    failure = cause ? *cause : silence(*transfer, part, silent);
    hangs = stop = true;
  }
}

const Transfer* IoQueue::State::unanswered(size_t* part) const {
  const Transfer* first = nullptr;
  for (const auto& [ticket, transfer] : active) {
    if (transfer->waits_for > 0 || (first != nullptr && first->ticket < ticket)) continue;
    for (size_t p = 0; p < transfer->parts.size(); ++p) {
      if (worker == nullptr || worker->unanswered(transfer->parts[p].file) == 0) continue;
      first = transfer.get();
      *part = p;
      break;
    }
  }
  return first;
}

Error IoQueue::State::silence(const Transfer& transfer, size_t part, std::chrono::microseconds time) const {
  const Transfer::Part& at = transfer.parts[part];
  return Error(
      Exit::kIo,
      {.area = "IO-05",
       .what = "the disk has not answered for " + seconds_text(time) + "; waiting for the " +
               (transfer.direction == IoDirection::kRead ? "read" : "write") + " of " + transfer.what,
       .place = fmt::format("{}+{}", space.path(at.file), at.offset),
       .next = "look for errors of that disk in the kernel's log (dmesg); if it is only slow, raise "
               "io.timeout"});
}

bool IoQueue::State::take(IoWorker& worker) {
  const std::lock_guard lock(mutex);
  for (Transfer* transfer : ready) worker.add(transfer);
  ready.clear();
  woken = false;
  return !stop;
}

void IoQueue::State::publish(IoWorker& worker, std::vector<Transfer*>& complete) {
  {
    const std::lock_guard lock(mutex);
    if (hangs) return;  // no thread waits any more, and the hook's objects may be gone
    for (const Transfer* t : complete) {
      if (!span_hook) break;
      span_hook({.direction = t->direction,
                 .what = t->what,
                 .start_ns = t->start_ns,
                 .end_ns = t->end_ns,
                 .bytes = t->bytes});
    }
    answers = worker.answers();
    counters.retries = before.retries + worker.retries();
    counters.busy_seconds = before.busy_seconds + worker.busy_seconds();
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

void IoQueue::State::run() {
  ::pthread_setname_np(::pthread_self(), "lm-io");
  std::optional<IoWorker> worker;
  std::optional<Error> error;
  try {
    worker.emplace(space, make_engine(), block, retry);
    {
      const std::lock_guard lock(mutex);
      engine = &worker->engine();
      this->worker = &*worker;
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
    error = Error(Exit::kInternal, {.area = "BUG-70", .what = e.what(), .place = "I/O thread", .next = ""});
  }
  {
    const std::lock_guard lock(mutex);
    engine = nullptr;
    cause = error;
    if (worker) counters.retries = before.retries + worker->retries();
  }
  if (worker) worker->settle();  // before the failure is published and a caller frees memory
  {
    const std::lock_guard lock(mutex);
    if (!failure) failure = error;
    active.clear();
    ready.clear();
    this->worker = nullptr;
    ended = true;
  }
  changed.notify_all();
}

IoQueue::IoQueue(IoFiles& space, std::function<std::unique_ptr<IoEngine>()> make_engine, int64_t block,
                 IoRetry retry)
    : state_(std::make_unique<State>(space, std::move(make_engine), block, retry)) {
  LM_CHECK(block > 0 && block % space.alignment() == 0, "io.block is not a multiple of the alignment");
  state_->start();
}

void IoQueue::State::start() {
  // Only the compute thread handles signals.
  sigset_t all, old;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    thread = std::thread([this] { run(); });
  } catch (const std::system_error& refused) {
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw Error(Exit::kHostMemory, {.area = "IO-17",
                                    .what = std::string("cannot start the I/O thread: ") + refused.what(),
                                    .place = "",
                                    .next = "raise the limits on processes (ulimit -u) and memory"});
  }
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return started || failure; });
  if (started) return;
  const Error error = *failure;
  lock.unlock();
  thread.join();
  throw Error(error);
}

bool IoQueue::State::end() {
  if (!thread.joinable()) return true;
  std::unique_lock lock(mutex);
  stop = true;
  if (engine != nullptr) engine->wake();
  patiently(lock, [this] { return ended; });
  if (hangs) return false;
  lock.unlock();
  thread.join();
  return true;
}

IoQueue::~IoQueue() {
  if (state_->end()) return;
  state_->thread.detach();
  [[maybe_unused]] const State* const stays = state_.release();  // the thread may never return
}

void IoQueue::restart() {
  if (!state_->end()) throw Error(*state_->failure);
  state_->before = state_->counters;
  state_->failure = state_->cause = std::nullopt;
  state_->started = state_->stop = state_->ended = state_->woken = false;
  state_->start();
}

bool IoQueue::hangs() const {
  const std::lock_guard lock(state_->mutex);
  return state_->hangs;
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
           fmt::format("{}: {} bytes of an extent of {}", what, bytes, extent.bytes));
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
  for (Ticket earlier : after) LM_CHECK(earlier < next, what + ": waits for an unknown transfer");
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
  LM_CHECK(ticket < state_->next, "wait for an unknown transfer");
  state_->patiently(lock, [&] { return state_->failure || !state_->active.contains(ticket); });
  state_->check();
}

bool IoQueue::done(Ticket ticket) const {
  const std::lock_guard lock(state_->mutex);
  state_->check();
  LM_CHECK(ticket < state_->next, "query of an unknown transfer");
  return !state_->active.contains(ticket);
}

void IoQueue::drain() {
  std::unique_lock lock(state_->mutex);
  const Ticket last = state_->next - 1;  // of those requested so far
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
