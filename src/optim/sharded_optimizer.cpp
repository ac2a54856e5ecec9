#include "optim/sharded_optimizer.h"

#include <algorithm>
#include <atomic>

#include "base/bytes.h"
#include "base/parallel.h"
#include "base/philox.h"
#include "kernels/newton_schulz.h"
#include "plan/update_work.h"

namespace lm {
ShardedOptimizer::ShardedOptimizer(const OptimizerSetup& setup, StreamView stream)
    : layout_(setup.layout),
      config_(setup.config),
      weight_dtype_(setup.weight_dtype),
      form_(master_form(setup.config.name, setup.config.rule, setup.config.master, setup.weight_dtype)),
      state_tensors_(setup.config.name, form_, is_stateless(setup.config.name, setup.config.rule)),
      seed_(setup.seed),
      kernels_(setup.kernels),
      stream_(stream),
      tiles_(setup.tiles),
      host_stream_{.device = DeviceType::kCpu, .handle = nullptr, .threads = setup.site.threads} {
  if (setup.site.host)
    host_ = std::make_unique<HostUpdate>(stream, setup.site.staging, setup.gradient_dtype, weight_dtype_,
                                         setup.clock);
  const int64_t scratch = update_scratch_bytes(layout_, config_.name);
  scratch_ = Memory(stream.device, scratch);
  if (host_ != nullptr && stream.device != DeviceType::kCpu)
    host_scratch_ = Memory(DeviceType::kCpu, scratch);
  if (tiles_.first_tile.empty()) {
    for (const BlockLayout& block : layout_.blocks) {
      tiles_.first_tile.push_back(static_cast<int64_t>(own_.size()));
      if (block.flat_elements == 0) continue;
      own_.emplace_back();
      tiles_.granules.push_back(block.flat_elements / kGranule);
    }
    tiles_.first_tile.push_back(static_cast<int64_t>(own_.size()));
    tiles_.first_granule.assign(own_.size(), 0);
  }
  own_.resize(static_cast<size_t>(tiles_.first_tile.back()));
  tiles_.off_device.resize(own_.size());
  tiles_.through_slots.resize(own_.size());
  for (size_t b = 0; b < layout_.blocks.size(); ++b) {
    const auto block = static_cast<int64_t>(b);
    for (int64_t tile = 0; tile < tiles(block); ++tile) {
      const size_t i = index(block, tile);
      const TileRange here = range(block, tile);
      const int64_t bytes = state_tensors_.bytes(layout_.blocks[b].count(here.first, here.end()));
      if (through_slots(i)) {
        if (here.elements > 0) tiles_.store->resize(static_cast<int64_t>(i), bytes);
        continue;
      }
      own_[i] = Memory(on_host(i) ? DeviceType::kCpu : stream.device, bytes);
    }
  }
}

int64_t ShardedOptimizer::tiles(int64_t block) const {
  const auto b = static_cast<size_t>(block);
  return tiles_.first_tile[b + 1] - tiles_.first_tile[b];
}

size_t ShardedOptimizer::index(int64_t block, int64_t tile) const {
  return static_cast<size_t>(tiles_.first_tile[static_cast<size_t>(block)] + tile);
}

TileRange ShardedOptimizer::range(int64_t block, int64_t tile) const {
  const size_t i = index(block, tile);
  return {tiles_.first_granule[i] * kGranule, tiles_.granules[i] * kGranule};
}

ShardedOptimizer::Tile ShardedOptimizer::place(int64_t block, int64_t tile) const {
  return {range(block, tile), &layout_.blocks[static_cast<size_t>(block)], own_[index(block, tile)].data()};
}

std::byte* ShardedOptimizer::part(const Tile& tile, size_t stream, int64_t at) const {
  return tile.data + state_tensors_.offset(stream, tile.block->count(tile.first, tile.end())) +
         state_tensors_[stream].bytes(tile.block->count(tile.first, at));
}

int64_t ShardedOptimizer::part_bytes(const Tile& tile, size_t stream) const {
  return state_tensors_[stream].bytes(tile.block->count(tile.first, tile.end()));
}

void ShardedOptimizer::start(const Unit& unit, const std::byte* weights, Staging& staging) {
  const auto size = static_cast<int64_t>(dtype_size(weight_dtype_));
  for (int64_t tile = 0; tile < tiles(unit.block); ++tile) {
    const size_t i = index(unit.block, tile);
    if (through_slots(i)) continue;
    const Tile own = place(unit.block, tile);
    const int64_t offset = own.first - unit.first;
    if (own.elements == 0 || offset < 0 || offset >= unit.elements) continue;
    const std::byte* const from = weights + offset * size;
    if (!on_host(i)) {
      fill_master(own, from, stream_);
    } else if (has_fp32_master(form_)) {
      std::vector<std::byte> copy(static_cast<size_t>(own.elements * size));
      staging.read_into(copy.data(), from, std::ssize(copy));
      fill_master(own, copy.data(), host_stream_);
    }
  }
}

// `weights`: the tile's.
void ShardedOptimizer::fill_master(const Tile& tile, const std::byte* weights, StreamView stream) const {
  if (!has_fp32_master(form_)) return;
  table(stream).accumulate({.to = part(tile, state_tensors_.size() - 1),
                            .from = weights,
                            .elements = tile.elements,
                            .to_dtype = DType::kF32,
                            .from_dtype = weight_dtype_,
                            .overwrite = true},
                           stream);
}

void ShardedOptimizer::update(int64_t block, const UpdateInputs& inputs) {
  for (int64_t tile = 0; tile < tiles(block); ++tile) update_tile(block, tile, inputs);
}

void ShardedOptimizer::update_tile(int64_t block, int64_t tile, const UpdateInputs& inputs) {
  if (range(block, tile).elements == 0) return;
  if (on_host(index(block, tile))) return update_on_host(block, tile, inputs);
  update_tile(block, tile, inputs, stream_);
}

void ShardedOptimizer::update_tile(int64_t block, int64_t tile, const UpdateInputs& inputs,
                                   StreamView stream) {
  const size_t i = index(block, tile);
  const Tile at = place(block, tile);
  if (through_slots(i)) return update_in_slot(block, i, at, inputs, stream);
  apply(block, at, at.first, at.end(), inputs, stream);
}

void ShardedOptimizer::update_on_host(int64_t block, int64_t tile, const UpdateInputs& inputs) {
  // The unit's tiles that the host updates.
  const auto ours = [&](int64_t t) {
    const int64_t offset = range(block, t).first - inputs.first;
    return on_host(index(block, t)) && offset >= 0 && offset < inputs.elements;
  };
  int64_t first = 0;
  while (!ours(first)) ++first;
  if (tile == first) {
    std::vector<HostUpdate::Range> ranges;
    for (int64_t t = tile; t < tiles(block); ++t) {
      if (!ours(t)) continue;
      const int64_t from = range(block, t).first - inputs.first;
      ranges.push_back(
          {.gradients = inputs.gradients + from * static_cast<int64_t>(dtype_size(inputs.gradient_dtype)),
           .weights = inputs.weights + from * static_cast<int64_t>(dtype_size(weight_dtype_)),
           .elements = range(block, t).elements});
    }
    host_->begin(std::move(ranges), inputs.ready);
  }
  const HostUpdate::Range here = host_->next();
  UpdateInputs staged = inputs;
  staged.gradients = here.gradients;
  staged.weights = here.weights;
  staged.first = range(block, tile).first;
  update_tile(block, tile, staged, host_stream_);
  host_->send();
}

void ShardedOptimizer::update_in_slot(int64_t block, size_t i, Tile tile, const UpdateInputs& inputs,
                                      StreamView stream) {
  Store& store = *tiles_.store;
  const auto array = static_cast<int64_t>(i);
  ChunkChecks* const checks = store.chunk_checks();
  Arrival arrival = Arrival::kKnown;
  tile.data = store.use_unchecked(array, &arrival);
  const int64_t from = (tile.first - inputs.first) * static_cast<int64_t>(dtype_size(weight_dtype_));
  if (arrival == Arrival::kZeros) fill_master(tile, inputs.weights + from, stream);
  if (checks == nullptr) return apply(block, tile, tile.first, tile.end(), inputs, stream);
  const bool unchecked = arrival == Arrival::kUnchecked;
  const bool intact = state_tensors_.of_elements()
                          ? update_by_granules(block, i, tile, unchecked, inputs, stream)
                          : update_at_once(block, i, tile, unchecked, inputs, stream);
  if (!intact) checks->report_damage(array);
  checks->all_stamped(array);
}

// Check, update and checksum of a few granules at a time, while they are in the cache.
bool ShardedOptimizer::update_by_granules(int64_t block, size_t i, const Tile& tile, bool unchecked,
                                          const UpdateInputs& inputs, StreamView stream) {
  constexpr int64_t kAtOnce = 4;  // granules: 10 x 16 KiB of state each, half of a core's L2
  ChunkChecks* const checks = tiles_.store->chunk_checks();
  const auto array = static_cast<int64_t>(i);
  // Visits each state tensor's bytes for the tile's elements [first, end).
  const auto each_state_tensor = [&](int64_t first, int64_t end, const auto& visit) {
    for (size_t k = 0; k < state_tensors_.size(); ++k) {
      const int64_t begin = state_tensors_.offset(k, {tile.elements});
      visit(begin + state_tensors_[k].bytes({first}), begin + state_tensors_[k].bytes({end}));
    }
  };
  StreamView alone = stream;
  alone.threads = 1;
  std::atomic<bool> damaged{false};
  parallel_for(stream.threads, tile.elements / kGranule, kAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t granule = begin; granule < end && !damaged; granule += kAtOnce) {
      const int64_t first = granule * kGranule, last = std::min(granule + kAtOnce, end) * kGranule;
      bool intact = true;
      if (unchecked)
        each_state_tensor(first, last, [&](int64_t a, int64_t b) {
          intact = intact && (checks->intact(array, a, b) || checks->reread(array, a, b));
        });
      if (!intact) {
        damaged = true;
        return;
      }
      apply(block, tile, tile.first + first, tile.first + last, inputs, alone);
      each_state_tensor(first, last, [&](int64_t a, int64_t b) { checks->stamp(array, a, b); });
    }
  });
  return !damaged;
}

// The same for state tensors whose part of a granule is not a whole number of chunks.
bool ShardedOptimizer::update_at_once(int64_t block, size_t i, const Tile& tile, bool unchecked,
                                      const UpdateInputs& inputs, StreamView stream) {
  constexpr int64_t kAtOnce = 16 * kChecksumChunk;
  ChunkChecks& checks = *tiles_.store->chunk_checks();
  const auto array = static_cast<int64_t>(i);
  const int64_t bytes = state_tensors_.bytes(tile.block->count(tile.first, tile.end()));
  const auto each_piece = [&](const auto& visit) {
    parallel_for(stream.threads, ceil_div(bytes, kAtOnce), 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece)
        visit(piece * kAtOnce, std::min((piece + 1) * kAtOnce, bytes));
    });
  };
  std::atomic<bool> damaged{false};
  if (unchecked)
    each_piece([&](int64_t a, int64_t b) {
      if (!checks.intact(array, a, b) && !checks.reread(array, a, b)) damaged = true;
    });
  if (damaged) return false;
  apply(block, tile, tile.first, tile.end(), inputs, stream);
  each_piece([&](int64_t a, int64_t b) { checks.stamp(array, a, b); });
  return true;
}

void ShardedOptimizer::apply(int64_t block, const Tile& tile, int64_t from, int64_t to,
                             const UpdateInputs& inputs, StreamView stream) const {
  each_range(*tile.block, from, to, updates_whole(config_.name, *tile.block), [&](const RuleRange& range) {
    if (is_factored(config_.name)) return apply_factored(block, tile, range, inputs, stream);
    if (range.tensor != nullptr && steps_by_muon(config_.name, *tile.block, *range.tensor))
      return apply_muon(block, tile, range, inputs, stream);
    if (!is_coded(config_.name)) return apply(block, tile, range, false, inputs, stream);
    tile.block->each_run(range.first, range.first + range.elements,
                         [&](int64_t first, int64_t elements, bool small) {
                           RuleRange run = range;
                           run.first = first, run.elements = elements;
                           apply(block, tile, run, !small, inputs, stream);
                         });
  });
}

RuleUpdate ShardedOptimizer::arguments(int64_t block, const Tile& tile, const RuleRange& range,
                                       const UpdateInputs& inputs) const {
  const auto weight_size = static_cast<int64_t>(dtype_size(weight_dtype_));
  const auto gradient_size = static_cast<int64_t>(dtype_size(inputs.gradient_dtype));
  return {.rule = RuleScalars::at(
              config_.name, config_.rule,
              {.lr = inputs.lr * range.lr_scale,
               .weight_decay = range.weight_decay.value_or(range.decay ? config_.weight_decay : 0),
               .t = t_}),
          .gradient = inputs.gradients + (range.first - inputs.first) * gradient_size,
          .weight = inputs.weights + (range.first - inputs.first) * weight_size,
          .master = has_master(form_) ? part(tile, state_tensors_.size() - 1, range.first) : nullptr,
          .elements = range.elements,
          .gradient_dtype = inputs.gradient_dtype,
          .weight_dtype = weight_dtype_,
          .form = form_,
          .gradient_scale = inputs.gradient_scale,
          .decision = inputs.decision,
          .rounding_key = philox_key(static_cast<uint64_t>(seed_), Purpose::kRounding,
                                     static_cast<uint64_t>(inputs.step), static_cast<uint32_t>(block)),
          .first_index = range.first};
}

void ShardedOptimizer::apply(int64_t block, const Tile& tile, const RuleRange& range, bool coded,
                             const UpdateInputs& inputs, StreamView stream) const {
  each_group(*tile.block, range,
             [&](const RuleRange& own) { apply_one(block, tile, own, coded, inputs, stream); });
}

void ShardedOptimizer::apply_one(int64_t block, const Tile& tile, const RuleRange& range, bool coded,
                                 const UpdateInputs& inputs, StreamView stream) const {
  RuleUpdate args = arguments(block, tile, range, inputs);
  const size_t count = state_tensors_.size() - (has_master(form_) ? 1 : 0);
  const auto at = [&](size_t state_tensor_of) { return part(tile, state_tensor_of, range.first); };
  if (!is_coded(config_.name)) {
    for (size_t s = 0; s < count; ++s) args.state[s] = at(s);
  } else {
    // Codes, scales, and the fp32 state of small tensors.
    for (size_t s = 0; s < count / 3; ++s) {
      if (coded) args.codes[s] = reinterpret_cast<uint8_t*>(at(3 * s));
      args.state[s] = at(3 * s + (coded ? 1 : 2));
    }
  }
  table(stream).update(args, stream);
}

void ShardedOptimizer::apply_factored(int64_t block, const Tile& tile, const RuleRange& range,
                                      const UpdateInputs& inputs, StreamView stream) const {
  const Memory& scratch = stream.device == scratch_.device() ? scratch_ : host_scratch_;
  std::byte* row = part(tile, 0, range.first);
  std::byte* column = part(tile, 1, range.first);
  const auto size = static_cast<int64_t>(dtype_size(state_tensors_[0].type));
  range.each_part([&](int64_t first, int64_t rows, int64_t columns) {
    RuleRange matrix = range;
    matrix.first = first;
    matrix.elements = rows * columns;
    RuleUpdate args = arguments(block, tile, in_group(*tile.block, matrix), inputs);
    args.factored = {.rows = rows,
                     .columns = columns,
                     .scratch = reinterpret_cast<float*>(scratch.data()),
                     .dtype = state_tensors_[0].type};
    if (range.tensor->parameter.vector()) {
      args.factored.vector = part(tile, 2, first);
    } else {
      args.factored.row = row;
      args.factored.column = column;
      row += round_up(rows, kStatisticsStart) * size;
      column += round_up(columns, kStatisticsStart) * size;
    }
    table(stream).update(args, stream);
  });
}

void ShardedOptimizer::apply_muon(int64_t block, const Tile& tile, const RuleRange& range,
                                  const UpdateInputs& inputs, StreamView stream) const {
  LM_CHECK(stream.device == scratch_.device(), "matrix products have other bits on another device");
  range.each_part([&](int64_t first, int64_t rows, int64_t columns) {
    RuleRange matrix = range;
    matrix.first = first;
    matrix.elements = rows * columns;
    RuleUpdate args = arguments(block, tile, in_group(*tile.block, matrix), inputs);
    args.state[0] = part(tile, 0, first);
    args.muon = {
        .call = MuonState::Call::kDirection, .rows = rows, .columns = columns, .direction = scratch_.data()};
    kernels_.update(args, stream);
    args.muon.direction = newton_schulz(kernels_, rows, columns, scratch_.data(), stream);
    args.muon.call = MuonState::Call::kStep;
    kernels_.update(args, stream);
  });
}

OpenTile ShardedOptimizer::open(int64_t block, int64_t tile) const {
  const size_t i = index(block, tile);
  return OpenTile({.streams = state_tensors_,
                   .form = form_,
                   .block = layout_.blocks[static_cast<size_t>(block)],
                   .range = range(block, tile),
                   .data = own_[i].data(),
                   .host = on_host(i),
                   .store = through_slots(i) ? tiles_.store : nullptr,
                   .array = static_cast<int64_t>(i)});
}

void ShardedOptimizer::show(int64_t block, int64_t tile, const TakeStream& take) const {
  const size_t i = index(block, tile);
  Tile at = place(block, tile);
  if (through_slots(i)) at.data = tiles_.store->use(static_cast<int64_t>(i));
  for (size_t s = 0; s < state_tensors_.size(); ++s) {
    const int64_t bytes = part_bytes(at, s);
    if (bytes > 0)
      take(s, state_tensors_[s].bytes(at.block->count(0, at.first)),
           {part(at, s), static_cast<size_t>(bytes)});
  }
}

void ShardedOptimizer::restore(int64_t block, int64_t tile, Staging& staging, const FillStream& fill) {
  const size_t i = index(block, tile);
  const auto array = static_cast<int64_t>(i);
  Tile at = place(block, tile);
  if (at.elements == 0) return;
  if (through_slots(i)) {
    tiles_.store->allocate_slot(array, 0);
    at.data = tiles_.store->use(array);
  }
  for (size_t s = 0; s < state_tensors_.size(); ++s) {
    const int64_t begin = state_tensors_[s].bytes(at.block->count(0, at.first)), bytes = part_bytes(at, s);
    if (bytes == 0) continue;
    const auto from = [&](int64_t offset, std::span<std::byte> out) { fill(s, begin + offset, out); };
    on_host(i) ? from(0, {part(at, s), static_cast<size_t>(bytes)}) : staging.write(part(at, s), bytes, from);
  }
  if (!through_slots(i)) return;
  tiles_.store->write_back(array);
  tiles_.store->forget(array);
}

void ShardedOptimizer::read_master(int64_t block, const TensorPlace& place_in_block, const std::byte* weights,
                                   float* out, Staging& staging) const {
  const int64_t begin = place_in_block.offset, end = begin + place_in_block.parameter.elements();
  for (int64_t tile = 0; tile < tiles(block); ++tile) {
    const TileRange here = range(block, tile);
    const int64_t from = std::max(begin, here.first), to = std::min(end, here.end());
    if (from >= to) continue;
    const std::byte* const of_range = weights + from * static_cast<int64_t>(dtype_size(weight_dtype_));
    open(block, tile).read_master(from, to, of_range, out + (from - begin), staging);
  }
}

}  // namespace lm
