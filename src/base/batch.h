// The model's input: micro-batches without padding. All documents of a micro-batch are concatenated in one
// list of tokens; attention stays inside a document and positions restart at 0. Plain values, host memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

namespace lm {

struct Batch {
  std::vector<int32_t> token;           // [tokens]
  std::vector<int32_t> position;        // [tokens], from 0 in each document
  std::vector<int32_t> target;          // [tokens]: the next token of the document, or -1 if it is masked
  std::vector<float> weight = {};       // [tokens], of each target's nll in the loss; empty: all 1
  std::vector<int32_t> sample;          // [tokens]: index of the example in the data set
  std::vector<int32_t> document_start;  // [documents + 1], ending with tokens
  // Of documents that are scored as a whole: their labels, equally many of each, one after another.
  std::vector<float> label = {};
  int64_t tokens() const { return static_cast<int64_t>(token.size()); }
  int64_t documents() const { return static_cast<int64_t>(document_start.size()) - 1; }
};

// A rank's micro-batches of one optimizer step. `target_tokens` counts targets >= 0 over all of them (and all
// ranks), `target_weight` is the sum of their weights if they have some. The loss is the sum of weight * nll
// divided by the sum of the weights, which is known before the step starts.
struct StepBatches {
  std::vector<Batch> micro;
  int64_t target_tokens = 0;
  int64_t tokens = 0;                        // over all ranks, too
  std::optional<double> target_weight = {};  // unset: 1 for each target
  double divisor() const { return target_weight.value_or(static_cast<double>(target_tokens)); }
};

// `tokens` rounded up to one of eight numbers between one power of two and the next, at least 32 apart: 4 %
// more on average. A GEMM library's caches per shape stay small when micro-batches have this many rows.
inline int64_t rounded_rows(int64_t tokens) {
  const auto power =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(tokens, 1))));
  const int64_t apart = std::max<int64_t>(32, power / 8);
  return (tokens + apart - 1) / apart * apart;
}

}  // namespace lm
