#include "comm/two_levels.h"

#include <algorithm>

#include "base/error.h"

namespace lm {
namespace {

constexpr auto kSumBytes = static_cast<int64_t>(sizeof(float));

// So many elements that both their own bytes and their sums' are whole parts.
int64_t room_for(int64_t staging, int machines) {
  return staging / kSumBytes / machines / kExchangePart * kExchangePart;
}

}  // namespace

TwoLevels::TwoLevels(Group& inside, Group& across, int64_t staging)
    : inside_(inside),
      across_(across),
      room_(room_for(staging, across.ranks())),
      partial_(static_cast<size_t>(room_ * across.ranks())) {
  LM_CHECK(room_ > 0, "staging for a part of every machine");
}

void TwoLevels::exchange(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                         const TwoLevelAdd& add) {
  LM_CHECK(std::ssize(shards) == ranks(), "a shard of every rank");
  int64_t longest = 0;
  for (const ByteRange& shard : shards) longest = std::max(longest, shard.bytes / add.element_bytes);
  std::vector<ByteRange> parts(shards.size());
  for (int64_t first = 0; first == 0 || first < longest; first += room_) {
    const int64_t at = first * add.element_bytes, most = room_ * add.element_bytes;
    std::ranges::transform(shards, parts.begin(), [&](const ByteRange& shard) {
      return ByteRange{shard.begin + at, std::clamp<int64_t>(shard.bytes - at, 0, most)};
    });
    add_inside(what, data, parts, add);
    add_across(what, parts, first, add);
  }
}

// Of every machine's shards, the one of the rank with this one's place.
void TwoLevels::add_inside(const char* what, const std::byte* data, std::span<const ByteRange> parts,
                           const TwoLevelAdd& add) {
  for (int m = 0; m < across_.ranks(); ++m) {
    float* const sums = partial_.data() + m * room_;
    const auto of_machine =
        parts.subspan(static_cast<size_t>(rank_of(m, 0)), static_cast<size_t>(inside_.ranks()));
    inside_.exchange(what, data, of_machine,
                     [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                       add.inside(sums + offset / add.element_bytes, bytes / add.element_bytes, from);
                     });
  }
}

void TwoLevels::add_across(const char* what, std::span<const ByteRange> parts, int64_t first,
                           const TwoLevelAdd& add) {
  std::vector<ByteRange> sums;
  for (int m = 0; m < across_.ranks(); ++m) {
    const ByteRange& part = parts[static_cast<size_t>(rank_of(m, inside_.rank()))];
    sums.push_back({m * room_ * kSumBytes, part.bytes / add.element_bytes * kSumBytes});
  }
  std::vector<const float*> machines(sums.size());
  across_.exchange(what, reinterpret_cast<const std::byte*>(partial_.data()), sums,
                   [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                     std::ranges::transform(from, machines.begin(), [](const std::byte* sum) {
                       return reinterpret_cast<const float*>(sum);
                     });
                     add.across(first + offset / kSumBytes, bytes / kSumBytes, machines);
                   });
}

}  // namespace lm
