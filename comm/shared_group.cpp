#include "comm/shared_group.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int kLookMs = 200;

// Of a run, the bytes from `at` on, at most `most`.
ByteRange part(const ByteRange& run, int64_t at, int64_t most) {
  return {run.begin + at, std::clamp<int64_t>(run.bytes - at, 0, most)};
}

void copy_run(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

SignsOfLife::SignsOfLife(const SharedRegion& region, double silence)
    : region_(region),
      silence_(silence),
      beats_(static_cast<size_t>(region.ranks())),
      seen_(static_cast<size_t>(region.ranks())) {}

void SignsOfLife::look(double now) {
  // Who was stopped itself, or has not looked for long, does not know who was silent meanwhile.
  const bool first = now - looked_ > std::max(silence_ / 2, 1.0);
  looked_ = now;
  for (int r = 0; r < region_.ranks(); ++r) {
    const auto i = static_cast<size_t>(r);
    const uint64_t beats = region_.beats(r);
    if (first || beats != beats_[i]) beats_[i] = beats, seen_[i] = now;
  }
}

SharedGroup::SharedGroup(SharedRegion& region, int rank, double silence, double late)
    : region_(region), rank_(rank), silence_(silence), late_(late), signs_(region, silence) {
  LM_CHECK(rank >= 0 && rank < region.ranks(), "a rank of the region");
  LM_CHECK(region.staging_bytes() >= 2 * kExchangePart * region.ranks(), "staging for a part of every rank");
  alive_ = std::thread([this] { live(); });
}

SharedGroup::~SharedGroup() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  leave_.notify_one();
  alive_.join();
}

void SharedGroup::live() {
  std::unique_lock lock(mutex_);
  while (!leave_.wait_for(lock, std::chrono::milliseconds(kLookMs), [this] { return leaving_; }))
    region_.beat(rank_);
}

void SharedGroup::share_among(const Members& members, const char* what, std::byte* data,
                              std::span<const ByteRange> shards, int64_t longest) {
  const int64_t room = region_.staging_bytes() / 2;
  const size_t count = members.ranks.size();
  for (size_t first = 0; first < shards.size(); first += count) {  // a shard of each member
    const auto run = [&](size_t i, int64_t at) { return part(shards[first + i], at, room); };
    for (int64_t at = 0; at == 0 || at < longest; at += room) {
      const ByteRange mine = run(static_cast<size_t>(members.place), at);
      copy_run(half(rank_), data + mine.begin, mine.bytes);
      for (const int r : members.ranks) {
        if (r != rank_) count_sent(r, mine.bytes);
      }
      meet(what);
      for (size_t i = 0; i < count; ++i) {
        const ByteRange theirs = run(i, at);
        if (members.ranks[i] != rank_) copy_run(data + theirs.begin, half(members.ranks[i]), theirs.bytes);
      }
      ++round_;
    }
  }
}

void SharedGroup::exchange_among(const Members& members, const char* what, const std::byte* data,
                                 std::span<const ByteRange> shards, int64_t longest, const Add& add) {
  const auto count = std::ssize(members.ranks);
  const int64_t room = region_.staging_bytes() / 2 / count / kExchangePart * kExchangePart;
  std::vector<const std::byte*> from(members.ranks.size());
  for (int64_t at = 0; at == 0 || at < longest; at += room) {
    for (int64_t i = 0; i < count; ++i) {
      const ByteRange theirs = part(shards[static_cast<size_t>(i)], at, room);
      copy_run(half(rank_) + i * room, data + theirs.begin, theirs.bytes);
      if (i != members.place) count_sent(members.ranks[static_cast<size_t>(i)], theirs.bytes);
    }
    meet(what);
    const ByteRange mine = part(shards[static_cast<size_t>(members.place)], at, room);
    for (size_t i = 0; i < from.size(); ++i) from[i] = half(members.ranks[i]) + members.place * room;
    if (mine.bytes > 0) add(at, mine.bytes, from);
    ++round_;
  }
}

void SharedGroup::meet(const char* what) {
  const uint64_t meeting = region_.arrive(rank_, what);
  meeting_.store(meeting, std::memory_order_relaxed);
  waited_ = Waited(monotonic_seconds());
  while (!region_.wait(meeting, kLookMs)) {
    if (region_.all_arrived(meeting)) break;
    if (region_.ended()) throw ended_error(what);
    look_after(what, meeting);
  }
  for (int r = 0; r < ranks(); ++r) {
    const std::string theirs = region_.name(r, meeting);
    LM_CHECK(theirs == what, fmt::format("rank {} calls \"{}\", this one \"{}\"", r, theirs, what));
  }
}

void SharedGroup::look_after(const char* what, uint64_t meeting) {
  const double now = monotonic_seconds();
  const double waited = waited_.look(now);
  signs_.look(now);
  for (int r = 0; r < ranks(); ++r) {
    if (region_.where(r).meeting >= meeting) continue;
    if (signs_.silent_seconds(r, now) > silence_) give_up(what, meeting, r, signs_.silent_seconds(r, now));
    if (waited > late_) give_up(what, meeting, r, waited);
  }
}

void SharedGroup::give_up(const char* what, uint64_t meeting, int rank, double seconds) const {
  if (!region_.end()) throw ended_error(what);  // another rank says which one is lost
  throw silent_error(fmt::format("\"{}\", call {}", what, meeting), rank, seconds);
}

std::function<std::optional<Error>(const std::string&)> SharedGroup::watch() const {
  return [this, signs = SignsOfLife(region_, silence_)](const std::string& what) mutable {
    if (region_.ended()) return std::optional(ended_error(what));
    const double now = monotonic_seconds();
    signs.look(now);
    for (int r = 0; r < ranks(); ++r) {
      if (signs.silent_seconds(r, now) <= silence_) continue;
      if (!region_.end()) return std::optional(ended_error(what));  // another rank says which one is lost
      return std::optional(silent_error("\"" + what + "\"", r, signs.silent_seconds(r, now)));
    }
    return std::optional<Error>();
  };
}

Error SharedGroup::ended_error(const std::string& what) const {
  return Error(Exit::kPeerLost, {.area = "PEER-08",
                                 .what = "another rank has ended during \"" + what + "\"",
                                 .place = fmt::format("rank {}", rank_),
                                 .next = "see that rank's message"});
}

Error SharedGroup::silent_error(const std::string& call, int rank, double seconds) const {
  const SharedRegion::Whereabouts there = region_.where(rank);
  char text[32];
  std::snprintf(text, sizeof text, "%.0f s", seconds);
  return Error(
      Exit::kNoProgress,
      {.area = "HANG-09",
       .what = fmt::format("rank {} has given no sign of life for {}: it has not come to {}, and was last "
                           "seen at \"{}\", call {}",
                           rank, text, call, there.what, there.meeting),
       .place = fmt::format("rank {}", rank_),
       .next = "see whether that process is stopped or waits for a disk; then start the same command again"});
}

}  // namespace lm
