#include "comm/mpi_group.h"

#include <cstring>

#include "base/error.h"

namespace lm {

MpiGroup::MpiGroup(MpiLink& link, int64_t staging, std::function<void(const char* what)> on_enter)
    : link_(link),
      on_enter_(std::move(on_enter)),
      staging_(std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(staging))),
      staging_bytes_(staging) {
  LM_CHECK(staging >= kReduceScatterPart * ranks(), "staging for a part of every rank");
}

void MpiGroup::move(const char* what) {
  if (on_enter_) on_enter_(what);
  for (const Transfer& transfer : transfers_) {
    if (transfer.from != nullptr) count_sent(transfer.peer, transfer.bytes);
  }
  link_.move(what, transfers_, continues());
}

void MpiGroup::all_gather_among(const Members& members, const char* what, std::byte* data,
                                std::span<const ByteRange> shards, int64_t /*longest*/) {
  transfers_.clear();
  const size_t count = members.ranks.size(), place = static_cast<size_t>(members.place);
  for (size_t i = 1; i < count; ++i) {  // each begins with another, so that no link has all of them at once
    const size_t other = (place + i) % count;
    for (size_t first = 0; first < shards.size(); first += count) {
      const ByteRange &theirs = shards[first + other], &mine = shards[first + place];
      const int peer = members.ranks[other];
      if (theirs.bytes > 0)
        transfers_.push_back({.to = data + theirs.begin, .bytes = theirs.bytes, .peer = peer});
      if (mine.bytes > 0)
        transfers_.push_back({.from = data + mine.begin, .bytes = mine.bytes, .peer = peer});
    }
  }
  move(what);
}

void MpiGroup::reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                                    std::span<const ByteRange> shards, int64_t longest, const Add& add) {
  const auto count = static_cast<int>(members.ranks.size());
  const int64_t room = staging_bytes_ / count / kReduceScatterPart * kReduceScatterPart;
  std::vector<const std::byte*> from(members.ranks.size());
  for (int64_t at = 0; at == 0 || at < longest; at += room) {
    const ByteRange mine = part(shards[static_cast<size_t>(members.place)], at, room);
    transfers_.clear();
    for (int i = 1; i < count; ++i) {
      const auto other = static_cast<size_t>((members.place + i) % count);
      const int peer = members.ranks[other];
      std::byte* const staged = staging_.get() + static_cast<int64_t>(other) * room;
      from[other] = staged;
      const ByteRange theirs = part(shards[other], at, room);
      if (mine.bytes > 0) transfers_.push_back({.to = staged, .bytes = mine.bytes, .peer = peer});
      if (theirs.bytes > 0)
        transfers_.push_back({.from = data + theirs.begin, .bytes = theirs.bytes, .peer = peer});
    }
    move(what);
    // A copy, as the sum may be made where the array is.
    std::byte* const own = staging_.get() + members.place * room;
    if (mine.bytes > 0) std::memcpy(own, data + mine.begin, static_cast<size_t>(mine.bytes));
    from[static_cast<size_t>(members.place)] = own;
    if (mine.bytes > 0) add(at, mine.bytes, from);
  }
}

}  // namespace lm
