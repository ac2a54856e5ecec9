// The loads and stores of kernels. The .cu files are compiled with -fsanitize=thread and linked without it,
// so that the calls it inserts end here: an access must lie in one allocation at a multiple of its size, its
// bytes are counted, and the order checker is told of it.
//
// A page of device memory belongs to one allocation (memory.cpp), so what is known of a page decides all
// accesses to it, and cells of 16 bytes that were touched are bits of it: a grid costs the order checker one
// look at each cell, however often and in whatever order its threads come by.
#include <cstdio>
#include <cstdlib>

#include "../emulator.h"
#include "grid.h"

namespace emulator::simt {
namespace {

constexpr uintptr_t kPage = 4096, kCell = 16, kWords = kPage / kCell / 64;
constexpr size_t kPages = 512;

struct Page {
  uint64_t grid = 0;  // the rest holds for this one
  uintptr_t number = 0;
  Extent extent;
  uint64_t read[kWords], written[kWords];
};
Page pages[kPages];  // by their number, the last that came
uint64_t grid_number = 0;
int64_t bytes_touched = 0, bytes_of_host = 0;  // of them, in registered host memory
bool checks = false;                           // the order
const bool no_host_address = std::getenv("EMULATOR_NO_HOST_ADDRESS") != nullptr;
thread_local bool grid_runs = false;  // in this thread; launchers, which are host code, are instrumented, too

void tell_order(const Page& page, const uint64_t (&cells)[kWords], bool write) {
  const uintptr_t begin = page.number * kPage, count = kPage / kCell;
  const auto is_touched = [&](uintptr_t c) { return (cells[c / 64] >> (c % 64) & 1) != 0; };
  for (uintptr_t c = 0; c < count; ++c) {
    if (!is_touched(c)) continue;
    const uintptr_t first = c;
    while (c < count && is_touched(c)) ++c;
    touched(reinterpret_cast<void*>(begin + first * kCell), static_cast<int64_t>((c - first) * kCell), write);
  }
}
void tell_order(const Page& page) {
  if (page.grid != grid_number || page.extent.begin == page.extent.end) return;
  tell_order(page, page.read, false);
  tell_order(page, page.written, true);
}

__attribute__((noinline)) void turn_to(Page& page, uintptr_t number) {
  if (checks) tell_order(page);
  page = {.grid = grid_number, .number = number, .extent = {}, .read = {}, .written = {}};
  page.extent = extent_of_page(reinterpret_cast<void*>(number * kPage));
  if (no_host_address && !page.extent.device && page.extent.begin != page.extent.end)
    stop("a kernel uses registered host memory, which it does not reach here");
}

std::string described(uintptr_t a, size_t bytes, bool write) {
  char text[96];
  std::snprintf(text, sizeof text, "%s %zu bytes at %#zx", write ? "writes" : "reads", bytes,
                static_cast<size_t>(a));
  return text;
}
__attribute__((noinline)) void outside(const Extent& extent, uintptr_t a, size_t bytes, bool write) {
  if (!extent.device) return;  // the host's own: stacks, shared memory, constants
  stop(described(a, bytes, write) + ", where no allocation is");
}
__attribute__((noinline)) void misaligned(uintptr_t a, size_t bytes, bool write) {
  stop(described(a, bytes, write) + ", which is no multiple of its size");
}

inline void note(const void* p, size_t bytes, bool write, bool aligned) {
  if (!grid_runs) return;
  const auto a = reinterpret_cast<uintptr_t>(p);
  Page& page = pages[a / kPage % kPages];
  if (page.number != a / kPage || page.grid != grid_number) [[unlikely]]
    turn_to(page, a / kPage);
  if (a < page.extent.begin || a + bytes > page.extent.end) [[unlikely]]
    return outside(page.extent, a, bytes, write);
  if (aligned && a % bytes != 0) [[unlikely]]
    misaligned(a, bytes, write);
  if (write && page.extent.read_only) [[unlikely]]
    stop(described(a, bytes, write) + " of host memory that is registered as read-only");
  bytes_touched += static_cast<int64_t>(bytes);
  if (!page.extent.device) bytes_of_host += static_cast<int64_t>(bytes);
  uint64_t* const cells = write ? page.written : page.read;
  const uintptr_t first = a % kPage / kCell, last = (a + bytes - 1) % kPage / kCell;
  cells[first / 64] |= uint64_t{1} << (first % 64);
  cells[last / 64] |= uint64_t{1} << (last % 64);
}
// Of any size, over pages.
void note_range(const char* p, size_t bytes, bool write) {
  while (bytes > 0) {
    const size_t now = std::min<size_t>(bytes, kCell - reinterpret_cast<uintptr_t>(p) % kCell);
    note(p, now, write, false);
    p += now, bytes -= now;
  }
}

}  // namespace

Accesses::Accesses() {
  ++grid_number;
  bytes_touched = bytes_of_host = 0;
  checks = checks_order();
  grid_runs = true;
}
Accesses::~Accesses() {
  grid_runs = false;
  if (checks) {
    for (const Page& page : pages) tell_order(page);
  }
  moved(bytes_touched, bytes_of_host);
}

}  // namespace emulator::simt

// gcc calls the plain ones where the type promises alignment, the unaligned ones where it does not.
using emulator::simt::note;
using emulator::simt::note_range;
extern "C" {
#define EMULATOR_ACCESS(n)                             \
  void __tsan_read##n(void* p) {                       \
    note(p, n, false, true);                           \
  }                                                    \
  void __tsan_write##n(void* p) {                      \
    note(p, n, true, true);                            \
  }                                                    \
  void __tsan_unaligned_read##n(void* p) {             \
    note_range(static_cast<const char*>(p), n, false); \
  }                                                    \
  void __tsan_unaligned_write##n(void* p) {            \
    note_range(static_cast<const char*>(p), n, true);  \
  }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4) EMULATOR_ACCESS(8) EMULATOR_ACCESS(16) void __tsan_read_range(void* p, size_t n) {
  note_range(static_cast<const char*>(p), n, false);
}
void __tsan_write_range(void* p, size_t n) {
  note_range(static_cast<const char*>(p), n, true);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
}
