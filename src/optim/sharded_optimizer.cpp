#include "optim/sharded_optimizer.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <string>

#include "base/parallel.h"
#include "base/philox.h"

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
      if (in_store(i)) continue;
      own_[i] = Memory(on_host(i) ? DeviceType::kCpu : stream.device,
                       streams_.bytes(place(block, tile).elements()));
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

bool ShardedOptimizer::streamed(size_t index) const {
  return index < tiles_.streamed.size() && tiles_.streamed[index] != 0;
}

bool ShardedOptimizer::in_store(size_t index) const {
  return index < tiles_.in_store.size() && tiles_.in_store[index] != 0;
}

ShardedOptimizer::Tile ShardedOptimizer::place(int64_t block, int64_t tile) const {
  const size_t i = index(block, tile);
  const int64_t first = tiles_.first_granule[i];
  const int64_t end = tile + 1 < tiles(block)
                          ? tiles_.first_granule[i + 1]
                          : layout_.blocks[static_cast<size_t>(block)].flat_elements / kGranule;
  return {nullptr, first, end - first};
}

ShardedOptimizer::Tile ShardedOptimizer::near_tile(int64_t block, int64_t tile) const {
  Tile out = place(block, tile);
  out.data = own_[index(block, tile)].data();
  return out;
}

void ShardedOptimizer::start(const Unit& unit, const std::byte* weights, Staging& staging) {
  const auto size = static_cast<int64_t>(dtype_size(weight_dtype_));
  for (int64_t tile = 0; tile < tiles(unit.block); ++tile) {
    const size_t i = index(unit.block, tile);
    if (in_store(i)) continue;
    const Tile near = near_tile(unit.block, tile);
    const int64_t offset = near.first * kGranule - unit.first;
    if (offset < 0 || offset >= unit.elements) continue;
    const std::byte* const from = weights + offset * size;
    if (!on_host(i)) {
      fill_master(near, from, stream_);
    } else if (form_ == MasterForm::kF32) {
      std::vector<std::byte> copy(static_cast<size_t>(near.granules * kGranule * size));
      staging.read_into(copy.data(), from, std::ssize(copy));
      fill_master(near, copy.data(), host_stream_);
    }
  }
}

// `weights`: the tile's.
void ShardedOptimizer::fill_master(const Tile& tile, const std::byte* weights, StreamView stream) const {
  if (form_ != MasterForm::kF32) return;
  table(stream).accumulate({.to = master(tile),
                            .from = weights,
                            .elements = tile.granules * kGranule,
                            .to_dtype = DType::kF32,
                            .from_dtype = weight_dtype_,
                            .overwrite = true},
                           stream);
}

void ShardedOptimizer::update(int64_t block, const UpdateInputs& inputs) {
  for (int64_t tile = 0; tile < tiles(block); ++tile) update_tile(block, tile, inputs);
}

void ShardedOptimizer::update_tile(int64_t block, int64_t tile, const UpdateInputs& inputs) {
  const size_t i = index(block, tile);
  if (on_host(i)) return update_on_host(block, tile, inputs);
  if (in_store(i)) return update_in_store(block, i, place(block, tile), inputs, stream_);
  const Tile near = near_tile(block, tile);
  apply(block, near, 0, near.granules, inputs, stream_);
}

void ShardedOptimizer::update_on_host(int64_t block, int64_t tile, const UpdateInputs& inputs) {
  const auto begins = [&](int64_t t) { return place(block, t).first * kGranule; };
  // The unit's tiles that the host updates.
  const auto ours = [&](int64_t t) {
    const int64_t offset = begins(t) - inputs.first;
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
      const int64_t from = begins(t) - inputs.first;
      ranges.push_back(
          {.gradients = inputs.gradients + from * static_cast<int64_t>(dtype_size(inputs.gradient_dtype)),
           .weights = inputs.weights + from * static_cast<int64_t>(dtype_size(weight_dtype_)),
           .elements = place(block, t).granules * kGranule});
    }
    host_->begin(std::move(ranges), inputs.ready);
  }
  const HostUpdate::Range here = host_->next();
  UpdateInputs staged = inputs;
  staged.gradients = here.gradients;
  staged.weights = here.weights;
  staged.first = place(block, tile).first * kGranule;
  const size_t i = index(block, tile);
  if (in_store(i)) {
    update_in_store(block, i, place(block, tile), staged, host_stream_);
  } else {
    const Tile near = near_tile(block, tile);
    apply(block, near, 0, near.granules, staged, host_stream_);
  }
  host_->send();
}

// Check, update and checksum of a few granules at a time, while they are in the cache.
void ShardedOptimizer::update_in_store(int64_t block, size_t i, Tile tile, const UpdateInputs& inputs,
                                       StreamView stream) {
  constexpr int64_t kAtOnce = 4;  // granules: 10 x 16 KiB of state each, half of a core's L2
  Store& store = *tiles_.store;
  const auto array = static_cast<int64_t>(i);
  Arrival arrival = Arrival::kKnown;
  tile.data = store.use_unchecked(array, &arrival);
  const int64_t from =
      (tile.first * kGranule - inputs.first) * static_cast<int64_t>(dtype_size(weight_dtype_));
  if (arrival == Arrival::kZeros) fill_master(tile, inputs.weights + from, stream);
  if (store.separate()) return apply(block, tile, 0, tile.granules, inputs, stream);
  // Each stream's bytes of granules [first, end).
  const auto each_stream = [&](int64_t first, int64_t end, const auto& visit) {
    for (size_t k = 0; k < streams_.size(); ++k) {
      const int64_t begin = streams_.offset(k, tile.elements());
      visit(begin + streams_[k].bytes(first * kGranule), begin + streams_[k].bytes(end * kGranule));
    }
  };
  StreamView alone = stream;
  alone.threads = 1;
  std::atomic<bool> damaged{false};
  parallel_for(stream.threads, tile.granules, kAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end && !damaged; first += kAtOnce) {
      const int64_t last = std::min(first + kAtOnce, end);
      bool intact = true;
      if (arrival == Arrival::kUnchecked)
        each_stream(first, last, [&](int64_t a, int64_t b) { intact = intact && store.intact(array, a, b); });
      if (!intact) {
        damaged = true;
        return;
      }
      apply(block, tile, first, last, inputs, alone);
      if (store.verifies()) each_stream(first, last, [&](int64_t a, int64_t b) { store.stamp(array, a, b); });
    }
  });
  if (damaged) store.report_damage(array);
  if (store.verifies()) store.all_stamped(array);
}

void ShardedOptimizer::apply(int64_t block, const Tile& tile, int64_t first, int64_t end,
                             const UpdateInputs& inputs, StreamView stream) const {
  const auto weight_size = static_cast<int64_t>(dtype_size(weight_dtype_));
  const auto gradient_size = static_cast<int64_t>(dtype_size(inputs.gradient_dtype));
  const int64_t from = (tile.first + first) * kGranule, to = (tile.first + end) * kGranule;
  for (const DecayRange& range : layout_.blocks[static_cast<size_t>(block)].ranges) {
    const int64_t begin = std::max(range.first, from), past = std::min(range.first + range.elements, to);
    if (begin >= past) continue;
    const int64_t in_tile = begin - tile.first * kGranule;
    RuleUpdate args{
        .rule = RuleScalars::at(
            config_.name, config_.rule,
            {.lr = inputs.lr, .weight_decay = range.decay ? config_.weight_decay : 0, .t = t_}),
        .gradient = inputs.gradients + (begin - inputs.first) * gradient_size,
        .weight = inputs.weights + (begin - inputs.first) * weight_size,
        .elements = past - begin,
        .gradient_dtype = inputs.gradient_dtype,
        .weight_dtype = weight_dtype_,
        .form = form_,
        .gradient_scale = inputs.gradient_scale,
        .rounding_key = philox_key(static_cast<uint64_t>(seed_), Purpose::kRounding,
                                   static_cast<uint64_t>(inputs.step), static_cast<uint32_t>(block)),
        .first_index = begin};
    for (size_t k = 0; k < streams_.size(); ++k) {
      std::byte* const at = part(tile, k) + streams_[k].bytes(in_tile);
      if (has_master(form_) && k + 1 == streams_.size()) {
        args.master = at;
      } else {
        args.state[k] = reinterpret_cast<float*>(at);
      }
    }
    table(stream).update(args, stream);
  }
}

bool ShardedOptimizer::fresh(size_t index) const {
  return in_store(index) && tiles_.store->fresh(static_cast<int64_t>(index));
}

void ShardedOptimizer::with_tile(int64_t block, int64_t tile,
                                 const std::function<void(const Tile&)>& body) const {
  const size_t i = index(block, tile);
  if (!in_store(i)) return body(near_tile(block, tile));
  const auto array = static_cast<int64_t>(i);
  Tile t = place(block, tile);
  tiles_.store->fetch(array, 0);
  t.data = tiles_.store->use(array);
  body(t);
  tiles_.store->forget(array);
}

void ShardedOptimizer::read_master(int64_t block, const TensorPlace& place_in_block, const std::byte* weights,
                                   float* out, Staging& staging) const {
  const int64_t begin = place_in_block.offset, end = begin + place_in_block.parameter.elements();
  for (int64_t tile = 0; tile < tiles(block); ++tile) {
    const Tile range = place(block, tile);
    const int64_t from = std::max(begin, range.first * kGranule),
                  to = std::min(end, (range.first + range.granules) * kGranule);
    if (from >= to) continue;
    const size_t i = index(block, tile);
    if (fresh(i)) {
      read_master_part(nullptr, false, from, to, weights, out + (from - begin), staging);
      continue;
    }
    with_tile(block, tile, [&](const Tile& t) {
      read_master_part(&t, on_host(i), from, to, weights, out + (from - begin), staging);
    });
  }
}

// `tile`: null before its first update; `host`: it is host memory, not the device's.
void ShardedOptimizer::read_master_part(const Tile* tile, bool host, int64_t from, int64_t to,
                                        const std::byte* weights, float* out, Staging& staging) const {
  const auto count = static_cast<size_t>(to - from);
  const auto read_state_of_tile = [&](void* target, int64_t size) {
    const std::byte* const source = master(*tile) + (from - tile->first * kGranule) * size;
    if (host) {
      std::memcpy(target, source, count * static_cast<size_t>(size));
    } else {
      staging.read_into(target, source, (to - from) * size);
    }
  };
  if (form_ == MasterForm::kWeight) return staging.read_into(out, weights + from * 4, (to - from) * 4);
  if (form_ == MasterForm::kF32 && tile != nullptr) return read_state_of_tile(out, 4);
  std::vector<uint16_t> high(count), low(count, 0);
  staging.read_into(high.data(), weights + from * 2, (to - from) * 2);
  if (form_ == MasterForm::kSplit && tile != nullptr) read_state_of_tile(low.data(), 2);
  for (size_t i = 0; i < count; ++i) {
    const auto top = static_cast<uint32_t>(high[i] - (low[i] >= 0x8000 ? 1 : 0)) & 0xFFFF;
    out[i] = std::bit_cast<float>(top << 16 | low[i]);
  }
}

void ShardedOptimizer::read_state(StateSink& sink, const WeightsFrom& weights, Staging& staging) const {
  sink.number("optimizer.t", t_);
  for (int64_t block = 0; block < std::ssize(layout_.blocks); ++block) {
    for (int64_t tile = 0; tile < tiles(block); ++tile) {
      if (fresh(index(block, tile))) {
        read_fresh_tile(block, tile, sink, weights, staging);
      } else {
        read_tile(block, tile, sink, staging);
      }
    }
  }
}

// A tile's streams by the elements of the block that they belong to, so that the list says the same however
// the block is cut.
void ShardedOptimizer::read_tile(int64_t block, int64_t tile, StateSink& sink, Staging& staging) const {
  const std::string name = "block" + std::to_string(block) + ".";
  const std::vector<int64_t> shape = {layout_.blocks[static_cast<size_t>(block)].flat_elements};
  with_tile(block, tile, [&](const Tile& t) {
    const int64_t first = t.first * kGranule;
    for (size_t k = 0; k < streams_.size(); ++k) {
      const StateStream& stream = streams_[k];
      const int64_t size = stream.bytes(1), bytes = stream.bytes(t.elements());
      const auto take = [&](int64_t offset, std::span<const std::byte> piece) {
        sink.part(name + stream.name, stream.type, shape, first + offset / size, piece);
      };
      if (on_host(index(block, tile))) {
        take(0, {part(t, k), static_cast<size_t>(bytes)});
      } else {
        staging.read(part(t, k), bytes, take);
      }
    }
  });
}

// What its first update will find: zeros, and an fp32 master that is the weight.
void ShardedOptimizer::read_fresh_tile(int64_t block, int64_t tile, StateSink& sink,
                                       const WeightsFrom& weights, Staging& staging) const {
  const Tile t = place(block, tile);
  const int64_t first = t.first * kGranule, elements = t.granules * kGranule;
  const std::string name = "block" + std::to_string(block) + ".";
  const std::vector<int64_t> shape = {layout_.blocks[static_cast<size_t>(block)].flat_elements};
  for (size_t k = 0; k < streams_.size(); ++k) {
    const StateStream& stream = streams_[k];
    std::vector<std::byte> bytes(static_cast<size_t>(stream.bytes(elements)));
    if (k + 1 == streams_.size() && form_ == MasterForm::kF32) {
      read_master_part(nullptr, false, 0, elements, weights(block, first),
                       reinterpret_cast<float*>(bytes.data()), staging);
    }
    sink.part(name + stream.name, stream.type, shape, first, bytes);
  }
}

}  // namespace lm
