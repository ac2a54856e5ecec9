// Where each tensor of a block lies: trainable tensors in one flat array (tensors start at multiples of 256
// elements, each weight-decay range at a granule of 4096), frozen tensors in one array of bytes (each of
// their pieces at a multiple of 512 bytes). Torch-free, immutable values.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "spec/encoding.h"
#include "spec/parameter.h"

namespace lm {

inline constexpr int64_t kGranule = 4096;     // elements; the unit of norms, tiles, shards
inline constexpr int64_t kTensorStart = 256;  // elements
// Rows of a vocabulary matrix that are worked on as one; an untied head may be borrowed and transferred by
// them.
inline constexpr int64_t kVocabularySegment = 8192;

// A run of a frozen tensor's bytes.
struct FrozenPiece {
  const Encoding* encoding = nullptr;
  int64_t offset = 0;  // into the block's frozen array
  int64_t bytes = 0;
};

struct TensorPlace {
  Parameter parameter;
  int64_t offset = 0;  // trainable: elements into the flat array; frozen: of the first piece
  bool frozen = false;
  std::vector<FrozenPiece> pieces = {};  // of a frozen tensor, in its encoding's order, one behind the other
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

// What a unit is to the step: which operations it has, and when.
enum class UnitRole : uint8_t {
  kEmbedding,
  kBody,               // a transformer block
  kHead,               // the final norm and, unless it is tied, the vocabulary matrix
  kFinalNorm,          // a head whose matrix comes in segments: the rest
  kVocabularySegment,  // of that matrix
};
// What is borrowed, transferred and updated as one. Ranges of the block's two arrays, padding included; those
// of the flat array begin and end at granules.
struct Unit {
  int64_t block = 0;
  UnitRole role = UnitRole::kBody;
  int64_t first_row = 0, rows = 0;  // of a vocabulary segment
  int64_t first = 0, elements = 0;  // trainable
  int64_t first_frozen_byte = 0, frozen_bytes = 0;
  bool segment() const { return role == UnitRole::kVocabularySegment; }
  // Whether all of this tensor of the block lies here.
  bool holds(const TensorPlace& place) const;
};

// The units of a model of L layers without their ranges: one for each block, then the segments of the head's
// matrix, 0 if it is whole. A unit's number is its place in this list.
std::vector<Unit> list_units(int64_t layers, int64_t segments);

struct ModelLayout {
  std::vector<BlockLayout> blocks;  // L + 2
  int64_t trainable_elements = 0;   // without padding
  int64_t frozen_elements = 0;
  int64_t flat_elements = 0;  // with padding, over all blocks
  int64_t frozen_bytes = 0;

  // As list_units has them; a tied head has no matrix to cut.
  std::vector<Unit> units(bool cut_head) const;
  std::string name(const Unit& unit) const;  // "block 3", "head, segment 2"
  // By the encodings' names, padding included; together frozen_bytes.
  std::map<std::string, int64_t> frozen_bytes_by_encoding() const;
};

// `dtype` is the model's, and what is frozen is stored in it, but for the transformer blocks' frozen matrices
// if `encoding` is not null.
ModelLayout make_layout(const ModelSpec& spec, const AdapterSpec* adapter, DType dtype,
                        const Encoding* encoding = nullptr);

}  // namespace lm
