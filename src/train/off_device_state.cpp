#include "train/off_device_state.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/bytes.h"
#include "base/error.h"
#include "base/host_address.h"
#include "base/staging.h"
#include "config/config_names.h"
#include "kernels/kernels.h"
#include "optim/shards.h"

namespace lm {
namespace {

static_assert(kSlotAlignment == kChecksumChunk, "plan and store count the same bytes");

// Bytes of the arrays that are fetched into slots, 0 for the others.
std::vector<int64_t> bytes_through_slots(const PoolPlan& pool, const PoolShape& shape) {
  std::vector<int64_t> bytes = pool.bytes;
  for (size_t a = 0; a < bytes.size(); ++a) {
    if (!shape.holds(static_cast<int64_t>(a))) bytes[a] = 0;
  }
  return bytes;
}

// Per array: whether its tier is pinned memory of the host.
std::vector<char> in_host(const PoolPlan& pool) {
  std::vector<char> out(pool.bytes.size(), 0);
  for (size_t a = 0; a < out.size(); ++a)
    out[a] = tier_row(pool.tier_id_of(a)).medium == Medium::kMemory ? 1 : 0;
  return out;
}

std::vector<ByteRange> frozen_shards(int64_t bytes, int group) {
  std::vector<ByteRange> out;
  for (int place = 0; place < group; ++place) {
    const Shard shard = frozen_shard_of(bytes, place, group);
    out.push_back({shard.first, shard.elements});
  }
  return out;
}

// Of a pool's arrays the shards that every group of ranks has.
std::function<std::vector<ByteRange>(int64_t)> shards_of_arrays(const OffDeviceSetup& setup, Pool pool) {
  const PlacementPlan& placement = setup.placement;
  const bool weights = pool == Pool::kWeights;
  return [&placement, weights, units = setup.layout.units(placement.head_segments() > 0),
          sharding = Sharding{placement.ranks, placement.pool(pool).shards, placement.whole_tensors},
          bytes = placement.pool(pool).bytes](int64_t array) {
    const Unit& unit = units[static_cast<size_t>(array)];
    const int64_t all = bytes[static_cast<size_t>(array)];
    const bool frozen = weights && placement.frozen_array(array);
    return frozen ? frozen_shards(all, sharding.group) : shard_bytes(unit, sharding, all / unit.elements);
  };
}

// A pool's arrays that pass through slots, of a pool of shards this rank's. One of which it has nothing is
// brought and written back with the others', and never used.
std::vector<int64_t> bytes_here(const OffDeviceSetup& setup, Pool pool) {
  const PlacementPlan& placement = setup.placement;
  std::vector<int64_t> bytes = bytes_through_slots(placement.pool(pool), placement.through(pool));
  for (size_t a = 0; pool == Pool::kOptimizer && a < setup.tiles.size(); ++a)
    if (bytes[a] > 0) bytes[a] = std::max<int64_t>(setup.tiles[a], 1);
  for (const Pool whole : {Pool::kWeights, Pool::kGradients}) {
    if (shards_of(whole) != pool) continue;
    const auto shards = shards_of_arrays(setup, whole);
    for (int64_t a = 0; a < std::ssize(bytes); ++a) {
      int64_t& here = bytes[static_cast<size_t>(a)];
      if (here == 0) continue;
      const auto place = static_cast<size_t>(setup.group->rank() % placement.pool(whole).shards);
      here = std::max<int64_t>(shards(a)[place].bytes, 1);
    }
  }
  return bytes;
}

// Per array of whole weights: whether the ranks of a machine have it in common.
std::vector<char> in_common(const OffDeviceSetup& setup, const LocalStoreSetup& store) {
  if (setup.machine_memory == nullptr || setup.store) return {};
  std::vector<char> out = store.in_host;
  for (size_t a = 0; a < out.size(); ++a)
    if (store.bytes[a] == 0 || !setup.placement.frozen_array(static_cast<int64_t>(a))) out[a] = 0;
  return out;
}

bool common_embedding(const OffDeviceSetup& setup) {
  return setup.machine_memory != nullptr && setup.placement.embedding_in_host > 0 &&
         setup.layout.blocks.front().frozen_bytes > 0;
}

// The GPU reads the embedding in place, which requires registered memory with the same address for host and
// GPU.
[[noreturn]] void refuse_embedding(bool registered, const std::string& reason) {
  throw Error(
      Exit::kHostMemory,
      {.area = "MEM-17",
       .what = "the GPU cannot use locked host memory: " + reason,
       .place = "",
       .next = registered ? "set offload.weights = \"none\""
                          : "raise the memlock limit (ulimit -l), or set offload.weights = \"none\""});
}

// `tier`: the store of the shards that are off the device; null where none is.
std::unique_ptr<Store> make_shards(const OffDeviceSetup& setup, Pool pool, Store* tier) {
  const PlacementPlan& placement = setup.placement;
  LM_CHECK(setup.group != nullptr && setup.group->ranks() == placement.ranks,
           "the number of ranks with shards");
  return std::make_unique<ShardStore>(
      ShardStoreSetup{.group = *setup.group,
                      .bytes = bytes_through_slots(placement.pool(pool), placement.through(pool)),
                      .shards = shards_of_arrays(setup, pool),
                      .name = [&placement, &layout = setup.layout,
                               pool](int64_t array) { return array_name(placement, layout, pool, array); },
                      .slots = placement.pool(pool).slots,
                      .gathers = pool == Pool::kWeights,
                      .stream = setup.stream,
                      .tier = tier});
}

}  // namespace

OffDeviceState::OffDeviceState(const OffDeviceSetup& setup) {
  const PlacementPlan& placement = setup.placement;
  if (setup.stream.device == DeviceType::kCuda)
    clock_ = std::make_unique<DeviceClock>(setup.stream, setup.trace);
  const auto down = std::make_shared<Stream>(setup.stream.device);
  std::array<std::optional<LocalStoreSetup>, kPools> wanted;
  int64_t disk = 0, memory = setup.training ? round_up(setup.staging, PinnedPool::kAlignment) : 0;
  if (!common_embedding(setup)) memory += round_up(placement.embedding_in_host, PinnedPool::kAlignment);
  for (int i = 0; i < kPools; ++i) {
    const auto pool = static_cast<Pool>(i);
    const PoolPlan& plan = placement.pool(pool);
    if (plan.slots == 0 || plan.shards > 1 || !(setup.training || pool == Pool::kWeights)) continue;
    const bool host = pool == Pool::kOptimizer && placement.update_on_host && !placement.shares_updates();
    LocalStoreSetup& store = wanted[static_cast<size_t>(i)].emplace();
    store.bytes = bytes_here(setup, pool);
    store.name = [&placement, &layout = setup.layout, pool](int64_t array) {
      return array_name(placement, layout, pool, array);
    };
    store.slots = plan.slots;
    store.verify = placement.verify;
    store.threads = setup.stream.threads;
    store.slots_on_device = !host && (placement.device == DeviceType::kCuda || setup.slots_on_device);
    if (!host) store.in_host = in_host(plan);
    if (pool == Pool::kWeights) store.in_common = in_common(setup, store);
    store.stream = host ? StreamView{} : setup.stream;
    // Shards of gradients are summed in the group's stream, and leave from there.
    if (pool == Pool::kGradientShards) store.stream = setup.group->stream(setup.stream);
    store.chunk_sums = kernels(store.stream.device).chunk_sums;
    store.down = host ? nullptr : down;
    store.clock = host ? nullptr : clock_.get();
    if (setup.store) continue;
    disk += LocalStore::swap_bytes(store.bytes, store.in_host);
    memory += round_up(LocalStore::pinned_bytes(store), PinnedPool::kAlignment);
  }
  if (setup.machine_memory != nullptr) map_common(setup, wanted[static_cast<size_t>(Pool::kWeights)]);
  if (memory > 0) open_memory(setup, memory);
  if (disk > 0) open_disks(setup, disk);
  for (size_t i = 0; i < kPools; ++i) {
    if (!wanted[i]) continue;
    if (setup.store) {
      stores_[i] = setup.store(static_cast<Pool>(i), *wanted[i]);
      continue;
    }
    auto store = std::make_unique<LocalStore>(*wanted[i], space_.get(), queue_.get(), *pinned_);
    if (!wanted[i]->common.empty()) common_ = store.get();
    stores_[i] = std::move(store);
  }
  for (const Pool pool : {Pool::kWeights, Pool::kGradients}) {
    const PoolPlan& plan = placement.pool(pool);
    if (plan.slots == 0 || plan.shards <= 1 || !(setup.training || pool == Pool::kWeights)) continue;
    stores_[static_cast<size_t>(pool)] = make_shards(setup, pool, store(*shards_of(pool)));
  }
}

void OffDeviceState::open_memory(const OffDeviceSetup& setup, int64_t bytes) {
  const PlacementPlan& placement = setup.placement;
  pinned_ = std::make_unique<PinnedPool>(placement.device, bytes);
  if (setup.training && setup.staging > 0) staging_ = pinned_->lease(setup.staging);
  if (placement.embedding_in_host > 0 && common_embedding_ == nullptr) place_embedding(placement);
  std::string refusal;
  if (placement.device == DeviceType::kCuda && !pinned_->registered(&refusal))
    warn_not_registered("transfers", bytes, refusal);
}

void OffDeviceState::place_embedding(const PlacementPlan& placement) {
  std::string reason;
  if (placement.device == DeviceType::kCuda && !pinned_->used_in_place(&reason))
    refuse_embedding(pinned_->registered(), reason);
  embedding_ = pinned_->lease(placement.embedding_in_host);
}

// Arrays of whole weights, then the embedding.
void OffDeviceState::map_common(const OffDeviceSetup& setup, std::optional<LocalStoreSetup>& weights) {
  const PlacementPlan& placement = setup.placement;
  const int64_t arrays = weights ? round_up(LocalStore::common_bytes(*weights), PinnedPool::kAlignment) : 0,
                embedding = common_embedding(setup) ? placement.embedding_in_host : 0;
  if (arrays + embedding == 0) return;
  MachineMemory& memory = *setup.machine_memory;
  const std::span<std::byte> all = memory.map(arrays + embedding, placement.device);
  fills_common_ = memory.first();
  if (arrays > 0) weights->common = all.first(static_cast<size_t>(arrays));
  if (arrays > 0) weights->fills_common = fills_common_;
  if (embedding > 0) common_embedding_ = all.data() + arrays;
  if (placement.device != DeviceType::kCuda) return;
  const std::string& refusal = memory.refusal();
  together(memory.group(), "memory of machines", [&] {
    if (embedding > 0 && !refusal.empty()) refuse_embedding(false, refusal);
    if (embedding > 0 && !cuda_uses_host_addresses())
      refuse_embedding(true, "kernels on this system do not reach it by its address");
  });
  if (!refusal.empty())
    warn_not_registered("frozen weights of the machine's ranks", arrays + embedding, refusal);
}

void OffDeviceState::publish_frozen() {
  if (common_ != nullptr) common_->publish_common();
}

void OffDeviceState::adopt_frozen() {
  if (common_ != nullptr) common_->adopt_common();
}

void OffDeviceState::open_disks(const OffDeviceSetup& setup, int64_t bytes) {
  const PlacementPlan& placement = setup.placement;
  space_ = std::make_unique<SwapSpace>(setup.paths, bytes, setup.swap_spare);
  const auto make = [this, &placement, chosen = setup.engine]() -> std::unique_ptr<IoEngine> {
    const std::span<std::byte> buffers[] = {pinned_->memory()};
    const EngineSetup engine{.files = space_->files(), .buffers = buffers, .depth = placement.io_depth};
    if (chosen) return chosen(engine);
    return make_engine(engine_kind(name_of(placement.engine)), engine, &engine_note_);
  };
  queue_ = std::make_unique<IoQueue>(*space_, make, placement.io_block,
                                     IoRetry{.silence = std::chrono::seconds(placement.io_timeout)});
  if (setup.trace != nullptr) {
    queue_->set_span_hook([trace = setup.trace](const IoSpan& span) {
      const TraceRow row = span.direction == IoDirection::kRead ? TraceRow::kReads : TraceRow::kWrites;
      trace->add(row, span.what, span.start_ns, span.end_ns, span.bytes);
    });
  }
  description_ = (engine_note_.empty() ? "" : engine_note_ + "; ") + queue_->description();
}

OffDeviceState::~OffDeviceState() {
  for (std::unique_ptr<Store>& store : stores_) store.reset();
  if (!hangs()) return;
  [[maybe_unused]] const void* const stay[] = {queue_.release(), pinned_.release(), space_.release()};
}

void OffDeviceState::reset() {
  if (queue_ != nullptr) queue_->restart();
  for (const std::unique_ptr<Store>& store : stores_) {
    if (store != nullptr) store->reset();
  }
}

void OffDeviceState::poll() const {
  for (const auto& store : stores_) {
    if (store != nullptr) store->poll();
  }
}

int64_t OffDeviceState::disk_bytes() const {
  return space_ != nullptr ? space_->allocated() : 0;
}

IoCounters OffDeviceState::counters() const {
  return queue_ == nullptr ? IoCounters{} : queue_->counters();
}

double OffDeviceState::busy_seconds() const {
  return counters().busy_seconds + (clock_ == nullptr ? 0 : clock_->copy_seconds());
}

double OffDeviceState::wait_seconds() const {
  double sum = clock_ == nullptr ? 0 : clock_->stall_seconds();
  for (const auto& store : stores_) sum += store == nullptr ? 0 : store->wait_seconds();
  return sum;
}

}  // namespace lm
