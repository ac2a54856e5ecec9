#include "optim/sharded_optimizer.h"

#include <algorithm>
#include <atomic>

#include "base/parallel.h"
#include "base/philox.h"
#include "optim/ranges.h"

namespace lm {
ShardedOptimizer::ShardedOptimizer(const OptimizerSetup& setup, StreamView stream)
    : layout_(setup.layout),
      config_(setup.config),
      weight_dtype_(setup.weight_dtype),
      form_(master_form(setup.config.master, setup.weight_dtype)),
      streams_(setup.config.name, form_),
      seed_(setup.seed),
      kernels_(setup.kernels),
      stream_(stream),
      tiles_(setup.tiles),
      host_stream_{.device = DeviceType::kCpu, .handle = nullptr, .threads = setup.site.threads} {
  if (setup.site.host)
    host_ = std::make_unique<HostUpdate>(stream, setup.site.staging, setup.gradient_dtype, weight_dtype_,
                                         setup.clock);
  if (tiles_.first_tile.empty()) {
    for (const BlockLayout& block : layout_.blocks) {
      tiles_.first_tile.push_back(static_cast<int64_t>(own_.size()));
      if (block.flat_elements > 0) own_.emplace_back();
    }
    tiles_.first_tile.push_back(static_cast<int64_t>(own_.size()));
    tiles_.first_granule.assign(own_.size(), 0);
  }
  own_.resize(static_cast<size_t>(tiles_.first_tile.back()));
  for (size_t b = 0; b < layout_.blocks.size(); ++b) {
    const auto block = static_cast<int64_t>(b);
    for (int64_t tile = 0; tile < tiles(block); ++tile) {
      const size_t i = index(block, tile);
      if (through_slots(i)) continue;
      own_[i] =
          Memory(on_host(i) ? DeviceType::kCpu : stream.device, streams_.bytes(range(block, tile).elements));
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

bool ShardedOptimizer::off_device(size_t index) const {
  return index < tiles_.off_device.size() && tiles_.off_device[index] != 0;
}

bool ShardedOptimizer::through_slots(size_t index) const {
  return index < tiles_.through_slots.size() && tiles_.through_slots[index] != 0;
}

TileRange ShardedOptimizer::range(int64_t block, int64_t tile) const {
  const size_t i = index(block, tile);
  const int64_t first = tiles_.first_granule[i] * kGranule;
  const int64_t end = tile + 1 < tiles(block) ? tiles_.first_granule[i + 1] * kGranule
                                              : layout_.blocks[static_cast<size_t>(block)].flat_elements;
  return {first, end - first};
}

ShardedOptimizer::Tile ShardedOptimizer::place(int64_t block, int64_t tile) const {
  return {range(block, tile), own_[index(block, tile)].data()};
}

void ShardedOptimizer::start(const Unit& unit, const std::byte* weights, Staging& staging) {
  const auto size = static_cast<int64_t>(dtype_size(weight_dtype_));
  for (int64_t tile = 0; tile < tiles(unit.block); ++tile) {
    const size_t i = index(unit.block, tile);
    if (through_slots(i)) continue;
    const Tile own = place(unit.block, tile);
    const int64_t offset = own.first - unit.first;
    if (offset < 0 || offset >= unit.elements) continue;
    const std::byte* const from = weights + offset * size;
    if (!on_host(i)) {
      fill_master(own, from, stream_);
    } else if (form_ == MasterForm::kF32) {
      std::vector<std::byte> copy(static_cast<size_t>(own.elements * size));
      staging.read_into(copy.data(), from, std::ssize(copy));
      fill_master(own, copy.data(), host_stream_);
    }
  }
}

// `weights`: the tile's.
void ShardedOptimizer::fill_master(const Tile& tile, const std::byte* weights, StreamView stream) const {
  if (form_ != MasterForm::kF32) return;
  table(stream).accumulate({.to = part(tile, streams_.size() - 1),
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
  const auto is_first = [&] {
    for (int64_t t = 0; t < tile; ++t) {
      if (ours(t)) return false;
    }
    return true;
  };
  if (is_first()) {
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

// Check, update and checksum of a few granules at a time, while they are in the cache.
void ShardedOptimizer::update_in_slot(int64_t block, size_t i, Tile tile, const UpdateInputs& inputs,
                                      StreamView stream) {
  constexpr int64_t kAtOnce = 4;  // granules: 10 x 16 KiB of state each, half of a core's L2
  Store& store = *tiles_.store;
  const auto array = static_cast<int64_t>(i);
  ChunkChecks* const checks = store.chunk_checks();
  Arrival arrival = Arrival::kKnown;
  tile.data = store.use_unchecked(array, &arrival);
  const int64_t from = (tile.first - inputs.first) * static_cast<int64_t>(dtype_size(weight_dtype_));
  if (arrival == Arrival::kZeros) fill_master(tile, inputs.weights + from, stream);
  if (checks == nullptr) return apply(block, tile, tile.first, tile.end(), inputs, stream);
  // Each stream's bytes of the tile's elements [first, end).
  const auto each_stream = [&](int64_t first, int64_t end, const auto& visit) {
    for (size_t k = 0; k < streams_.size(); ++k) {
      const int64_t begin = streams_.offset(k, tile.elements);
      visit(begin + streams_[k].bytes(first), begin + streams_[k].bytes(end));
    }
  };
  StreamView alone = stream;
  alone.threads = 1;
  std::atomic<bool> damaged{false};
  parallel_for(stream.threads, tile.elements / kGranule, kAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t granule = begin; granule < end && !damaged; granule += kAtOnce) {
      const int64_t first = granule * kGranule, last = std::min(granule + kAtOnce, end) * kGranule;
      bool intact = true;
      if (arrival == Arrival::kUnchecked)
        each_stream(first, last, [&](int64_t a, int64_t b) {
          intact = intact && (checks->intact(array, a, b) || checks->reread(array, a, b));
        });
      if (!intact) {
        damaged = true;
        return;
      }
      apply(block, tile, tile.first + first, tile.first + last, inputs, alone);
      each_stream(first, last, [&](int64_t a, int64_t b) { checks->stamp(array, a, b); });
    }
  });
  if (damaged) checks->report_damage(array);
  checks->all_stamped(array);
}

void ShardedOptimizer::apply(int64_t block, const Tile& tile, int64_t from, int64_t to,
                             const UpdateInputs& inputs, StreamView stream) const {
  const auto weight_size = static_cast<int64_t>(dtype_size(weight_dtype_));
  const auto gradient_size = static_cast<int64_t>(dtype_size(inputs.gradient_dtype));
  const bool whole_tensors = rule_text(config_.name).whole_tensors;
  each_range(
      layout_.blocks[static_cast<size_t>(block)], from, to, whole_tensors, [&](const RuleRange& range) {
        RuleUpdate args{
            .rule = RuleScalars::at(config_.name, config_.rule,
                                    {.lr = inputs.lr * range.lr_scale,
                                     .weight_decay = range.decay ? config_.weight_decay : 0,
                                     .t = t_}),
            .gradient = inputs.gradients + (range.first - inputs.first) * gradient_size,
            .weight = inputs.weights + (range.first - inputs.first) * weight_size,
            .elements = range.elements,
            .gradient_dtype = inputs.gradient_dtype,
            .weight_dtype = weight_dtype_,
            .form = form_,
            .gradient_scale = inputs.gradient_scale,
            .rounding_key = philox_key(static_cast<uint64_t>(seed_), Purpose::kRounding,
                                       static_cast<uint64_t>(inputs.step), static_cast<uint32_t>(block)),
            .first_index = range.first};
        for (size_t k = 0; k < streams_.size(); ++k) {
          std::byte* const at = part(tile, k) + streams_[k].bytes(range.first - tile.first);
          if (has_master(form_) && k + 1 == streams_.size()) {
            args.master = at;
          } else {
            args.state[k] = reinterpret_cast<float*>(at);
          }
        }
        table(stream).update(args, stream);
      });
}

OpenTile ShardedOptimizer::open(int64_t block, int64_t tile) const {
  const size_t i = index(block, tile);
  return {streams_,
          form_,
          range(block, tile),
          own_[i].data(),
          on_host(i),
          through_slots(i) ? tiles_.store : nullptr,
          static_cast<int64_t>(i)};
}

void ShardedOptimizer::restore(int64_t block, int64_t tile, Staging& staging, const FillStream& fill) {
  const size_t i = index(block, tile);
  const auto array = static_cast<int64_t>(i);
  Tile at = place(block, tile);
  if (through_slots(i)) {
    tiles_.store->claim(array, 0);
    at.data = tiles_.store->use(array);
  }
  for (size_t s = 0; s < streams_.size(); ++s) {
    const int64_t begin = streams_[s].bytes(at.first), bytes = streams_[s].bytes(at.elements);
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
