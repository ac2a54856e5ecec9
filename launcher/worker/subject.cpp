#include <algorithm>
#include <filesystem>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "checkpoint/restore.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "launcher/environment.h"
#include "launcher/model_place.h"
#include "launcher/recorded.h"
#include "launcher/worker/job.h"
#include "plan/adapter.h"
#include "weights/adapter_files.h"
#include "weights/model_directory.h"

namespace lm {

namespace fs = std::filesystem;

namespace {

// A configuration must name data to train on, and a model's directory has none.
Config config_of_model(const std::string& path, const std::vector<std::string>& overrides) {
  constexpr const char* kNoData = "none";
  Config config = parse_config(
      "[model]\npath = " + value_text(path) + "\n[data]\ntrain = [\"" + kNoData + "\"]\n", path, overrides);
  if (config.data.train == std::vector<std::string>{kNoData}) config.data.train.clear();
  return config;
}

// The default length may be more than the positions that a model has learned.
void fit_positions(Config& config) {
  const std::string directory = model_directory(config.model.path, read_environment());
  if (!fs::exists(directory + "/config.json")) return;  // opening the model says so
  const int64_t most = read_model_spec(directory).embedding.positions;
  if (most > 0) config.data.max_length = std::min(config.data.max_length, most);
}

// A PEFT adapter names the model that it is for.
void open_adapter(const std::string& path, Subject& subject) {
  const AdapterSpec adapter = read_adapter_config(path, nullptr).spec;
  subject.config.train.method = method_of(adapter.kind);
  if (adapter.virtual_tokens > 0) subject.config.prompt.length = adapter.virtual_tokens;
  subject.trained = path;
  settle_model(subject.config, read_environment());
}

// A run with PiSSA writes a plain adapter, with the pairs that it began with as a part of it: its ranks are
// those of its files, and not the configuration's. One of P-tuning writes what its encoder has computed.
void open_plain(Subject& subject) {
  LoraConfig& lora = subject.config.lora;
  if (subject.config.train.method == Method::kPtuning) {
    subject.config.train.method = Method::kPrompt;
    subject.config.prompt.hidden.reset();
    lora.init = subject.trained;
    return;
  }
  if (subject.config.train.method == Method::kFull || lora.start != LoraStart::kPissa) return;
  lora.start = LoraStart::kZero;
  lora.init = subject.trained;
  lora.written.clear();
}

}  // namespace

Subject open_subject(const std::string& place, const std::vector<std::string>& overrides) {
  const std::string adapter = model_directory(place, read_environment());
  const std::string path = run_of(place).empty() && holds_adapter(adapter) ? adapter : place;
  const std::string run = run_of(path);
  Subject subject;
  if (run.empty()) {
    subject.config = config_of_model(path, overrides);
    if (holds_adapter(path)) open_adapter(path, subject);
    fit_positions(subject.config);
    return subject;
  }
  subject = {.config = load_config(run + "/config.toml", overrides), .trained = path, .run = run};
  subject.checkpoint = fs::exists(fs::path(path) / kManifestName);
  if (run != path) {
    if (!subject.checkpoint) open_plain(subject);
    return subject;
  }
  subject.trained = path + "/model";
  if (fs::is_directory(subject.trained)) {
    open_plain(subject);
    return subject;
  }
  for (const FoundCheckpoint& found : find_checkpoints(path + "/checkpoints")) {
    if (!found.manifest) continue;
    log_note("CKPT-14", "this run has no trained model yet: taking its newest checkpoint, " + found.path);
    subject.trained = found.path;
    subject.checkpoint = true;
    return subject;
  }
  throw Error(Exit::kIncompatible, {.area = "RUN-14",
                                    .what = "this run has no trained model yet, and no checkpoint",
                                    .place = subject.trained,
                                    .next = "let the run finish: lmlaunch " + path + "/config.toml"});
}

}  // namespace lm
