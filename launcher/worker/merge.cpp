// `lmlaunch merge`: adapters of one base model become one adapter.
#include <fmt/format.h>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "launcher/machine/survey.h"
#include "launcher/model_place.h"
#include "launcher/worker/adapters.h"
#include "launcher/worker/run_files.h"
#include "launcher/worker/worker_commands.h"
#include "weights/model_directory.h"

namespace lm {
namespace {

CombineOptions options_of(const CommandLine& line) {
  CombineOptions out{.threads = survey_host().cpu.cores};
  const std::string type = line.value("--type").value_or("cat");
  if (type == "svd") {
    out.how = Combination::kSvd;
  } else if (type == "linear") {
    out.how = Combination::kLinear;
  } else if (type != "cat") {
    throw usage_error("--type: expected cat, svd or linear, got \"" + type + "\"",
                      "see `lmlaunch merge --help`");
  }
  const std::optional<int64_t> rank = line.integer("--rank");
  if (rank && out.how != Combination::kSvd)
    throw usage_error("--rank is for --type svd: that of " + type + " follows from the adapters",
                      "add --type svd, or leave --rank out");
  if (rank && *rank < 1) throw usage_error("--rank: expected 1 or more", "see `lmlaunch merge --help`");
  out.rank = rank.value_or(0);
  return out;
}

// The model that all of them were trained on, as the first names it. Names and shapes of tensors do not tell
// two models apart, and the sum of adapters of two fits neither.
std::string common_base(const std::vector<NamedAdapter>& adapters, const CommandLine& line) {
  if (const std::optional<std::string> base = line.value("--base")) {
    for (const NamedAdapter& adapter : adapters) check_base(adapter.subject, *base, "--base");
    return *base;
  }
  const Environment environment = read_environment();
  const auto directory = [&](const Subject& subject) {
    return std::filesystem::weakly_canonical(
        resolve_model(subject.config.model.path, environment, subject.config.lora.init));
  };
  const Subject& first = adapters.front().subject;
  for (const NamedAdapter& adapter : adapters) {
    const Subject& other = adapter.subject;
    if (directory(first) == directory(other)) continue;
    throw Error(Exit::kInput, {.area = "FILE-27",
                               .what = "the adapters have different base models: " + first.trained +
                                       " was trained on \"" + first.config.model.path + "\", and " +
                                       other.trained + " on \"" + other.config.model.path + "\"",
                               .place = other.trained,
                               .next = "merge adapters of one model; if these are copies of it, name one: "
                                       "--base DIR",
                               .kept = "nothing was written"});
  }
  return first.config.model.path;
}

}  // namespace

Exit merge_command(const CommandLine& line) {
  const CombineOptions options = options_of(line);
  const std::string output = *line.value("-o");
  std::vector<NamedAdapter> named;
  std::vector<WeightedAdapter> adapters;
  for (const std::string& text : line.positional) {
    named.push_back(open_adapter_argument(text));
    adapters.push_back({named.back().subject.trained, named.back().weight});
  }
  const std::string base = common_base(named, line), directory = resolve_model(base, read_environment());
  const ModelSpec spec = read_model_spec(directory);
  refuse_new_tokens(adapters, directory, spec);
  const CombinedAdapter combined(spec, adapters, options);
  write_combined(output, combined,
                 base_of_adapter(base, directory, spec, own_template(named.front().subject)));
  if (line.has("--json")) {
    const nlohmann::ordered_json out{{"directory", output}, {"r", combined.spec().r}, {"base", base}};
    std::printf("%s\n", out.dump().c_str());
  } else {
    std::printf("%s\n", output.c_str());
  }
  return Exit::kDone;
}

}  // namespace lm
