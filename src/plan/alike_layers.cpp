#include "plan/alike_layers.h"

#include <algorithm>

namespace lm {
namespace {

bool alike(const TensorPlace& a, const TensorPlace& b) {
  const auto same_part = [](const ParameterPart& x, const ParameterPart& y) {
    return x.first == y.first && x.rows == y.rows;
  };
  const auto same_piece = [](const FrozenPiece& x, const FrozenPiece& y) {
    return x.encoding == y.encoding && x.offset == y.offset && x.bytes == y.bytes;
  };
  const Parameter &p = a.parameter, &q = b.parameter;
  return a.offset == b.offset && a.frozen == b.frozen && p.kind == q.kind && p.rows == q.rows &&
         p.columns == q.columns && std::ranges::equal(p.parts, q.parts, same_part) &&
         std::ranges::equal(a.pieces, b.pieces, same_piece);
}

bool alike(const BlockLayout& a, const BlockLayout& b) {
  return a.flat_elements == b.flat_elements && a.frozen_bytes == b.frozen_bytes &&
         a.trainables == b.trainables &&
         std::ranges::equal(a.tensors, b.tensors,
                            [](const TensorPlace& x, const TensorPlace& y) { return alike(x, y); });
}

}  // namespace

AlikeLayers::AlikeLayers(const ModelSpec& spec, const ModelLayout& layout, RecomputeChoice recompute)
    : whole_spec_(spec), whole_layout_(layout) {
  const auto block = [&](int64_t layer) -> const BlockLayout& {
    return layout.blocks[static_cast<size_t>(layer) + 1];
  };
  // Before the first trained block nothing is kept, and nobody wants the gradient of its input.
  const int64_t trained = layout.first_trained() - 1;  // layer
  const auto side = [&](int64_t layer) { return layer < trained ? -1 : layer > trained ? 1 : 0; };
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    // Of the first layer nobody may want the gradient of the input: it is like no other.
    int64_t first = std::min<int64_t>(i, 1);
    while (first < i && !(spec.layer(first) == spec.layer(i) && side(first) == side(i) &&
                          recompute.of(first + 1) == recompute.of(i + 1) && alike(block(first), block(i))))
      ++first;
    like_.push_back(first);
    kept_ = std::max(kept_, first + 1);
  }
  if (!cut()) return;
  spec_ = spec;
  spec_.layers.resize(static_cast<size_t>(kept_));
  layout_.blocks.assign(layout.blocks.begin(), layout.blocks.begin() + kept_ + 1);
  layout_.blocks.push_back(layout.blocks.back());
  layout_.experts = layout.experts;
}

int64_t AlikeLayers::stands_for(int64_t unit) const {
  if (unit == 0) return 0;
  const int64_t layers = whole_spec_.layer_count();
  return unit <= layers ? like_[static_cast<size_t>(unit) - 1] + 1 : unit - layers + kept_;
}

}  // namespace lm
