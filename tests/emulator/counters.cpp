// Counters instead of time: what a step asks of the GPU and of the link, by name.
#include <mutex>

#include "state.h"

namespace emulator {
namespace {

std::mutex mutex;  // guards `now`
Counters& now() {
  static auto* const counters = new Counters;
  return *counters;
}

// "gemm 4x5x6" and "copy pinned to device, 64" without their sizes.
std::string plain(const std::string& what) {
  const size_t cut = what.find_first_of(",0123456789");
  const bool sized = what.starts_with("gemm") || what.starts_with("copy") || what.starts_with("memset");
  std::string name = sized && cut != std::string::npos ? what.substr(0, cut) : what;
  while (!name.empty() && name.back() == ' ') name.pop_back();
  return name;
}

}  // namespace

void count(const Operation& op) {
  if (op.kind == Kind::kOrder) return;
  const std::lock_guard lock(mutex);
  Counters& c = now();
  if (op.kind == Kind::kKernel) ++c.launches;
  if (op.kind == Kind::kAten) ++c.aten_operations;
  if (op.kind == Kind::kGemm) ++c.gemms;
  if (op.kind == Kind::kNccl) ++c.collectives;
  Counters::Name& name = c.by_name[plain(op.what)];
  ++name.times;
  for (const Access& a : op.accesses) name.bytes += a.rows * a.bytes;
}

void count_moved(const Operation& op, int64_t bytes, int64_t of_host) {
  const std::lock_guard lock(mutex);
  now().bytes_in_place += of_host;
  now().by_name[plain(op.what)].bytes += bytes;
}

void count_wait() {
  const std::lock_guard lock(mutex);
  ++now().host_waits;
}

void count_copy(Where from, Where to, int64_t bytes) {
  const std::lock_guard lock(mutex);
  Counters& c = now();
  c.pageable_copies += from == Where::kPageable || to == Where::kPageable;
  const bool from_device = from == Where::kDevice, to_device = to == Where::kDevice;
  (from_device == to_device ? c.bytes_inside : to_device ? c.bytes_to_device : c.bytes_to_host) += bytes;
}

void count_allocation() {
  const std::lock_guard lock(mutex);
  ++now().allocations;
}
void count_registration() {
  const std::lock_guard lock(mutex);
  ++now().registrations;
}

Counters counters() {
  const std::lock_guard lock(mutex);
  return now();
}
void reset_counters() {
  const std::lock_guard lock(mutex);
  now() = {};
}

}  // namespace emulator
