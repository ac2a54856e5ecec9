#include "train/rank.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "plan/weight_rows.h"

namespace lm {
namespace {

// Of a GPU's step.
int64_t router_memory_bytes(const RankSetup& setup, DeviceType device) {
  return device == DeviceType::kCuda ? router_result_bytes(setup.spec) : 0;
}

// Room for three leases.
int64_t step_memory_bytes(const RankSetup& setup, DeviceType device) {
  const auto whole = [](int64_t bytes) { return round_up(bytes, PinnedPool::kAlignment); };
  return whole(setup.plan.upload_bytes) + whole(setup.plan.result_bytes) +
         whole(router_memory_bytes(setup, device));
}

// Results lie as the sums of the loss, decisions, then the norms; on the CPU there is no memory for them.
constexpr size_t kSumBytes = sizeof(StepSums), kResultBytes = kStepResultBytes;
std::span<std::byte> head(const PinnedBlock& block, size_t bytes) {
  return block.bytes().first(block.size() > 0 ? bytes : 0);
}
std::span<std::byte> tail(const PinnedBlock& block, size_t skipped) {
  return block.bytes().subspan(block.size() > 0 ? skipped : 0);
}

const Kernels& kernels_of(const RankSetup& setup, DeviceType device) {
  return setup.kernels != nullptr ? *setup.kernels : library_kernels(device);
}

// A traced run on a GPU shows its kernels.
std::unique_ptr<TimedKernels> timed(const RankSetup& setup, DeviceClock* clock, DeviceType device) {
  if (setup.trace == nullptr || clock == nullptr || device != DeviceType::kCuda) return nullptr;
  return std::make_unique<TimedKernels>(kernels_of(setup, device), *clock);
}

PinnedBlock lease(PinnedPool& pool, int64_t bytes) {
  return bytes > 0 ? pool.lease(bytes) : PinnedBlock();
}

// Every rank's tiles begin in its shard of a unit where the first rank's do in its own.
void move_to_shards(const std::vector<Unit>& units, int rank, const Sharding& sharding, TileLayout& tiles) {
  for (const Unit& unit : units) {
    const Shard first = shard_of(unit, sharding, 0), own = shard_of(unit, sharding, sharding.place(rank));
    const auto block = static_cast<size_t>(unit.block);
    const bool one = sharding.of_whole_tensors(unit);
    for (int64_t t = tiles.first_tile[block]; t < tiles.first_tile[block + 1]; ++t) {
      const auto i = static_cast<size_t>(t);
      if (one) {
        if (unit.elements > 0)
          tiles.first_granule[i] = own.first / kGranule, tiles.granules[i] = own.elements / kGranule;
        continue;
      }
      const int64_t offset = tiles.first_granule[i] - first.first / kGranule;
      if (offset < 0 || offset >= first.elements / kGranule) continue;
      tiles.first_granule[i] = own.first / kGranule + offset;
      tiles.granules[i] = std::clamp<int64_t>(own.elements / kGranule - offset, 0, tiles.granules[i]);
    }
  }
}

TileLayout tile_layout(const PlacementPlan& placement, const std::vector<Unit>& units, int rank,
                       Store* store) {
  if (store == nullptr && !placement.update_on_host && placement.head_segments() == 0 && !placement.sharded)
    return {};
  TileLayout tiles{.first_tile = placement.first_tile,
                   .first_granule = placement.first_granule,
                   .granules = placement.granules,
                   .off_device = placement.pool(Pool::kOptimizer).off_device,
                   .through_slots = placement.through_slots(Pool::kOptimizer),
                   .store = store,
                   .on_host = placement.shares_updates() ? placement.host_tiles : std::vector<char>()};
  if (placement.sharded) move_to_shards(units, rank, placement.sharding(), tiles);
  return tiles;
}

// Of whole tensors every rank has tiles of other lengths; else none has longer ones than the plan's.
std::vector<int64_t> bytes_of_tiles(const RankSetup& setup, int rank) {
  const PlacementPlan& placement = setup.plan.placement;
  const bool of_whole_tensors = placement.sharded && placement.whole_tensors != WholeTensors::kNone;
  if (!of_whole_tensors || setup.tokens_per_step == 0) return {};
  const TileLayout tiles =
      tile_layout(placement, setup.layout.units(placement.head_segments() > 0), rank, nullptr);
  const StateTensors state = setup.plan.numerics.state();
  std::vector<int64_t> out;
  for (size_t b = 0; b < setup.layout.blocks.size(); ++b) {
    for (auto t = static_cast<size_t>(tiles.first_tile[b]); t < static_cast<size_t>(tiles.first_tile[b + 1]);
         ++t) {
      const int64_t first = tiles.first_granule[t] * kGranule, elements = tiles.granules[t] * kGranule;
      out.push_back(state.bytes(setup.layout.blocks[b].count(first, first + elements)));
    }
  }
  return out;
}

}  // namespace

Rank::Rank(const RankSetup& setup, StreamView stream)
    : setup_(setup),
      group_(setup.group != nullptr ? *setup.group : alone_),
      device_group_(setup.device_group != nullptr ? *setup.device_group : group_),
      device_(stream.device),
      off_device_({.placement = setup_.plan.placement,
                   .layout = setup_.layout,
                   .paths = setup_.swap_paths,
                   .stream = stream,
                   .training = setup_.tokens_per_step > 0,
                   .staging = setup_.plan.placement.update_staging,
                   .swap_spare = setup_.plan.swap_spare,
                   .tiles = bytes_of_tiles(setup_, group_.rank()),
                   .engine = setup_.engine,
                   .store = setup_.store,
                   .slots_on_device = setup_.slots_on_device,
                   .trace = setup_.trace,
                   .group = &device_group_,
                   .machine_memory = shares_frozen() ? setup_.machine_memory : nullptr}),
      weights_(setup.layout, setup.plan.numerics.trained_dtype(), stream.device, weight_places()),
      arena_(stream.device, setup.plan.arena.bytes),
      rope_(setup.spec, std::max<int64_t>(setup.max_length, 1), setup.plan.numerics.dtype, stream.device,
            stream),
      step_memory_(stream.device, step_memory_bytes(setup_, stream.device)),
      upload_memory_(lease(step_memory_, setup_.plan.upload_bytes)),
      result_memory_(lease(step_memory_, setup_.plan.result_bytes)),
      router_memory_(lease(step_memory_, router_memory_bytes(setup_, stream.device))),
      uploads_(upload_memory_.bytes(), setup_.plan.step.may_run_ahead() ? 2 : 1),
      timed_kernels_(timed(setup_, off_device_.clock(), stream.device)),
      context_{setup.spec,
               setup_.plan.step.arithmetic.dtype,
               stream.device,
               timed_kernels_ ? timed_kernels_->table() : kernels_of(setup_, stream.device),
               stream,
               arena_,
               rope_,
               uploads_,
               setup_.plan.step.arithmetic.documents_at_once,
               setup_.plan.step.arithmetic.round_rows} {
  const int64_t positions = setup.spec.embedding.positions;
  LM_CHECK(positions == 0 || setup.max_length <= positions, "documents longer than the table of positions");
  if (device_ == DeviceType::kCuda) cap_library_memory(setup_.plan.library_device_bytes);
  if (setup.tokens_per_step > 0) {
    StreamView update_stream = stream;
    update_stream.threads = setup.plan.placement.optimizer_threads;
    gradients_ =
        std::make_unique<Gradients>(setup.layout, setup.plan.numerics.gradient_dtype, context_.kernels,
                                    update_stream, tail(result_memory_, kResultBytes),
                                    GradientPlaces{.store = off_device_.store(Pool::kGradients),
                                                   .in_slot = setup.plan.placement.gradients_in_slot,
                                                   .slot_elsewhere = setup.plan.placement.defer_tied_gradient,
                                                   .chunked_head = setup.plan.placement.head_segments() > 0});
    optimizer_ = std::make_unique<ShardedOptimizer>(
        OptimizerSetup{.layout = setup.layout,
                       .config = setup.optimizer,
                       .weight_dtype = setup.plan.numerics.trained_dtype(),
                       .seed = setup.seed,
                       .kernels = context_.kernels,
                       .tiles = tile_layout(setup.plan.placement, weights_.units(), group_.rank(),
                                            off_device_.store(Pool::kOptimizer)),
                       .gradient_dtype = setup.plan.numerics.gradient_dtype,
                       .site = {.host = setup.plan.placement.update_on_host,
                                .threads = setup.plan.placement.optimizer_threads,
                                .staging = off_device_.update_staging()},
                       .clock = off_device_.clock()},
        update_stream);
    if (const BlockLayout& embedding = setup.layout.blocks.front(); embedding.flat_elements > 0) {
      const UpdatedRows all = updated_rows(setup.spec, setup.tokens_per_step, setup.max_length);
      std::span<const int64_t> chosen;
      if (setup.adapter != nullptr) chosen = setup.adapter->tokens;
      const TensorPlace* const pairs = embedding.find("embed.lora_A");
      embedding_gradient_ = std::make_unique<EmbeddingGradient>(
          setup.spec, trained_rows(all, embedding), setup.plan.micro_tokens, stream.device, chosen,
          pairs == nullptr ? 0 : pairs->parameter.rows);
    }
  }
  make_step();
  if (setup_.plan.cache_positions > 0)
    decoder_ = std::make_unique<Decoder>(
        context_,
        Decoder::Size{.positions = setup_.plan.cache_positions,
                      .texts = setup_.plan.cache_texts,
                      .virtual_tokens = setup_.adapter == nullptr ? 0 : setup_.adapter->virtual_tokens});
}

WeightPlaces Rank::weight_places() {
  WeightPlaces out{.store = off_device_.store(Pool::kWeights),
                   .chunked_head = setup_.plan.placement.head_segments() > 0,
                   .embedding = off_device_.embedding(),
                   .shards = setup_.plan.placement.pool(Pool::kWeights).shards > 1,
                   .loads_embedding = off_device_.loads_embedding()};
  // A GPU's memory is its own.
  if (!shares_frozen() || device_ == DeviceType::kCuda) return out;
  const int64_t bytes =
      WeightStore::frozen_in_memory(setup_.layout, setup_.plan.numerics.trained_dtype(), out);
  if (bytes == 0) return out;  // all of it passes through slots
  MachineMemory& memory = *setup_.machine_memory;
  out.frozen = memory.map(bytes);
  out.loads_frozen = memory.first();
  return out;
}

void Rank::frozen_ready() {
  if (!shares_frozen()) return;
  off_device_.publish_frozen();
  setup_.machine_memory->filled();
  off_device_.adopt_frozen();
}

void Rank::make_step() {
  StepConfig config = setup_.plan.step;
  config.seed = static_cast<uint64_t>(setup_.seed);
  config.max_grad_norm = setup_.max_grad_norm;
  config.router_aux_loss = setup_.router_aux_loss;
  // The plan's memory is enough: a fused pass takes more.
  config.two_phases = setup_.objective.weigh != nullptr;
  step_ = std::make_unique<TrainStep>(
      StepParts{
          .context = context_,
          .model = {setup_.spec, setup_.layout, setup_.adapter},
          .weights = weights_,
          .off_device = off_device_,
          .gradients = gradients_.get(),
          .optimizer = optimizer_.get(),
          .embedding_gradient = embedding_gradient_.get(),
          .group = group_,
          .device_group = device_group_,
          .host_sums = head(result_memory_, kSumBytes),
          .host_decisions =
              tail(result_memory_, kSumBytes).first(result_memory_.size() > 0 ? kResultBytes - kSumBytes : 0),
          .host_starts = router_memory_.bytes(),
          .trace = setup_.trace,
          .progress_counter = &progress_counter_,
          .objective = setup_.objective},
      std::move(config));
}

Rank::~Rank() {
  try {
    synchronize(context_.stream);
  } catch (const Error&) {
    // The GPU has failed, and whoever asked it for something has been told.
  }
}

void Rank::weights_ready() {
  if (optimizer_ == nullptr) return;
  Staging staging(context_.stream);
  for (int64_t u = 0; u < std::ssize(weights_.units()); ++u) {
    const OpenUnit open = weights_.open(u, false);
    optimizer_->start(weights_.units()[static_cast<size_t>(u)], open.trainable(), staging);
  }
}

bool Rank::can_reset(const Error& error) const {
  const Exit code = error.code();
  return (code == Exit::kIntegrity || code == Exit::kIo || code == Exit::kNoSpace) && !off_device_.hangs();
}

void Rank::reset() {
  synchronize(context_.stream);
  step_.reset();  // its loans end, and it forgets what it has deferred
  off_device_.reset();
  arena_.rewind(0);
  if (optimizer_ != nullptr) optimizer_->abandon();
  make_step();
}

StateCatalogue Rank::catalogue() const {
  const bool chunked_head = setup_.plan.placement.head_segments() > 0;
  return list_state(setup_.layout, setup_.plan.numerics, chunked_head, training(),
                    {setup_.plan.placement.sharding(), group_.rank()});
}

void Rank::restore(StateReader& from, int64_t updates) {
  step_->flush();
  Staging staging(context_.stream);
  // What goes to memory that stays where it is comes all at once.
  std::vector<StateReader::Part> parts;
  const auto read = [&](bool stays, const std::string& array, int64_t offset, std::span<std::byte> out) {
    stays && !staging.used() ? parts.push_back({array, offset, out}) : from.read(array, offset, out);
  };
  const std::vector<Unit>& units = weights_.units();
  const Sharding sharding = setup_.plan.placement.sharding();
  const auto name = [](int64_t block, const char* array) { return fmt::format("block{}.{}", block, array); };
  for (int64_t u = 0; u < std::ssize(units); ++u) {
    const Unit& unit = units[static_cast<size_t>(u)];
    if (unit.elements == 0) continue;
    const auto size = static_cast<int64_t>(dtype_size(weights_.dtype()));
    OpenUnit open = weights_.open(u, true);
    // Of weights in shards this rank's alone: the others read theirs.
    const Shard here = weights_.in_shards(u) ? shard_of(unit, sharding, sharding.place(group_.rank()))
                                             : Shard{unit.first, unit.elements};
    std::byte* const to = open.trainable() + (here.first - unit.first) * size;
    staging.write(to, here.elements * size, [&](int64_t offset, std::span<std::byte> out) {
      read(!weights_.through_slots(u), name(unit.block, "weight"), here.first * size + offset, out);
    });
    open.close();
  }
  if (optimizer_ == nullptr) return from.read(parts), staging.finish();
  const StateTensors streams = setup_.plan.numerics.state();
  for (int64_t b = 0; b < std::ssize(setup_.layout.blocks); ++b) {
    for (int64_t tile = 0; tile < optimizer_->tiles(b); ++tile) {
      optimizer_->restore(b, tile, staging, [&](size_t s, int64_t offset, std::span<std::byte> out) {
        read(!optimizer_->array(b, tile), name(b, streams[s].name), offset, out);
      });
    }
  }
  from.read(parts);
  optimizer_->restore_updates(updates);
  staging.finish();
}

}  // namespace lm
