#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "checkpoint/restore.h"
#include "checkpoint/trained_values.h"
#include "config/config_text.h"
#include "launcher/model_place.h"
#include "launcher/rank/job.h"
#include "launcher/rank/rank_commands.h"
#include "launcher/recorded.h"
#include "weights/adapter_files.h"
#include "weights/verify.h"

namespace lm {
namespace {

VerifyResult verify_checkpoint(const std::string& directory) {
  VerifyResult result;
  try {
    CheckpointReader reader(directory);
    reader.verify();
    for (const CheckpointFile& file : reader.manifest().files) result.files.push_back(file.name);
    result.tensors = std::ssize(reader.manifest().tensors);
    result.bytes = reader.manifest().bytes();
    result.weights_hash = trained_hash(reader);
    result.ok = true;
  } catch (const Error& error) {
    result.problem = error.report();
    result.code = error.code();
  }
  return result;
}

std::optional<ModelSpec> find_base(const std::string& name) {
  std::string directory;
  try {
    directory = resolve_model(name, read_environment());
  } catch (const Error&) {
    log_note("FILE-21",
             "the adapter is not compared with its base model, which was not found: \"" + name + "\"");
    return std::nullopt;
  }
  return read_model_spec(directory);
}

}  // namespace

Exit verify_command(const CommandLine& line) {
  namespace fs = std::filesystem;
  const std::string& what = line.positional[0];
  const auto has = [](const std::string& directory, const char* file) {
    return fs::exists(fs::path(directory) / file);
  };
  const bool model = has(what, kAdapterConfig) || has(what, kManifestName);
  // Of a run: its trained model, or its newest checkpoint.
  const std::string subject = model                  ? what
                              : run_of(what).empty() ? resolve_model(what, read_environment())
                                                     : open_subject(what).trained;
  const VerifyResult result =
      has(subject, kManifestName) ? verify_checkpoint(subject) : verify_model(subject, find_base);
  if (line.has("--json")) {
    nlohmann::ordered_json json = {
        {"ok", result.ok}, {"weights_hash", result.weights_hash}, {"files", result.files}};
    if (!result.ok) json["problem"] = result.problem;
    std::printf("%s\n", json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else if (result.ok) {
    std::printf("ok  %s  %ld tensors, %ld bytes\n", result.weights_hash.c_str(), result.tensors,
                result.bytes);
  } else {
    std::fputs(result.problem.c_str(), stderr);
  }
  return result.code;
}

}  // namespace lm
