#include "plan/machine.h"

#include <algorithm>

#include "base/bytes.h"

namespace lm {
namespace {

// Of a current NVMe drive and a PCIe 4 x16 slot, where nothing was measured.
constexpr double kDiskRead = 3e9, kDiskWrite = 2e9, kLink = 22e9;

// Where nothing was measured.
constexpr int64_t kCpuBase = 140 * kMiB, kCudaBase = 900 * kMiB;
// What the libraries take more once products and threads have run: 12 to 16 MiB in runs of models of 2 to 6
// layers of 256 and 512.
constexpr int64_t kCpuGrowth = 14 * kMiB;

}  // namespace

int64_t Machine::host_capacity() const {
  if (host_limit <= 0) return host_memory;
  return host_memory > 0 ? std::min(host_memory, host_limit) : host_limit;
}

int64_t host_library_bytes(const Machine& machine, DeviceType device) {
  if (device == DeviceType::kCuda) return kCudaBase;
  return machine.library_bytes > 0 ? machine.library_bytes + kCpuGrowth : kCpuBase;
}

Machine share_of_machine(const Machine& machine, int ranks) {
  Machine out = machine;
  out.cores = std::max(1, machine.cores / ranks);
  for (int64_t* const bytes : {&out.host_memory, &out.host_available, &out.host_limit}) *bytes /= ranks;
  out.memory_bandwidth /= ranks;
  for (Disk& disk : out.disks) disk.all_gather_among(ranks);
  return out;
}

std::string kernel_set(const Machine& machine, DeviceType device) {
  if (device == DeviceType::kCuda) return "cuda " + machine.gpus.front().name;
  if (machine.instructions == Instructions::kNone) return "cpu";
  // VBMI changes which code looks up 8-bit codes, and no bit of a result.
  const bool core = machine.instructions == Instructions::kAvx512Vbmi;
  return std::string("cpu ") + instructions_name(core ? Instructions::kAvx512Core : machine.instructions);
}

LinkRates link_rates(const Machine& machine, DeviceType device) {
  LinkRates rates;
  double both = 0;
  bool measured = true;
  for (const Disk& disk : machine.disks) {
    rates.disk_read += disk.read_bandwidth;
    rates.disk_write += disk.write_bandwidth;
    both += disk.both_bandwidth;
    measured &= disk.both_bandwidth > 0;
  }
  rates.assumed = rates.disk_read <= 0 || rates.disk_write <= 0;
  // Of a disk that takes turns both ways together take as long as one after the other: a half.
  if (measured && !rates.assumed)
    rates.disk_share = std::min(1.0, both / 4 * (1 / rates.disk_read + 1 / rates.disk_write));
  if (rates.assumed) rates.disk_read = kDiskRead, rates.disk_write = kDiskWrite;
  rates.link = device == DeviceType::kCuda && machine.gpus.front().link_bandwidth > 0
                   ? machine.gpus.front().link_bandwidth
                   : kLink;
  return rates;
}

}  // namespace lm
