// Rows of the embedding that are trained in place of its own (lora.tokens). Before each use the frozen
// table's rows are overwritten by them, so that lookups and a tied head's products read one table; what they
// get back is summed for these rows alone.
#pragma once

#include <span>

#include "model/linear.h"

namespace lm {

// Rows [row, row + count) of the table are rows [first, first + count) of the trained tensor.
struct RowRun {
  int64_t row = 0, first = 0, count = 0;
};
// Of tokens in the order of the trained tensor's rows.
std::vector<RowRun> row_runs(std::span<const int64_t> tokens);

struct TokenRows {
  Param rows = {};                    // [n, H]; undefined: there are none
  std::span<const RowRun> runs = {};  // borrowed
};

// The table's rows become the trained ones, in the table's type.
void write_token_rows(const Context& context, const TokenRows& tokens, const View& table);

// Of a tied head: adds to the gradient of the rows that the logits' columns are of. `dlogits` [R, S] belong
// to rows [first_row, first_row + S) of the table; `first`: they are overwritten.
void add_token_gradients(const Context& context, const TokenRows& tokens, const View& dlogits,
                         int64_t first_row, const View& x, bool first);

}  // namespace lm
