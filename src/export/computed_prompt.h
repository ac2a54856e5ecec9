// A prompt that P-tuning trains with its encoder as peft's files have it: its embeddings alone, as the
// encoder makes them. In memory, in fp32.
#pragma once

#include <vector>

#include "export/weight_source.h"

namespace lm {

class ComputedPrompt {
 public:
  // `adapter`, with the layout that it is trained in, and the source of its values.
  ComputedPrompt(const ModelSpec& model, const AdapterSpec& adapter, const ModelLayout& layout,
                 const WeightSource& source);

  // The adapter of the files, whose encoder is nowhere.
  static AdapterSpec spec_of(const AdapterSpec& adapter);
  const AdapterSpec& spec() const { return spec_; }
  const ModelLayout& layout() const { return layout_; }
  WeightSource source() const;  // of its tensor; borrows this

 private:
  AdapterSpec spec_;
  ModelLayout layout_;
  std::vector<float> values_;
};

}  // namespace lm
