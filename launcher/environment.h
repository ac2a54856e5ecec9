// The process's environment, read here alone: where Python, the hub cache and our own cache are, and which
// GPUs CUDA is told to show. Values of one moment; any thread may call before threads change the environment.
// No other variable changes behaviour.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lm {

struct Environment {
  std::string python;                   // interpreter for data preparation; "" when none was found
  std::string python_from;              // "LMLAUNCH_PYTHON", "the build" or "PATH"
  std::vector<std::string> hub_caches;  // nearest first: directories that hold models--ORG--NAME
  std::string cache_dir;  // ours: $XDG_CACHE_HOME/lmlaunch or ~/.cache/lmlaunch; "" without a home
  std::string token_cache() const { return cache_dir.empty() ? "" : cache_dir + "/tokens"; }
};

Environment read_environment();

// What a rank's CUDA is told about GPUs.
struct CudaVariables {
  std::optional<std::string> visible_devices;  // CUDA_VISIBLE_DEVICES
  // CUDA_DEVICE_ORDER. Ours is PCI_BUS_ID: then CUDA, NVML and nvidia-smi number alike, so that the numbers
  // in CUDA_VISIBLE_DEVICES are those that nvidia-smi shows. CUDA's own default, FASTEST_FIRST, is kept when
  // the user says so.
  std::string device_order = "PCI_BUS_ID";
};

CudaVariables read_cuda_variables();

// SLURM_JOB_END_TIME: when the scheduler ends this job, in seconds since 1970; nothing outside of a Slurm
// job.
std::optional<int64_t> job_end_time();

// A directory with a config.json: `path` itself, or the snapshot that refs/main of ORG/NAME names in a hub
// cache. Throws Error(11) with every place that was looked at.
std::string resolve_model(const std::string& path, const Environment& environment);

// The environment of a rank as "NAME=value" strings: without what changes the bits of a result behind our
// back (ATEN_*, MKL_*, DNNL_*, ONEDNN_*, OMP_*, TORCH_*, PYTORCH_*, CUBLAS*), with cuBLAS's workspace, the
// GEMM library's code cache and the spinning of waiting threads fixed, and with CUDA's numbering of GPUs.
std::vector<std::string> rank_environment();

}  // namespace lm
