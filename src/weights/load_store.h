// From files, or from nothing, into a rank's weight store: on the CPU straight to their place, on a GPU piece
// by piece through a buffer of kStagingBytes (base/staging.h). Called once, before the first step, by the
// rank's compute thread; reads and draws with `threads` threads. Complete on return.
#pragma once

#include <string>

#include "base/cuda.h"
#include "weights/loans.h"

namespace lm {

struct LoadSetup {
  const ModelSpec& spec;
  const ModelLayout& layout;
  DType dtype;
  StreamView stream;
  int threads = 1;
};

// The base model's tensors from a Hugging Face directory; throws Error(11) for what does not match the spec.
void load_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store);
// Fresh base weights: model.init = "random".
void initialise_weights(const LoadSetup& setup, int64_t seed, WeightStore& store);
// The adapter's tensors, from a PEFT directory or fresh.
void load_adapter_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store);
void initialise_adapter(const LoadSetup& setup, int64_t seed, WeightStore& store);
// Fresh ones that begin with what quantising the base lost (loftq.h). The base is read and quantised once
// more: from `directory`, or, where it is "", as initialise_weights draws it.
struct LoftqBase {
  std::string directory;
  DType dtype;  // that its codes are made of
};
void initialise_loftq(const LoadSetup& setup, int64_t seed, const LoftqBase& base, double scale,
                      WeightStore& store);

}  // namespace lm
