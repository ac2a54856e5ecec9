// A PEFT adapter directory, in and out: adapter_config.json and adapter_model.safetensors. Reading refuses by
// name every setting that would change the mathematics and is not implemented; writing keeps to plain LoRA,
// which other programs load too. The caller owns the memory; one thread (loading uses its own). Errors are
// Error(11).
#pragma once

#include <functional>
#include <string>

#include "weights/loader.h"
#include "weights/weight_source.h"

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

// `layout` was made with this adapter's spec; every LoRA tensor in it is loaded, none may be left over.
int64_t load_adapter(const std::string& directory, const ModelLayout& layout,
                     const std::function<LoadTarget(size_t block, const TensorPlace& place)>& target,
                     const LoadOptions& options);

// Compares the adapter's targets, names, shapes and types with the model that it is for, without reading
// data.
void check_adapter(const std::string& directory, const ModelSpec& base);

// The model under an adapter: what adapter_config.json calls it, and where its tokenizer files are.
struct BaseModel {
  std::string name;
  std::string directory;           // "": the adapter gets no tokenizer files
  std::string chat_template = {};  // in place of the base model's; "": that one
  std::string architecture = {};  // "LlamaForCausalLM", so that another one can be told from it; "": not said
  std::string revision = {};      // the commit of a model of the hub
};

// Makes the whole directory and renames it at the end; weights in fp32. rsLoRA is written as its equal,
// alpha·√r with use_rslora false, because some readers know lora_alpha alone. The base model's tokenizer
// files and chat template stand beside the adapter: whoever serves it looks for them there first.
void write_adapter(const std::string& directory, const AdapterSpec& spec, const BaseModel& base,
                   const ModelLayout& layout, const WeightSource& source, bool replace);

}  // namespace lm
