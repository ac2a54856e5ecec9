#include "comm/shared_group.h"

#include <fmt/format.h>
#include <chrono>
#include <cstring>
#include <limits>

#include "base/clock.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int kLookMs = 200;

void copy_run(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

SharedGroup::SharedGroup(SharedRegion& region, int rank, double silence, double late)
    : region_(region),
      rank_(rank),
      patience_{silence, late},
      liveness_({rank}, region.ranks(), patience_, monotonic_seconds()),
      heartbeat_(std::chrono::milliseconds(kLookMs), [this] {
        region_.post_heartbeat(rank_);
        return true;
      }) {
  LM_CHECK(rank >= 0 && rank < region.ranks(), "a rank of the region");
  LM_CHECK(region.staging_bytes() >= 2 * kReduceScatterPart * region.ranks(),
           "staging for a part of every rank");
}

void SharedGroup::all_gather_among(const Members& members, const char* what, std::byte* data,
                                   std::span<const ByteRange> shards, int64_t longest) {
  const int64_t room = region_.staging_bytes() / 2;
  const size_t count = members.ranks.size();
  for (size_t first = 0; first < shards.size(); first += count) {  // a shard of each member
    for (int64_t at = 0; at == 0 || at < longest; at += room) {
      const ByteRange mine = part(shards[first + static_cast<size_t>(members.place)], at, room);
      copy_run(half(rank_), data + mine.begin, mine.bytes);
      for (const int r : members.ranks) {
        if (r != rank_) count_sent(r, mine.bytes);
      }
      meet(what);
      for (size_t i = 0; i < count; ++i) {
        const ByteRange theirs = part(shards[first + i], at, room);
        if (members.ranks[i] != rank_) copy_run(data + theirs.begin, half(members.ranks[i]), theirs.bytes);
      }
      ++round_;
    }
  }
}

void SharedGroup::reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                                       std::span<const ByteRange> shards, int64_t longest, const Add& add) {
  const auto count = std::ssize(members.ranks);
  const int64_t room = region_.staging_bytes() / 2 / count / kReduceScatterPart * kReduceScatterPart;
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
  liveness_.enter({what, meeting}, monotonic_seconds());
  while (!region_.wait(meeting, kLookMs)) {
    if (region_.all_arrived(meeting)) break;
    if (const std::optional<Error> error = lost(liveness_, meeting)) throw Error(*error);
  }
  for (int r = 0; r < ranks(); ++r) {
    const std::string theirs = region_.name(r, meeting);
    LM_CHECK(theirs == what,
             fmt::format("collective mismatch: rank {} is in \"{}\", this one in \"{}\"", r, theirs, what));
  }
}

std::optional<Error> SharedGroup::lost(Liveness& liveness, uint64_t meeting) const {
  const Error ended = peer_ended({rank_}, "during \"" + liveness.here().what + "\"");
  if (region_.ended()) return ended;
  const double now = monotonic_seconds();
  for (int r = 0; r < ranks(); ++r) {
    const Posted there = region_.peek(r);
    if (there.last.number >= meeting) continue;
    std::optional<Error> error = liveness.silent(r, there, now);
    if (!error) error = liveness.late(r, now);
    if (!error) continue;
    if (!region_.end()) return ended;  // another rank says which one is lost
    return error;
  }
  return std::nullopt;
}

std::function<std::optional<Error>(const std::string&)> SharedGroup::watch() const {
  // Each meeting is a meeting to come, and only silence counts.
  constexpr double kForEver = std::numeric_limits<double>::infinity();
  return [this, liveness = Liveness({rank_}, ranks(), {patience_.silence, kForEver}, monotonic_seconds())](
             const std::string& what) mutable {
    liveness.enter({what}, monotonic_seconds());
    return lost(liveness, std::numeric_limits<uint64_t>::max());
  };
}

}  // namespace lm
