// The range of one update call of a rule: elements of a block's flat array with the same settings.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/error.h"
#include "spec/block_layout.h"

namespace lm {

struct RuleRange {
  int64_t first = 0, elements = 0;
  bool decay = false;
  double lr_scale = 1;                  // of the learning rate
  const TensorPlace* tensor = nullptr;  // the tensor, for rules that need whole tensors
};

// body(range) for elements [from, to) of the block, in order. Whole tensors exclude the padding after them,
// and none may begin or end outside.
template <class Body>
void each_range(const BlockLayout& block, int64_t from, int64_t to, bool whole_tensors, const Body& body) {
  for (const DecayRange& range : block.ranges) {
    const int64_t begin = std::max(range.first, from), end = std::min(range.first + range.elements, to);
    if (begin >= end) continue;
    RuleRange out{begin, end - begin, range.decay, range.lr_scale, nullptr};
    if (!whole_tensors) {
      body(out);
      continue;
    }
    for (const Trainable& entry : block.trainables) {
      const TensorPlace& place = block.tensors[entry.tensor];
      const int64_t past = place.offset + place.parameter.elements();
      if (place.offset >= end || past <= begin) continue;
      LM_CHECK(place.offset >= begin && past <= end,
               place.parameter.name + " is split, but its rule needs it whole");
      out.first = place.offset;
      out.elements = place.parameter.elements();
      out.tensor = &place;
      body(out);
    }
  }
}

}  // namespace lm
