#include "comm/two_levels.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace lm {
namespace {

constexpr auto kSumBytes = static_cast<int64_t>(sizeof(float));

// So many elements that both their own bytes and their sums' are whole parts.
int64_t room_for(int64_t partial, int machines) {
  return partial / kSumBytes / machines / kReduceScatterPart * kReduceScatterPart;
}

}  // namespace

TwoLevels::TwoLevels(Group& group, int each, DeviceType device, int64_t partial) : group_(group) {
  LM_CHECK(each > 0 && group.ranks() % each == 0, "equally many ranks on every machine");
  const int machine = group.rank() / each, place = group.rank() % each;
  inside_ = every(1, machine * each, each, place);
  across_ = every(each, place, group.ranks() / each, machine);
  room_ = room_for(partial, machines());
  LM_CHECK(room_ > 0, "room for a part of every machine's sums");
  partial_ = Memory(device, machines() * room_ * kSumBytes);
}

void TwoLevels::reduce_scatter(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                               const TwoLevelAdd& add) {
  LM_CHECK(std::ssize(shards) == group_.ranks(), "a shard of every rank");
  const int64_t longest = longest_of(shards) / add.element_bytes;
  std::vector<ByteRange> parts(shards.size());
  for (int64_t first = 0; first < longest; first += room_) {
    const int64_t at = first * add.element_bytes, most = room_ * add.element_bytes;
    std::ranges::transform(shards, parts.begin(),
                           [&](const ByteRange& shard) { return part(shard, at, most); });
    add_inside(what, data, parts, add);
    add_across(what, parts, first, add);
  }
}

// Of every machine's shards, the one of the rank with this one's place.
void TwoLevels::add_inside(const char* what, const std::byte* data, std::span<const ByteRange> parts,
                           const TwoLevelAdd& add) {
  for (int m = 0; m < machines(); ++m) {
    const auto of_machine = parts.subspan(static_cast<size_t>(m * each()), inside_.ranks.size());
    group_.reduce_scatter_among(inside_, what, data, of_machine, longest_of(of_machine),
                                [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                                  add.inside(sums_of(m) + offset / add.element_bytes,
                                             bytes / add.element_bytes, from);
                                });
  }
}

void TwoLevels::add_across(const char* what, std::span<const ByteRange> parts, int64_t first,
                           const TwoLevelAdd& add) {
  std::vector<ByteRange> sums;
  for (int m = 0; m < machines(); ++m) {
    const ByteRange& part = parts[static_cast<size_t>(across_.ranks[static_cast<size_t>(m)])];
    sums.push_back({m * room_ * kSumBytes, part.bytes / add.element_bytes * kSumBytes});
  }
  group_.reduce_scatter_among(across_, what, partial_.data(), sums,
                              longest_of(parts) / add.element_bytes * kSumBytes,
                              [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                                add.across(first + offset / kSumBytes, bytes / kSumBytes, from);
                              });
}

}  // namespace lm
