// What a rule updates at once: elements of a block's flat array for which one set of settings counts.
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
  const TensorPlace* tensor = nullptr;  // of a rule that asks for whole tensors: the one that this is
};

// body(range) for elements [from, to) of the block, in order. Whole tensors come without the padding behind
// them, and none may begin or end outside.
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
               place.parameter.name + " is cut, and its rule wants it whole");
      out.first = place.offset;
      out.elements = place.parameter.elements();
      out.tensor = &place;
      body(out);
    }
  }
}

}  // namespace lm
