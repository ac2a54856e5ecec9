// Files of a run's directory that the rank writes: resolved configuration, plan, log, status during the run,
// and the trained model at the end. One thread.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "export/export_adapter.h"
#include "export/weight_source.h"
#include "launcher/worker/job.h"
#include "train/event_file.h"

namespace lm {

class RunFiles {
 public:
  // `writes`: only one rank of a run writes; on the others every function does nothing. `asked`, `ranks`: for
  // the status, how many ranks were asked for and how many there are.
  RunFiles(std::string directory, bool writes, int64_t asked, int64_t ranks)
      : directory_(std::move(directory)), writes_(writes), asked_(asked), ranks_(ranks) {}
  std::string path(const std::string& name) const { return directory_ + "/" + name; }

  // Writes numerics.json, config.toml (every `auto` resolved; with the preset's name if `asked`, the
  // configuration's file, has it), plan.txt, plan.json, and for a `fresh` run whose model came from the hub
  // base_model.json. Later log lines also go to log.txt. If the directory already has a configuration, these
  // files are held back until a step is done (`running`) or the model is written: a start that fails before
  // its first step leaves those that the run can resume with.
  void begin(const Job& job, const std::string& asked, bool fresh);
  // Writes plan.txt and plan.json again after the plan has changed; held back like them.
  void write_plan(const Job& job);
  // Writes chat_template.jinja, if the trained model's is not its base's; held back like them.
  void keep_template(const Job& job);
  // Call after every step.
  void running(int64_t step);
  // <run>/tensorboard, if log.to asks for it; else null.
  std::unique_ptr<EventFile> events(const LogConfig& log) const;
  // Writes <run>/model: a Hugging Face directory, or a PEFT adapter. Replaces an earlier one atomically. All
  // ranks call it; sharded weights come from a checkpoint of the rank's state.
  void write_model(const Job& job, Rank& rank, const std::string& checkpoint = "");

 private:
  void write(const std::string& name, std::string text);
  void write_held();
  void record_base(const Job& job, bool fresh);

  std::string directory_;
  bool writes_;
  bool holds_ = false;
  int64_t asked_, ranks_;
  std::vector<std::pair<std::string, std::string>> held_;  // name and text, in writing order
};

// The run's configuration with each `auto` replaced by the plan's choice.
Config resolved_config(const Job& job, const std::string& directory);

// Writes the rank's model, or its adapter, into `output`. `masters`: master weights of every trained element,
// by block, if the rank does not have all of them.
void export_rank(const Job& job, Rank& rank, const std::string& output, bool replace,
                 const std::vector<std::vector<float>>& masters = {});

// The directory with the weights that a checkpoint lacks; "": it has all of them, or they follow from the
// seed.
std::string frozen_source(const Job& job);

// Whether no rank has all trained weights.
bool trains_in_shards(const Job& job);

inline constexpr char kChatTemplate[] = "chat_template.jinja";
// The chat template of a trained run or adapter; "": its base model's own.
std::string own_template(const Subject& subject);

// What an adapter's files say of its base model: `path` as the configuration names it, in `directory`.
BaseModel base_of_adapter(const std::string& path, const std::string& directory, const ModelSpec& spec,
                          const std::string& chat_template);
BaseModel base_of_adapter(const Job& job);  // borrows the job's spec

struct ExportRequest {
  std::string output;
  DType dtype = DType::kBF16;  // of a model; an adapter is always fp32
  bool adapter = false;        // a PEFT adapter, not a model
  bool replace = false;
  bool patterns = false;     // AdapterForm's
  bool each_expert = false;  // an adapter in the form of export/each_expert.h
};
// The same from any source.
void write_export(const Job& job, const WeightSource& source, const ExportRequest& request);

}  // namespace lm
