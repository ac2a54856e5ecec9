// What the rows of tokens pass through where each rank keeps some experts (model/expert_exchange.h): an
// all-to-all in rounds of so many rows to each rank, fixed by the model, so that its memory is. Owned by the
// step, used by the rank's compute thread, in whose stream rows leave and arrive.
#pragma once

#include <span>
#include <vector>

#include "base/arena.h"
#include "comm/collective_names.h"
#include "comm/group.h"
#include "model/expert_exchange.h"
#include "spec/model_spec.h"

namespace lm {

class RankExperts final : public ExpertExchange {
 public:
  // Borrows the group, whose memory is the stream's device's. Rows have at most `row_bytes`, those of a
  // hidden state.
  RankExperts(Group& group, StreamView stream, const ExpertShare& share, int64_t layers, int64_t row_bytes);

  ExpertShare share() const override { return share_; }
  void gather_starts(int64_t layer, std::span<const int32_t> start, int32_t* all) override;
  std::span<const int32_t> on_host(std::span<const int32_t> all) override;
  void move_rows(int64_t layer, const RowsOnTheWay& rows) override;

 private:
  Group& group_;
  StreamView stream_;
  ExpertShare share_;
  CollectiveNames starts_, rows_;
  Memory leaving_;             // of a round, what goes to each rank
  std::vector<int32_t> host_;  // of a GPU's starts
};

}  // namespace lm
