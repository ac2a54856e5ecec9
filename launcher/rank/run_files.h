// The files of a run's directory, as the rank writes them: resolved configuration, plan, log, status while it
// runs, and the trained model at the end. One thread.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "export/weight_source.h"
#include "launcher/rank/job.h"
#include "train/event_file.h"

namespace lm {

class RunFiles {
 public:
  // `writes`: one of a run's ranks does; of the others nothing is written, whatever is called.
  explicit RunFiles(std::string directory, bool writes = true)
      : directory_(std::move(directory)), writes_(writes) {}
  std::string path(const std::string& name) const { return directory_ + "/" + name; }

  // numerics.json, config.toml (every `auto` as resolved; with the preset's name where `asked`, the
  // configuration's file, has it), plan.txt, plan.json; of a `fresh` run whose model came from the
  // hub base_model.json; later lines of the log also go to log.txt. Where the
  // directory has a configuration already, these files are held back until a step is done (`running`) or the
  // model is written: a start that fails before its first step leaves those with which the run can go on.
  void begin(const Job& job, const std::string& asked, bool fresh);
  // plan.txt and plan.json, once more after a change of the plan; held back like them.
  void write_plan(const Job& job);
  // chat_template.jinja, where the trained model's is not its base's; held back like them.
  void keep_template(const Job& job);
  // To be called after every step.
  void running(int64_t step);
  // <run>/tensorboard, where log.to asks for it; null where it does not.
  std::unique_ptr<EventFile> events(const LogConfig& log) const;
  // <run>/model: a Hugging Face directory, or a PEFT adapter. Replaces an earlier one in one step. All ranks
  // call; where weights are in shards, out of a checkpoint of the rank's state.
  void write_model(const Job& job, Rank& rank, const std::string& checkpoint = "");

 private:
  void write(const std::string& name, std::string text);
  void write_held();
  void record_base(const Job& job, bool fresh);

  std::string directory_;
  bool writes_;
  bool holds_ = false;
  std::vector<std::pair<std::string, std::string>> held_;  // name and text, in the order of writing
};

// The run's configuration with its `auto` keys replaced by what the plan chose.
Config resolved_config(const Job& job, const std::string& directory);

// The rank's model, or its adapter, into `output`. `masters`: of every trained element, by block, where the
// rank has not all of them.
void export_rank(const Job& job, Rank& rank, const std::string& output, bool replace,
                 const std::vector<std::vector<float>>& masters = {});

// Whether no rank has the whole of what is trained.
bool trains_in_shards(const Job& job);

inline constexpr char kChatTemplate[] = "chat_template.jinja";
// The chat template of what was trained, a run or an adapter; "": its base model's own.
std::string own_template(const Subject& subject);

struct ExportRequest {
  std::string output;
  DType dtype = DType::kBF16;  // of a model; an adapter is always fp32
  bool adapter = false;        // a PEFT adapter, not a model
  bool replace = false;
};
// The same out of any source.
void write_export(const Job& job, const WeightSource& source, const ExportRequest& request);

}  // namespace lm
