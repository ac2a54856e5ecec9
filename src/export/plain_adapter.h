// An adapter with PiSSA's start as a plain one of the original model: W + s (B A - B0 A0) is W + s' B' A' for
// A' = [A; A0] and B' = [B, -B0], of twice the rank and the same scale. In memory, in fp32; what else is
// trained beside the pairs stays as it is.
#pragma once

#include <vector>

#include "export/weight_source.h"
#include "weights/principal_pairs.h"

namespace lm {

class PlainAdapter {
 public:
  // `adapter`, with the layout that it is trained in, and the source of its values.
  PlainAdapter(const ModelSpec& model, const AdapterSpec& adapter, const ModelLayout& layout,
               const WeightSource& source, const PrincipalPairs& starts);

  const AdapterSpec& spec() const { return spec_; }
  const ModelLayout& layout() const { return layout_; }
  WeightSource source() const;  // of its tensors; borrows this
  // A block's flat array.
  const std::byte* block(size_t block) const;

 private:
  AdapterSpec spec_;
  ModelLayout layout_;
  std::vector<std::vector<float>> blocks_;
};

}  // namespace lm
