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

// `whole` with what of elements [begin, begin + whole.elements) of the flat array lies in the unit.
void add_part(StateEntry whole, int64_t begin, const Unit& unit, int64_t u, StateCatalogue& out) {
  const int64_t from = std::max(begin, unit.first),
                to = std::min(begin + whole.elements, unit.first + unit.elements);
  if (from >= to) return;
  whole.unit = u;
  whole.first = from - begin;
  whole.elements = to - from;
  whole.flat = from;
  out.push_back(std::move(whole));
}

}  // namespace

StateCatalogue list_state(const ModelLayout& layout, const NumericsPlan& numerics, bool cut_head,
                          bool training) {
  const std::vector<Unit> units = layout.units(cut_head);
  StateCatalogue out;
  for (int64_t b = 0; b < std::ssize(layout.blocks); ++b) {
    const std::vector<int64_t> here = units_of_block(units, b);
    for (const TensorPlace& place : layout.blocks[static_cast<size_t>(b)].tensors) {
      if (place.frozen) continue;
      const Parameter& p = place.parameter;
      const StateEntry whole{
          .name = "weight." + p.name,
          .state = StateClass::kWeights,
          .dtype = numerics.dtype,
          .shape = p.vector() ? std::vector<int64_t>{p.rows} : std::vector<int64_t>{p.rows, p.columns},
          .elements = p.elements()};
      for (const int64_t u : here) add_part(whole, place.offset, units[static_cast<size_t>(u)], u, out);
    }
  }
  if (!training) return out;
  out.push_back({.name = "optimizer.t", .state = StateClass::kOptimizer, .dtype = DType::kI64, .shape = {}});
  const StateStreams streams = numerics.state();
  for (int64_t b = 0; b < std::ssize(layout.blocks); ++b) {
    const int64_t flat = layout.blocks[static_cast<size_t>(b)].flat_elements;
    for (const int64_t u : units_of_block(units, b)) {
      for (size_t s = 0; s < streams.size(); ++s) {
        const StateEntry whole{.name = "block" + std::to_string(b) + "." + streams[s].name,
                               .state = StateClass::kOptimizer,
                               .dtype = streams[s].type,
                               .shape = {flat},
                               .stream = s,
                               .elements = flat};
        add_part(whole, 0, units[static_cast<size_t>(u)], u, out);
      }
    }
  }
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
