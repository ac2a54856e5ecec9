// Writes a PEFT adapter directory, of plain LoRA alone, which other programs load too. Weights come out of
// memory that the caller lends. One thread; errors: 14 when the output exists, 20/21 on writing.
#pragma once

#include <string>

#include "export/weight_source.h"
#include "spec/block_layout.h"

namespace lm {

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
