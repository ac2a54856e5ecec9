// Where each tensor of a block lies: trainable tensors in one flat array (tensors start at multiples of 256
// elements, each weight-decay range at a granule of 4096), frozen tensors in one array of bytes (each at a
// multiple of 512 bytes). Torch-free, immutable values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "spec/parameter.h"

namespace lm {

inline constexpr int64_t kGranule = 4096;     // elements; the unit of norms, tiles, shards
inline constexpr int64_t kTensorStart = 256;  // elements
// Rows of a vocabulary matrix that are worked on as one; an untied head may be lent and moved by them.
inline constexpr int64_t kVocabularySegment = 8192;

struct TensorPlace {
  Parameter parameter;
  int64_t offset = 0;  // trainable: elements into the flat array; frozen: bytes into the frozen array
  bool frozen = false;
};

// A run of granules that one set of optimizer settings applies to.
struct DecayRange {
  int64_t first = 0;     // element, multiple of kGranule
  int64_t elements = 0;  // multiple of kGranule
  bool decay = false;
  double lr_scale = 1;
};

struct BlockLayout {
  std::string name;
  std::vector<TensorPlace> tensors;  // trainable, then frozen
  std::vector<DecayRange> ranges;    // cover the flat array
  int64_t flat_elements = 0;         // trainable, padding included; multiple of kGranule (may be 0)
  int64_t parameter_elements = 0;    // trainable, without padding
  int64_t frozen_bytes = 0;
  int64_t frozen_elements = 0;
  const TensorPlace* find(const std::string& name) const;  // null when absent
};

// What is lent, moved and updated as one: a block, or, where the head is cut, a vocabulary segment of its
// matrix; its block then is what is left of it. Ranges of the block's two arrays, padding included; those of
// the flat array begin and end at granules.
struct Unit {
  int64_t block = 0;
  int64_t first_row = 0, rows = 0;  // of the head's matrix; rows 0: no segment
  int64_t first = 0, elements = 0;  // trainable
  int64_t first_frozen_byte = 0, frozen_bytes = 0;
  bool segment() const { return rows > 0; }
  // Whether all of this tensor of the block lies here.
  bool holds(const TensorPlace& place) const;
};

struct ModelLayout {
  std::vector<BlockLayout> blocks;  // L + 2
  DType frozen_dtype = DType::kBF16;
  int64_t trainable_elements = 0;  // without padding
  int64_t frozen_elements = 0;
  int64_t flat_elements = 0;  // with padding, over all blocks
  int64_t frozen_bytes = 0;

  // One per block, then the segments of the head's matrix in order if it is to be cut (a tied head has none).
  std::vector<Unit> units(bool cut_head) const;
};

// `dtype` is the model's (of frozen pieces).
ModelLayout make_layout(const ModelSpec& spec, const AdapterSpec* adapter, DType dtype);

}  // namespace lm
