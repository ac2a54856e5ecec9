#include "comm/mpi_worker.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/clock.h"

namespace lm {
namespace {

// Between two calls the thread only keeps signs going; within one it sleeps once nothing comes at once, as
// ranks may share cores.
constexpr std::chrono::milliseconds kIdle{10};
constexpr std::chrono::microseconds kNap{20};
constexpr double kSpinSeconds = 50e-6;
constexpr int kSignTag = 1;

}  // namespace

std::string seconds_of(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.1f s" : "%.0f s", value);
  return text;
}

void copy_text(char* to, size_t size, const std::string& from) {
  std::snprintf(to, size, "%s", from.c_str());
}

Error MpiWorker::mpi_error(const std::string& reason) const {
  return Error(Exit::kPeerLost, {.area = "PEER-10",
                                 .what = "MPI has failed in \"" + what_ + "\": " + reason,
                                 .place = here() + " on " + setup_.host,
                                 .next = "see whether another rank has ended, and its message"});
}

Sign MpiWorker::sign(Sign::Kind kind) const {
  Sign out;
  out.kind = kind;
  out.call = call_;
  copy_text(out.what, sizeof out.what, what_);
  copy_text(out.host, sizeof out.host, setup_.host);
  return out;
}

void MpiWorker::run() {
  prctl(PR_SET_NAME, "lm-mpi");
  prctl(PR_SET_TIMERSLACK, 1000);  // ns: naps are short
  char text[512] = "";
  const int joined = setup_.api.join(&rank, &ranks, text, sizeof text);
  {
    const std::lock_guard lock(mutex_);
    if (joined == 0) {
      joined_ = true;
    } else {
      failure_ = mpi_error(text);
    }
  }
  done_.notify_all();
  heard_at_ = turned_at_ = monotonic_seconds();
  try {
    while (joined == 0 && turn()) {
    }
  } catch (const Error& error) {
    give_up(error);
  }
  {
    const std::lock_guard lock(mutex_);
    released_ = ended_ = true;
  }
  done_.notify_all();
}

// False: it was the last.
bool MpiWorker::turn() {
  std::optional<Sign> last_word;
  bool leaving = false;
  {
    std::unique_lock lock(mutex_);
    const auto anything = [this] { return asked_ || last_word_ || leaving_ || stopping_; };
    if (!order_) wake_.wait_for(lock, kIdle, anything);
    ++turns_;
    if (stopping_) return false;
    take_order();
    last_word = last_word_;
    leaving = leaving_;
  }
  if (heard_end_) fail_with_it();
  if (heard_end_ || last_word) {
    speak_once(last_word);
    return false;
  }
  const double now = monotonic_seconds();
  // A process that was stopped itself does not know who was silent meanwhile.
  if (now - turned_at_ > setup_.silence / 2) heard_at_ = now;
  turned_at_ = now;
  if (leaving) return say_goodbye();
  take_signs();
  beat();
  if (order_) {
    if (pending_.empty()) begin_order();
    if (!advance_order()) {
      look_at_late();
      if (now - order_->began > kSpinSeconds) std::this_thread::sleep_for(kNap);
    }
  }
  look_at_neighbour();
  return true;
}

// With the mutex.
void MpiWorker::take_order() {
  if (!asked_ || order_) return;
  order_ = asked_, what_ = asked_->what, call_ = asked_->call;
  continues_ = asked_->continues;
  taken_ = true;
}

void MpiWorker::begin_order() {
  char text[512];
  for (const bool receive : {true, false}) {  // so that nothing comes before it is expected
    for (const Transfer& transfer : order_->transfers) {
      if ((transfer.to != nullptr) != receive) continue;
      for (int64_t at = 0; at < transfer.bytes; at += kMostMessage) {
        const int64_t bytes = std::min(transfer.bytes - at, kMostMessage);
        void* const request = receive ? setup_.api.receive(transfer.to + at, bytes, transfer.peer,
                                                           MpiChannel::kData, text, sizeof text)
                                      : setup_.api.send(transfer.from + at, bytes, transfer.peer,
                                                        MpiChannel::kData, order_->tag, text, sizeof text);
        if (request == nullptr) throw mpi_error(text);
        pending_.push_back({request, &transfer});
      }
    }
  }
}

// Whether the order is done.
bool MpiWorker::advance_order() {
  std::erase_if(pending_, [this](Pending& one) {
    MpiArrival arrival;
    if (!finish(one.request, &arrival)) return false;
    if (one.transfer->to != nullptr && arrival.tag != order_->tag) {
      throw Error(
          Exit::kInternal,
          {.area = "BUG-70",
           .what = fmt::format("rank {} has come for something else than \"{}\", call {}", one.transfer->peer,
                               what_, call_),
           .place = here(),
           .next = "see that all machines run the same lmlaunch; if they do, report this message with "
                   "the logs of both ranks: it is a bug in lmlaunch"});
    }
    return true;
  });
  if (!pending_.empty()) return false;
  {
    const std::lock_guard lock(mutex_);
    asked_.reset();
    taken_ = false;
  }
  order_.reset();
  done_.notify_all();
  return true;
}

// Whether the request, which is then gone, is complete.
bool MpiWorker::finish(void*& request, MpiArrival* arrival) {
  MpiArrival ignored;
  char text[512] = "";
  const int done = setup_.api.test(request, arrival == nullptr ? &ignored : arrival, text, sizeof text);
  if (done < 0) throw mpi_error(text);
  if (done > 0) request = nullptr;
  return done > 0;
}

void* MpiWorker::begin_send(const Sign& sign, int to) {
  char text[512] = "";
  void* const request =
      setup_.api.send(&sign, sizeof sign, to, MpiChannel::kSigns, kSignTag, text, sizeof text);
  if (request == nullptr) throw mpi_error(text);
  return request;
}

void MpiWorker::take_signs() {
  if (ranks == 1) return;
  for (;;) {
    char text[512] = "";
    if (hearing_ == nullptr && !neighbour_left_) {
      hearing_ = setup_.api.receive(&heard_, sizeof heard_, -1, MpiChannel::kSigns, text, sizeof text);
      if (hearing_ == nullptr) throw mpi_error(text);
    }
    MpiArrival arrival;
    if (hearing_ == nullptr || !finish(hearing_, &arrival)) return;
    take(heard_, arrival.from);
  }
}

void MpiWorker::take(const Sign& sign, int from) {
  heard_at_ = monotonic_seconds();
  if (sign.kind != Sign::Kind::kEnd) {  // of the neighbour: nobody else sends these
    neighbour_ = sign;
    neighbour_left_ = sign.kind == Sign::Kind::kLeave;
    return;
  }
  const Error error(static_cast<Exit>(sign.code),
                    {.area = "PEER-32",
                     .what = fmt::format("rank {} on {} has ended the run: {}", from, sign.host, sign.why),
                     .place = here() + " on " + setup_.host + ", in \"" + what_ + "\"",
                     .next = sign.next});
  if (!heard_end_) heard_end_ = error;
  const std::lock_guard lock(mutex_);
  if (!heard_word_) heard_word_ = sign;
  if (from == 0) told_by_leader_ = sign.why;
}

// A rank that ends right after a call may be heard of before that call's last message: what all have sent
// still comes.
void MpiWorker::fail_with_it() {
  try {
    for (const double until = monotonic_seconds() + kComeSeconds;
         (order_ || continues_) && monotonic_seconds() < until;) {
      {
        const std::lock_guard lock(mutex_);
        take_order();
      }
      if (order_ && pending_.empty()) begin_order();
      if (!order_ || !advance_order()) std::this_thread::sleep_for(kNap);
    }
  } catch (const Error&) {
    // Of a call that the other rank has not come to.
  }
  {
    const std::lock_guard lock(mutex_);
    failure_ = heard_end_;
    released_ = true;
  }
  done_.notify_all();
}

// What is wrong with a run every rank finds at about the same time, and rank 0 says it for all: whoever ends,
// or hears that another one does, waits a moment for what rank 0 has to say.
void MpiWorker::speak_once(std::optional<Sign> last_word) {
  bool told = false;
  for (Waited waited(monotonic_seconds(), kLookSeconds); waited.look(monotonic_seconds()) < kHearSeconds;) {
    if (last_word && !told) {
      tell_all(*last_word, waited);
      told = true;
    }
    if (rank == 0 && told) return;
    take_signs();
    {
      const std::lock_guard lock(mutex_);
      if (stopping_ || !told_by_leader_.empty()) return;
      last_word = last_word_;
    }
    std::this_thread::sleep_for(kNap);
  }
}

void MpiWorker::beat() {
  if (ranks == 1 || (speaking_ != nullptr && !finish(speaking_))) return;
  const double now = monotonic_seconds();
  if (now - spoken_at_ < kBeatSeconds) return;
  spoken_at_ = now;
  spoken_ = sign(Sign::Kind::kBeat);
  speaking_ = begin_send(spoken_, (rank + 1) % ranks);
}

void MpiWorker::look_at_neighbour() {
  // By this turn's time: it may have been stopped since, and then does not know either.
  const double silent = turned_at_ - heard_at_;
  if (ranks == 1 || neighbour_left_ || silent < setup_.silence) return;
  const int before = (rank + ranks - 1) % ranks;
  leader_lost_ = before == 0;
  const std::string host = neighbour_.host[0] == 0 ? "" : std::string(" on ") + neighbour_.host;
  const std::string where = neighbour_.host[0] == 0 ? ""
                                                    : fmt::format(": it was last seen at \"{}\", call {}",
                                                                  neighbour_.what, neighbour_.call);
  throw Error(Exit::kNoProgress,
              {.area = "HANG-09",
               .what = fmt::format("rank {}{} has given no sign of life for {}{}", before, host,
                                   seconds_of(silent), where),
               .place = fmt::format("{} on {}, in \"{}\", call {}", here(), setup_.host, what_, call_),
               .next = kLookForRank});
}

void MpiWorker::look_at_late() {
  const double waited = order_->waited.look(monotonic_seconds());
  if (waited < setup_.late) return;
  const auto missing = std::find_if(pending_.begin(), pending_.end(),
                                    [](const Pending& one) { return one.transfer->to != nullptr; });
  const Transfer& transfer = *(missing == pending_.end() ? pending_.front() : *missing).transfer;
  throw Error(Exit::kNoProgress, {.area = "HANG-09",
                                  .what = fmt::format("rank {} has not come to \"{}\", call {}, for {}",
                                                      transfer.peer, what_, call_, seconds_of(waited)),
                                  .place = here() + " on " + setup_.host,
                                  .next = "see that rank's log"});
}

// Some may be gone, and take nothing: what rank 0 says is heard meanwhile.
void MpiWorker::tell_all(const Sign& sign, Waited& waited) {
  std::vector<void*> requests;
  const Sign& word = words_.emplace_back(sign);
  for (int r = 0; r < ranks; ++r) {
    if (r != rank) requests.push_back(begin_send(word, r));
  }
  while (!requests.empty() && waited.look(monotonic_seconds()) < kTellSeconds) {
    std::erase_if(requests, [this](void*& request) { return finish(request); });
    take_signs();
    {
      const std::lock_guard lock(mutex_);
      if (!told_by_leader_.empty()) return;
    }
    std::this_thread::sleep_for(kNap);
  }
}

// True: there is more to wait for. The neighbour's goodbye is the last thing that comes.
bool MpiWorker::say_goodbye() {
  if (ranks > 1) {
    std::this_thread::sleep_for(kNap);
    take_signs();
    if (speaking_ != nullptr && !finish(speaking_)) return true;
    if (spoken_.kind != Sign::Kind::kLeave) {
      spoken_ = sign(Sign::Kind::kLeave);
      speaking_ = begin_send(spoken_, (rank + 1) % ranks);
      return true;
    }
    if (!neighbour_left_) return true;
  }
  setup_.api.leave();
  return false;
}

void MpiWorker::give_up(const Error& error) {
  const Sign word = word_of_end(error.code(), error.what(), error.text().advice());
  {
    // First: unless rank 0 does, this rank says it on the console before the others' ends reach its door.
    const std::lock_guard lock(mutex_);
    failure_ = error;
    released_ = true;
  }
  done_.notify_all();
  try {
    if (leader_lost_) {
      Waited waited(monotonic_seconds(), kLookSeconds);
      tell_all(word, waited);
    } else {
      speak_once(word);
    }
  } catch (const Error&) {
    // MPI has failed: the others find out by themselves.
  }
}

}  // namespace lm
