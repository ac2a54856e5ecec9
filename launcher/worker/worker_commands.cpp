#include "launcher/worker/worker_commands.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/cuda.h"
#include "launcher/worker/run.h"
#include "offload/copy_probe.h"

namespace lm {
namespace {

// `doctor --copies`, which only the CLI calls: one JSON array on stdout, an object per GPU.
Exit print_copies() {
  nlohmann::json rows = nlohmann::json::array();
  std::string reason;
  const int count = cuda_device_count(&reason);
  if (count == 0) std::fprintf(stderr, "no GPU: %s\n", reason.c_str());
  for (int gpu = 0; gpu < count; ++gpu) {
    const GpuInfo info = cuda_device(gpu);  // selects it, too
    const CopyProbe probe = probe_copies(DeviceType::kCuda);
    rows.push_back({{"gpu", info.name},
                    {"uuid", info.uuid},
                    {"to_device_bytes_per_s", probe.to_device_bytes_per_s},
                    {"to_host_bytes_per_s", probe.to_host_bytes_per_s},
                    {"both_bytes_per_s", probe.both_bytes_per_s},
                    {"pinned", probe.pinned},
                    {"pinned_reason", probe.pinned_reason}});
  }
  std::printf("%s\n", rows.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  return Exit::kDone;
}

}  // namespace

Exit run_worker_command(const std::vector<std::string>& arguments) {
  const CommandLine line = parse_command_line(arguments, Reader::kWorker);
  if (line.command == "train") return run_training(line);
  if (line.command == "eval") return eval_command(line);
  if (line.command == "generate") return generate_command(line);
  if (line.command == "chat") return chat_command(line);
  if (line.command == "serve") return serve_command(line);
  if (line.command == "export") return export_command(line);
  if (line.command == "merge") return merge_command(line);
  if (line.command == "verify") return verify_command(line);
  if (line.command == "diff") return diff_command(line);
  if (line.command == "doctor" && line.has("--copies")) return print_copies();
  throw Error(Exit::kUsage, {.area = "USE-20",
                             .what = "the worker has no command " + line.command,
                             .place = "",
                             .next = "start lmlaunch instead"});
}

}  // namespace lm
