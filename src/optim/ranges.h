// The ranges of the update calls of a rule: elements of a block's flat array with the same settings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/error.h"
#include "spec/block_layout.h"

namespace lm {

struct RuleRange {
  int64_t first = 0, elements = 0;
  bool decay = false;
  double lr_scale = 1;                      // of the learning rate
  std::optional<double> weight_decay = {};  // a parameter group's
  const TensorPlace* tensor = nullptr;      // of ours, for rules that need whole tensors of the files
  // TensorPlace::each_part of the range's.
  template <class Body>
  void each_part(const Body& body) const {
    tensor->each_part([&](int64_t part, int64_t rows, int64_t columns) {
      if (part >= first && part < first + elements) body(part, rows, columns);
    });
  }
};

// Calls body(range) for the parts of `range` that are in one parameter group each, or in none, in order.
template <class Body>
void each_group(const BlockLayout& block, const RuleRange& range, const Body& body) {
  int64_t from = range.first;
  const int64_t end = range.first + range.elements;
  const auto take = [&](int64_t to, const GroupRange& group) {
    if (to <= from) return;
    RuleRange out = range;
    out.first = from;
    out.elements = to - from;
    out.lr_scale = group.lr_scale;
    out.weight_decay = group.weight_decay;
    from = to;
    body(out);
  };
  for (const GroupRange& group : block.groups) {
    take(std::min(group.first, end), {});
    take(std::min(group.first + group.elements, end), group);
  }
  take(end, {});
}

// A tensor of the files, or a part of one, which is in one parameter group, with that group's settings.
inline RuleRange in_group(const BlockLayout& block, const RuleRange& range) {
  RuleRange out = range;
  each_group(block, range, [&](const RuleRange& own) { out = own; });
  return out;
}

// body(range) for elements [from, to) of the block, in order. Of whole tensors a range is one of ours, or
// those of the files in it that are here: without the padding after them, and none may begin or end outside.
template <class Body>
void each_range(const BlockLayout& block, int64_t from, int64_t to, bool whole_tensors, const Body& body) {
  for (const DecayRange& range : block.ranges) {
    const int64_t begin = std::max(range.first, from), end = std::min(range.first + range.elements, to);
    if (begin >= end) continue;
    RuleRange out{.first = begin, .elements = end - begin, .decay = range.decay};
    if (!whole_tensors) {
      body(out);
      continue;
    }
    for (const Trainable& entry : block.trainables) {
      const TensorPlace& place = block.tensors[entry.tensor];
      out.tensor = &place;
      out.elements = 0;
      place.each_part([&](int64_t part, int64_t rows, int64_t columns) {
        const int64_t past = part + rows * columns;
        if (part >= end || past <= begin) return;
        LM_CHECK(part >= begin && past <= end,
                 place.parameter.name + " is split, but its rule needs it whole");
        if (out.elements == 0) out.first = part;
        out.elements = past - out.first;
      });
      if (out.elements > 0) body(out);
    }
  }
}

}  // namespace lm
