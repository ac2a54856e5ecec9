#include "train/routed_experts.h"

#include <fmt/format.h>
#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "plan/weight_rows.h"

namespace lm {
namespace {

// What lies in [0, bytes) beside these ranges, which may touch each other.
std::vector<ByteRange> without(int64_t bytes, std::vector<ByteRange> ranges) {
  std::ranges::sort(ranges, {}, &ByteRange::begin);
  std::vector<ByteRange> out;
  int64_t at = 0;
  for (const ByteRange& range : ranges) {
    if (range.begin > at) out.push_back({at, range.begin - at});
    at = std::max(at, range.end());
  }
  if (at < bytes) out.push_back({at, bytes - at});
  return out;
}

}  // namespace

ExpertParts expert_parts(const ExpertsSpec& spec, int64_t layer, const BlockLayout& block) {
  std::unordered_map<std::string, const TensorPlace*> places;
  for (const TensorPlace& place : block.tensors) {
    if (place.frozen) places[place.parameter.name] = &place;
  }
  ExpertParts out;
  std::vector<ByteRange> all;
  for (int64_t e = 0; e < spec.experts; ++e) {
    std::vector<ByteRange>& expert = out.experts.emplace_back();
    for (const char* const tensor : {"gate_up", "gate_up_bias", "down", "down_bias"}) {
      const auto found =
          places.find(fmt::format("layers.{}.{}", layer, expert_name(static_cast<size_t>(e), tensor)));
      if (found == places.end()) continue;
      // With what fills a piece up: the next one's then follows without a gap for others.
      for (const FrozenPiece& piece : found->second->pieces)
        expert.push_back(
            {piece.offset, std::min(frozen_piece_bytes(piece), block.frozen_bytes - piece.offset)});
    }
    all.insert(all.end(), expert.begin(), expert.end());
  }
  if (all.empty()) return {};
  out.others = without(block.frozen_bytes, std::move(all));
  return out;
}

RoutedExperts::RoutedExperts(const Context& context, const ModelLayout& layout, const WeightStore& weights,
                             Store* store, std::span<std::byte> host_starts)
    : context_(context), store_(store), host_starts_(host_starts), copied_(context.device) {
  if (store == nullptr || !store->fetches_parts()) return;
  const auto layers = static_cast<int64_t>(context.spec.layer_count());
  blocks_.resize(static_cast<size_t>(layers) + 1);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const auto* const spec = context.spec.layer(layer).find<ExpertsSpec>();
    const int64_t unit = layer + 1;
    if (spec == nullptr || !weights.through_slots(unit) || weights.trained_through_slots(unit)) continue;
    ExpertParts parts = expert_parts(*spec, layer, layout.blocks[static_cast<size_t>(unit)]);
    if (!parts.experts.empty()) blocks_[static_cast<size_t>(unit)] = {spec, std::move(parts)};
  }
}

void RoutedExperts::fetch(int64_t unit, int64_t slot) {
  Block* const block = experts_of(unit);
  if (block != nullptr) block->in_parts = fetches_by_routing(*block->spec, tokens_);
  if (block == nullptr || !block->in_parts) return store_->fetch(unit, slot);
  block->fetch = ++fetches_;
  block->there.assign(block->parts.experts.size(), 0);
  store_->fetch_parts(unit, slot, block->parts.others);
}

// Where the host reads them: on a GPU the one wait of a pass for what its router has chosen.
const int32_t* RoutedExperts::on_host(const int32_t* start, int64_t count) {
  if (context_.device == DeviceType::kCpu) return start;
  const auto bytes = count * static_cast<int64_t>(sizeof(int32_t));
  LM_CHECK(std::ssize(host_starts_) >= bytes, "host memory for what routers choose");
  copy_bytes(host_starts_.data(), start, bytes, context_.stream);
  copied_.record(context_.stream);
  copied_.synchronize();
  return reinterpret_cast<const int32_t*>(host_starts_.data());
}

bool RoutedExperts::there(int64_t layer, int64_t expert) const {
  const Block& block = blocks_[static_cast<size_t>(layer) + 1];
  return !block.in_parts || block.there[static_cast<size_t>(expert)] != 0;
}

template <class Chosen>
int64_t RoutedExperts::bring_chosen(int64_t layer, const Chosen& chosen) {
  Block& block = *experts_of(layer + 1);
  std::vector<ByteRange> missing;
  for (size_t e = 0; e < block.there.size(); ++e) {
    if (!chosen(e) || std::exchange(block.there[e], 1) != 0) continue;
    const std::vector<ByteRange>& expert = block.parts.experts[e];
    missing.insert(missing.end(), expert.begin(), expert.end());
  }
  ++counts_.waits;
  counts_.bytes += store_->bring(layer + 1, missing);
  return block.fetch;
}

int64_t RoutedExperts::bring(int64_t layer, const int32_t* start, int64_t brought) {
  const Block& block = *experts_of(layer + 1);
  if (!asks(block, brought)) return brought;
  start = on_host(start, block.spec->experts + 1);
  return bring_chosen(layer, [&](size_t e) { return start[e + 1] > start[e]; });
}

int64_t RoutedExperts::bring_for_ranks(int64_t layer, std::span<const int32_t> rows, int64_t brought) {
  const Block& block = *experts_of(layer + 1);
  if (!asks(block, brought)) return brought;
  const size_t experts = block.there.size();
  return bring_chosen(layer, [&](size_t e) {
    for (size_t i = e; i < rows.size(); i += experts)
      if (rows[i] > 0) return true;
    return false;
  });
}

}  // namespace lm
