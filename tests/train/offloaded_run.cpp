#include "offloaded_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "kernels/runtime.h"
#include "plan/parameter_groups.h"
#include "run_batches.h"
#include "tests/support/family_shapes.h"
#include "tests/support/llama_spec.h"
#include "tests/support/update_staging.h"
#include "two_phase_objectives.h"
#include "weights/load_store.h"

namespace lm::offloaded_run {
namespace {

ModelSpec small_spec(const Variant& run) {
  // Qwen3's heads are wider together than the model.
  ModelSpec spec = llama_spec(
      {.layers = run.layers, .head_dim = run.family == Family::kQwen3 ? 24 : 16, .vocab = run.vocab});
  spec.max_positions = 512;
  spec.tied = run.tied;
  if (run.family == Family::kQwen2) add_biases(spec);
  if (run.family == Family::kQwen3) norm_heads(spec);
  // Shorter than the documents, and not in every layer.
  if (run.family == Family::kMistral)
    spec.layers.front().attention().window = 5, spec.layers.back().attention().window = 7;
  if (run.family == Family::kGpt2) like_gpt2(spec, kLength);
  if (run.family == Family::kGemma) like_gemma(spec);
  if (run.family == Family::kCohere) like_cohere(spec);
  if (run.family == Family::kGranite) like_granite(spec);
  if (run.family == Family::kGemma4) like_gemma4(spec);
  if (run.family == Family::kExperts) like_qwen3_moe(spec);
  if (run.family == Family::kManyExperts) like_qwen3_moe(spec, 256, 1);
  if (run.family == Family::kEightExperts) like_qwen3_moe(spec, 8, 2);
  if (run.family == Family::kBiasedExperts) like_gpt_oss(spec, 4, 2);
  if (run.family == Family::kExpertsBeside) like_gemma4_moe(spec, 8, 2);
  if (run.family == Family::kSigmoidExperts) like_glm4_moe(spec, 8, 4), add_shared_expert(spec);
  if (run.adapted_experts) spec.names.experts = "mlp.experts";
  return spec;
}

// Every byte of the state by name, however it is cut.
struct Contents : StateSink {
  explicit Contents(const StateCatalogue& catalogue) : catalogue(catalogue), moved(catalogue.size(), 0) {}
  // Exactly the bytes that the catalogue lists.
  void expect_all() const {
    for (size_t i = 0; i < moved.size(); ++i) EXPECT_EQ(moved[i], catalogue[i].bytes()) << catalogue[i].name;
  }
  const StateCatalogue& catalogue;
  std::vector<int64_t> moved;  // of each entry
  std::map<std::string, std::vector<std::byte>> bytes;
  void write(const StateEntry& entry, int64_t offset, std::span<const std::byte> b) override {
    moved.at(static_cast<size_t>(&entry - catalogue.data())) += std::ssize(b);
    std::vector<std::byte>& known = bytes[entry.name];
    // Of a rank among several the rest stays zero.
    const auto begin =
        static_cast<size_t>(entry.first * static_cast<int64_t>(dtype_size(entry.dtype)) + offset);
    EXPECT_GE(begin, known.size()) << entry.name;
    known.resize(begin);
    known.insert(known.end(), b.begin(), b.end());
  }
};

void stream(PlacementPlan& placement, Pool pool, bool wanted, int64_t slots, bool mixed) {
  PoolPlan& plan = placement.pool(pool);
  if (!wanted) return;
  const bool shards = plan.shards > 1;  // these have the tiers
  for (size_t a = 0; a < plan.off_device.size(); ++a) {
    if (mixed && !shards && a < plan.off_device.size() / 2) plan.off_device[a] = 0;
  }
  plan.slots = std::min<int64_t>(slots, std::count(plan.off_device.begin(), plan.off_device.end(), 1));
  if (shards) stream(placement, *shards_of(pool), true, slots, mixed);
}

// Once per process: LibTorch keeps a GEMM workspace for each stream that it was ever given.
StreamView started(int threads) {
  static const StreamView stream = start_torch(device(), threads, true);
  return stream;
}

}  // namespace

std::string Variant::text() const {
  std::string out;
  const auto add = [&](const char* name, int64_t value) {
    out += std::string(name) + "=" + std::to_string(value) + " ";
  };
  add("lora", lora), add("tied", tied), add("vocab", vocab), add("clip", static_cast<int>(clip));
  add("micro", micro_batches), add("rule", static_cast<int>(rule));
  add("bf16", dtype == DType::kBF16), add("fp16", dtype == DType::kF16),
      add("master", static_cast<int>(master)), add("recompute", recompute);
  add("level", static_cast<int>(level.level)), add("every", level.every);
  add("optimizer", optimizer), add("gradients", gradients), add("weights", weights);
  add("activations", activations), add("mixed", mixed), add("granules", granules), add("slots", slots);
  add("group", group), add("threads", optimizer_threads), add("engine", static_cast<int>(engine));
  add("bf16_gradients", gradient_dtype == DType::kBF16), add("family", static_cast<int>(family));
  add("groups", groups), add("stateless", stateless), add("kind", static_cast<int>(kind)),
      add("encoder", encoder);
  add("base", static_cast<int>(base)), add("fp32_adapters", fp32_adapters), add("r", r), add("dora", dora);
  add("pissa", pissa), add("in_backward", in_backward), add("defer_tied_gradient", defer_tied_gradient),
      add("stage", stage), add("nodes", nodes);
  add("machine", among == ZeroGroup::kMachine), add("one_copy", one_copy), add("parallel", parallel);
  add("slots_on_device", slots_on_device), add("host", host), add("on_host", on_host), add("shared", shared);
  add("two_phases", two_phases), add("weighed", weighed);
  return out;
}
std::string Variant::numbers() const {
  std::string out;
  for (const int64_t value : {vocab,
                              int64_t{lora},
                              int64_t{tied},
                              static_cast<int64_t>(clip),
                              micro_batches,
                              static_cast<int64_t>(dtype),
                              static_cast<int64_t>(rule),
                              static_cast<int64_t>(master),
                              static_cast<int64_t>(gradient_dtype),
                              static_cast<int64_t>(family),
                              layers,
                              steps,
                              static_cast<int64_t>(base),
                              int64_t{fp32_adapters},
                              r,
                              int64_t{dora} + 2 * int64_t{pissa},
                              static_cast<int64_t>(kind),
                              encoder,
                              int64_t{nodes},
                              int64_t{groups},
                              int64_t{stateless},
                              int64_t{weighed}})
    out += std::to_string(value) + ",";
  return out;
}

DeviceType device() {
  return cuda_built() ? DeviceType::kCuda : DeviceType::kCpu;
}

RecomputeChoice drawn_level(int i) {
  constexpr RecomputeChoice kLevels[] = {Recompute::kAttention, {Recompute::kBlock, 2}, Recompute::kBlock};
  return kLevels[i % 3];
}

Variant drawn_variant(std::mt19937& random, int i) {
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  Variant run;
  run.lora = draw(0, 3) == 0;
  run.tied = draw(0, 1) == 1;
  run.vocab = std::array<int64_t, 4>{300, 300, 8200, 17000}[static_cast<size_t>(run.tied ? 0 : draw(0, 3))];
  run.clip = static_cast<Clip>(draw(0, 2));
  run.micro_batches = draw(0, 1) == 0 ? 1 : 4;
  run.dtype = draw(0, 3) == 0 ? DType::kF32 : DType::kBF16;
  run.master = static_cast<Master>(run.dtype == DType::kF32 ? 1 : draw(0, 2));
  run.optimizer = draw(0, 3) > 0;
  run.gradients = draw(0, 1) == 1;
  run.weights = draw(0, 1) == 1;
  run.activations = draw(0, 1) == 1;
  run.recompute = draw(0, 1) == 1;
  run.level = drawn_level(i);
  run.mixed = draw(0, 2) == 0;
  run.granules = std::array<int64_t, 3>{1, 3, 1000}[static_cast<size_t>(draw(0, 2))];
  run.slots = draw(1, 4);
  run.group = draw(1, 4);
  run.optimizer_threads = draw(1, 2);
  run.engine = static_cast<Engine>(draw(0, 2));
  run.verify = draw(0, 3) > 0;
  run.slots_on_device = draw(0, 2) == 0;
  run.host = run.slots_on_device ? draw(0, 2) : 0;
  run.on_host = run.slots_on_device && run.optimizer && draw(0, 1) == 1;
  run.family = static_cast<Family>(draw(0, 3));
  run.rule = static_cast<RuleId>(static_cast<size_t>(i) % Rules::kSize);
  if (run.dtype == DType::kBF16 && draw(0, 1) == 1) run.gradient_dtype = DType::kBF16;
  if (run.lora) run.base = static_cast<EncodingKind>(draw(0, 5));
  run.fp32_adapters = run.lora && run.gradient_dtype == DType::kF32 && draw(0, 1) == 1;
  if (has_no_master(run.rule)) run.dtype = DType::kBF16, run.fp32_adapters = false;
  run.groups = draw(0, 2) == 0;
  return run;
}

bool ring_allowed() {
  try {
    make_uring_engine({.files = {}, .buffers = {}, .depth = 1});
    return true;
  } catch (const Error&) {
    return false;
  }
}

Training::Training(const Variant& run, EngineFactory engine, StoreFactory store, Group* group,
                   Group* device_group)
    : run_(run),
      rank_index_(group == nullptr ? 0 : group->rank()),
      ranks_(group == nullptr ? 1 : group->ranks()),
      engine_(std::move(engine)),
      adapter_(run.adapter()),
      spec_(small_spec(run)),
      layout_(make_layout(spec_, run.lora ? &adapter_ : nullptr, run.dtype,
                          run.base == EncodingKind::kPlain ? nullptr : &encoding_of(run.base), {},
                          run.parallel ? ExpertShare{ranks_, rank_index_} : ExpertShare{})),
      stream_(started(run.threads)) {
  Config config;
  config.data.max_length = kLength;
  config.train.global_batch = 2 * run.micro_batches;
  config.train.micro_batch = 2;
  config.train.recompute = run.recompute ? run.level : Recompute::kNone;
  config.train.method = run.lora ? Method::kLora : Method::kFull;
  config.train.gradients = run.gradient_dtype == DType::kBF16 ? GradientDType::kBF16 : GradientDType::kF32;
  config.model.dtype = model_type(run.dtype);
  config.lora.dtype = run.fp32_adapters ? LoraDType::kF32 : LoraDType::kAuto;
  config.optimizer.clip = optimizer_.clip = run.clip;
  config.optimizer.master = optimizer_.master = run.master;
  config.optimizer.name = optimizer_.name = run.rule;
  config.optimizer.threads = run.optimizer_threads;
  if (run.stateless) optimizer_.rule.of<Sgd>().momentum = 0;
  config.optimizer.rule = optimizer_.rule;
  if (run.groups) {
    optimizer_.groups = {{"layers.1.self_attn.q_proj", 0.3, {}}, {"regex:(v|down)_proj", 1, 0.2}};
    if (is_coded(run.rule)) optimizer_.groups = {{"self_attn", 0.3, {}}, {"mlp", 1, 0.2}};
    set_groups(optimizer_, layout_);
  }
  optimizer_.weight_decay = 0.01;
  const auto tier_id = [](bool off_device) { return off_device ? OffloadTier::kNvme : OffloadTier::kNone; };
  config.offload.optimizer = tier_id(run.optimizer);
  config.offload.gradients = tier_id(run.gradients && !run.in_backward);
  config.train.update = run.in_backward ? UpdateTime::kInBackward : UpdateTime::kAfter;
  config.offload.weights = tier_id(run.weights);
  config.offload.activations = tier_id(run.activations), config.offload.verify = run.verify;
  config.zero.stage = run.stage, config.zero.group = run.among;
  config.zero.experts = run.parallel ? ZeroExperts::kParallel : ZeroExperts::kReplicated;
  const StateTensors state(run.rule, master_form(run.rule, run.master, run.trained_dtype()));
  config.io.tile = ByteSize{state.bytes({run.granules * kGranule})};
  Machine machine;
  machine.cores = 2;
  if (cuda_built()) machine.gpus.push_back(built_in_gpu("H200"));
  plan_ = make_plan({config, spec_, run.lora ? &adapter_ : nullptr, layout_, device()}, machine,
                    {.ranks = ranks_, .nodes = run.nodes, .share_memory = run.one_copy});
  plan_.placement.io_timeout = run.io_timeout, plan_.placement.keep_norms = run.keep_norms;
  set_pools();
  set_update_site();
  if (run.slots_on_device && run.weights && !run.tied) {
    const BlockLayout& embedding = layout_.blocks.front();
    plan_.placement.embedding_in_host =
        embedding.frozen_bytes + embedding.flat_elements * static_cast<int64_t>(dtype_size(run.dtype));
  }
  set_arena(config);
  if (run.one_copy) machine_memory_ = std::make_unique<MachineMemory>(*group, ranks_ / run.nodes);
  rank_ = std::make_unique<Rank>(
      RankSetup{.spec = spec_,
                .layout = layout_,
                .adapter = run.lora ? &adapter_ : nullptr,
                .optimizer = optimizer_,
                .plan = plan_,
                .seed = 1,
                .max_length = kLength,
                .tokens_per_step = 2 * kLength * run.micro_batches,
                .max_grad_norm = kMaxGradNorm,
                .swap_paths = {{std::filesystem::temp_directory_path().string(), 1}},
                .engine = [this](const EngineSetup& setup) { return make_engine_of_run(setup); },
                .store = std::move(store),
                .slots_on_device = run.slots_on_device,
                .group = group,
                .device_group = device_group,
                .machine_memory = machine_memory_.get(),
                .kernels = run.kernels,
                .objective = run.weighed      ? kWeighed
                             : run.two_phases ? kTwoPhases
                                              : objectives::cross_entropy},
      stream_);
  load();
}

void Training::load() {
  const LoadSetup load{spec_, layout_, run_.dtype, stream_, 1},
      adapters{spec_, layout_, run_.trained_dtype(), stream_, 1};
  initialise_weights(load, 1, rank_->weights());
  const AdapterBase drawn{.directory = "", .dtype = run_.dtype};
  if (run_.lora && run_.pissa) {
    const PairBase base{.directory = "", .seed = 1, .dtype = run_.dtype};
    place_starts(load, PrincipalPairs(base, adapter_), true, rank_->weights());
  } else if (run_.lora && run_.dora)
    initialise_from_base(adapters, 1, drawn, adapter_, rank_->weights());
  else if (run_.lora)
    initialise_adapter(adapters, 1, rank_->weights());
  rank_->weights_ready();
  rank_->frozen_ready();
}

Training::Copy Training::copy() {
  State bytes = state();  // completes deferred updates
  return {std::move(bytes), rank_->optimizer().t()};
}

void Training::restore(const Copy& copy) {
  struct Reader : StateReader {
    explicit Reader(const State& state) : from(state) {}
    void read(const std::string& array, int64_t offset, std::span<std::byte> bytes) override {
      std::memcpy(bytes.data(), from.at(array).data() + offset, bytes.size());
    }
    const State& from;
  } reader(copy.state);
  rank_->reset();
  restore_from(reader, copy.updates);
}

void Training::restore_from(StateReader& from, int64_t updates) {
  load();  // a copy has nothing of what is frozen
  rank_->restore(from, updates);
}

std::vector<int64_t> Training::reduced_units() const {
  const std::vector<Unit> units = layout_.units(head_segments() > 0);
  std::vector<int64_t> out;
  for (const Operation& operation : make_schedule(plan_.step).operations) {
    const Unit& unit = units[static_cast<size_t>(operation.unit)];
    const bool trained = layout_.blocks[static_cast<size_t>(unit.block)].flat_elements > 0;
    if (operation.kind == OperationKind::kNorm && trained) out.push_back(operation.unit);
  }
  return out;
}

Training::~Training() = default;

// Slots as few as this run wants.
void Training::set_pools() {
  PlacementPlan& p = plan_.placement;
  const bool one_group = run_.in_backward || p.pool(Pool::kGradients).shards > 1;
  p.group = one_group ? run_.micro_batches : std::min(run_.group, run_.micro_batches);
  stream(p, Pool::kOptimizer, run_.optimizer, run_.slots, run_.mixed);
  stream(p, Pool::kGradients, run_.gradients && !run_.lora && !run_.in_backward, run_.slots, run_.mixed);
  stream(p, Pool::kWeights, run_.weights, run_.slots, run_.mixed);
  if (run_.activations) {
    PoolPlan& inputs = p.pool(Pool::kActivations);
    inputs.bytes.assign(static_cast<size_t>((spec_.layer_count() + 1) * p.group),
                        std::ranges::max(inputs.bytes));
    inputs.off_device.assign(inputs.bytes.size(), 1);
    inputs.slots = std::min<int64_t>(std::max<int64_t>(run_.slots, 2), std::ssize(inputs.bytes));
  }
  if (run_.defer_tied_gradient) {
    p.defer_tied_gradient = true;
    p.gradients_in_slot.front() = 1;
    plan_.upload_bytes *= 2;
  }
  for (PoolPlan& pool : p.pools) {
    if (run_.host == 1) pool.tier_id = TierId::kHost;
    if (run_.host == 2) pool.kept[tier_index(TierId::kHost)] = std::ssize(pool.bytes) / 2;
  }
}

// What a plan for a GPU may choose.
void Training::set_update_site() {
  PlacementPlan& p = plan_.placement;
  // A GPU's products are the GPU's.
  p.update_on_host = run_.on_host && !(device() == DeviceType::kCuda && is_muon(run_.rule));
  p.update_staging = p.update_on_host
                         ? update_staging_bytes(p.tile_granules * kGranule, plan_.numerics.gradient_dtype,
                                                plan_.numerics.trained_dtype())
                         : 0;
  PoolPlan& pool = p.pool(Pool::kOptimizer);
  for (size_t a = 0; run_.shared && p.update_on_host && a < pool.bytes.size(); ++a)
    p.host_tiles.push_back(a % 2 == 0 && tier_row(pool.tier_id_of(a)).medium == Medium::kMemory ? 1 : 0);
  const std::vector<char> through_slots = p.through_slots(Pool::kOptimizer);
  pool.slots = std::min<int64_t>(pool.slots, std::count(through_slots.begin(), through_slots.end(), 1));
}

void Training::set_arena(const Config& config) {
  const AdapterSpec* const adapter = run_.lora ? &adapter_ : nullptr;
  const int64_t sequences = plan_.numerics.micro_batch;
  plan_.step = step_config(spec_, layout_, plan_, plan_.micro_tokens, run_.clip);
  plan_.arena =
      arena_need({spec_, layout_, adapter}, plan_.step, sequences * config.data.max_length, sequences);
}

std::unique_ptr<IoEngine> Training::make_engine_of_run(const EngineSetup& setup) {
  if (engine_) return engine_(setup);
  // A ring or an error: what says io_uring is never something else.
  if (run_.engine == Engine::kUring) return make_engine(IoEngineKind::kUring, setup, nullptr);
  if (run_.engine == Engine::kThreads) return make_engine(IoEngineKind::kThreads, setup, nullptr);
  disk_ = std::make_unique<SimDisk>(setup.files, SimSetup{.faults = {}, .seed = 3, .shuffle = true});
  return disk_->make_engine();
}

StateCatalogue Training::catalogue() const {
  return list_state(layout_, plan_.numerics, head_segments() > 0, true,
                    {plan_.placement.sharding(), rank_index_});
}

State Training::state() {
  const StateCatalogue catalogue = this->catalogue();
  Contents contents(catalogue);
  LiveState state = rank_state(*rank_);
  move_state(catalogue, state, contents);
  contents.expect_all();
  return std::move(contents.bytes);
}

StepBatches Training::batches(int64_t step) const {
  StepBatches all = batches_of(run_.micro_batches, step, spec_.vocab);
  const int64_t count = std::ssize(all.micro);
  all.micro.erase(all.micro.begin() + count * (rank_index_ + 1) / ranks_, all.micro.end());
  all.micro.erase(all.micro.begin(), all.micro.begin() + count * rank_index_ / ranks_);
  return all;
}

void Training::start(int64_t step, double lr) {
  const bool fp16 = run_.dtype == DType::kF16;
  rank_->step().start(batches(step), step, lr, !fp16 ? 1 : step == run_.overflows_at ? 1e30 : 1024);
}

Outcome Training::run(bool read_between) {
  Outcome out;
  for (int64_t s = 1; s <= run_.steps; ++s) {
    if (read_between) state();
    const StepResult result = step(s);
    out.losses.push_back(result.loss);
    out.norms.push_back(std::isnan(result.grad_norm) ? HUGE_VAL : result.grad_norm);  // to compare
    out.skipped.push_back(result.skipped);
    // In the middle: an evaluation, which begins with a flush.
    if (s == 5)
      out.evaluated = rank_->step().evaluate(batches_of(run_.micro_batches, s, spec_.vocab).micro[0]).nll;
  }
  out.state = state();
  const IoCounters moved = rank_->off_device().counters();
  out.moved_bytes = moved.read_bytes + moved.written_bytes;
  return out;
}

float Training::replace_norm_weight(float value) {
  rank_->step().flush();
  const BlockLayout& last = layout_.blocks.back();
  const auto place = std::find_if(last.tensors.begin(), last.tensors.end(),
                                  [](const TensorPlace& p) { return p.parameter.name == "norm"; });
  EXPECT_NE(place, last.tensors.end());
  OpenUnit open = rank_->weights().open(std::ssize(layout_.blocks) - 1, true);
  const int64_t bytes = run_.dtype == DType::kBF16 ? 2 : 4;
  uint32_t was = 0, bits = 0;
  std::memcpy(&bits, &value, 4);
  if (bytes == 2) bits >>= 16;
  copy_bytes(&was, open.tensor(*place), bytes, stream_);
  synchronize(stream_);
  copy_bytes(open.tensor(*place), &bits, bytes, stream_);
  synchronize(stream_);
  open.close();
  if (bytes == 2) was <<= 16;
  float old = 0;
  std::memcpy(&old, &was, 4);
  return old;
}

const Outcome& reference(const Variant& run) {
  static std::map<std::string, Outcome> known;
  const auto found = known.find(run.numbers());
  if (found != known.end()) return found->second;
  Variant resident = run;
  resident.recompute = resident.optimizer = resident.gradients = resident.weights = resident.activations =
      resident.mixed = resident.in_backward = resident.defer_tied_gradient = resident.two_phases = false;
  resident.slots_on_device = resident.on_host = false;
  resident.granules = resident.group = 1, resident.slots = 2, resident.host = 0,
  resident.optimizer_threads = 1;
  resident.engine = Engine::kSim, resident.verify = true;
  return known.emplace(run.numbers(), Training(resident).run()).first->second;
}

void expect_same(const Variant& run, const Outcome& got) {
  const Outcome& want = reference(run);
  EXPECT_EQ(got.losses, want.losses) << run.text();
  EXPECT_EQ(got.norms, want.norms) << run.text();
  EXPECT_EQ(got.skipped, want.skipped) << run.text();
  EXPECT_EQ(got.evaluated, want.evaluated) << run.text();
  ASSERT_EQ(got.state.size(), want.state.size()) << run.text();
  for (const auto& [name, bytes] : want.state) {
    ASSERT_TRUE(got.state.count(name)) << name;
    EXPECT_TRUE(got.state.at(name) == bytes) << name << " differs: " << run.text();
  }
}

}  // namespace lm::offloaded_run
