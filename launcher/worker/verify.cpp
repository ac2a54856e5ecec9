#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "checkpoint/restore.h"
#include "checkpoint/trained_values.h"
#include "config/config_text.h"
#include "export/export_adapter.h"
#include "export/export_model.h"
#include "launcher/model_place.h"
#include "launcher/recorded.h"
#include "launcher/worker/checkpoint_weights.h"
#include "launcher/worker/job.h"
#include "launcher/worker/run_files.h"
#include "launcher/worker/worker_commands.h"
#include "spec/parameter.h"
#include "weights/adapter_files.h"
#include "weights/loader.h"
#include "weights/model_directory.h"
#include "weights/verify.h"

namespace lm {
namespace {

// Whether an export of the model has more, or other bytes, than the trained tensors of a checkpoint: the
// towers of a wrapper, buffers, transposed matrices, and experts' matrices that are one tensor there.
bool export_differs(const ModelSpec& spec) {
  if (!spec.wrapper.empty()) return true;
  return std::ranges::any_of(list_parameters(spec, nullptr), [](const BlockParameters& block) {
    return !block.frozen.empty() || std::ranges::any_of(block.trainable, [](const Parameter& parameter) {
      return std::ranges::any_of(
          parameter.parts, [](const ParameterPart& part) { return part.transposed || part.slices > 0; });
    });
  });
}

// Of such a model trained whole, or of one whose files have tensors in other types than most, if its base is
// here: the hash of what would be exported of the checkpoint.
std::string hash_with_base(const std::string& directory, const CommandLine& line) {
  if (run_of(directory).empty()) return "";
  Subject subject = open_subject(directory);
  Config& config = subject.config;
  const Environment environment = read_environment();
  if (config.train.method != Method::kFull || !model_is_here(config.model.path, environment)) return "";
  const std::string base = resolve_model(config.model.path, environment);
  const ModelSpec spec = read_model_spec(base);
  const DType dtype = storage_type(config.model.dtype);
  const ExportOptions options{
      .dtype = dtype, .fresh = config.model.init == ModelInit::kRandom, .unread = unread_modules(spec)};
  if (config.train.only.empty() && !export_differs(spec) &&
      !takes_from_base(base, make_layout(spec, nullptr, dtype), options))
    return "";
  config.model.dtype = ModelDType::kF32;
  const std::unique_ptr<Job> job = open_job(config, line, PlanPurpose::kExport);
  CheckpointWeights weights(*job, directory, dtype);
  return export_hash(job->model.directory, job->model.layout, weights.source(), options);
}

// Whether experts have adapters: those of all experts are one tensor in the export.
bool adapts_experts(const Manifest& manifest) {
  return std::ranges::any_of(manifest.tensors, [](const SavedTensor& tensor) {
    const auto has = [&](const char* part) { return tensor.name.find(part) != std::string::npos; };
    return tensor.name.starts_with(kAdapterPrefix) && has(".experts.") && has(".lora_");
  });
}

// Of an adapter of experts, or one with new tokens, whose export has copies of the base's matrices, if its
// base is here: the hash of that export. "": the export has the tensors of the checkpoint.
std::string hash_of_adapter(const std::string& directory, const Manifest& manifest, const CommandLine& line) {
  if (run_of(directory).empty()) return "";
  Subject subject = open_subject(directory);
  Config& config = subject.config;
  const std::string& init = config.lora.init;
  const bool experts = adapts_experts(manifest);
  if (!trains_adapter(config) || (config.model.add_tokens.empty() && init.empty() && !experts)) return "";
  if (!model_is_here(config.model.path, read_environment()) || (!init.empty() && !holds_adapter(init)))
    return "";
  const DType dtype = storage_type(config.model.dtype);
  config.model.dtype = ModelDType::kF32;
  const std::unique_ptr<Job> job = open_job(config, line, PlanPurpose::kExport);
  const BaseModel base = base_of_adapter(*job);
  if (!experts && (!base.grown || job->model.adapter->pissa)) return "";
  CheckpointWeights weights(*job, directory, dtype);
  return adapter_hash(*job->model.adapter, base, job->model.layout, weights.source());
}

VerifyResult verify_checkpoint(const std::string& directory, const CommandLine& line) {
  VerifyResult result;
  try {
    CheckpointReader reader(directory);
    reader.verify();
    for (const CheckpointFile& file : reader.manifest().files) result.files.push_back(file.name);
    result.tensors = std::ssize(reader.manifest().tensors);
    result.bytes = reader.manifest().bytes();
    result.weights_hash = hash_with_base(directory, line);
    if (result.weights_hash.empty())
      result.weights_hash = hash_of_adapter(directory, reader.manifest(), line);
    if (result.weights_hash.empty()) result.weights_hash = trained_hash(reader);
    result.ok = true;
  } catch (const Error& error) {
    result.problem = error.report();
    result.code = error.code();
  }
  return result;
}

std::optional<ModelSpec> find_base(const std::string& adapter, const std::string& name) {
  std::string directory;
  try {
    directory = resolve_model(name, read_environment());
  } catch (const Error&) {
    log_note("FILE-21",
             "the adapter is not compared with its base model, which was not found: \"" + name + "\"");
    return std::nullopt;
  }
  ModelSpec spec = read_model_spec(directory);
  grow_by_adapter(adapter, directory, spec);
  return spec;
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
      has(subject, kManifestName)
          ? verify_checkpoint(subject, line)
          : verify_model(subject, [&](const std::string& name) { return find_base(subject, name); });
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
