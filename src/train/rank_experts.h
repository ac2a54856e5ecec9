// What the rows of tokens pass through where each rank keeps some experts (model/expert_exchange.h): an
// all-to-all in rounds of so many rows to each rank, fixed by the model, so that its memory is. Owned by the
// step, used by the rank's compute thread. On CPUs alone.
#pragma once

#include "base/arena.h"
#include "comm/collective_names.h"
#include "comm/group.h"
#include "model/expert_exchange.h"
#include "spec/model_spec.h"

namespace lm {

class RankExperts final : public ExpertExchange {
 public:
  // Borrows the group. Rows have at most `row_bytes`, those of a hidden state.
  RankExperts(Group& group, const ExpertShare& share, int64_t layers, int64_t row_bytes);

  ExpertShare share() const override { return share_; }
  void gather_counts(int64_t layer, std::span<int32_t> all) override;
  void move_rows(int64_t layer, const RowsOnTheWay& rows) override;

 private:
  Group& group_;
  ExpertShare share_;
  CollectiveNames counts_, rows_;
  Memory leaving_;  // of a round, what goes to each rank
};

}  // namespace lm
