#include "launcher/worker/adapters.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "launcher/grown_model.h"
#include "launcher/machine/survey.h"
#include "launcher/model_place.h"
#include "launcher/worker/run_files.h"
#include "plan/adapter.h"
#include "spec/architecture.h"
#include "weights/adapter_files.h"
#include "weights/model_directory.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// The number behind the last '@'; empty where there is none.
std::optional<double> weight_of(const std::string& text, size_t at) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, fault] = std::from_chars(text.data() + at + 1, end, value);
  if (fault != std::errc() || stop != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace

bool is_of_scores(const Subject& adapter) {
  return !adapter.checkpoint && holds_adapter(adapter.trained) &&
         read_adapter_config(adapter.trained, nullptr).scores;
}

NamedAdapter open_adapter_argument(const std::string& text) {
  std::error_code ignored;
  const size_t at = text.rfind('@');
  std::string place = text;
  NamedAdapter out;
  // "ORG/NAME@REVISION" is the hub's: what is no number stays part of the name.
  if (at != std::string::npos && !fs::exists(text, ignored)) {
    const std::optional<double> weight = weight_of(text, at);
    if (weight) place = text.substr(0, at);
    if (!weight && fs::exists(text.substr(0, at), ignored))
      throw usage_error("the weight of an adapter is no number: " + text, "write DIR@0.5");
    out.weight = weight.value_or(1);
  }
  out.subject = open_subject(place);
  if (!trains_adapter(out.subject.config) || out.subject.trained.empty())
    throw usage_error(place + " is no adapter, and no run that trained one",
                      "name a directory with adapter_config.json, or a run");
  if (out.subject.checkpoint)
    throw usage_error(place + " is a checkpoint of an adapter",
                      "export it first: lmlaunch export " + place + " -o DIR");
  if (trains_scores(out.subject.config) || is_of_scores(out.subject))
    throw usage_error(place + " has a head of scores beside its adapter, and two heads do not become one",
                      "merge it into its base model: lmlaunch export " + place + " --merge -o DIR");
  if (out.subject.config.lora.start == LoraStart::kLoftq)
    throw usage_error(place +
                          ": with lora.start = \"loftq\" the adapter also compensates for the quantization "
                          "error, which must not be counted twice",
                      "use it alone: lmlaunch generate " + place);
  return out;
}

void check_base(const Subject& adapter, const std::string& base, const std::string& word) {
  const Environment environment = read_environment();
  const ModelSpec into = read_model_spec(resolve_model(base, environment));
  const std::string& trained_on = adapter.config.model.path;
  const std::string of_adapter =
      holds_adapter(adapter.trained) ? read_adapter_config(adapter.trained, nullptr).base_class : "";
  std::string difference;
  if (model_is_here(trained_on, environment)) {
    difference = architecture_difference(read_model_spec(resolve_model(trained_on, environment)), into);
  } else if (of_adapter.empty()) {
    log_note("FILE-27",
             word +
                 " is not compared with the model that the adapter was trained on, which was not found: \"" +
                 trained_on + "\"");
  } else if (of_adapter != into.architecture && of_adapter != classifier_of(into.model_type)) {
    difference = "it is a " + into.architecture + ", not a " + of_adapter;
  }
  if (difference.empty()) return;
  throw Error(
      Exit::kInput,
      {.area = "FILE-27",
       .what = word + " is a model of another architecture than the one that the adapter was trained on: " +
               difference,
       .place = base,
       .next = "name that model, or a copy of it",
       .kept = "nothing was written"});
}

void write_combined(const std::string& directory, const CombinedAdapter& combined, const BaseModel& base) {
  const auto source = [&](size_t block, const TensorPlace& place, int64_t) {
    return combined.view(block, place);
  };
  write_adapter(directory, combined.spec(), base, combined.layout(), source, {});
}

void refuse_new_tokens(const std::vector<WeightedAdapter>& adapters, const std::string& directory,
                       const ModelSpec& spec) {
  for (const WeightedAdapter& adapter : adapters) {
    ModelSpec grown = spec;
    if (!grow_by_adapter(adapter.directory, directory, grown)) continue;
    throw Error(
        Exit::kInput,
        {.area = "FILE-27",
         .what = "this adapter has tokens that its base model has not, and others do not fit beside it",
         .place = adapter.directory,
         .next = "merge it into the model: `lmlaunch export " + adapter.directory + " --merge -o DIR`",
         .kept = "nothing was written"});
  }
}

ScratchDirectory::ScratchDirectory() {
  std::error_code ignored;
  path_ = (fs::temp_directory_path(ignored) / "lmlaunch-adapter-XXXXXX").string();
  if (mkdtemp(path_.data()) != nullptr) return;
  throw Error(Exit::kIo, {.area = "FILE-27",
                          .what = std::string("no directory for the combined adapter can be written: ") +
                                  std::strerror(errno),
                          .place = path_,
                          .next = "set TMPDIR to a directory that can be written, or combine the adapters "
                                  "before: lmlaunch merge A B -o DIR"});
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void add_adapters(const std::vector<std::string>& texts, const ScratchDirectory& scratch, Subject& subject) {
  Config& config = subject.config;
  if (trains_adapter(config))
    throw usage_error(
        "--adapter is for a model with all of its weights, and the first argument is an adapter",
        "name its base model first, and each adapter by --adapter");
  if (subject.checkpoint)
    throw usage_error("--adapter is for a model, and the first argument is a checkpoint",
                      "export it first: lmlaunch export " + subject.trained + " -o DIR");
  if (!subject.trained.empty()) config.model.path = subject.trained;
  config.model.init = ModelInit::kPretrained;
  std::vector<WeightedAdapter> adapters;
  std::string chat_template;
  for (const std::string& text : texts) {
    const NamedAdapter adapter = open_adapter_argument(text);
    check_base(adapter.subject, config.model.path, "the model");
    if (adapters.empty()) chat_template = own_template(adapter.subject);
    adapters.push_back({adapter.subject.trained, adapter.weight});
  }
  std::string directory = adapters.front().directory;
  if (adapters.size() > 1 || adapters.front().weight != 1) {
    const std::string base = resolve_model(config.model.path, read_environment());
    const ModelSpec spec = read_model_spec(base);
    refuse_new_tokens(adapters, base, spec);
    const CombinedAdapter combined(spec, adapters, {.threads = survey_host().cpu.cores});
    directory = scratch.path() + "/adapter";
    write_combined(directory, combined, base_of_adapter(config.model.path, base, spec, chat_template));
  }
  // What the run trained with says nothing about the adapters.
  config.train.method = method_of(read_adapter_config(directory, nullptr).spec.kind);
  config.train.only.clear();
  config.optimizer.groups.clear();
  config.lora = {};
  config.lora.init = directory;
  subject = {.config = config, .trained = directory};
}

}  // namespace lm
