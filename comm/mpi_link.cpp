#include "comm/mpi_link.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "comm/mpi_worker.h"

namespace lm {
namespace {

// Of a call: its number and its name, so that ranks that come for different things notice.
int tag_of(uint64_t call, const char* what) {
  uint32_t hash = 2166136261U;
  for (const char* c = what; *c != 0; ++c) hash = (hash ^ static_cast<unsigned char>(*c)) * 16777619U;
  return static_cast<int>((hash ^ static_cast<uint32_t>(call)) & 0xffffffU);
}

}  // namespace

bool MpiWorker::wait(std::unique_lock<std::mutex>& lock, double seconds, const std::function<bool()>& done) {
  constexpr std::chrono::duration<double> kStep(kLookSeconds / 2);
  for (Waited waited(monotonic_seconds(), kLookSeconds); waited.look(monotonic_seconds()) < seconds;) {
    if (done_.wait_for(lock, kStep, done)) return true;
  }
  return done();
}

void MpiWorker::wait_joined() {
  std::unique_lock lock(mutex_);
  const double most = 2 * setup_.silence;
  Waited waited(monotonic_seconds());
  while (!wait(lock, kBeatSeconds, [this] { return joined_ || failure_; })) {
    if (setup_.ended && setup_.ended()) {
      throw Error(Exit::kPeerLost, {.area = "PEER-08",
                                    .what = "another rank has ended before all had come",
                                    .place = setup_.host,
                                    .next = "see that rank's message"});
    }
    if (waited.look(monotonic_seconds()) < most) continue;
    throw Error(Exit::kNoProgress,
                {.area = "HANG-09",
                 .what = "not all processes of the MPI job have come within " + seconds_of(most),
                 .place = setup_.host,
                 .next = "see whether all machines run the same lmlaunch, and reach each other"});
  }
  if (failure_) throw Error(*failure_);
}

void MpiWorker::move(const char* what, std::span<const Transfer> transfers, bool continues) {
  std::unique_lock lock(mutex_);
  if (failure_) throw Error(*failure_);
  const uint64_t call = ++calls_;
  const double began = monotonic_seconds();
  asked_ = Order{what, call, tag_of(call, what), transfers, began, Waited(began), continues};
  wake_.notify_one();
  uint64_t turns = turns_;
  Waited turn(began);
  while (!wait(lock, kBeatSeconds, [this] { return !asked_ || failure_; })) {
    const double now = monotonic_seconds();
    if (turns_ != turns) turns = turns_, turn = Waited(now);
    const double stuck = turn.look(now);
    if (setup_.ended && setup_.ended()) {
      stopping_ = true;
      wake_.notify_one();
      wait(lock, kTellSeconds, [this] { return ended_; });
      fail(lock,
           Error(Exit::kPeerLost, {.area = "PEER-08",
                                   .what = std::string("another rank has ended during \"") + what + "\"",
                                   .place = here() + " on " + setup_.host,
                                   .next = "see that rank's message"}));
    }
    if (stuck > setup_.silence) {
      fail(lock, Error(Exit::kNoProgress, {.area = "HANG-09",
                                           .what = std::string("MPI itself has been stuck for ") +
                                                   seconds_of(stuck) + " in \"" + what + "\"",
                                           .place = here() + " on " + setup_.host,
                                           .next = kLookForRank}));
    }
  }
  if (!asked_) return;
  wait(lock, 2 * kTellSeconds, [this] { return released_; });
  fail(lock, *failure_);
}

void MpiWorker::fail(std::unique_lock<std::mutex>& lock, const Error& error) {
  const Error copy = error;  // it may be the one that the mutex guards
  const bool taken = taken_;
  if (!taken) asked_.reset();  // a thread that was stuck does not begin it later
  lock.unlock();
  if (taken && setup_.abandon) setup_.abandon(copy);
  throw Error(copy);
}

std::optional<Error> MpiWorker::lost() {
  const std::lock_guard lock(mutex_);
  if (failure_ || !setup_.ended || !setup_.ended()) return failure_;
  return Error(Exit::kPeerLost, {.area = "PEER-08",
                                 .what = "another rank has ended",
                                 .place = here() + " on " + setup_.host,
                                 .next = "see that rank's message"});
}

bool MpiWorker::moving() {
  const std::lock_guard lock(mutex_);
  return asked_.has_value();
}

Sign MpiWorker::word_of_end(Exit code, const std::string& why, const std::string& next) const {
  Sign word = sign(Sign::Kind::kEnd);
  word.code = static_cast<int32_t>(code);
  copy_text(word.why, sizeof word.why, why);
  copy_text(word.next, sizeof word.next, next);
  return word;
}

bool MpiWorker::end(Exit code, std::string why, const std::string& next) {
  std::unique_lock lock(mutex_);
  why.resize(std::min(why.size(), sizeof Sign::why - 1));
  last_word_ = word_of_end(code, why, next);
  wake_.notify_one();
  wait(lock, 2 * kTellSeconds + kHearSeconds, [this] { return ended_; });
  return told_by_leader_ == why;
}

void MpiWorker::passed_on(Exit code, const std::string& said, const std::string& next) {
  std::unique_lock lock(mutex_);
  const bool heard = heard_word_ && said.find(heard_word_->why) != std::string::npos;
  last_word_ = heard ? *heard_word_ : word_of_end(code, said, next);
  wake_.notify_one();
  wait(lock, kTellSeconds + kHearSeconds, [this] { return ended_; });
}

bool MpiWorker::leave() {
  std::unique_lock lock(mutex_);
  leaving_ = true;
  wake_.notify_one();
  return wait(lock, setup_.silence, [this] { return ended_; });
}

bool MpiWorker::stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  wake_.notify_one();
  return wait(lock, kTellSeconds, [this] { return ended_; });
}

MpiLink::MpiLink(LinkSetup setup) : worker_(std::make_shared<MpiWorker>(std::move(setup))) {
  std::thread([worker = worker_] { worker->run(); }).detach();
  worker_->wait_joined();
  rank_ = worker_->rank;
  ranks_ = worker_->ranks;
}

MpiLink::~MpiLink() {
  worker_->stop();
}

void MpiLink::move(const char* what, std::span<const Transfer> transfers, bool continues) {
  worker_->move(what, transfers, continues);
}

std::optional<Error> MpiLink::lost() const {
  return worker_->lost();
}

bool MpiLink::moving() const {
  return worker_->moving();
}

bool MpiLink::end(Exit code, const std::string& why, const std::string& next) {
  return worker_->end(code, why, next);
}

void MpiLink::passed_on(Exit code, const std::string& said, const std::string& next) {
  worker_->passed_on(code, said, next);
}

void MpiLink::leave() {
  worker_->leave();
}

}  // namespace lm
