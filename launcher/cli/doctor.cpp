#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/bytes.h"
#include "base/error.h"
#include "base/processor.h"
#include "comm/mpi_api.h"
#include "comm/nccl_api.h"
#include "launcher/cli/commands.h"
#include "launcher/cli/device_choice.h"
#include "launcher/environment.h"
#include "launcher/machine/machine_survey.h"
#include "launcher/machine/probe.h"
#include "launcher/machine/rates.h"
#include "launcher/machine/survey.h"
#include "offload/disk_probe.h"

namespace lm {
namespace {

using Json = nlohmann::ordered_json;

// One line of the report: `ok` false is something a run may miss, and `next` says how to fix it.
struct Check {
  std::string name;
  bool ok = true;
  std::string value;
  std::string next;
  Json numbers = Json::object();  // machine-readable figures
};

// Instructions that kernels and products of bf16 matrices use.
const char* simd_text(Instructions best) {
  switch (best) {
    case Instructions::kNone:
      return "no AVX2";
    case Instructions::kAvx2:
      return "AVX2; no bf16 instructions: bf16 products at the rate of fp32 ones";
    case Instructions::kAvx512Core:
    case Instructions::kAvx512Vbmi:
      return "AVX-512; no bf16 instructions: bf16 products at the rate of fp32 ones";
    case Instructions::kAvx512Bf16:
      return "AVX-512 with bf16";
    case Instructions::kAmx:
      return "AVX-512 with bf16, AMX";
  }
  return "";
}

Check check_cpu(const CpuFacts& cpu) {
  const bool avx2 = has_instructions(Instructions::kAvx2);
  return {"cpu", avx2,
          fmt::format("{}, {} cores usable, {}", cpu.model, cpu.cores, simd_text(best_instructions())),
          avx2 ? "" : "training works, several times slower than with AVX2"};
}

Check check_memory(const HostFacts& host) {
  return {"memory", host.available_memory > kGiB,
          format_bytes(host.memory) + ", " + format_bytes(host.available_memory) + " available",
          host.available_memory > kGiB ? "" : "free some memory: even a small model needs 1 GiB"};
}

Check check_limit(const MemoryLimit& limit) {
  if (limit.bytes == 0) return {"memory limit", true, "none", ""};
  return {"memory limit", limit.bytes > kGiB, format_bytes(limit.bytes) + " (" + limit.source + ")",
          limit.bytes > kGiB ? "" : "raise the limit of the container or the shell"};
}

// A card, and the number under which a run sees it.
Check check_gpu(size_t card, const SurveyedGpus& found) {
  const GpuFacts& gpu = found.survey.cards[card];
  const std::vector<GpuFacts>& visible = found.visible.gpus;
  const auto seen = std::find_if(visible.begin(), visible.end(),
                                 [&](const GpuFacts& one) { return one.card == static_cast<int>(card); });
  const bool shown = seen != visible.end();
  std::string value = gpu.name.empty() ? "unnamed" : gpu.name;
  const Gpu known = gpu_of(gpu.name, gpu.figures);
  if (known.capability.known()) value += ", compute capability " + known.capability.text();
  if (!gpu.uuid.empty()) value += ", " + gpu.uuid;
  if (gpu.memory > 0)
    value += ", " + format_bytes(gpu.memory) + ", " + format_bytes(gpu.free_memory) + " free";
  // Only CUDA knows its order; which cards are visible is certain.
  if (!shown) {
    value += ", hidden by CUDA_VISIBLE_DEVICES=\"" + found.cuda.visible_devices.value_or("") + "\"";
  } else if (found.visible.order_guessed) {
    value += ", numbered by CUDA_DEVICE_ORDER=" + found.cuda.device_order;
  } else {
    value += fmt::format(", CUDA device {}", seen - visible.begin());
  }
  Check check{"gpu", gpu.memory > 0, value, gpu.memory > 0 ? "" : found.survey.problem + ": " + kMendNvml};
  check.numbers = {{"uuid", gpu.uuid}, {"visible", shown}, {"compute_capability", known.capability.text()}};
  const GpuObstacle obstacle = gpu_obstacle(known.capability, gpu_code());
  if (!obstacle.what.empty()) {
    check.ok = false;
    check.next = obstacle.what + ": " + obstacle.next;
  }
  return check;
}

std::vector<Check> check_gpus(const SurveyedGpus& found) {
  std::vector<Check> out;
  const std::string driver = gpu_driver();
  const int count = count_gpus();
  if (count == 0) {
    out.push_back({"gpus", true, "none",
                   driver.empty() ? ""
                                  : "the driver is there, /dev/nvidia0 is not: in a container, "
                                    "start it with the GPUs"});
  }
  const size_t cards = found.survey.cards.size();
  for (size_t card = 0; card < cards; ++card) out.push_back(check_gpu(card, found));
  for (const GpuFacts& gpu : found.visible.gpus) {
    if (gpu.card < 0) out.push_back({"gpu", true, gpu.uuid + ", as CUDA_VISIBLE_DEVICES names it", ""});
  }
  if (cards > 0 && found.visible.gpus.empty()) {
    out.push_back(
        {"gpus", false,
         all_hidden({.gpus = static_cast<int>(cards), .hidden_by = found.cuda.visible_devices.value_or("")}),
         "unset it, or name a GPU as `nvidia-smi -L` lists them: by its number or its UUID"});
  }
  if (count > 0 || !driver.empty()) {
    // CUDA 13 runs on drivers from 580 on.
    const bool new_enough = std::atoi(driver.c_str()) >= 580;
    out.push_back({"gpu driver", new_enough, driver.empty() ? "not found" : driver,
                   new_enough ? "" : "CUDA 13 needs driver 580 or newer"});
  }
  return out;
}

Check check_executable(const std::string& name, bool needed) {
  const std::string path = beside_this_program(name);
  if (path.empty()) return {name, !needed, "not there", needed ? how_to_mend() : ""};
  std::string missing;
  for (const std::string& library : missing_libraries(path))
    missing += (missing.empty() ? "" : ", ") + library;
  if (missing.empty()) return {name, true, path, ""};
  return {name, false, path + " misses " + missing,
          how_to_mend() + " in this environment, or install what is missing"};
}

std::string gigabytes(double bytes_per_s) {
  return fmt::format("{:.2f}", bytes_per_s / 1e9);
}

Check check_copies(const Json& row) {
  constexpr double kSlow = 8e9;  // bytes/s; PCIe 3 x16 gives 12
  const auto rate = [&](const char* key) { return row.at(key).get<double>(); };
  const bool pinned = row.at("pinned").get<bool>();
  const double slower = std::min(rate("to_device_bytes_per_s"), rate("to_host_bytes_per_s"));
  Check check{"pinned copies", pinned && slower >= kSlow,
              row.at("gpu").get<std::string>() + ": to it " + gigabytes(rate("to_device_bytes_per_s")) +
                  " GB/s, back " + gigabytes(rate("to_host_bytes_per_s")) + ", together " +
                  gigabytes(rate("both_bytes_per_s")) +
                  (pinned ? "" : ", not pinned: " + row.at("pinned_reason").get<std::string>()),
              ""};
  if (!pinned) {
    check.next = "CUDA refuses to lock host memory: raise the memlock limit of the container or the shell";
  } else if (slower < kSlow) {
    check.next = "a link of 16 lanes is faster: look for the card's slot, or a riser (nvidia-smi -q -d PCIE)";
  }
  check.numbers = row;
  return check;
}

// The worker measures, since the CLI does not link CUDA: a second per GPU, and a few to start.
std::vector<Check> check_copies(const SurveyedGpus& found) {
  const std::string program = beside_this_program("lmlaunch-cuda");
  if (found.visible.gpus.empty() || program.empty()) return {};
  const std::optional<std::string> output =
      program_output({.argv = {program, "doctor", "--copies"},
                      .variables = {"CUDA_DEVICE_ORDER=" + found.cuda.device_order}},
                     60000);
  std::vector<Check> out;
  try {
    if (output) {
      for (const Json& row : Json::parse(*output)) out.push_back(check_copies(row));
    }
  } catch (const Json::exception&) {
    out.clear();
  }
  if (out.empty()) {
    out.push_back({"pinned copies", false, "not measured: CUDA finds no GPU that it can use",
                   "`lmlaunch-cuda doctor --copies` beside lmlaunch says why"});
  }
  return out;
}

Check check_io_uring() {
  const int error = io_uring_errno();
  if (error == 0) return {"io_uring", true, "works", ""};
  return {
      "io_uring", false, std::string("not available: ") + std::strerror(error),
      error == EPERM
          ? "blocked by the container's seccomp profile or kernel.io_uring_disabled; I/O threads do instead"
          : "I/O threads do instead"};
}

// A measured disk; `failure` is why it could not be measured.
struct MeasuredDisk {
  std::string path;
  std::optional<DiskProbe> probe;
  std::string failure, next;
};

MeasuredDisk measure_disk(const std::string& path) {
  try {
    return {path, probe_disk(path), "", ""};
  } catch (const Error& error) {
    return {path, std::nullopt, error.what(), error.text().advice()};
  }
}

Check check_disk_rates(const MeasuredDisk& disk) {
  if (!disk.probe) return {"disk rates", false, disk.failure, disk.next};
  constexpr double kSlow = 1e9;  // bytes/s
  const DiskProbe& p = *disk.probe;
  Check check{"disk rates", p.direct,
              disk.path + ": read " + gigabytes(p.read_bytes_per_s) + " GB/s, write " +
                  gigabytes(p.write_bytes_per_s) + ", together " + gigabytes(p.both_bytes_per_s) +
                  (p.direct ? ", direct" : ", buffered: " + p.direct_reason),
              ""};
  struct statfs file_system {};
  if (statfs(disk.path.c_str(), &file_system) == 0 && file_system.f_type == TMPFS_MAGIC) {
    check.ok = false;
    check.next = "this is memory, not a disk: for offload.paths take a directory on an NVMe drive";
  } else if (!p.direct) {
    check.next = "for offload.paths take a directory on ext4 or XFS: here every byte passes the page cache";
  } else if (p.read_bytes_per_s < kSlow) {
    check.next = "an NVMe drive reads 3 GB/s and more; `lmlaunch plan` shows what this one costs a run";
  }
  check.numbers = {{"path", disk.path},
                   {"read_bytes_per_s", p.read_bytes_per_s},
                   {"write_bytes_per_s", p.write_bytes_per_s},
                   {"both_bytes_per_s", p.both_bytes_per_s},
                   {"direct", p.direct}};
  return check;
}

// The engine that a run with io.engine = "auto" would use, as the probe has just done.
Check check_io_engine(const DiskProbe& probe) {
  const bool registered = probe.engine.find("unregistered") == std::string::npos;
  std::string next;
  if (!probe.note.empty()) {
    next = "the same results with more threads; let the container make io_uring calls for fewer";
  } else if (!registered) {
    next = "each request pins its pages again, which costs CPU time: raise the memlock limit";
  }
  return {"io engine", probe.note.empty() && registered,
          probe.engine + (probe.note.empty() ? "" : "; " + probe.note), next};
}

Check check_memlock() {
  const int64_t limit = memlock_limit();
  // The limit does not apply to the superuser.
  const bool enough = limit < 0 || limit >= 64 * kMiB || geteuid() == 0;
  return {"memlock", enough, limit < 0 ? "unlimited" : format_bytes(limit),
          enough ? ""
                 : "`ulimit -l unlimited` lets io_uring register its buffers; without it each request pins "
                   "its pages again"};
}

Check check_disk() {
  std::error_code error;
  const std::string here = std::filesystem::current_path(error).string();
  const int64_t free = free_disk_bytes(here);
  return {"disk", free > 10 * kGiB, format_bytes(free) + " free in " + here,
          free > 10 * kGiB ? ""
                           : "a full fine-tune writes 2 bytes per parameter, and much more with checkpoints"};
}

// mpirun's version is the library's if both are from one package.
Check check_mpi() {
  const std::string plugin = beside_this_program("lmlaunch-mpi.so");
  if (plugin.empty()) {
    return {"open mpi", true, "not built in: runs use one machine",
            "for several machines: install openmpi-bin and libopenmpi-dev, then " + how_to_mend()};
  }
  try {
    return {"open mpi", true, mpi_version(plugin), ""};
  } catch (const Error& error) {
    // A wheel has the plugin; the machine may lack the library.
    return {"open mpi", true, "runs use one machine: " + error.text().what,
            "for several machines: " + error.text().advice()};
  }
}

// Needed by several GPUs.
Check check_nccl(bool several) {
  try {
    return {"nccl", true, nccl_version(), ""};
  } catch (const Error& error) {
    return {"nccl", !several, error.text().what, several ? error.text().advice() : ""};
  }
}

// NCCL moves data through it between GPUs that cannot reach each other: some 10 MB for each channel and
// direction.
Check check_shared_memory(int gpus) {
  const int64_t free = free_disk_bytes("/dev/shm");
  const bool enough = gpus < 2 || free >= gpus * 40 * kMiB;
  return {"shared memory", enough, format_bytes(free) + " free in /dev/shm",
          enough
              ? ""
              : "several GPUs may need 40 MiB each: make it larger (of a container --shm-size=1g), or delete "
                "what fills it"};
}

Check check_python(const Environment& environment) {
  if (environment.python.empty()) {
    return {"python", false, "not found", "needed to prepare data: set LMLAUNCH_PYTHON, or install python3"};
  }
  // From the packages' metadata: importing them would take seconds.
  const char* program =
      "import sys, importlib.metadata as m\n"
      "print('python', sys.version.split()[0])\n"
      "for p in ('tokenizers', 'jinja2', 'numpy', 'pyarrow'):\n"
      "  try: print(p, m.version(p))\n"
      "  except m.PackageNotFoundError: print(p, 'MISSING')\n";
  const std::optional<std::string> output =
      program_output({.argv = {environment.python, "-c", program}}, 10000);
  std::string versions = output.value_or("");
  for (char& c : versions) c = c == '\n' ? ',' : c;
  if (!versions.empty()) versions.pop_back();
  const bool ok = output && versions.find("MISSING") == std::string::npos;
  return {
      "python", ok,
      environment.python + " (from " + environment.python_from + "): " + (output ? versions : "does not run"),
      ok ? "" : "install requirements.txt into it, or set LMLAUNCH_PYTHON to an interpreter that has it"};
}

Check check_hub(const Environment& environment) {
  std::error_code error;
  for (const std::string& cache : environment.hub_caches) {
    int models = 0;
    for (const auto& entry : std::filesystem::directory_iterator(cache, error)) {
      models += entry.path().filename().string().starts_with("models--");
    }
    if (models > 0) return {"hub cache", true, fmt::format("{}, {} models", cache, models), ""};
  }
  return {"hub cache", true, environment.hub_caches.empty() ? "none" : environment.hub_caches[0] + ", empty",
          ""};
}

struct Diagnosis {
  std::vector<Check> checks;
  Machine machine;  // what `plan --machine` reads
};

// Those that --path names, else the one of this directory. Paths on one device share its space and its rates.
std::vector<Disk> disks_to_offload_to(const std::vector<MeasuredDisk>& measured) {
  std::vector<Disk> out;
  std::vector<dev_t> devices;
  for (size_t i = measured.size() > 1 ? 1 : 0; i < measured.size(); ++i) {
    struct stat status {};
    if (!measured[i].probe || stat(measured[i].path.c_str(), &status) != 0) continue;
    const DiskProbe& p = *measured[i].probe;
    out.push_back(
        {measured[i].path, p.free_bytes, p.read_bytes_per_s, p.write_bytes_per_s, p.both_bytes_per_s});
    devices.push_back(status.st_dev);
  }
  for (size_t i = 0; i < out.size(); ++i) out[i].all_gather_among(std::ranges::count(devices, devices[i]));
  return out;
}

// With what was measured now, and what earlier runs have measured of the CPU.
Machine describe_machine(const SurveyedGpus& gpus, const std::vector<Check>& copies,
                         const std::vector<MeasuredDisk>& disks, const std::string& cache_dir) {
  Machine machine = survey_machine(gpus.visible.gpus);
  for (size_t i = 0; i < std::min(copies.size(), machine.gpus.size()); ++i)
    machine.gpus[i].link_bandwidth = copies[i].numbers.value("both_bytes_per_s", 0.0) / 2;
  machine.disks = disks_to_offload_to(disks);
  for (const DType dtype : {DType::kF32, DType::kBF16})
    take_cached_rates({DeviceType::kCpu, dtype, machine.cores}, cache_dir, machine);
  return machine;
}

Diagnosis diagnose(const std::vector<std::string>& paths) {
  const HostFacts host = survey_host();
  const Environment environment = read_environment();
  utsname system{};
  uname(&system);
  Diagnosis found;
  std::vector<Check>& out = found.checks;
  out = {{"kernel", true, std::string(system.sysname) + " " + system.release, ""},
         check_cpu(host.cpu),
         check_memory(host),
         check_limit(host.limit)};
  const SurveyedGpus gpus = survey_visible_gpus();
  for (Check& check : check_gpus(gpus)) out.push_back(std::move(check));
  out.push_back(check_executable("lmlaunch-cpu", true));
  out.push_back(check_executable("lmlaunch-cuda", !gpus.survey.cards.empty()));
  const std::vector<Check> copies = check_copies(gpus);
  out.insert(out.end(), copies.begin(), copies.end());
  out.push_back(check_io_uring());
  std::error_code error;
  std::vector<MeasuredDisk> disks = {measure_disk(std::filesystem::current_path(error).string())};
  for (const std::string& path : paths) disks.push_back(measure_disk(path));
  const auto measured =
      std::find_if(disks.begin(), disks.end(), [](const MeasuredDisk& d) { return d.probe.has_value(); });
  if (measured != disks.end()) out.push_back(check_io_engine(*measured->probe));
  out.push_back(check_memlock());
  out.push_back(check_disk());
  for (const MeasuredDisk& disk : disks) out.push_back(check_disk_rates(disk));
  out.push_back(check_mpi());
  out.push_back(check_nccl(gpus.visible.gpus.size() > 1));
  out.push_back(check_shared_memory(static_cast<int>(gpus.visible.gpus.size())));
  out.push_back(check_python(environment));
  out.push_back(check_hub(environment));
  found.machine = describe_machine(gpus, copies, disks, environment.cache_dir);
  return found;
}

}  // namespace

Exit doctor_command(const CommandLine& line) {
  const auto [checks, machine] = diagnose(line.list("--path"));
  if (line.has("--json")) {
    Json list = Json::array();
    for (const Check& check : checks) {
      Json row = {{"name", check.name}, {"ok", check.ok}, {"value", check.value}, {"next", check.next}};
      row.update(check.numbers);
      list.push_back(std::move(row));
    }
    const Json out = {{"checks", list}, {"machine", Json::parse(machine_json(machine))}};
    std::printf("%s\n", out.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    return Exit::kDone;
  }
  for (const Check& check : checks) {
    std::printf("%-4s  %-14s %s\n", check.ok ? "ok" : "look", check.name.c_str(),
                escape_controls(check.value).c_str());
    if (!check.next.empty()) std::printf("      %-14s -> %s\n", "", check.next.c_str());
  }
  return Exit::kDone;
}

}  // namespace lm
