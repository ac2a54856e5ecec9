#include "plan/state_catalogue.h"

#include <algorithm>

namespace lm {
namespace {

// Numbers of a block's units, in the order of its flat array: the segments of a cut head, then what is left.
std::vector<int64_t> units_of_block(const std::vector<Unit>& units, int64_t block) {
  std::vector<int64_t> out;
  for (int64_t u = 0; u < std::ssize(units); ++u) {
    if (units[static_cast<size_t>(u)].block == block) out.push_back(u);
  }
  std::ranges::sort(out, {}, [&](int64_t u) { return units[static_cast<size_t>(u)].first; });
  return out;
}

// What of an array over a block's flat array lies in the unit.
void add_part(StateEntry array, const Unit& unit, int64_t u, StateCatalogue& out) {
  if (unit.elements == 0) return;
  array.shape = {array.elements};
  array.unit = u;
  array.first = unit.first;
  array.elements = unit.elements;
  out.push_back(std::move(array));
}

}  // namespace

StateCatalogue list_state(const ModelLayout& layout, const NumericsPlan& numerics, bool cut_head,
                          bool training) {
  const std::vector<Unit> units = layout.units(cut_head);
  const auto each_unit = [&](const auto& visit) {
    for (int64_t b = 0; b < std::ssize(layout.blocks); ++b) {
      const std::string block = "block" + std::to_string(b) + ".";
      const int64_t elements = layout.blocks[static_cast<size_t>(b)].flat_elements;
      for (const int64_t u : units_of_block(units, b))
        visit(block, elements, units[static_cast<size_t>(u)], u);
    }
  };
  StateCatalogue out;
  each_unit([&](const std::string& block, int64_t elements, const Unit& unit, int64_t u) {
    add_part({.name = block + "weight",
              .state = StateClass::kWeights,
              .dtype = numerics.dtype,
              .elements = elements},
             unit, u, out);
  });
  if (!training) return out;
  out.push_back({.name = "optimizer.t", .state = StateClass::kOptimizer, .dtype = DType::kI64, .shape = {}});
  const StateStreams streams = numerics.state();
  each_unit([&](const std::string& block, int64_t elements, const Unit& unit, int64_t u) {
    for (size_t s = 0; s < streams.size(); ++s) {
      add_part({.name = block + streams[s].name,
                .state = StateClass::kOptimizer,
                .dtype = streams[s].type,
                .stream = s,
                .elements = elements},
               unit, u, out);
    }
  });
  return out;
}

void move_state(const StateCatalogue& catalogue, StateSource& from, StateSink& to) {
  for (size_t begin = 0, end = 0; begin < catalogue.size(); begin = end) {
    const StateEntry& first = catalogue[begin];
    while (end < catalogue.size() && catalogue[end].unit == first.unit && catalogue[end].state == first.state)
      ++end;
    from.read({&catalogue[begin], end - begin},
              [&](const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) {
                to.write(entry, offset, bytes);
              });
  }
}

}  // namespace lm
