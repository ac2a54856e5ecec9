// Sampling of the next token from the model's logits: temperature, top-k, then top-p, as in transformers.
// Pure: a seed and the token's position in the answer give the same choice everywhere.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lm {

struct Sampling {
  double temperature = 0;  // 0: always the likeliest
  int64_t top_k = 0;       // 0: all
  double top_p = 1;        // 1: all
  uint64_t seed = 0;
};

struct Candidate {
  int32_t token = 0;
  double weight = 0;  // its unnormalised probability
};
// The tokens that pass `sampling`'s filters, likeliest first (ties: the lowest id first). Temperature above
// 0.
std::vector<Candidate> candidates(const Sampling& sampling, std::span<const float> logits);

// The answer's token number `place`.
int32_t choose_token(const Sampling& sampling, std::span<const float> logits, int64_t place);

}  // namespace lm
