#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/restore.h"
#include "config/config_text.h"
#include "launcher/environment.h"
#include "launcher/rank/rank_commands.h"
#include "weights/verify.h"

namespace lm {
namespace {

VerifyResult verify_checkpoint(const std::string& directory) {
  VerifyResult result;
  try {
    CheckpointReader reader(directory);
    reader.verify();
    std::string hashes;
    for (const CheckpointFile& file : reader.manifest().files) {
      result.files.push_back(file.name);
      hashes += file.hash();
    }
    result.tensors = std::ssize(reader.manifest().tensors);
    result.bytes = reader.manifest().bytes();
    result.weights_hash = hash_text(hashes);
    result.ok = true;
  } catch (const Error& error) {
    result.problem = error.report();
  }
  return result;
}

}  // namespace

Exit verify_command(const CommandLine& line) {
  namespace fs = std::filesystem;
  const std::string& what = line.positional[0];
  const bool run = fs::exists(fs::path(what) / "model") && fs::exists(fs::path(what) / "config.toml");
  const bool adapter = fs::exists(fs::path(what) / "adapter_config.json");
  const bool checkpoint = fs::exists(fs::path(what) / kManifestName);
  const std::string directory = checkpoint ? ""
                                : run      ? what + "/model"
                                : adapter  ? what
                                           : resolve_model(what, read_environment());
  const VerifyResult result = checkpoint ? verify_checkpoint(what) : verify_model(directory);
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
  return result.ok ? Exit::kDone : Exit::kInput;
}

}  // namespace lm
