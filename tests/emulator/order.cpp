// The order checker (EMULATOR_RACES): who wrote and who read each 16 bytes last, and whether whoever comes
// next had waited for them. It finds what only luck kept in order, whatever the order was this time.
#include <unistd.h>

#include <cstdio>

#include "state.h"

namespace emulator {
namespace {

struct Mark {
  uint32_t stream = 0, number = 0;
};
struct Cell {
  Mark write;
  Mark read[3];  // of different streams; a fourth takes the first's place
};

constexpr uintptr_t kCell = 16, kCellsPerPage = 256;

struct Shadow {
  std::mutex mutex;
  std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages;
  std::unordered_set<std::string> told;
  uintptr_t last = 0;
  Cell* cells = nullptr;

  Cell& at(uintptr_t cell) {
    if (cell / kCellsPerPage != last || cells == nullptr) {
      last = cell / kCellsPerPage;
      auto& page = pages[last];
      if (!page) page = std::make_unique<Cell[]>(kCellsPerPage);
      cells = page.get();
    }
    return cells[cell % kCellsPerPage];
  }
};
Shadow& shadow() {
  static Shadow* const s = new Shadow;
  return *s;
}

void complain(const Mark& before, const char* how, const Operation& op, const Stream& in, uintptr_t where) {
  std::string name = "?";
  {
    const std::lock_guard lock(state().mutex);
    const Stream& other = *state().streams[before.stream];
    if (before.number < other.names.size()) name = other.names[before.number];
  }
  char place[32];
  std::snprintf(place, sizeof place, "0x%zx", static_cast<size_t>(where));
  const std::string text = std::string(how) + ": '" + op.what + "' in stream " + std::to_string(in.number) +
                           ", '" + name + "' in stream " + std::to_string(before.stream);
  if (shadow().told.insert(text).second)
    std::fprintf(stderr, "emulator: RACE: %s, at %s\n", text.c_str(), place);
  if (state().settings.races > 1) _exit(86);
}

void visit(uintptr_t begin, uintptr_t end, bool write, const Operation& op, const Stream& in) {
  const auto me = static_cast<uint32_t>(in.number), number = static_cast<uint32_t>(op.clock[in.number]);
  const auto unordered = [&](const Mark& m) {
    return m.number != 0 && m.stream != me && (m.stream >= op.clock.size() || op.clock[m.stream] < m.number);
  };
  for (uintptr_t c = begin / kCell; c <= (end - 1) / kCell; ++c) {
    Cell& cell = shadow().at(c);
    if (unordered(cell.write)) {
      complain(cell.write, write ? "write after unordered write" : "read after unordered write", op, in,
               c * kCell);
    }
    if (!write) {
      Mark* mine = &cell.read[0];
      for (Mark& r : cell.read) {
        if (r.number != 0 && r.stream != me) continue;
        mine = &r;
        break;
      }
      *mine = {me, number};
      continue;
    }
    for (Mark& r : cell.read) {
      if (unordered(r)) complain(r, "write after unordered read", op, in, c * kCell);
      r = {};
    }
    cell.write = {me, number};
  }
}

}  // namespace

void check_order(uintptr_t begin, int64_t bytes, bool write, const Operation& op, const Stream& in) {
  const std::lock_guard lock(shadow().mutex);
  visit(begin, begin + static_cast<uintptr_t>(bytes), write, op, in);
}

void check_order(const Operation& op, const Stream& in) {
  const std::lock_guard lock(shadow().mutex);
  for (const Access& a : op.accesses) {
    if (a.bytes <= 0) continue;
    for (int64_t r = 0; r < a.rows; ++r) {
      const uintptr_t begin = reinterpret_cast<uintptr_t>(a.begin) + static_cast<uintptr_t>(r * a.stride);
      visit(begin, begin + static_cast<uintptr_t>(a.bytes), a.write, op, in);
    }
  }
}

void forget_order(uintptr_t begin, size_t bytes) {
  const std::lock_guard lock(shadow().mutex);
  for (uintptr_t p = begin / (kCell * kCellsPerPage); p <= (begin + bytes - 1) / (kCell * kCellsPerPage);
       ++p) {
    shadow().pages.erase(p);
  }
  shadow().cells = nullptr;
}

}  // namespace emulator
