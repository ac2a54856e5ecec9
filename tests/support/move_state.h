// Moves state from a source to a sink, entry by entry.
#pragma once

#include "plan/state_catalogue.h"

namespace lm {

// Reads entries of one unit and class together, as a checkpoint does.
inline void move_state(const StateCatalogue& catalogue, StateSource& from, StateSink& to) {
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
