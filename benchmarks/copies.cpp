// How fast are copies between pinned host memory and each GPU: to it, back, and both at once? The ceiling is
// the link's specification: PCIe 4 x16 32 GB/s each way, PCIe 5 x16 64, NVLink-C2C 450. Says so where there
// is no GPU. Prints a table and one JSON line.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/cuda.h"
#include "base/error.h"
#include "offload/copy_probe.h"

namespace {

using namespace lm;

void run() {
  std::string reason;
  const int count = cuda_device_count(&reason);
  if (count == 0) {
    std::printf("no GPU: %s\n", reason.c_str());
    return;
  }
  nlohmann::json rows = nlohmann::json::array();
  std::printf("%-32s %14s %14s %14s\n", "pinned copies", "to GPU GB/s", "to host GB/s", "both GB/s");
  for (int gpu = 0; gpu < count; ++gpu) {
    const std::string name = cuda_device(gpu).name;  // selects it, too
    const CopyProbe probe = probe_copies(DeviceType::kCuda, 256 * kMiB, 0.5);
    std::printf("%-32s %14.2f %14.2f %14.2f%s\n", name.c_str(), probe.to_device_bytes_per_s / 1e9,
                probe.to_host_bytes_per_s / 1e9, probe.both_bytes_per_s / 1e9,
                probe.pinned ? "" : ("  not pinned: " + probe.pinned_reason).c_str());
    rows.push_back({{"gpu", gpu},
                    {"name", name},
                    {"pinned", probe.pinned},
                    {"to_device_gbps", probe.to_device_bytes_per_s / 1e9},
                    {"to_host_gbps", probe.to_host_bytes_per_s / 1e9},
                    {"both_gbps", probe.both_bytes_per_s / 1e9}});
  }
  std::printf("%s\n", nlohmann::json{{"benchmark", "copies"}, {"rows", rows}}.dump().c_str());
  std::printf("figure: %.1f GB/s to the GPU, %.1f to the host\n", rows[0]["to_device_gbps"].get<double>(),
              rows[0]["to_host_gbps"].get<double>());
}

}  // namespace

int main() {
  try {
    run();
    return 0;
  } catch (const lm::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  }
}
