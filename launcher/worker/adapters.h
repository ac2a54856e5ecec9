// Adapters that a command line names beside a model: which they are, whether they fit it, and several of them
// as one. Only reads, but for a scratch directory. One thread.
#pragma once

#include <string>
#include <vector>

#include "export/combine_adapters.h"
#include "export/export_adapter.h"
#include "launcher/worker/job.h"

namespace lm {

// "DIR" or "DIR@WEIGHT", DIR being a run, an adapter's directory or its name on the hub.
struct NamedAdapter {
  Subject subject;
  double weight = 1;
};
// Throws Error(2) for a weight that is no number, for what holds no adapter, for one with a head of scores,
// and for one whose file alone is not what was trained: a checkpoint, or a start by LoftQ.
NamedAdapter open_adapter_argument(const std::string& text);

// Whether it is a PEFT directory with a head of scores.
bool is_of_scores(const Subject& adapter);

// Equal names and shapes do not mean the same model: an adapter applied to another model raises no error, but
// the result answers nonsense. Throws Error(11) where `base`, which the user has named by `word`, is of
// another architecture than the model that the adapter was trained on.
void check_base(const Subject& adapter, const std::string& base, const std::string& word);

// Throws Error(11) for an adapter with tokens that its base, the model of `spec` in `directory`, does not
// have: two adapters may have given one number to different tokens. Before several adapters become one.
void refuse_new_tokens(const std::vector<WeightedAdapter>& adapters, const std::string& directory,
                       const ModelSpec& spec);

// Writes a PEFT directory with one rank and alpha, so that servers read it alike.
void write_combined(const std::string& directory, const CombinedAdapter& combined, const BaseModel& base);

// A directory among the system's temporary files, removed at the end.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// `subject`, a model or a run of all weights, with the adapters of --adapter. Several ones, or one with a
// weight, are combined exactly in `scratch`, which must exist until the weights are loaded.
void add_adapters(const std::vector<std::string>& texts, const ScratchDirectory& scratch, Subject& subject);

}  // namespace lm
