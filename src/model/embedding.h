// The embedding: a gather of rows forward, of the tokens' table and, where a model learns its positions, of
// theirs; backward, the sum of gradients per distinct row of the whole optimizer step, in the order of
// positions, added to the block's gradient once (for a tied weight that is after the head's gradient), before
// ranks exchange it. Memory for the sums is owned here, sized for the longest step.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "model/layer_inputs.h"
#include "model/prompt_encoder.h"
#include "model/token_rows.h"
#include "model/virtual_tokens.h"
#include "spec/block_layout.h"

namespace lm {

// LoRA of the table: its rows become table + scale B A.
struct TableAdapter {
  Param a, b;  // [r, H], [V, r]; undefined: there is none
  float scale = 1;
  bool defined() const { return a.weight.defined(); }
};

struct Embedding {
  Param table;                 // [V, H]
  Param positions;             // [P, H]; undefined where positions are not learned
  LayerInputs inputs = {};     // undefined tensors where layers have none of their own
  DropoutMask dropout = {};    // of their sum, while training
  Param prompt = {};           // [n, H], of the virtual tokens; undefined without prompt tuning
  TokenRows tokens = {};       // rows in place of the table's own
  PromptEncoder encoder = {};  // what makes the virtual tokens' embeddings of `prompt` (P-tuning)
  TableAdapter adapter = {};
};

// What multiplies a token's row, as the model's type has it.
float embedding_scale(const EmbeddingSpec& spec, DType dtype);

// And an embedding of a prompt.
float prompt_scale(const Context& context);

// x [T, H] = drop(scale * table[token] (+ positions[position])). The table gets its trained rows first; a
// prompt's rows are in place of the products.
void embedding_forward(const Context& context, const Embedding& embedding, const DeviceBatch& batch,
                       const View& x);

// The backward pass of an adapter, from dx [T, H] of the sum: A's gradient is added, and the gradient of B's
// rows, [T, r], is returned in memory of the arena, for EmbeddingGradient::add. `first`: A's is overwritten.
View table_adapter_backward(const Context& context, const TableAdapter& adapter, const DeviceBatch& batch,
                            const View& dx, bool first);
// From the gradient of x to that of the prompt and of its encoder; the prompt's rows of dx become zero.
// `first`: the gradients' memory has no value yet.
void prompt_backward(const Context& context, const Embedding& embedding, const DeviceBatch& batch,
                     const View& dx, bool first);

// Rows of the tables that a step may update at most: distinct tokens, and distinct positions.
struct UpdatedRows {
  int64_t tokens = 0, positions = 0;
  int64_t chosen = 0;  // tokens whose rows alone are trained (lora.tokens)
  int64_t inputs = 0;  // of the table of layers' inputs, as wide as these
  int64_t pairs = 0;   // of an adapter's B
  int64_t all() const { return tokens + positions + chosen; }
};
UpdatedRows updated_rows(const ModelSpec& spec, int64_t step_tokens, int64_t max_length);
// Of those, the rows of tables that are trained.
UpdatedRows trained_rows(UpdatedRows rows, const BlockLayout& embedding);

// The gradient of one table of which each token of a batch takes a row.
class RowGradient {
 public:
  struct Table {
    int64_t rows = 0, columns = 0;
    std::vector<int32_t> Batch::*index = &Batch::token;  // which row
    int64_t ignored = -1;                                // a row that gets no gradient; -1: none
    // Where some rows alone have one: of each row of the table its row of the gradient, -1: none.
    std::vector<int32_t> places = {};
  };
  // `max_rows` distinct rows of a step at most, `max_tokens` of a micro-batch.
  RowGradient(const Table& table, int64_t max_rows, int64_t max_tokens, DeviceType device);

  void begin(const Context& context, const std::vector<Batch>& micro_batches);
  void add(const Context& context, size_t micro, const View& dx);
  // gradient[row] += scale * sum.
  void finish(const Context& context, const View& gradient, float scale);

 private:
  // Of one micro-batch: positions grouped by slot.
  struct Slots {
    std::vector<int32_t> order_and_start;  // [T], then [slots + 1]: where a slot's positions begin
    int64_t tokens = 0;
  };

  // The row of the gradient that a row of the table has; -1: none.
  int32_t place_of(int32_t row) const {
    if (row == table_.ignored) return -1;
    return table_.places.empty() ? row : table_.places[static_cast<size_t>(row)];
  }

  Table table_;  // `rows`: of its gradient
  int64_t max_rows_;
  std::vector<int32_t> slot_of_row_;  // [table_.rows], -1 outside a step
  std::vector<int32_t> rows_;         // distinct ones in order of appearance
  std::vector<Slots> micro_;
  Memory sums_;   // fp32 [max_rows, columns]
  Memory index_;  // on a GPU: order, start and rows of the call in flight
};

// Gradients of the rows that a micro-batch's tokens have taken.
struct RowGradients {
  View dx = {};      // [T, H]
  View inputs = {};  // of the table of layers' inputs, where there is one
  View pairs = {};   // [T, r] of an adapter's B
};

class EmbeddingGradient {
 public:
  // Of the tables that have rows in `most`; `chosen`: the tokens of its chosen rows.
  // `rank`: of an adapter.
  EmbeddingGradient(const ModelSpec& spec, const UpdatedRows& most, int64_t max_tokens, DeviceType device,
                    std::span<const int64_t> chosen = {}, int64_t rank = 0);

  // A backward of the step begins: numbers the distinct rows of its micro-batches and zeroes their sums.
  void begin(const Context& context, const std::vector<Batch>& micro_batches);
  // Adds those of micro-batch `micro`, in the order of positions. Micro-batches come in ascending order.
  void add(const Context& context, size_t micro, const RowGradients& of);
  // gradient[row] += sum, once per backward, of all tables; the tokens' and that of layers' inputs with the
  // factor that their rows have. The caller has zeroed the gradients before, but a tied head's.
  void finish(const Context& context, const Embedding& embedding);

 private:
  std::optional<RowGradient> tokens_, chosen_, positions_, inputs_, pairs_;
};

}  // namespace lm
