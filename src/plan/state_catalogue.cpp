#include "plan/state_catalogue.h"

#include <fmt/format.h>
#include <algorithm>

#include "plan/update_work.h"

namespace lm {
namespace {

// Numbers of a block's units, in the order of its flat array: the segments of a chunked head, then the final
// norm.
std::vector<int64_t> units_of_block(const std::vector<Unit>& units, int64_t block) {
  std::vector<int64_t> out;
  for (int64_t u = 0; u < std::ssize(units); ++u) {
    if (units[static_cast<size_t>(u)].block == block) out.push_back(u);
  }
  std::ranges::sort(out, {}, [&](int64_t u) { return units[static_cast<size_t>(u)].first; });
  return out;
}

// What of an array lies in the shard of a unit: elements [first, first + elements) of it.
void add_part(StateEntry array, const Shard& shard, int64_t u, StateCatalogue& out) {
  if (array.elements == 0) return;
  array.unit = u;
  array.shard = shard;
  out.push_back(std::move(array));
}

}  // namespace

StateCatalogue list_state(const ModelLayout& layout, const NumericsPlan& numerics, bool chunked_head,
                          bool training, const ListedBy& by) {
  const int part = by.sharding.part(by.rank);
  const std::vector<Unit> units = layout.units(chunked_head);
  const auto each_unit = [&](const auto& visit) {
    for (int64_t b = 0; b < std::ssize(layout.blocks); ++b) {
      const std::string block = fmt::format("block{}.", b);
      for (const int64_t u : units_of_block(units, b))
        visit(block, layout.blocks[static_cast<size_t>(b)],
              part_of(units[static_cast<size_t>(u)], by.sharding, part), u);
    }
  };
  StateCatalogue out;
  each_unit([&](const std::string& name, const BlockLayout& block, const Shard& shard, int64_t u) {
    add_part({.name = name + "weight",
              .state = StateClass::kWeights,
              .dtype = numerics.trained_dtype(),
              .shape = {block.flat_elements},
              .first = shard.first,
              .elements = shard.elements},
             shard, u, out);
  });
  if (!training) return out;
  if (part == 0)
    out.push_back(
        {.name = "optimizer.t", .state = StateClass::kOptimizer, .dtype = DType::kI64, .shape = {}});
  const StateTensors streams = numerics.state();
  each_unit([&](const std::string& name, const BlockLayout& block, const Shard& shard, int64_t u) {
    for (size_t s = 0; s < streams.size(); ++s) {
      const auto values = [&](int64_t from, int64_t to) { return streams[s].values(block.count(from, to)); };
      add_part({.name = name + streams[s].name,
                .state = StateClass::kOptimizer,
                .dtype = streams[s].type,
                .shape = {values(0, block.flat_elements)},
                .stream = s,
                .first = values(0, shard.first),
                .elements = values(shard.first, shard.end())},
               shard, u, out);
    }
  });
  return out;
}

bool save_copies(const PlacementPlan& placement, Clip clip) {
  return placement.ranks > 1 || placement.device != DeviceType::kCpu || clip != Clip::kGlobal ||
         placement.pool(Pool::kWeights).slots > 0 || placement.pool(Pool::kOptimizer).slots > 0;
}

namespace {

// Elements that the rank that has most of them saves.
int64_t saved_elements(const ModelLayout& layout, const PlacementPlan& placement) {
  const Sharding sharding = placement.sharding();
  int64_t of_all = 0;  // of each rank
  std::vector<int64_t> of_ranks(static_cast<size_t>(placement.ranks), 0);
  for (const Unit& unit : layout.units(placement.head_segments() > 0)) {
    if (unit.elements == 0) continue;
    if (!sharding.of_whole_tensors(unit)) {
      of_all += longest_part(unit, sharding);
      continue;
    }
    const std::vector<Shard> parts = parts_of_unit(unit, sharding);
    for (size_t r = 0; r < of_ranks.size(); ++r) of_ranks[r] += parts[r].elements;
  }
  return of_all + std::ranges::max(of_ranks);
}

}  // namespace

int64_t save_buffer_bytes(const ModelLayout& layout, const NumericsPlan& numerics,
                          const PlacementPlan& placement, Clip clip) {
  constexpr int64_t kHeader = kMiB;
  const int64_t all = layout.flat_elements * static_cast<int64_t>(dtype_size(numerics.trained_dtype())) +
                      state_bytes(layout, numerics.state());
  int64_t bytes = kHeader + all;
  // Enough for every buffer whatever a rank's part is: then it is not looked for, as that takes its time.
  if (placement.ranks > 1 && save_buffers(all / placement.ranks, true) < save_buffers(all, true)) {
    const double share = static_cast<double>(saved_elements(layout, placement)) /
                         static_cast<double>(std::max<int64_t>(layout.flat_elements, 1));
    bytes = kHeader + static_cast<int64_t>(share * static_cast<double>(all));
  }
  const int64_t staging = placement.device == DeviceType::kCpu ? 0 : kSaveStaging;
  return save_buffers(bytes, save_copies(placement, clip)) * kSaveBuffer + staging;
}

}  // namespace lm
