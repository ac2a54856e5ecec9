// The files of a run's directory, as the rank writes them: resolved configuration, plan, log, status while it
// runs, and the trained model at the end. One thread.
#pragma once

#include <string>

#include "launcher/rank/job.h"
#include "weights/weight_source.h"

namespace lm {

class RunFiles {
 public:
  explicit RunFiles(std::string directory) : directory_(std::move(directory)) {}
  std::string path(const std::string& name) const { return directory_ + "/" + name; }

  // numerics.json, config.toml (every `auto` as resolved), plan.txt, plan.json; later lines of the log also
  // go to log.txt.
  void begin(const Job& job) const;
  void running(int64_t step) const;
  // <run>/model: a Hugging Face directory, or a PEFT adapter. Replaces an earlier one in one step.
  void write_model(const Job& job, Rank& rank) const;

 private:
  std::string directory_;
};

// The run's configuration with its `auto` keys replaced by what the plan chose.
Config resolved_config(const Job& job, const std::string& directory);

// The rank's model, or its adapter, into `output`.
void export_rank(const Job& job, Rank& rank, const std::string& output, bool replace);

struct ExportRequest {
  std::string output;
  DType dtype = DType::kBF16;  // of a model; an adapter is always fp32
  bool adapter = false;        // a PEFT adapter, not a model
  bool replace = false;
};
// The same out of any source.
void write_export(const Job& job, const WeightSource& source, const ExportRequest& request);

}  // namespace lm
