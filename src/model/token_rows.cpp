#include "model/token_rows.h"

#include <algorithm>
#include <vector>

namespace lm {

std::vector<RowRun> row_runs(std::span<const int64_t> tokens) {
  std::vector<RowRun> out;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!out.empty() && out.back().row + out.back().count == tokens[i]) {
      ++out.back().count;
    } else {
      out.push_back({tokens[i], static_cast<int64_t>(i), 1});
    }
  }
  return out;
}

void write_token_rows(const Context& context, const TokenRows& tokens, const View& table) {
  for (const RowRun& run : tokens.runs) {
    context.kernels.copy_rows({.from = tokens.rows.weight.row_range(run.first, run.count),
                               .to = table.row_range(run.row, run.count)},
                              context.stream);
  }
}

void add_token_gradients(const Context& context, const TokenRows& tokens, const View& dlogits,
                         int64_t first_row, const View& x, bool first) {
  if (!tokens.rows.gradient.defined()) return;
  for (const RowRun& run : tokens.runs) {
    const int64_t begin = std::max(run.row, first_row),
                  end = std::min(run.row + run.count, first_row + dlogits.columns);
    if (begin >= end) continue;
    add_weight_gradient(context, tokens.rows.gradient.row_range(run.first + begin - run.row, end - begin),
                        dlogits.column_range(begin - first_row, end - begin), x, first);
  }
}

}  // namespace lm
