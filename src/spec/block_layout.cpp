#include "spec/block_layout.h"

#include <utility>

#include "base/bytes.h"

namespace lm {
namespace {

constexpr int64_t kFrozenStart = 512;  // bytes: the alignment of direct I/O and of the widest vector loads

void place_trainable(std::vector<Parameter>&& parameters, BlockLayout& layout) {
  for (Parameter& parameter : parameters) {
    const bool decay = !parameter.vector();
    if (layout.ranges.empty() || layout.ranges.back().decay != decay) {
      layout.flat_elements = round_up(layout.flat_elements, kGranule);
      layout.ranges.push_back({.first = layout.flat_elements, .elements = 0, .decay = decay});
    }
    DecayRange& range = layout.ranges.back();
    const int64_t offset = round_up(layout.flat_elements, kTensorStart);
    layout.flat_elements = offset + parameter.elements();
    range.elements = round_up(layout.flat_elements, kGranule) - range.first;
    layout.parameter_elements += parameter.elements();
    layout.tensors.push_back({.parameter = std::move(parameter), .offset = offset, .frozen = false});
  }
  layout.flat_elements = round_up(layout.flat_elements, kGranule);
}

void place_frozen(std::vector<Parameter>&& parameters, DType dtype, BlockLayout& layout) {
  for (Parameter& parameter : parameters) {
    const int64_t elements = parameter.elements();
    layout.tensors.push_back(
        {.parameter = std::move(parameter), .offset = layout.frozen_bytes, .frozen = true});
    layout.frozen_elements += elements;
    layout.frozen_bytes += round_up(elements * static_cast<int64_t>(dtype_size(dtype)), kFrozenStart);
  }
}

}  // namespace

const TensorPlace* BlockLayout::find(const std::string& tensor) const {
  for (const TensorPlace& place : tensors) {
    if (place.parameter.name == tensor) return &place;
  }
  return nullptr;
}

ModelLayout make_layout(const ModelSpec& spec, const AdapterSpec* adapter, DType dtype) {
  ModelLayout model;
  for (BlockParameters& block : list_parameters(spec, adapter)) {
    BlockLayout layout;
    layout.name = std::move(block.name);
    place_trainable(std::move(block.trainable), layout);
    place_frozen(std::move(block.frozen), dtype, layout);
    model.trainable_elements += layout.parameter_elements;
    model.frozen_elements += layout.frozen_elements;
    model.flat_elements += layout.flat_elements;
    model.frozen_bytes += layout.frozen_bytes;
    model.blocks.push_back(std::move(layout));
  }
  return model;
}

}  // namespace lm
