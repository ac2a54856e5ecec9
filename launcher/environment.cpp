#include "launcher/environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/process.h"
#include "base/processor.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool executable(const std::string& path) {
  std::error_code ignored;
  return !path.empty() && fs::is_regular_file(path, ignored) && access(path.c_str(), X_OK) == 0;
}

std::string on_path(const std::string& name) {
  const std::string path = variable("PATH");
  for (size_t from = 0; from <= path.size();) {
    const size_t to = std::min(path.find(':', from), path.size());
    const std::string candidate = path.substr(from, to - from) + "/" + name;
    if (to > from && executable(candidate)) return candidate;
    from = to + 1;
  }
  return "";
}

std::string cache_directory() {
  const std::string home = variable("HOME"), xdg = variable("XDG_CACHE_HOME");
  return !xdg.empty() ? xdg : home.empty() ? "" : home + "/.cache";
}

// Directory of the hub's and the datasets' libraries; "" without a home directory.
std::string hub_directory() {
  const std::string hf_home = variable("HF_HOME"), cache = cache_directory();
  return !hf_home.empty() ? hf_home : cache.empty() ? "" : cache + "/huggingface";
}

}  // namespace

bool can_execute(const std::string& program) {
  return program.find('/') == std::string::npos ? !on_path(program).empty() : executable(program);
}

std::string how_to_mend(const std::string& program) {
  const std::filesystem::path package = std::filesystem::path(program).parent_path().parent_path();
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(package.parent_path(), error)) {
    const std::string name = entry.path().filename();
    if (package.filename() == "lmlaunch" && name.starts_with("lmlaunch-") && name.ends_with(".dist-info"))
      return "pip install --force-reinstall lmlaunch";
  }
  return "./dev build";
}

std::string how_to_mend() {
  return how_to_mend(beside_this_program("lmlaunch"));
}

Environment read_environment() {
  Environment out;
  out.home = variable("HOME");
  const std::string cache = cache_directory();
  if (!cache.empty()) out.cache_dir = cache + "/lmlaunch";
  const std::string hub = variable("HF_HUB_CACHE"), datasets = variable("HF_DATASETS_CACHE"),
                    hub_home = hub_directory();
  if (!hub.empty()) {
    out.hub_caches.push_back(hub);
  } else if (!hub_home.empty()) {
    out.hub_caches.push_back(hub_home + "/hub");
  }
  if (!datasets.empty()) {
    out.datasets_caches.push_back(datasets);
  } else if (!hub_home.empty()) {
    out.datasets_caches.push_back(hub_home + "/datasets");
  }
  out.python = variable("LMLAUNCH_PYTHON");
  out.python_from = "LMLAUNCH_PYTHON";
  if (!out.python.empty()) {
    if (out.python.find('/') == std::string::npos) out.python = on_path(out.python);
    return out;  // named explicitly: nothing else is tried
  }
  out.python = LM_BUILD_PYTHON;
  out.python_from = "the build";
  if (executable(out.python)) return out;
  out.python = on_path("python3");
  out.python_from = "PATH";
  return out;
}

HubAccess read_hub_access() {
  HubAccess out{.endpoint = variable("HF_ENDPOINT")};
  if (out.endpoint.empty()) out.endpoint = "https://huggingface.co";
  std::string offline = variable("HF_HUB_OFFLINE");
  for (char& c : offline) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  for (const char* word : {"1", "ON", "YES", "TRUE"}) out.offline = out.offline || offline == word;
  const auto trimmed = [](std::string text) {
    std::erase_if(text, [](unsigned char c) { return std::isspace(c) || std::iscntrl(c); });
    return text;
  };
  out.token = trimmed(variable("HF_TOKEN"));
  out.token_from = "HF_TOKEN";
  if (!out.token.empty()) return out;
  out.token_from = variable("HF_TOKEN_PATH");
  const std::string hub_home = hub_directory();
  if (out.token_from.empty() && !hub_home.empty()) out.token_from = hub_home + "/token";
  std::error_code ignored;
  if (fs::is_regular_file(out.token_from, ignored))
    out.token = trimmed(read_small_file(out.token_from, 1 << 16));
  return out;
}

CudaVariables read_cuda_variables() {
  CudaVariables out;
  if (const char* devices = std::getenv("CUDA_VISIBLE_DEVICES")) out.visible_devices = devices;
  if (const char* order = std::getenv("CUDA_DEVICE_ORDER")) out.device_order = order;
  return out;
}

std::optional<int64_t> job_end_time() {
  const std::string text = variable("SLURM_JOB_END_TIME");
  int64_t seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  const bool whole = error == std::errc() && end == text.data() + text.size() && seconds > 0;
  return whole ? std::optional(seconds) : std::nullopt;
}

namespace {

std::optional<int> count(const char* name) {
  const std::string text = variable(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 ? std::optional(value)
                                                                                : std::nullopt;
}

// Replaces characters that cannot be part of a file's name.
std::string word(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return !std::isalnum(c) && c != '.' && c != '-'; },
      '_');
  return text;
}

// Addresses in mpirun's URI: "12.0;tcp://10.0.0.1,10.1.0.1:4711;tcp6://[fd00::1]:4712".
std::vector<std::string> addresses_of(const std::string& uri) {
  static constexpr std::string_view kBegin = ";tcp://";
  const size_t begin = uri.find(kBegin);
  if (begin == std::string::npos) return {};
  const size_t first = begin + kBegin.size();
  std::istringstream list(uri.substr(first, uri.find(':', first) - first));
  std::vector<std::string> out;
  for (std::string one; std::getline(list, one, ',');) out.push_back(one);
  return out;
}

}  // namespace

LauncherJob read_launcher_job() {
  LauncherJob job;
  const std::optional<int> mpirun_rank = count("OMPI_COMM_WORLD_RANK"),
                           mpirun_ranks = count("OMPI_COMM_WORLD_SIZE");
  if (mpirun_rank && mpirun_ranks) {
    job.launcher = "mpirun";
    job.rank = *mpirun_rank;
    job.ranks = *mpirun_ranks;
    const int here = count("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(0);
    job.one_machine = here == job.ranks;
    if (here > 0 && job.ranks % here == 0) job.machines = job.ranks / here;
    job.local_rank = count("OMPI_COMM_WORLD_LOCAL_RANK").value_or(0);
    job.id = word(variable("PMIX_NAMESPACE"));
    job.launcher_addresses = addresses_of(variable("OMPI_MCA_orte_hnp_uri"));
    return job;
  }
  // Set only for processes that srun has started; a batch script is one process, whatever the job has
  // requested.
  const std::optional<int> tasks = count("SLURM_STEP_NUM_TASKS"), task = count("SLURM_PROCID");
  if (!tasks || !task || *tasks < 2) return job;
  job.launcher = "srun";
  job.rank = *task;
  job.ranks = *tasks;
  job.one_machine = count("SLURM_STEP_NUM_NODES") == 1;
  job.machines = std::max(count("SLURM_STEP_NUM_NODES").value_or(1), 1);
  job.local_rank = count("SLURM_LOCALID").value_or(0);
  if (const std::string address = variable("SLURM_LAUNCH_NODE_IPADDR"); !address.empty())
    job.launcher_addresses = {address};
  job.id = word(variable("SLURM_JOB_ID") + "." + variable("SLURM_STEP_ID") + "." +
                variable("SLURM_RESTART_COUNT"));
  if (variable("PMIX_NAMESPACE").empty()) {
    job.problem = fmt::format(
        "srun has started {} processes that cannot find each other: each would train by itself", *tasks);
  }
  return job;
}

void limit_processor() {
  const std::string name = variable("LM_CPU");
  if (name.empty()) return;
  const std::optional<Instructions> most = instructions_of(name);
  if (!most) {
    throw Error(Exit::kConfig, {.area = "CPU-10",
                                .what = "LM_CPU is not a known processor level: " + name,
                                .place = "",
                                .next = "unset it, or set it to one of " + instructions_names()});
  }
  limit_instructions(*most);
}

namespace {

std::optional<double> seconds(const char* name) {
  const std::string text = variable(name);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value > 0 ? std::optional(value)
                                                                               : std::nullopt;
}

}  // namespace

std::optional<double> silence_seconds() {
  return seconds("LMLAUNCH_SILENCE");
}

std::optional<double> follow_seconds() {
  return seconds("LMLAUNCH_FOLLOW");
}

std::vector<std::string> one_machine_mpi() {
  std::vector<std::string> out;
  // Containers may copy between processes only if the kernel allows it; otherwise Open MPI warns at each
  // copy.
  for (const char* entry :
       {"OMPI_MCA_pml=ob1", "OMPI_MCA_btl=self,vader", "OMPI_MCA_btl_vader_single_copy_mechanism=none"}) {
    const std::string text = entry;
    if (std::getenv(text.substr(0, text.find('=')).c_str()) == nullptr) out.push_back(text);
  }
  return out;
}

std::vector<std::string> gpu_of_rank(int place, const std::string& interface) {
  // Entries of the list are in CUDA's order, whether numbers or prefixes of UUIDs.
  std::string gpu = std::to_string(place);
  if (const auto list = read_cuda_variables().visible_devices) {
    std::istringstream entries(*list);
    for (int i = 0; i <= place; ++i) std::getline(entries, gpu, ',');
  }
  return gpu_of_rank(gpu, interface);
}

std::vector<std::string> gpu_of_rank(const std::string& gpu, const std::string& interface) {
  std::vector<std::string> out = {"CUDA_VISIBLE_DEVICES=" + gpu};
  // NCCL takes a name as a prefix, unless it is written "=name".
  if (!interface.empty() && std::getenv("NCCL_SOCKET_IFNAME") == nullptr)
    out.emplace_back("NCCL_SOCKET_IFNAME==" + interface);
  if (std::getenv("NCCL_RAS_ENABLE") == nullptr) out.emplace_back("NCCL_RAS_ENABLE=0");
  return out;
}

std::vector<std::string> worker_environment() {
  // Several of these change result bits (math modes, thread counts, algorithm choice), so none is passed on.
  static constexpr std::string_view kDropped[] = {"ATEN_", "MKL_",   "DNNL_",    "ONEDNN_",
                                                  "OMP_",  "TORCH_", "PYTORCH_", "CUBLAS"};
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (std::none_of(std::begin(kDropped), std::end(kDropped),
                     [&](auto name) { return text.starts_with(name); })) {
      out.emplace_back(text);
    }
  }
  out.emplace_back("CUBLAS_WORKSPACE_CONFIG=:4096:8");
  // Batches without padding have many lengths, and the GEMM library caches compiled code for each: 18 MiB
  // more per step with its default of 1024 entries. The limit bounds it; evicted entries change no bit.
  out.emplace_back("ONEDNN_PRIMITIVE_CACHE_CAPACITY=192");
  // Waiting threads spin this often, then sleep: with the default a step on a machine with busy neighbours
  // took 10.3 s, with sleeping threads 4.8 s.
  out.emplace_back("GOMP_SPINCOUNT=20000");
  if (std::getenv("CUDA_DEVICE_ORDER") == nullptr) {
    out.emplace_back("CUDA_DEVICE_ORDER=" + read_cuda_variables().device_order);
  }
  for (std::string& limit : library_limits()) out.push_back(std::move(limit));
  return out;
}

}  // namespace lm
