#include "comm/mpi_worker.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace lm {
namespace {

// Between two collectives the thread only keeps heartbeats going; within one it sleeps once nothing comes at
// once, as ranks may share cores.
constexpr double kIdle = 10e-3, kNap = 20e-6;  // seconds
constexpr double kSpinSeconds = 50e-6;
constexpr int kNoticeTag = 1;

void copy_text(char* to, size_t size, const std::string& from) {
  std::snprintf(to, size, "%s", from.c_str());
}

}  // namespace

Error MpiWorker::mpi_error() const {
  return Error(Exit::kPeerLost, {.area = "PEER-10",
                                 .what = "MPI has failed in " + liveness_.here().text() + ": " + text_,
                                 .place = self().text(),
                                 .next = "see whether another rank has ended, and its message"});
}

Notice MpiWorker::notice(Notice::Kind kind) const {
  Notice out;
  out.kind = kind;
  out.rank = rank_;
  out.number = liveness_.here().number;
  copy_text(out.what, sizeof out.what, liveness_.here().what);
  copy_text(out.host, sizeof out.host, setup_.host);
  return out;
}

Notice MpiWorker::end_notice(Exit code, const std::string& why, const std::string& next) const {
  Notice word = notice(Notice::Kind::kEnd);
  word.code = static_cast<int32_t>(code);
  copy_text(word.why, sizeof word.why, why);
  copy_text(word.next, sizeof word.next, next);
  return word;
}

void MpiWorker::run() {
  prctl(PR_SET_NAME, "lm-mpi");
  prctl(PR_SET_TIMERSLACK, 1000);  // ns: naps are short
  const int joined = setup_.api.join(&rank_, &ranks_, text_, sizeof text_);
  {
    const std::lock_guard lock(mutex_);
    if (joined == 0) {
      joined_ = true;
      liveness_ = Liveness(self(), ranks_, patience(), clock());
    } else {
      failure_ = mpi_error();
    }
  }
  done_.notify_all();
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
  std::optional<Notice> last_word;
  bool leaving = false;
  {
    std::unique_lock lock(mutex_);
    const auto anything = [this] { return asked_ || last_word_ || leaving_ || stopping_; };
    if (!order_) setup_.threads.wait_for(wake_, lock, kIdle, anything);
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
  // By this turn's time others are judged: it may be stopped meanwhile, and then does not know either.
  const double now = clock();
  if (leaving) return say_goodbye();
  take_notices();
  post_heartbeat();
  if (order_) {
    if (pending_.empty()) begin_order();
    if (!advance_order()) {
      look_at_late(now);
      setup_.threads.nap(now - order_->began > kSpinSeconds ? kNap : 0);
    }
  }
  look_at_neighbour(now);
  return true;
}

// With the mutex.
void MpiWorker::take_order() {
  if (!asked_ || order_) return;
  order_ = asked_;
  liveness_.enter({asked_->what, asked_->number}, asked_->began);
  continues_ = asked_->continues;
  taken_ = true;
}

void MpiWorker::begin_order() {
  for (const bool receive : {true, false}) {  // so that nothing comes before it is expected
    for (const Transfer& one : order_->transfers) {
      if ((one.to != nullptr) != receive) continue;
      for (int64_t at = 0; at < one.bytes; at += kMostMessage) {
        const int64_t bytes = std::min(one.bytes - at, kMostMessage);
        const MpiAddress address{.to = one.peer, .tag = order_->tag};
        void* const request =
            receive ? setup_.api.receive(one.to + at, bytes, one.peer, MpiChannel::kData, text_, sizeof text_)
                    : setup_.api.send(one.from + at, bytes, &address, text_, sizeof text_);
        pending_.push_back({begun(request), &one, bytes});
      }
    }
  }
}

// Whether the order is done.
bool MpiWorker::advance_order() {
  std::erase_if(pending_, [this](Pending& one) {
    MpiArrival arrival;
    if (!finish(one.request, &arrival)) return false;
    if (one.transfer->to != nullptr && (arrival.tag != order_->tag || arrival.bytes != one.bytes)) {
      throw Error(
          Exit::kInternal,
          {.area = "BUG-70",
           .what = fmt::format("collective mismatch: rank {} is not in {}", one.transfer->peer,
                               liveness_.here().text()),
           .place = self().text(),
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
  const int done = setup_.api.test(request, arrival == nullptr ? &ignored : arrival, text_, sizeof text_);
  if (done < 0) throw mpi_error();
  if (done > 0) request = nullptr;
  return done > 0;
}

void* MpiWorker::begun(void* request) const {
  if (request == nullptr) throw mpi_error();
  return request;
}

void* MpiWorker::begin_send(const Notice& notice, int to) {
  const MpiAddress address{.to = to, .channel = MpiChannel::kNotices, .tag = kNoticeTag};
  return begun(setup_.api.send(&notice, sizeof notice, &address, text_, sizeof text_));
}

void MpiWorker::take_notices() {
  if (ranks_ == 1) return;
  for (;;) {
    if (hearing_ == nullptr && !neighbour_left_) {
      hearing_ =
          begun(setup_.api.receive(&heard_, sizeof heard_, -1, MpiChannel::kNotices, text_, sizeof text_));
    }
    MpiArrival arrival;
    if (hearing_ == nullptr || !finish(hearing_, &arrival)) return;
    take(heard_, arrival.from);
  }
}

void MpiWorker::take(const Notice& notice, int from) {
  if (notice.kind != Notice::Kind::kEnd) {  // of the neighbour: nobody else sends these
    neighbour_ = {neighbour_.heartbeats + 1, {notice.what, notice.number}, notice.host};
    neighbour_left_ = notice.kind == Notice::Kind::kLeave;
    return;
  }
  const Error error(static_cast<Exit>(notice.code),
                    {.area = "PEER-32",
                     .what = RankName{notice.rank, notice.host}.text() + " has ended the run: " + notice.why,
                     .place = self().text() + ", in " + liveness_.here().text(),
                     .next = notice.next});
  if (!heard_end_) heard_end_ = error;
  const std::lock_guard lock(mutex_);
  if (!heard_word_) heard_word_ = notice;
  if (from == 0) told_by_leader_ = notice.why;
}

// A rank that ends right after a collective may be heard of before that one's last message: what all have
// sent still comes.
void MpiWorker::fail_with_it() {
  try {
    for (const double until = clock() + kComeSeconds; (order_ || continues_) && clock() < until;) {
      {
        const std::lock_guard lock(mutex_);
        take_order();
      }
      if (order_ && pending_.empty()) begin_order();
      if (!order_ || !advance_order()) setup_.threads.nap(kNap);
    }
  } catch (const Error&) {
    // Of a collective that the other rank has not entered.
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
void MpiWorker::speak_once(std::optional<Notice> last_word) {
  bool told = false;
  for (Waited waited(clock(), kLookSeconds); waited.look(clock()) < kHearSeconds;) {
    if (last_word && !told) {
      tell_all(*last_word, waited);
      told = true;
    }
    if (rank_ == 0 && told) return;
    take_notices();
    {
      const std::lock_guard lock(mutex_);
      if (stopping_ || !told_by_leader_.empty()) return;
      last_word = last_word_;
    }
    setup_.threads.nap(kNap);
  }
}

void MpiWorker::post_heartbeat() {
  if (ranks_ == 1 || (speaking_ != nullptr && !finish(speaking_))) return;
  const double now = clock();
  if (now - spoken_at_ < kHeartbeatSeconds) return;
  spoken_at_ = now;
  spoken_ = notice(Notice::Kind::kHeartbeat);
  speaking_ = begin_send(spoken_, (rank_ + 1) % ranks_);
}

void MpiWorker::look_at_neighbour(double now) {
  if (ranks_ == 1 || neighbour_left_) return;
  const int before = (rank_ + ranks_ - 1) % ranks_;
  const std::optional<Error> error = liveness_.silent(before, neighbour_, now);
  if (!error) return;
  leader_lost_ = before == 0;
  throw Error(*error);
}

void MpiWorker::look_at_late(double now) {
  const auto missing = std::find_if(pending_.begin(), pending_.end(),
                                    [](const Pending& one) { return one.transfer->to != nullptr; });
  const Pending& one = missing == pending_.end() ? pending_.front() : *missing;
  if (const std::optional<Error> error = liveness_.late(one.transfer->peer, now)) throw Error(*error);
}

// Some may be gone, and take nothing: what rank 0 says is heard meanwhile.
void MpiWorker::tell_all(const Notice& notice, Waited& waited) {
  std::vector<void*> requests;
  const Notice& word = words_.emplace_back(notice);
  for (int r = 0; r < ranks_; ++r) {
    if (r != rank_) requests.push_back(begin_send(word, r));
  }
  while (!requests.empty() && waited.look(clock()) < kTellSeconds) {
    std::erase_if(requests, [this](void*& request) { return finish(request); });
    take_notices();
    {
      const std::lock_guard lock(mutex_);
      if (!told_by_leader_.empty()) return;
    }
    setup_.threads.nap(kNap);
  }
}

// True: there is more to wait for. The neighbour's goodbye is the last thing that comes.
bool MpiWorker::say_goodbye() {
  if (ranks_ > 1) {
    setup_.threads.nap(kNap);
    take_notices();
    if (speaking_ != nullptr && !finish(speaking_)) return true;
    if (spoken_.kind != Notice::Kind::kLeave) {
      spoken_ = notice(Notice::Kind::kLeave);
      speaking_ = begin_send(spoken_, (rank_ + 1) % ranks_);
      return true;
    }
    if (!neighbour_left_) return true;
  }
  setup_.api.leave();
  return false;
}

void MpiWorker::give_up(const Error& error) {
  const Notice word = end_notice(error.code(), error.what(), error.text().advice());
  {
    // First: unless rank 0 does, this rank says it on the console before the others' ends reach its CLI
    // process.
    const std::lock_guard lock(mutex_);
    failure_ = error;
    released_ = true;
  }
  done_.notify_all();
  try {
    if (leader_lost_) {
      Waited waited(clock(), kLookSeconds);
      tell_all(word, waited);
    } else {
      speak_once(word);
    }
  } catch (const Error&) {
    // MPI has failed: the others find out by themselves.
  }
}

}  // namespace lm
