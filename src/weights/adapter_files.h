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
  std::string base_class;          // "LlamaForCausalLM", as auto_mapping has it; may be empty
  std::string base_revision = {};  // of the hub; "": not said
};

// `names`: of the model that it is for; null: that is not known, and targets stay as the file has them.
AdapterConfig read_adapter_config(const std::string& directory, const NameMap* names);

// `layout` was made with this adapter's spec; every tensor of the adapter in it is loaded, none may be left
// over.
int64_t load_adapter(const std::string& directory, const ModelLayout& layout, const FindTarget& target,
                     const LoadOptions& options);

// Compares the adapter's targets, names, shapes and types with the model that it is for, without reading
// data.
void check_adapter(const std::string& directory, const ModelSpec& base);

}  // namespace lm
