// Inputs of a plan beside the configuration, from the model's files: model directory, spec, adapter and
// layout. The CLI's plan and the rank's are made from the same. Values.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "launcher/environment.h"
#include "launcher/grown_model.h"
#include "plan/plan.h"

namespace lm {

// A model by its published name, and its config.json: enough for a plan.
struct ModelShape {
  std::string name;  // "ORG/NAME"
  std::string config;
};

struct PlannedModel {
  std::string directory;  // resolved from model.path; "": planned from a built-in shape
  ModelSpec spec;
  std::optional<AdapterSpec> adapter;  // of any train.method but "full"
  ModelLayout layout;
  std::optional<GrownVocabulary> grown;  // the spec has more tokens than the model's files
  std::string named_directory = {};      // the model's own where `directory` stands for it (stand_in)

  // Of the files that model.path names.
  const std::string& origin() const { return named_directory.empty() ? directory : named_directory; }
  int64_t virtual_tokens() const { return adapter ? adapter->virtual_tokens : 0; }
  const AdapterSpec* adapter_spec() const { return adapter ? &*adapter : nullptr; }
  // Borrows both.
  PlanInputs inputs(const Config& config, DeviceType device) const {
    return {config, spec, adapter_spec(), layout, device};
  }
};

// Throws Error(10) if data.max_length exceeds the positions for which the model has learned an embedding:
// there is none for a longer text. `generate` and `chat` set it to their longest text.
void require_positions(const Config& config, const ModelSpec& spec);

// Warns if data.max_length exceeds the context length that the model was trained for. Notes which frequencies
// of RoPE it chooses, where it does.
void warn_of_length(const Config& config, const ModelSpec& spec);

// Notes which dropouts of the model's config.json training applies, and which it leaves out.
void note_dropouts(const PlannedModel& model);

// Throws Error(10) for an adapter, the one of lora.init, that can be used and not trained further. Before a
// plan of training, and before a run.
void require_trainable(const Config& config, const PlannedModel& model);

// The model's directory becomes one that has the tokens of `grown`. Before anything reads its files or its
// tokenizer; a plan needs neither. Throws as grown_directory does.
void stand_in(const Config& config, const Environment& environment, PlannedModel& model);

// Whether a plan for that name needs no file of the model.
bool model_is_built_in(const std::string& path, std::span<const ModelShape> known);

// Reads config.json, and adapter_config.json if an adapter is trained further. A model that is not found
// locally is planned from its shape, if `known` has it: fine-tuned models ("-Instruct") have that of their
// base. Throws Error(10, 11), also if data.max_length is more than the positions that the model has
// embeddings for.
PlannedModel open_model(const Config& config, const Environment& environment,
                        std::span<const ModelShape> known = {});

// With zero.experts = "parallel" the layout of a training run becomes that of rank `rank`. `inputs` are the
// model's own.
void share_experts(const PlanInputs& inputs, const World& world, int rank, PlannedModel& model);

}  // namespace lm
