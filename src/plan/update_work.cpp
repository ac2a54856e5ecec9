#include "plan/update_work.h"

#include <algorithm>

#include "base/arena.h"
#include "kernels/newton_schulz.h"

namespace lm {

int64_t state_bytes(const ModelLayout& layout, const StateTensors& streams) {
  int64_t bytes = 0;
  for (const BlockLayout& block : layout.blocks) bytes += streams.bytes(block.count(0, block.flat_elements));
  return bytes;
}

bool steps_by_muon(RuleId rule, const BlockLayout& block, const TensorPlace& tensor) {
  return is_muon(rule) && block.linear && !tensor.frozen && !tensor.parameter.vector();
}

WholeTensors whole_tensors(RuleId rule) {
  if (!rule_text(rule).whole_tensors) return WholeTensors::kNone;
  return is_muon(rule) ? WholeTensors::kOfLinearLayers : WholeTensors::kAll;
}

bool updates_whole(RuleId rule, const BlockLayout& block) {
  return Sharding{.whole = whole_tensors(rule)}.of_whole_tensors({.linear = block.linear});
}

int64_t update_scratch_bytes(const ModelLayout& layout, RuleId rule) {
  int64_t most = 0;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      if (place.frozen) continue;
      const bool muon = steps_by_muon(rule, block, place);
      place.each_part([&](int64_t, int64_t rows, int64_t columns) {
        if (is_factored(rule)) most = std::max(most, factored_scratch(rows, columns) * 4);
        if (muon) most = std::max(most, newton_schulz_scratch_bytes(rows, columns));
      });
    }
  }
  return most;
}

Cost update_products(const BlockLayout& block, int64_t first, int64_t elements, RuleId rule,
                     DeviceType device, std::set<GemmShape>* gemms) {
  Counts counts{.cost = {}, .gemms = gemms};
  if (!is_muon(rule)) return {};
  auto* const nowhere = reinterpret_cast<std::byte*>(Arena::kAlignment);
  for (const TensorPlace& place : block.tensors) {
    if (!steps_by_muon(rule, block, place)) continue;
    if (place.offset < first || place.offset >= first + elements) continue;
    place.each_part([&](int64_t, int64_t rows, int64_t columns) {
      newton_schulz(counting_kernels(device), rows, columns, nowhere, counting_stream(counts, device, 1));
    });
  }
  return counts.cost;
}

}  // namespace lm
