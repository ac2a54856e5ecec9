#include "comm/mpi_link.h"

#include <fmt/format.h>
#include <algorithm>
#include "comm/mpi_worker.h"

namespace lm {
namespace {

// Of a collective: its number and its name, so that ranks that are in different ones notice.
int tag_of(uint64_t number, const char* what) {
  uint32_t hash = 2166136261U;
  for (const char* c = what; *c != 0; ++c) hash = (hash ^ static_cast<unsigned char>(*c)) * 16777619U;
  return static_cast<int>((hash ^ static_cast<uint32_t>(number)) & 0xffffffU);
}

}  // namespace

bool MpiWorker::wait(std::unique_lock<std::mutex>& lock, double seconds, const std::function<bool()>& done) {
  for (Waited waited(clock(), kLookSeconds); waited.look(clock()) < seconds;) {
    if (setup_.threads.wait_for(done_, lock, kLookSeconds / 2, done)) return true;
  }
  return done();
}

bool MpiWorker::wait_ended(std::unique_lock<std::mutex>& lock, double seconds) {
  wake_.notify_one();
  return wait(lock, seconds, [this] { return ended_; });
}

void MpiWorker::fail(std::unique_lock<std::mutex>& lock, const Error& error) {
  const Error copy = error;  // it may be the one that the mutex guards
  const bool taken = taken_;
  if (!taken) asked_.reset();  // a thread that was stuck does not begin it later
  lock.unlock();
  if (taken && setup_.abandon) setup_.abandon(copy);
  throw Error(copy);
}

MpiLink::MpiLink(LinkSetup setup) : worker_(std::make_shared<MpiWorker>(std::move(setup))) {
  MpiWorker& w = *worker_;
  w.setup_.threads.start([worker = worker_] { worker->run(); });
  std::unique_lock lock(w.mutex_);
  const double most = 2 * w.setup_.silence;
  Waited waited(w.clock());
  while (!w.wait(lock, kHeartbeatSeconds, [&w] { return w.joined_ || w.failure_; })) {
    if (w.someone_ended()) throw peer_ended({-1, w.setup_.host}, "before all had joined");
    if (waited.look(w.clock()) < most) continue;
    throw Error(Exit::kNoProgress,
                {.area = "HANG-09",
                 .what = fmt::format("not all processes of the MPI job have joined within {:.0f} s", most),
                 .place = w.setup_.host,
                 .next = "see whether all machines run the same lmlaunch, and reach each other"});
  }
  if (w.failure_) throw Error(*w.failure_);
  rank_ = w.rank_;
  ranks_ = w.ranks_;
}

MpiLink::~MpiLink() {
  MpiWorker& w = *worker_;
  std::unique_lock lock(w.mutex_);
  w.stopping_ = true;
  w.wait_ended(lock, kTellSeconds);
}

void MpiLink::move(const char* what, std::span<const Transfer> transfers, bool continues) {
  MpiWorker& w = *worker_;
  std::unique_lock lock(w.mutex_);
  if (w.failure_) throw Error(*w.failure_);
  const uint64_t number = ++collectives_;
  const double began = w.clock();
  w.asked_ = MpiWorker::Order{what, number, tag_of(number, what), transfers, began, continues};
  w.wake_.notify_one();
  StallTimer turn(began);
  while (!w.wait(lock, kHeartbeatSeconds, [&w] { return !w.asked_ || w.failure_; })) {
    const double stuck = turn.look(w.turns_, w.clock());
    if (w.someone_ended()) {
      w.stopping_ = true;
      w.wait_ended(lock, kTellSeconds);
      w.fail(lock, peer_ended(w.self(), "during " + CollectiveName{what}.text()));
    }
    if (stuck > w.setup_.silence) {
      w.fail(lock, no_progress(w.self(), "MPI, in " + CollectiveName{what, number}.text(), stuck,
                               w.setup_.silence));
    }
  }
  if (!w.asked_) return;
  w.wait(lock, 2 * kTellSeconds, [&w] { return w.released_; });
  w.fail(lock, *w.failure_);
}

std::optional<Error> MpiLink::lost() const {
  const std::lock_guard lock(worker_->mutex_);
  if (worker_->failure_ || !worker_->someone_ended()) return worker_->failure_;
  return peer_ended(worker_->self(), "");
}

bool MpiLink::moving() const {
  const std::lock_guard lock(worker_->mutex_);
  return worker_->asked_.has_value();
}

bool MpiLink::end(Exit code, std::string why, const std::string& next) {
  MpiWorker& w = *worker_;
  std::unique_lock lock(w.mutex_);
  why.resize(std::min(why.size(), sizeof Notice::why - 1));
  w.last_word_ = w.end_notice(code, why, next);
  w.wait_ended(lock, 2 * kTellSeconds + kHearSeconds);
  return w.told_by_leader_ == why;
}

void MpiLink::passed_on(Exit code, const std::string& said, const std::string& next) {
  MpiWorker& w = *worker_;
  std::unique_lock lock(w.mutex_);
  const bool heard = w.heard_word_ && said.find(w.heard_word_->why) != std::string::npos;
  w.last_word_ = heard ? *w.heard_word_ : w.end_notice(code, said, next);
  w.wait_ended(lock, kTellSeconds + kHearSeconds);
}

void MpiLink::leave() {
  MpiWorker& w = *worker_;
  std::unique_lock lock(w.mutex_);
  w.leaving_ = true;
  w.wait_ended(lock, w.setup_.silence);
}

}  // namespace lm
