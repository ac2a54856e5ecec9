// Shapes of well-known models, so that they can be planned before they are downloaded.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "launcher/planned_model.h"
#include "spec/families/family.h"

namespace lm {

// The fields of a model's config.json that a plan needs.
struct BuiltInModel {
  const char* name;  // "ORG/NAME", as on the hub
  const Family* family;
  int hidden, ffn, layers, heads, kv_heads, head_dim, vocab;
  bool tied;  // tied embeddings
  double rope_theta;
  int positions;
  int64_t parameters;  // as its publisher counts them, of the text model alone
  // Further keys of its config.json, as JSON: those that its family does not assume.
  const char* more = nullptr;
};
std::span<const BuiltInModel> built_in_models();

// The same as ModelShapes, for open_model.
const std::vector<ModelShape>& model_shapes();

}  // namespace lm
