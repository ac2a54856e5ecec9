// A PEFT adapter directory: adapter_config.json and adapter_model.safetensors. Reading refuses by name every
// setting that would change the mathematics and is not implemented. The caller owns the memory; one thread
// (loading uses its own). Errors are Error(11). export/export_adapter.h writes one.
#pragma once

#include <string>

#include "weights/loader.h"

namespace lm {

inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kAdapterWeights = "adapter_model.safetensors";

struct AdapterConfig {
  AdapterSpec spec;
  std::string base_model;          // base_model_name_or_path, may be empty
  std::string base_class;          // "LlamaForCausalLM", from auto_mapping; may be empty
  std::string base_revision = {};  // on the hub; "": unknown
  bool scores = false;             // task_type SEQ_CLS: a head of scores is trained beside it
};

// `base`: its base model, by which the modules, their ranks and alphas are resolved (weights/peft_modules.h);
// null: unknown, and the targets are empty.
AdapterConfig read_adapter_config(const std::string& directory, const ModelSpec* base);

// `layout` was made with this adapter's spec; loads every tensor of the adapter in it, and the file may have
// no others but copies of the base's vocabulary matrices (weights/base_copies.h).
int64_t load_adapter(const std::string& directory, const ModelLayout& layout, const FindTarget& target,
                     const LoadOptions& options);

// Compares the adapter's targets, names, shapes and types with its base model, without reading data.
void check_adapter(const std::string& directory, const ModelSpec& base);

}  // namespace lm
