// From a block's memory to its layers: views of each tensor of the layout over the weights on loan and the
// block's gradient array. Cheap enough (some dozen views) to be done whenever a loan begins.
#pragma once

#include "model/head_loss.h"
#include "model/transformer.h"
#include "spec/block_layout.h"

namespace lm {

// Where the arrays of a block (or of a segment of a cut head) are right now. `gradients` is null in
// evaluation; unused parts may be null.
struct BlockMemory {
  std::byte* trainable = nullptr;  // working weights, flat_elements of the model's type
  std::byte* frozen = nullptr;     // frozen_bytes
  std::byte* gradients = nullptr;  // flat_elements of the gradient type
  // Of the block: what the memory begins with.
  int64_t first = 0, first_frozen_byte = 0;
};

struct BindOptions {
  DType dtype = DType::kBF16;
  DType gradient_dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  const AdapterSpec* adapter = nullptr;
  // Of LoRA dropout; `training` off: no dropout.
  bool training = false;
  uint64_t seed = 0;
  int64_t step = 0;
};

Param bind_param(const BlockLayout& layout, const std::string& name, const BlockMemory& memory,
                 const BindOptions& options);
TransformerBlock bind_transformer(const ModelSpec& spec, const BlockLayout& layout, int64_t layer,
                                  const BlockMemory& memory, const BindOptions& options);
// `memory` holds this unit, a segment of the head's matrix.
HeadSegment bind_segment(const BlockLayout& layout, const Unit& unit, const BlockMemory& memory,
                         const BindOptions& options);
Head bind_head(const BlockLayout& layout, const BlockMemory& memory, const Param& tied_embedding,
               const BindOptions& options);

}  // namespace lm
