// Loads or initialises the weights of a rank's weight store: on the CPU directly in place, on a GPU chunk by
// chunk through a buffer of kStagingBytes (base/staging.h). Called once, before the first step, by the rank's
// compute thread; reads and initialises with `threads` threads. Complete on return.
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

// The base model's tensors from a Hugging Face directory; throws Error(11) for a mismatch with the spec.
void load_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store);
// Fresh base weights: model.init = "random".
void initialise_weights(const LoadSetup& setup, int64_t seed, WeightStore& store);
// The adapter's tensors, from a PEFT directory or fresh (magnitudes: 0).
void load_adapter_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store);
void initialise_adapter(const LoadSetup& setup, int64_t seed, WeightStore& store);
// A head of scores: fresh, or that of a base model's directory. Beside adapters `setup` has their type.
void initialise_head(const LoadSetup& setup, int64_t seed, WeightStore& store);
void load_head(const LoadSetup& setup, const std::string& directory, WeightStore& store);
// Fresh adapters that begin with what the base is: with LoftQ they approximate its quantization error
// (loftq.h), and DoRA's magnitudes are the lengths of the adapted rows (row_lengths.h). Reads, and quantizes,
// the base once more: from `directory`, or, if it is "", as initialise_weights initialises it.
struct AdapterBase {
  std::string directory;
  DType dtype;  // of its values, which may be quantized then
  bool loftq = false;
};
void initialise_from_base(const LoadSetup& setup, int64_t seed, const AdapterBase& base,
                          const AdapterSpec& adapter, WeightStore& store);

// Copies of norms that begin as the base's: read once more from `directory`, or, if it is "", as
// initialise_weights initialises them.
void copy_replaced(const LoadSetup& setup, int64_t seed, const std::string& directory, WeightStore& store);
// A prefix that begins with zeros, or a prompt that begins with embeddings of tokens drawn from the
// vocabulary; `directory` as above.
void start_virtual_tokens(const LoadSetup& setup, int64_t seed, const std::string& directory,
                          WeightStore& store);

}  // namespace lm
