// How config.json describes rotary position embeddings: one table for all layers, or one for each kind of
// layer. Values; each function throws as ConfigReader does.
#pragma once

#include <optional>

#include "spec/config_reader.h"
#include "spec/model_spec.h"

namespace lm {

struct Family;

// What holds for a table where it is silent.
struct RopeDefaults {
  double theta = 1e4;
  double rotated = 0;  // as Family has it
  int64_t head_dim = 0;
  int64_t max_positions = 0;             // max_position_embeddings
  std::optional<int64_t> original = {};  // original_max_position_embeddings beside the table, which wins
  bool neighbours = false;
  bool old_longrope = false;  // as Family has it
  bool of_a_kind = false;     // of one kind of layer: the reference reads no `truncate` there
};
RopeSpec read_rope_table(const ConfigReader& table, const RopeDefaults& defaults);

// rope_parameters (files of transformers 5), or rope_theta and rope_scaling (older ones): a table for all
// layers. If all are there, rope_scaling's entries count, and a theta inside wins over the one outside: the
// order of the reference.
void read_rope(const ConfigReader& config, const Family& family, ModelSpec& spec);
// The same; `missing` is the table where the file has neither.
void read_rope_or(const ConfigReader& config, const Family& family, const Json& missing, ModelSpec& spec);

// A table for layers with a window, one for the others, each only where a layer has use for it: an entry of
// rope_parameters. Older files have rope_theta and rope_scaling, which concern layers without a window, and
// `sliding_key` (null: there is no such key) for the others.
struct KindDefaults {
  double full_theta = 1e4, sliding_theta = 1e4;
  const char* sliding_key = nullptr;
};
void read_ropes_by_kind(const ConfigReader& config, const KindDefaults& defaults, ModelSpec& spec);
// An entry of rope_parameters for each kind of layer that the model has, complete; `missing` where the file
// has no rope_parameters.
void read_rope_entries(const ConfigReader& config, const Json& missing, ModelSpec& spec);

}  // namespace lm
