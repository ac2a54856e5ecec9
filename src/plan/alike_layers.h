// Layers of a model that are alike need and cost the same. A dry run passes the first layers, among which
// each kind of layer is, and what it learns of these is said of all. Pure; borrows the model.
#pragma once

#include <cstdint>
#include <vector>

#include "config/config.h"
#include "spec/block_layout.h"
#include "spec/model_spec.h"

namespace lm {

class AlikeLayers {
 public:
  // Layers of different levels of recomputation are not alike.
  AlikeLayers(const ModelSpec& spec, const ModelLayout& layout, RecomputeChoice recompute = Recompute::kNone);
  AlikeLayers(const AlikeLayers&) = delete;
  AlikeLayers& operator=(const AlikeLayers&) = delete;

  // The model without the layers that have their like among the first ones.
  const ModelSpec& spec() const { return cut() ? spec_ : whole_spec_; }
  const ModelLayout& layout() const { return cut() ? layout_ : whole_layout_; }
  int64_t all() const { return whole_spec_.layer_count(); }
  // The unit of the short model that stands for `unit` of the whole one.
  int64_t stands_for(int64_t unit) const;

 private:
  bool cut() const { return kept_ < whole_spec_.layer_count(); }

  const ModelSpec& whole_spec_;
  const ModelLayout& whole_layout_;
  std::vector<int64_t> like_;  // of each layer, the first one that is like it
  int64_t kept_ = 0;           // layers of the short model
  ModelSpec spec_;
  ModelLayout layout_;
};

}  // namespace lm
