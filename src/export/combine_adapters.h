// Several LoRA adapters of one base model combined into one, module by module, as PEFT's add_weighted_adapter
// combines them. Owns the result, in fp32; while it is made, all adapters are in memory. Errors are
// Error(11).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "export/weight_source.h"
#include "spec/block_layout.h"

namespace lm {

struct WeightedAdapter {
  std::string directory;  // PEFT's
  double weight = 1;
};

// Of adapters i with the factors f = weight · scale, W' = W + Σ f B A:
enum class Combination : uint8_t {
  kCat,     // A and B one behind the other, so ranks add up: exact
  kSvd,     // the best approximation of that of a chosen rank
  kLinear,  // (Σ sqrt(f) B) (Σ sqrt(f) A): equal ranks, and products of different adapters come in
};

struct CombineOptions {
  Combination how = Combination::kCat;
  int64_t rank = 0;  // of kSvd; 0: the largest one of the adapters
  int threads = 1;
};

class CombinedAdapter {
 public:
  // A module is adapted that one of them adapts. Refuses DoRA by name, since its magnitudes belong to one
  // adapter, and adapters that do not fit `base`.
  CombinedAdapter(const ModelSpec& base, std::span<const WeightedAdapter> adapters,
                  const CombineOptions& options);

  const AdapterSpec& spec() const { return spec_; }  // alpha is the rank in each module: the scale is 1
  const ModelLayout& layout() const { return layout_; }
  WeightView view(size_t block, const TensorPlace& place) const;

 private:
  AdapterSpec spec_;
  ModelLayout layout_;
  std::vector<std::vector<float>> blocks_;  // as each block's flat array
};

}  // namespace lm
