#include "launcher/machine/disk_survey.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "config/config_names.h"
#include "launcher/machine/probe.h"
#include "launcher/machine/rate_cache.h"
#include "offload/disk_probe.h"
#include "offload/engines.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolder = "disks";

// Whether some class of state may be offloaded to disk.
bool may_use_disks(const Config& config) {
  const OffloadConfig& offload = config.offload;
  const auto may = [](OffloadTier tier_id) { return tier_id == OffloadTier::kAuto || names_disk(tier_id); };
  return !offload.paths.empty() && (may(offload.optimizer) || may(offload.gradients) ||
                                    may(offload.weights) || may(offload.activations));
}

// The cache key of a disk's rates.
Json rate_key(const std::string& path, dev_t device, IoEngineChoice engine) {
  std::error_code ignored;
  const fs::path whole = fs::weakly_canonical(path, ignored);
  return {{"device", fmt::format("{}:{}", major(device), minor(device))},
          {"path", whole.empty() ? path : whole.string()},
          {"engine", name_of(engine)}};
}

template <class D, class V>
void visit_rates(D& disk, const V& rate) {
  rate("read_bytes_per_s", disk.read_bandwidth);
  rate("write_bytes_per_s", disk.write_bandwidth);
  rate("both_bytes_per_s", disk.both_bandwidth);
}

bool take_cached_rates(const std::string& cache_dir, const Json& key, Disk& disk) {
  return read_figures(cache_dir, kFolder, key, [&](const Json& figures) {
    Disk known = disk;
    visit_rates(known, [&](const char* name, double& rate) { rate = cached_rate(figures, name); });
    disk = known;
  });
}

bool measure(IoEngineChoice engine, Disk& disk) {
  log_line("measuring the disk of " + disk.path + ": 2 s");
  try {
    const DiskProbe probe = probe_disk(disk.path, engine_kind(name_of(engine)));
    disk.read_bandwidth = probe.read_bytes_per_s;
    disk.write_bandwidth = probe.write_bytes_per_s;
    disk.both_bandwidth = probe.both_bytes_per_s;
    return true;
  } catch (const Error& error) {
    // The run may need less than the probe; if not, it reports the error itself.
    log_note("DISK-19", std::string("not measured: ") + error.what());
    return false;
  }
}

// A second plan within the week does not measure; to measure a changed disk earlier, delete the file.
void keep_disk_rates(const std::string& cache_dir, const Json& key, const Disk& disk) {
  Json figures;
  visit_rates(disk, [&](const char* name, double rate) { figures[name] = rate; });
  const std::string file = cache_figures(cache_dir, kFolder, key, figures);
  log_line(
      fmt::format("{} reads {:.2f} GB/s and writes {:.2f} GB/s; {}", disk.path, disk.read_bandwidth / 1e9,
                  disk.write_bandwidth / 1e9,
                  file.empty() ? "not cached: it will be measured again" : "cached for a week in " + file));
}

[[noreturn]] void refuse(const std::string& path, int error) {
  const bool unsupported = error == EOPNOTSUPP || error == EISDIR;
  throw Error(
      Exit::kDoesNotFit,
      {.area = "DISK-33",
       .what = "cannot keep offload files here: " +
               (unsupported ? "this file system has no anonymous files (O_TMPFILE)" : errno_text(error)),
       .place = "offload.paths: " + path,
       .next = error == ENOENT   ? "create the directory, or name another one in offload.paths"
               : unsupported     ? "name a directory on ext4 or XFS in offload.paths"
               : error == ENOSPC ? "free space there, or name another directory in offload.paths"
                                 : "make it a directory you may write to, or name another one",
       .kept = "nothing was started or written"});
}

// On tmpfs the plan would count offloaded bytes as disk, and the kernel as memory.
void refuse_memory(const std::string& path) {
  struct statfs info {};
  if (statfs(path.c_str(), &info) != 0) return;
  const auto kind = static_cast<unsigned long>(info.f_type);
  if (kind != TMPFS_MAGIC && kind != RAMFS_MAGIC) return;
  throw Error(Exit::kDoesNotFit,
              {.area = "DISK-33",
               .what = std::string("offload files here would be in memory: the file system is a ") +
                       (kind == TMPFS_MAGIC ? "tmpfs" : "ramfs"),
               .place = "offload.paths: " + path,
               .next = "name a directory on a disk; for state in memory set offload.optimizer, .gradients or "
                       ".weights to \"host\"",
               .kept = "nothing was started or written"});
}

}  // namespace

void check_disks(const Config& config, PlanPurpose purpose) {
  for (const std::string& path : config.offload.paths) {
    const int descriptor = open(path.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor < 0) refuse(path, errno);
    close(descriptor);
    refuse_memory(path);
  }
  const bool used = purpose == PlanPurpose::kTrain || may_use_disks(config);
  const int error = config.io.engine == IoEngineChoice::kUring && used ? io_uring_errno() : 0;
  if (error == 0) return;
  throw Error(Exit::kConfig,
              {.area = "IO-18",
               .what = "io.engine = \"uring\", and io_uring is not available here: " + errno_text(error) +
                       (cause_of_refusal(error)[0] == 0 ? "" : fmt::format(" ({})", cause_of_refusal(error))),
               .place = "io.engine",
               .next = "set io.engine = \"auto\" or \"threads\", or allow io_uring in this container",
               .kept = "nothing was started or written"});
}

std::string ring_refusal(const Config& config) {
  const int error = config.io.engine == IoEngineChoice::kAuto ? io_uring_errno() : 0;
  return error == 0 ? "" : no_ring(error);
}

std::vector<Disk> survey_disks(const Config& config, const std::string& cache_dir, DiskRates rates) {
  std::vector<Disk> disks;
  std::vector<dev_t> devices;
  for (const std::string& path : config.offload.paths) {
    struct stat info {};
    disks.push_back({.path = path});
    devices.push_back(stat(path.c_str(), &info) == 0 ? info.st_dev : 0);
    if (devices.back() == 0) continue;
    Disk& disk = disks.back();
    disk.free_bytes = free_disk_bytes(path);
    const Json key = rate_key(path, info.st_dev, config.io.engine);
    const bool known = take_cached_rates(cache_dir, key, disk);
    if (!known && rates == DiskRates::kMeasured && measure(config.io.engine, disk))
      keep_disk_rates(cache_dir, key, disk);
  }
  for (size_t i = 0; i < disks.size(); ++i) {
    const int64_t sharers = std::count(devices.begin(), devices.end(), devices[i]);
    if (devices[i] == 0 || sharers == 1) continue;
    disks[i].all_gather_among(sharers);
  }
  return disks;
}

}  // namespace lm
