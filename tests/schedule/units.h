// Units with tiles as a plan would give them.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace lm {

// `tiles`: of each block's state that is off the device, 0 where it is on it. `cut`: of a chunked head's
// segments, of its final norm behind them.
inline std::vector<ScheduleUnit> tiled_units(int64_t layers, const std::vector<int64_t>& tiles,
                                             const std::vector<int64_t>& cut = {}) {
  const int64_t segments = cut.empty() ? 0 : std::ssize(cut) - 1;
  std::vector<ScheduleUnit> units = schedule_units(layers, segments);
  for (ScheduleUnit& unit : units) {
    const int64_t off_device = tiles[static_cast<size_t>(unit.block)];
    unit.off_device = off_device > 0;
    if (unit.role == UnitRole::kVocabularySegment || unit.role == UnitRole::kFinalNorm) {
      const int64_t at = unit.first_tile;  // segments, then the norm
      unit.first_tile = 0;
      for (int64_t i = 0; i < at; ++i) unit.first_tile += cut[static_cast<size_t>(i)];
      unit.end_tile = unit.first_tile + cut[static_cast<size_t>(at)];
    } else if (unit.off_device) {
      unit.end_tile = off_device;
    }
  }
  return units;
}

}  // namespace lm
