#include "launcher/worker/save_model.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/log.h"
#include "export/computed_prompt.h"
#include "export/export_model.h"
#include "launcher/machine/probe.h"
#include "weights/loader.h"

namespace lm {
namespace {

// Estimated bytes of a tensor's entry in a safetensors header, beside its name; and of config.json, an index
// and directories.
constexpr int64_t kHeaderPerTensor = 160, kSmallFiles = 256 * kKiB;

[[noreturn]] void refuse(const std::string& directory, int64_t bytes, const std::string& why) {
  throw Error(Exit::kDoesNotFit,
              {.area = "FILE-03",
               .what = "the trained model will take " + format_bytes(bytes) + ", and " + why,
               .place = directory,
               .next = "free space there, or set run.dir to a directory on another disk",
               .kept = "nothing was trained"});
}

// 0, or errno if the bytes cannot be reserved.
int reserve(int fd, int64_t bytes) {
  // fallocate would raise SIGXFSZ, which ends the process
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(bytes)) return EFBIG;
  int status = 0;
  do {
    status = fallocate(fd, 0, 0, bytes);
  } while (status != 0 && errno == EINTR);
  return status == 0 ? 0 : errno;
}

// A new directory for the user alone: the model may reveal its training data. "" if none can be made.
std::string private_directory(const std::string& parent) {
  std::string name = parent + "/lmlaunch-model-XXXXXX";
  return mkdtemp(name.data()) == nullptr ? "" : name;
}

std::vector<std::string> other_places(const Job& job) {
  std::vector<std::string> out = job.config.offload.paths;
  if (!job.environment.cache_dir.empty()) out.push_back(job.environment.cache_dir);
  out.insert(out.end(), {"/var/tmp", "/tmp"});
  return out;
}

// Returns where the model is now; "" if no directory took it.
std::string write_elsewhere(const Job& job, Rank& rank) {
  for (const std::string& place : other_places(job)) {
    std::error_code ignored;
    if (place == job.environment.cache_dir) std::filesystem::create_directories(place, ignored);
    if (free_disk_bytes(place) < model_bytes(job)) continue;
    const std::string directory = private_directory(place);
    if (directory.empty()) continue;
    try {
      export_rank(job, rank, directory + "/model", false);
      return directory + "/model";
    } catch (const Error& error) {
      log_warning("FILE-03", "the model cannot be written to " + directory + " either: " + error.what());
      rmdir(directory.c_str());
    }
  }
  return "";
}

}  // namespace

int64_t model_bytes(const Job& job) {
  const bool lora = job.model.adapter.has_value();
  const auto nothing = [](size_t, const TensorPlace&, int64_t) { return WeightView(); };
  ExportOptions options;
  options.dtype = job.plan.numerics.dtype;
  options.fresh = job.config.model.init == ModelInit::kRandom;
  options.unread = unread_modules(job.model.spec);
  const ModelLayout* layout = &job.model.layout;
  std::optional<ModelLayout> computed;  // P-tuning's encoder is not written
  if (lora && job.model.adapter->encoder > 0) {
    const AdapterSpec written = ComputedPrompt::spec_of(*job.model.adapter);
    layout = &computed.emplace(make_layout(job.model.spec, &written, DType::kF32));
  }
  const std::vector<TensorInfo> tensors =
      lora ? OutgoingTensors(*layout, OutgoingTensors::What::kAdapter, DType::kF32, nothing).tensors()
           : exported_tensors(job.model.directory, job.model.layout, options);
  int64_t bytes = kSmallFiles + tokenizer_bytes(job.model.directory);
  for (const TensorInfo& tensor : tensors)
    bytes += tensor.bytes() + kHeaderPerTensor + std::ssize(tensor.name);
  // The pairs that PiSSA's began with are a part of what is written (export/plain_adapter.h).
  for (const BlockLayout& block : job.model.layout.blocks) {
    for (const Trainable& start : block.starts)
      bytes += block.tensors[start.tensor].parameter.elements() * static_cast<int64_t>(sizeof(float));
  }
  // The copy of a tied head (weights/saved_modules.h).
  const ModelSpec& spec = job.model.spec;
  if (lora && spec.tied && job.model.adapter->trains_whole(spec.names.embedding + std::string(".weight")))
    bytes += spec.vocab * spec.hidden * static_cast<int64_t>(sizeof(float));
  // Copies of matrices with new tokens (export/export_adapter.h).
  if (lora && job.model.grown)
    bytes += (spec.tied ? 1 : 2) * spec.vocab * spec.hidden * static_cast<int64_t>(sizeof(float));
  return bytes;
}

ReservedSpace::ReservedSpace(const std::string& directory, int64_t bytes) {
  if (bytes == 0) return;
  const int64_t free = free_disk_bytes(directory);
  const std::string short_of = format_bytes(free) + " are free";
  if (free < bytes) refuse(directory, bytes, short_of);
  fd_ = open(directory.c_str(), O_TMPFILE | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  const int error = fd_ < 0 ? errno : reserve(fd_, bytes);
  if (error == 0) return;
  release();
  if (error == EFBIG) refuse(directory, bytes, "files may not be that long here (ulimit -f)");
  if (error == ENOSPC || error == EDQUOT) refuse(directory, bytes, short_of + ": " + std::strerror(error));
  log_note("FILE-03", "space for the trained model is free, but cannot be reserved in " + directory + ": " +
                          std::strerror(error));
}

void ReservedSpace::release() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void save_model(RunFiles& files, const Job& job, Rank& rank, ReservedSpace& space, int64_t step,
                const std::string& checkpoint) {
  space.release();
  try {
    return files.write_model(job, rank, checkpoint);
  } catch (const Error& error) {
    if (rank.group().ranks() > 1) throw;  // the other ranks cannot help any more
    const std::string wanted = files.path("model"), found = write_elsewhere(job, rank);
    ErrorText text = error.text();
    text.what = "the trained model cannot be written: " + text.what;
    text.kept = found.empty() ? "" : fmt::format("the model after step {}, in {}", step, found);
    if (!found.empty()) {
      text.next = text.advice() + "; then: mv " + found + " " + wanted;
      text.otherwise.clear();
    }
    throw Error(error.code(), text);
  }
}

}  // namespace lm
