#include "spec/block_layout.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

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

// Takes the head's matrix out of `units`' last, and adds its segments.
void cut_head_matrix(const BlockLayout& last, int64_t element_bytes, std::vector<Unit>& units) {
  const TensorPlace* const head = last.find("head");
  if (head == nullptr) return;
  LM_CHECK(head->offset == 0, "the head's matrix comes first in its block");
  Unit rest = units.back();
  int64_t& first = head->frozen ? rest.first_frozen_byte : rest.first;
  int64_t& size = head->frozen ? rest.frozen_bytes : rest.elements;
  first = size;
  for (const TensorPlace& place : last.tensors) {
    if (place.frozen == head->frozen && place.offset > 0) first = std::min(first, place.offset);
  }
  size -= first;
  units.back() = rest;
  const int64_t rows = head->parameter.rows;
  const int64_t each = kVocabularySegment * head->parameter.columns * (head->frozen ? element_bytes : 1);
  for (int64_t row = 0, at = 0; row < rows; row += kVocabularySegment, at += each) {
    Unit segment{.block = rest.block, .first_row = row, .rows = std::min(kVocabularySegment, rows - row)};
    (head->frozen ? segment.first_frozen_byte : segment.first) = at;
    (head->frozen ? segment.frozen_bytes : segment.elements) = std::min(each, first - at);
    units.push_back(segment);
  }
}

}  // namespace

bool Unit::holds(const TensorPlace& place) const {
  return place.frozen
             ? place.offset >= first_frozen_byte && place.offset < first_frozen_byte + frozen_bytes
             : place.offset >= first && place.offset + place.parameter.elements() <= first + elements;
}

std::vector<Unit> ModelLayout::units(bool cut_head) const {
  std::vector<Unit> out;
  for (const BlockLayout& block : blocks) {
    out.push_back({.block = static_cast<int64_t>(out.size()),
                   .elements = block.flat_elements,
                   .frozen_bytes = block.frozen_bytes});
  }
  if (cut_head) cut_head_matrix(blocks.back(), static_cast<int64_t>(dtype_size(frozen_dtype)), out);
  return out;
}

const TensorPlace* BlockLayout::find(const std::string& tensor) const {
  for (const TensorPlace& place : tensors) {
    if (place.parameter.name == tensor) return &place;
  }
  return nullptr;
}

ModelLayout make_layout(const ModelSpec& spec, const AdapterSpec* adapter, DType dtype) {
  ModelLayout model;
  model.frozen_dtype = dtype;
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
