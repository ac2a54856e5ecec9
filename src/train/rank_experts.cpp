#include "train/rank_experts.h"

#include <algorithm>

#include "base/cuda.h"
#include "base/error.h"

namespace lm {

RankExperts::RankExperts(Group& group, StreamView stream, const ExpertShare& share, int64_t layers,
                         int64_t row_bytes)
    : group_(group),
      stream_(stream),
      share_(share),
      starts_("counts of experts of layer", static_cast<size_t>(layers)),
      rows_("rows of experts of layer", static_cast<size_t>(layers)),
      leaving_(stream.device, expert_round_bytes(share.ranks, row_bytes)) {
  LM_CHECK(share.ranks == group.ranks() && share.place == group.rank(), "experts of all ranks");
}

void RankExperts::gather_starts(int64_t layer, std::span<const int32_t> start, int32_t* all) {
  const auto each = static_cast<int64_t>(start.size_bytes());
  auto* const bytes = reinterpret_cast<std::byte*>(all);
  std::vector<ByteRange> shards;
  for (int r = 0; r < share_.ranks; ++r) shards.push_back({r * each, each});
  copy_bytes(bytes + share_.place * each, start.data(), each, stream_);
  group_.begin_after(stream_);
  group_.all_gather(starts_.of(layer), bytes, shards);
  group_.end_before(stream_);
}

std::span<const int32_t> RankExperts::on_host(std::span<const int32_t> all) {
  if (stream_.device == DeviceType::kCpu) return all;
  host_.resize(all.size());
  copy_bytes(host_.data(), all.data(), static_cast<int64_t>(all.size_bytes()), stream_);
  synchronize(stream_);
  group_.check();
  return host_;
}

void RankExperts::move_rows(int64_t layer, const RowsOnTheWay& way) {
  const int64_t row = way.from.columns * static_cast<int64_t>(dtype_size(way.from.dtype));
  LM_CHECK(way.from.stride == way.from.columns && way.to.stride == way.to.columns, "contiguous rows");
  const int64_t room = leaving_.size() / share_.ranks / row;  // rows of a round to each rank
  LM_CHECK(room > 0, "a row is longer than what was planned");
  const auto* const from = static_cast<const std::byte*>(way.from.data);
  auto* const to = static_cast<std::byte*>(way.to.data);
  std::vector<ByteRange> shards(way.out.size());
  const auto in_round = [&](int64_t rows, int64_t first) {
    return std::clamp<int64_t>(rows - first, 0, room);
  };
  for (int64_t first = 0; first < std::ranges::max(way.most); first += room) {
    for (size_t r = 0; r < shards.size(); ++r) {
      shards[r] = {static_cast<int64_t>(r) * room * row, in_round(way.most[r], first) * row};
      const int64_t rows = in_round(way.out[r].rows, first);
      if (rows > 0)
        copy_bytes(leaving_.data() + shards[r].begin, from + (way.out[r].first + first) * row, rows * row,
                   stream_);
    }
    group_.begin_after(stream_);
    group_.all_to_all(
        rows_.of(layer), leaving_.data(), shards,
        [&](int rank, int64_t offset, std::span<const std::byte> bytes) {
          const RowRange& in = way.in[static_cast<size_t>(rank)];
          // Who sends less than another fills up with what nobody reads.
          const int64_t sent =
              std::clamp<int64_t>(in_round(in.rows, first) * row - offset, 0, std::ssize(bytes));
          if (sent > 0)
            copy_bytes(to + (in.first + first) * row + offset, bytes.data(), sent, group_.stream(stream_));
        });
    group_.end_before(stream_);
  }
}

}  // namespace lm
