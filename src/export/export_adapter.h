// Writes a PEFT adapter directory of any kind (AdapterKind), which other programs load too. Weights are
// borrowed from the caller. One thread; errors: 14 when the output exists, 20/21 on writing.
#pragma once

#include <string>

#include "export/weight_source.h"
#include "spec/block_layout.h"

namespace lm {

// The base model of an adapter: its name in adapter_config.json, and the directory of its tokenizer files.
struct BaseModel {
  std::string name;
  std::string directory;            // "": the adapter gets no tokenizer files
  std::string chat_template = {};   // replaces the base model's; "": the base model's
  std::string architecture = {};    // "LlamaForCausalLM", to recognise a different model; "": omitted
  std::string revision = {};        // the commit of a hub model
  bool scores = false;              // it has a head of scores, which is trained beside the adapter
  bool wrapped = false;             // the base is a text model inside another one (ModelSpec::wrapper)
  const ModelSpec* spec = nullptr;  // needed for virtual tokens, modules trained whole and `grown`; borrowed
  // `directory` has more tokens than the model that `name` names: the adapter gets copies of the matrices of
  // the vocabulary, as PEFT writes them.
  bool grown = false;
};

struct AdapterForm {
  bool replace = false;  // a directory that is there
  // Ranks and alphas that differ stay as they are, named by rank_pattern and alpha_pattern. Without this the
  // adapter is written with one rank and one alpha, since servers ignore the patterns: rows of A and columns
  // of B that are 0 fill smaller ranks up, and B takes the differences of scale.
  bool patterns = false;
};

// Writes the whole directory and renames it at the end; weights in fp32. The modules of a wrapped base have
// the names of the wrapper's class in transformers 5, and a pattern as targets that leaves the towers out.
// With one rank and alpha rsLoRA is written in its equivalent form, alpha·√r with use_rslora false, because
// some readers only know lora_alpha. The base model's tokenizer files and chat template are copied beside the
// adapter: servers look for them there first.
void write_adapter(const std::string& directory, const AdapterSpec& spec, const BaseModel& base,
                   const ModelLayout& layout, const WeightSource& source, const AdapterForm& form);

// The hash of the weights that it would write with `patterns`: what verify_model finds of a run's own files.
std::string adapter_hash(const AdapterSpec& spec, const BaseModel& base, const ModelLayout& layout,
                         const WeightSource& source);

}  // namespace lm
