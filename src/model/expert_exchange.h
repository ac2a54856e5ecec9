// Expert parallelism (Lepikhin et al., "GShard"): each rank keeps some of a layer's experts, and the rows of
// tokens go to the rank that has theirs and come back. Who carries rows; a step implements it
// (train/rank_experts.h), and a dry run one that moves nothing. Calls are collectives: every rank makes the
// same ones for the same layers in the same order, whatever its routers have chosen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/view.h"
#include "spec/block_layout.h"

namespace lm {

struct RowRange {
  int64_t first = 0, rows = 0;
  bool operator==(const RowRange&) const = default;
};

// Rows of `from` to the ranks, by rank, and where those of each rank come into `to`: contiguous views of one
// width and type. `most`: of each rank the longest range that any rank sends it; all ranks know the same.
struct RowsOnTheWay {
  View from, to;
  std::vector<RowRange> out, in;
  std::vector<int64_t> most;
};

// Memory of a round of rows to all ranks: so much, and at least a row to each.
inline constexpr int64_t kExpertRoundBytes = int64_t{1} << 20;
constexpr int64_t expert_round_bytes(int ranks, int64_t row_bytes) {
  return std::max(kExpertRoundBytes, ranks * row_bytes);
}

class ExpertExchange {
 public:
  virtual ExpertShare share() const = 0;
  // start [E + 1]: where the rows of each of this rank's experts begin, and the end; `all` [ranks, E + 1]
  // becomes that of every rank. Memory of the device.
  virtual void gather_starts(int64_t layer, std::span<const int32_t> start, int32_t* all) = 0;
  // These where the host reads them, until the next call. On a GPU it waits for the stream.
  virtual std::span<const int32_t> on_host(std::span<const int32_t> all) = 0;
  virtual void move_rows(int64_t layer, const RowsOnTheWay& rows) = 0;

 protected:
  ~ExpertExchange() = default;
};

}  // namespace lm
