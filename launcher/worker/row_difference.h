// Two runs' rows of metrics.jsonl compared: the first step whose computed columns differ. Rows are read one
// after the other, in bounded memory; one that is being written is left out. Pure, except that it reads.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace lm {

struct ColumnDifference {
  std::string name;  // "loss"; of an evaluation "eval_loss", "target_tokens of eval_loss"; "answer to TEXT"
  std::array<Json, 2> values;
  std::optional<double> relative;  // |a - b| / max(|a|, |b|), of finite numbers
};

struct RowDifference {
  std::array<int64_t, 2> last = {};  // step of each run's last row; 0: no rows
  int64_t compared = 0, differ = 0;  // training steps that both have
  int64_t last_compared = 0;
  std::optional<int64_t> first;           // first step that differs; 0: the evaluation before training
  std::vector<ColumnDifference> columns;  // of that step
};

// False for times, bytes and percentages, which two equal runs need not share.
bool is_computed(std::string_view column);

// Paths of two metrics.jsonl; a missing one has no rows. Throws Error(11) for a row that is no JSON object
// with a step.
RowDifference compare_rows(const std::string& a, const std::string& b);

}  // namespace lm
