// Memory of the stand-in runtime: cudaMalloc, registration, copies and fills.
//
// Device memory starts as NaNs, its addresses are never used twice, the page behind it is nobody's, and the
// bytes beside it in its own pages are looked at when it is freed. A copy with pageable host memory is
// carried out when its turn in the stream comes and nobody waits for it, as CUDA allows since 12.2 ("might be
// synchronous"): who does not say his wait sees old bytes, every time. EMULATOR_PAGEABLE=waits is what
// drivers have done so far.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "state.h"

namespace emulator {

bool is_device_address(const void* p) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  return a >= kBase && a < kBase + kSpan;
}

void* inside(const void* p) {
  return const_cast<char*>(static_cast<const char*>(p)) + (is_device_address(p) ? kAlias : 0);
}

bool pinned_holds(const void* p, size_t bytes, bool* partly) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  auto it = state().pinned.upper_bound(a);
  if (it == state().pinned.begin()) return false;
  --it;
  if (a >= it->first + it->second) return false;
  if (a + bytes > it->first + it->second && partly != nullptr) *partly = true;
  return true;
}

namespace {

const Allocation* allocation_of(const void* p, size_t bytes) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  auto it = state().device.upper_bound(a);
  if (it == state().device.begin()) return nullptr;
  --it;
  return a + bytes <= it->first + it->second.bytes ? &it->second : nullptr;
}

// The bytes beside an allocation that are mapped with it: nobody may write them.
template <class Body>
void each_beside(const Allocation& a, uintptr_t address, const Body& body) {
  const auto begin = reinterpret_cast<uintptr_t>(a.base);
  const auto in = [](uintptr_t p) { return static_cast<unsigned char*>(inside(reinterpret_cast<void*>(p))); };
  body(in(begin), address - begin, "before");
  body(in(address + a.bytes), begin + a.mapped - address - a.bytes, "behind");
}

void check_canaries(const Allocation& a, uintptr_t address) {
  each_beside(a, address, [&](const unsigned char* p, size_t n, const char* where) {
    const auto broken = std::count_if(p, p + n, [](unsigned char byte) { return byte != kCanary; });
    if (broken == 0) return;
    fault(std::to_string(broken) + " bytes " + where + " an allocation of " + std::to_string(a.bytes) +
          " bytes were written");
  });
}

int64_t rounded(size_t bytes) {
  return static_cast<int64_t>((bytes + 511) / 512 * 512);
}

// With the state's mutex. Said whenever it is more than before, as a process may end without a word.
void note_peak(State& s) {
  int64_t now = 0;
  for (const int64_t one : s.used) now += one;
  if (s.settings.peak_dir.empty() || now <= s.most_used) return;
  s.most_used = now;
  std::ofstream(s.settings.peak_dir + "/" + std::to_string(getpid())) << now << "\n";
}

// Whether all of the range is mapped with these permissions, the first letters of /proc/self/maps.
bool mapped_as(const void* p, size_t bytes, const std::string& permissions) {
  auto at = reinterpret_cast<uintptr_t>(p);
  const uintptr_t end = at + bytes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; at < end && std::getline(maps, line);) {
    unsigned long from = 0, to = 0;
    char granted[8] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %7s", &from, &to, granted) != 3 || to <= at) continue;
    if (from > at || std::string(granted).compare(0, permissions.size(), permissions) != 0) return false;
    at = to;
  }
  return at >= end;
}

// Whether p is in a block that the device may only read.
bool registered_read_only(const void* p) {
  const std::lock_guard lock(state().mutex);
  const auto it = state().pinned.upper_bound(reinterpret_cast<uintptr_t>(p));
  return it != state().pinned.begin() && state().read_only.contains(std::prev(it)->first);
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle, bool block) {
  if (bytes == 0) return ok();
  Where target{}, source{};
  if (const auto e = locate(to, bytes, &target))
    return refused(e, "a copy to memory that is not all of one allocation");
  if (const auto e = locate(from, bytes, &source))
    return refused(e, "a copy from memory that is not all of one allocation");
  if (target == Where::kPinned && registered_read_only(to))
    return refused(cudaErrorInvalidValue, "a copy to host memory that is registered as read-only");
  Stream* const s = find(handle);
  static const char* const kNames[] = {"device", "pinned", "pageable"};
  const auto size = static_cast<int64_t>(bytes);
  Operation op{.kind = Kind::kCopy,
               .what = std::string("copy ") + kNames[static_cast<int>(source)] + " to " +
                       kNames[static_cast<int>(target)] + ", " + std::to_string(bytes),
               .work = [=] { std::memcpy(inside(to), inside(from), bytes); },
               .accesses = {},
               .clock = {}};
  if (source != Where::kPageable) op.accesses.push_back(reads(from, size));
  if (target != Where::kPageable) op.accesses.push_back(writes(to, size));
  count_copy(source, target, size);
  const bool host_only = source != Where::kDevice && target != Where::kDevice;
  const bool pageable = source == Where::kPageable || target == Where::kPageable;
  submit(s, std::move(op));
  if (block || host_only || (pageable && state().settings.pageable_waits)) host_wait(mark(s));
  return ok();
}

cudaError_t fill(void* to, int value, size_t bytes, cudaStream_t handle) {
  if (bytes == 0) return ok();
  Where target{};
  if (const auto e = locate(to, bytes, &target))
    return refused(e, "a memset of memory that is not all of one allocation");
  if (target == Where::kPageable) return refused(cudaErrorInvalidValue, "a memset of pageable host memory");
  if (target == Where::kPinned && registered_read_only(to))
    return refused(cudaErrorInvalidValue, "a memset of host memory that is registered as read-only");
  submit(find(handle), {.kind = Kind::kCopy,
                        .what = "memset, " + std::to_string(bytes),
                        .work = [=] { std::memset(inside(to), value, bytes); },
                        .accesses = {writes(to, static_cast<int64_t>(bytes))},
                        .clock = {}});
  return ok();
}

}  // namespace

bool device_holds(const void* p, size_t bytes) {
  return allocation_of(p, bytes) != nullptr;
}

cudaError_t locate(const void* p, size_t bytes, Where* where, int* on_device) {
  const std::lock_guard lock(state().mutex);
  if (is_device_address(p)) {
    *where = Where::kDevice;
    const Allocation* const a = allocation_of(p, bytes);
    if (on_device != nullptr && a != nullptr) *on_device = a->device;
    return a != nullptr ? cudaSuccess : cudaErrorInvalidValue;
  }
  bool partly = false;
  *where = pinned_holds(p, bytes, &partly) ? Where::kPinned : Where::kPageable;
  return partly ? cudaErrorInvalidValue : cudaSuccess;
}

Extent extent_of_page(const void* place) {
  const auto page = reinterpret_cast<uintptr_t>(place) / kPage * kPage;
  const std::lock_guard lock(state().mutex);
  const bool on_device = page - (kBase + kAlias) < kSpan;
  Extent e{.begin = 0, .end = 0, .device = on_device, .read_only = false};
  const uintptr_t shift = on_device ? kAlias : 0, last = page + kPage - shift;
  // The last block that begins before the page's end; a page of the device has no other.
  const auto cut = [&](uintptr_t begin, size_t bytes) {
    if (begin + bytes <= page - shift) return;
    e.read_only = !on_device && state().read_only.contains(begin);
    e.begin = std::max(page, begin + shift), e.end = std::min(page + kPage, begin + bytes + shift);
  };
  if (on_device) {
    const auto it = state().device.lower_bound(last);
    if (it != state().device.begin()) cut(std::prev(it)->first, std::prev(it)->second.bytes);
  } else {
    const auto it = state().pinned.lower_bound(last);
    if (it != state().pinned.begin()) cut(std::prev(it)->first, std::prev(it)->second);
  }
  return e;
}

bool device_can_use(const void* p) {
  const std::lock_guard lock(state().mutex);
  return is_device_address(p) ? device_holds(p, 1) : pinned_holds(p, 1);
}

}  // namespace emulator

using namespace emulator;
#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto d = static_cast<size_t>(device);
  *total = static_cast<size_t>(s.settings.cards[d].memory);
  *free = *total - static_cast<size_t>(s.used[d]);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** out, size_t bytes) {
  *out = nullptr;
  if (bytes == 0) return ok();
  count_allocation();
  State& s = state();
  const auto size = static_cast<size_t>(rounded(bytes)), mapped = (size + kPage - 1) / kPage * kPage;
  Allocation a{.bytes = bytes, .mapped = mapped, .base = nullptr, .device = device};
  uintptr_t address = 0;
  {
    const std::lock_guard lock(s.mutex);
    const auto d = static_cast<size_t>(device);
    if (s.used[d] + rounded(bytes) > s.settings.cards[d].memory) return failed(cudaErrorMemoryAllocation);
    s.used[d] += rounded(bytes);
    note_peak(s);
    a.base = reinterpret_cast<char*>(s.next);
    address = s.next + mapped - size;
    s.next += mapped + kPage;
    s.device[address] = a;
  }
  mprotect(inside(a.base), mapped, PROT_READ | PROT_WRITE);
  *out = reinterpret_cast<void*>(address);
  constexpr size_t kMostPoison = 256u << 20;  // more would take as long as the test
  if (s.settings.poison && bytes <= kMostPoison) std::memset(inside(*out), s.garbage, bytes);
  each_beside(a, address, [](unsigned char* p, size_t n, const char*) { std::memset(p, kCanary, n); });
  return ok();
}

cudaError_t cudaFree(void* p) {
  if (p == nullptr) return ok();
  count_allocation();
  synchronize_all();  // as the real one does
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto it = s.device.find(reinterpret_cast<uintptr_t>(p));
  if (it == s.device.end())
    return refused(cudaErrorInvalidValue, "cudaFree of what cudaMalloc did not return");
  const Allocation a = it->second;
  check_canaries(a, it->first);
  s.used[static_cast<size_t>(a.device)] -= rounded(a.bytes);
  mmap(inside(a.base), a.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  s.device.erase(it);
  return ok();
}

cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned flags) {
  count_registration();
  State& s = state();
  if (!s.settings.pin) return failed(cudaErrorMemoryAllocation);
  const bool read_only = (flags & cudaHostRegisterReadOnly) != 0;
  if (read_only && !s.settings.read_only) return failed(cudaErrorNotSupported);
  // The driver writes to its pages, or may, unless it is told that nobody does.
  if (!mapped_as(p, bytes, read_only ? "r" : "rw")) return failed(cudaErrorInvalidValue);
  const std::lock_guard lock(s.mutex);
  const auto a = reinterpret_cast<uintptr_t>(p);
  const auto next = s.pinned.upper_bound(a);
  const bool overlaps = pinned_holds(p, 1) || (next != s.pinned.end() && next->first < a + bytes);
  if (overlaps) return failed(cudaErrorHostMemoryAlreadyRegistered);
  s.pinned[a] = bytes;
  if (read_only) s.read_only.insert(a);
  return ok();
}

cudaError_t cudaHostUnregister(void* p) {
  count_registration();
  State& s = state();
  if (s.settings.races > 0 && any_busy()) {
    std::fprintf(stderr, "emulator: note: memory is unregistered while streams still work\n");
  }
  const std::lock_guard lock(s.mutex);
  const auto it = s.pinned.find(reinterpret_cast<uintptr_t>(p));
  if (it == s.pinned.end()) return failed(cudaErrorHostMemoryNotRegistered);
  if (!mapped_as(p, it->second, "r")) fault("memory was unmapped before it is unregistered");
  s.read_only.erase(it->first);
  // Its pages may become somebody else's.
  forget_order(it->first, it->second);
  s.pinned.erase(it);
  return ok();
}

cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned flags) {
  *out = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  const cudaError_t error = cudaHostRegister(*out, bytes, flags);
  const std::lock_guard lock(state().mutex);
  if (error == cudaSuccess) state().host_allocated.insert(*out);
  return error;
}

cudaError_t cudaFreeHost(void* p) {
  if (p == nullptr) return ok();
  synchronize_all();
  const cudaError_t error = cudaHostUnregister(p);
  const std::lock_guard lock(state().mutex);
  if (state().host_allocated.erase(p) > 0) std::free(p);
  return error;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  std::memset(out, 0, sizeof *out);
  Where where{};
  int on_device = 0;
  locate(p, 1, &where, &on_device);
  constexpr cudaMemoryType kTypes[] = {cudaMemoryTypeDevice, cudaMemoryTypeHost, cudaMemoryTypeUnregistered};
  out->type = kTypes[static_cast<int>(where)];
  out->device = where == Where::kPageable ? -2 : on_device;
  out->devicePointer = where == Where::kPageable ? nullptr : const_cast<void*>(p);
  out->hostPointer = where == Where::kDevice ? nullptr : const_cast<void*>(p);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t s) {
  return copy(to, from, bytes, s, false);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, true);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t s) {
  return fill(to, value, bytes, s);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return fill(to, value, bytes, nullptr);
}

}  // extern "C"
#pragma GCC visibility pop
