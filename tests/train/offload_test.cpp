// Where state lives never changes a bit: losses, norms, weights and moments of runs that stream every class
// through few slots against the run that keeps everything near. Built twice: for the CPU, which stands in for
// a GPU where a run is `separate`, and for a GPU, where it skips without one.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "base/error.h"
#include "model/runtime.h"
#include "offload/sim_engine.h"
#include "train/rank.h"
#include "weights/load_store.h"

namespace lm {
namespace {

constexpr int kSteps = 12;
constexpr int64_t kLength = 24;

enum class Engine { kUring, kThreads, kSim };

// A run of the matrix. The first six decide the numbers, the rest must not.
struct Variant {
  bool lora = false, tied = true;
  int64_t vocab = 300;  // more than 8192: an untied head is cut where weights or gradients are streamed
  Clip clip = Clip::kGlobal;
  int64_t micro_batches = 1;
  DType dtype = DType::kBF16;
  Master master = Master::kSplit;

  bool recompute = false;
  bool optimizer = false, gradients = false, weights = false, activations = false;  // streamed
  bool mixed = false;    // the earlier half of each pool stays near
  int64_t granules = 1;  // of a tile
  int64_t slots = 2;     // more where an operation needs more
  int64_t group = 1;
  int optimizer_threads = 1;
  Engine engine = Engine::kSim;
  bool verify = true;
  bool separate = false;  // slots apart from host memory, as on a GPU
  bool on_host = false;   // with `separate`: state off the device is updated in host memory, as beside a GPU
  int host = 0;           // with `separate`: homes in host memory: 0 of none, 1 of all, 2 of the earlier half

  std::string text() const {
    std::string out;
    const auto add = [&](const char* name, int64_t value) {
      out += std::string(name) + "=" + std::to_string(value) + " ";
    };
    add("lora", lora), add("tied", tied), add("vocab", vocab), add("clip", static_cast<int>(clip)),
        add("micro", micro_batches);
    add("bf16", dtype == DType::kBF16), add("master", static_cast<int>(master)), add("recompute", recompute);
    add("optimizer", optimizer), add("gradients", gradients), add("weights", weights);
    add("activations", activations), add("mixed", mixed), add("granules", granules), add("slots", slots);
    add("group", group), add("threads", optimizer_threads), add("engine", static_cast<int>(engine));
    add("separate", separate), add("host", host), add("on_host", on_host);
    return out;
  }
  std::string numbers() const {
    return std::to_string(vocab) + "," + std::to_string(lora) + std::to_string(tied) +
           std::to_string(static_cast<int>(clip)) + std::to_string(micro_batches) +
           std::to_string(static_cast<int>(dtype)) + std::to_string(static_cast<int>(master));
  }
};

ModelSpec small_spec(bool tied, int64_t vocab) {
  ModelSpec spec;
  spec.model_type = "llama";
  spec.hidden = 64;
  spec.ffn = 160;
  spec.layers = 3;
  spec.heads = 4;
  spec.kv_heads = 2;
  spec.head_dim = 16;
  spec.vocab = vocab;
  spec.max_positions = 512;
  spec.tied = tied;
  spec.window.assign(3, 0);
  return spec;
}

// Documents of unequal length, so that shapes vary from micro-batch to micro-batch.
StepBatches batches_of(int64_t micro_batches, int64_t step, int64_t vocab) {
  StepBatches out;
  for (int64_t m = 0; m < micro_batches; ++m) {
    Batch batch;
    const int64_t length = kLength - (step * 3 + m * 5) % 8;
    batch.document_start.push_back(0);
    for (int64_t d = 0; d < 2; ++d) {
      for (int64_t p = 0; p < length; ++p) {
        batch.token.push_back(static_cast<int32_t>((step * 131 + m * 977 + d * 79 + p * p * 31) % vocab));
        batch.position.push_back(static_cast<int32_t>(p));
        batch.sample.push_back(static_cast<int32_t>(d + 2 * m));
      }
      batch.document_start.push_back(static_cast<int32_t>((d + 1) * length));
    }
    for (size_t i = 0; i < batch.token.size(); ++i) {
      const bool last = (static_cast<int64_t>(i) + 1) % length == 0;
      batch.target.push_back(last ? -1 : batch.token[i + 1]);
      out.target_tokens += last ? 0 : 1;
    }
    out.micro.push_back(std::move(batch));
  }
  return out;
}

// Every byte of the state by name, however it is cut.
struct Contents : StateSink {
  std::map<std::string, std::vector<std::byte>> bytes;
  void part(const std::string& name, DType type, const std::vector<int64_t>&, int64_t first,
            std::span<const std::byte> b) override {
    EXPECT_EQ(first * static_cast<int64_t>(dtype_size(type)), std::ssize(bytes[name])) << name;
    bytes[name].insert(bytes[name].end(), b.begin(), b.end());
  }
  void number(const std::string& name, int64_t value) override {
    const auto* p = reinterpret_cast<const std::byte*>(&value);
    bytes[name].assign(p, p + sizeof value);
  }
};

struct Outcome {
  std::vector<double> losses, norms;
  double evaluated = 0;
  std::map<std::string, std::vector<std::byte>> state;
  int64_t moved_bytes = 0;
};

void stream(PlacementPlan& placement, Pool pool, bool wanted, int64_t slots, bool mixed) {
  PoolPlan& plan = placement.pool(pool);
  if (!wanted) return;
  for (size_t a = 0; a < plan.streamed.size(); ++a) {
    if (mixed && a < plan.streamed.size() / 2) plan.streamed[a] = 0;
  }
  plan.slots = std::min<int64_t>(slots, std::count(plan.streamed.begin(), plan.streamed.end(), 1));
}

DeviceType device() {
  return cuda_built() ? DeviceType::kCuda : DeviceType::kCpu;
}

// Once per process: LibTorch keeps a GEMM workspace for each stream that it was ever given.
StreamView started() {
  static const StreamView stream = start_torch(device(), 2, true);
  return stream;
}

class Training {
 public:
  explicit Training(const Variant& run)
      : run_(run),
        spec_(small_spec(run.tied, run.vocab)),
        layout_(make_layout(spec_, run.lora ? &adapter_ : nullptr, run.dtype)),
        stream_(started()) {
    Config config;
    config.data.max_length = kLength;
    config.train.global_batch = 2 * run.micro_batches;
    config.train.micro_batch = 2;
    config.train.recompute = run.recompute ? Recompute::kBlock : Recompute::kNone;
    config.train.method = run.lora ? Method::kLora : Method::kFull;
    config.train.gradients = GradientDType::kF32;
    config.model.dtype = run.dtype == DType::kBF16 ? ModelDType::kBF16 : ModelDType::kF32;
    config.optimizer.clip = optimizer_.clip = run.clip;
    config.optimizer.master = optimizer_.master = run.master;
    config.optimizer.threads = run.optimizer_threads;
    optimizer_.weight_decay = 0.01;
    const auto home = [](bool far) { return far ? OffloadHome::kNvme : OffloadHome::kNone; };
    config.offload.optimizer = home(run.optimizer);
    config.offload.gradients = home(run.gradients);
    config.offload.weights = home(run.weights);
    config.offload.activations = home(run.activations);
    config.offload.verify = run.verify;
    config.io.tile = ByteSize{run.granules * 4096 *
                              (8 + (run.dtype == DType::kF32       ? 0
                                    : run.master == Master::kF32   ? 4
                                    : run.master == Master::kSplit ? 2
                                                                   : 0))};
    Machine machine;
    machine.cores = 2;
    if (cuda_built()) machine.gpus.push_back(known_gpu("H200"));
    plan_ = make_plan(config, spec_, run.lora ? &adapter_ : nullptr, layout_, machine, device());
    PlacementPlan& p = plan_.placement;
    p.group = std::min(run.group, run.micro_batches);
    // Slots as few as this run wants, and the arena for this group.
    stream(p, Pool::kOptimizer, run.optimizer, run.slots, run.mixed);
    stream(p, Pool::kGradients, run.gradients && !run.lora, run.slots, run.mixed);
    stream(p, Pool::kWeights, run.weights, run.slots, run.mixed);
    if (run.activations) {
      PoolPlan& inputs = p.pool(Pool::kActivations);
      inputs.bytes.assign(static_cast<size_t>((spec_.layers + 1) * p.group), inputs.bytes.front());
      inputs.streamed.assign(inputs.bytes.size(), 1);
      inputs.slots = std::min<int64_t>(std::max<int64_t>(run.slots, 2), std::ssize(inputs.bytes));
    }
    for (PoolPlan& pool : p.pools) {
      if (run.host == 1) pool.home = Home::kHost;
      if (run.host == 2) pool.kept_in_host = std::ssize(pool.bytes) / 2;
    }
    set_update_site();
    if (run.separate && run.weights && !run.tied) {
      const BlockLayout& embedding = layout_.blocks.front();
      p.embedding_in_host =
          embedding.frozen_bytes + embedding.flat_elements * static_cast<int64_t>(dtype_size(run.dtype));
    }
    arena(config);
    rank_ = std::make_unique<Rank>(
        RankSetup{.spec = spec_,
                  .layout = layout_,
                  .adapter = run.lora ? &adapter_ : nullptr,
                  .optimizer = optimizer_,
                  .plan = plan_,
                  .seed = 1,
                  .max_length = kLength,
                  .tokens_per_step = 2 * kLength * run.micro_batches,
                  .max_grad_norm = 0.5,
                  .swap_paths = {{std::filesystem::temp_directory_path().string(), 1}},
                  .engine = [this](const EngineSetup& setup) { return make_engine_of_run(setup); },
                  .separate_slots = run.separate},
        stream_);
    const LoadSetup load{spec_, layout_, run.dtype, stream_, 1};
    initialise_weights(load, 1, rank_->weights());
    if (run.lora) initialise_adapter(load, 1, rank_->weights());
    rank_->weights_ready();
  }

  std::map<std::string, std::vector<std::byte>> state() {
    Contents contents;
    rank_->read_state(contents);
    return std::move(contents.bytes);
  }

  int64_t head_segments() const { return plan_.placement.head_segments(); }

  Outcome run() {
    Outcome out;
    for (int64_t step = 1; step <= kSteps; ++step) {
      const StepBatches batches = batches_of(run_.micro_batches, step, spec_.vocab);
      const StepResult result = rank_->step().run(batches, step, 3e-3);
      out.losses.push_back(result.loss);
      out.norms.push_back(result.grad_norm);
      // In the middle: an evaluation, which begins with a flush.
      if (step == 5) out.evaluated = rank_->step().evaluate(batches.micro[0]);
    }
    out.state = state();
    const IoCounters moved = rank_->far().counters();
    out.moved_bytes = moved.read_bytes + moved.written_bytes;
    return out;
  }

 private:
  std::unique_ptr<IoEngine> make_engine_of_run(const EngineSetup& setup) {
    if (run_.engine == Engine::kUring) return make_engine(IoEngineKind::kAuto, setup, nullptr);
    if (run_.engine == Engine::kThreads) return make_threads_engine(setup);
    disk_ = std::make_unique<SimDisk>(setup.files, SimSetup{.faults = {}, .seed = 3, .shuffle = true});
    return disk_->make_engine();
  }

  // What a plan for a GPU may choose.
  void set_update_site() {
    PlacementPlan& p = plan_.placement;
    p.update_on_host = run_.on_host;
    p.update_staging = run_.on_host
                           ? HostUpdate::staging_bytes(p.tile_granules * kGranule,
                                                       plan_.numerics.gradient_dtype, plan_.numerics.dtype)
                           : 0;
    PoolPlan& pool = p.pool(Pool::kOptimizer);
    const std::vector<char> moved = p.moved(Pool::kOptimizer);
    pool.slots = std::min<int64_t>(pool.slots, std::count(moved.begin(), moved.end(), 1));
  }

  void arena(const Config& config) {
    const NumericsPlan& n = plan_.numerics;
    plan_.arena = arena_need(spec_, run_.lora ? &adapter_ : nullptr,
                             {.tokens = n.micro_batch * config.data.max_length,
                              .documents = n.micro_batch,
                              .row_chunk = n.row_chunk,
                              .recompute = n.recompute,
                              .train_embedding = !run_.lora,
                              .dtype = n.dtype,
                              .gradient_dtype = n.gradient_dtype,
                              .device = device(),
                              .threads = 2,
                              .group = plan_.placement.group,
                              .inputs_elsewhere = run_.activations,
                              .cut_head = plan_.placement.head_segments() > 0});
  }

  Variant run_;
  AdapterSpec adapter_{
      .r = 4, .alpha = 8, .rslora = false, .dropout = 0.1, .targets = {"q_proj", "v_proj", "down_proj"}};
  OptimizerConfig optimizer_;
  ModelSpec spec_;
  ModelLayout layout_;
  StreamView stream_;
  Plan plan_;
  std::unique_ptr<SimDisk> disk_;
  std::unique_ptr<Rank> rank_;
};

// The run that keeps everything near, once per set of numbers.
const Outcome& reference(const Variant& run) {
  static std::map<std::string, Outcome> known;
  const auto found = known.find(run.numbers());
  if (found != known.end()) return found->second;
  Variant near;
  near.lora = run.lora, near.tied = run.tied, near.clip = run.clip, near.micro_batches = run.micro_batches;
  near.dtype = run.dtype, near.master = run.master, near.vocab = run.vocab;
  return known.emplace(run.numbers(), Training(near).run()).first->second;
}

void expect_same(const Variant& run, const Outcome& got) {
  const Outcome& want = reference(run);
  EXPECT_EQ(got.losses, want.losses) << run.text();
  EXPECT_EQ(got.norms, want.norms) << run.text();
  EXPECT_EQ(got.evaluated, want.evaluated) << run.text();
  ASSERT_EQ(got.state.size(), want.state.size()) << run.text();
  for (const auto& [name, bytes] : want.state) {
    ASSERT_TRUE(got.state.count(name)) << name;
    EXPECT_TRUE(got.state.at(name) == bytes) << name << " differs: " << run.text();
  }
}

class Offload : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_built() && cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  }
};

TEST_F(Offload, EachClassByItselfGivesTheSameBits) {
  for (int which = 0; which < 4; ++which) {
    Variant run;
    run.optimizer = which == 0, run.gradients = which == 1, run.weights = which == 2,
    run.activations = which == 3;
    run.recompute = run.activations;
    run.micro_batches = 2;
    const Outcome got = Training(run).run();
    EXPECT_GT(got.moved_bytes, 0) << run.text();
    expect_same(run, got);
  }
}

TEST_F(Offload, EverythingOnDiskGivesTheSameBitsUnderEveryEngine) {
  for (const Engine engine : {Engine::kUring, Engine::kThreads, Engine::kSim}) {
    Variant run;
    run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
    run.micro_batches = 4;
    run.group = 2;
    run.engine = engine;
    const Outcome got = Training(run).run();
    EXPECT_GT(got.moved_bytes, 0);
    expect_same(run, got);
  }
}

// The CPU beside a device: state in host memory, on disk, or half and half; under every clip mode and master.
TEST_F(Offload, UpdatesBesideTheDeviceGiveTheSameBits) {
  for (int i = 0; i < 27; ++i) {
    Variant run;
    run.separate = run.optimizer = run.on_host = true;
    run.host = i % 3;
    run.clip = static_cast<Clip>(i / 3 % 3);
    run.master = static_cast<Master>(i / 9);
    run.gradients = i % 2 == 1, run.weights = i % 4 == 2, run.mixed = i % 5 == 4;
    run.lora = i % 7 == 6, run.granules = 1 + i % 4;
    SCOPED_TRACE(run.text());
    const Outcome got = Training(run).run();
    EXPECT_TRUE(run.host != 1 || got.moved_bytes == 0);  // only what is on disk is read and written
    expect_same(run, got);
  }
}

// Nothing has been written yet; an fp32 master off the device, which its first update makes of the weight, is
// read as such all the same, and is still made of it afterwards.
TEST_F(Offload, StateIsReadBeforeTheFirstStepAndReadingChangesNothing) {
  for (const Master master : {Master::kF32, Master::kSplit}) {
    Variant near;
    near.master = master;
    const auto want = Training(near).state();
    for (const bool on_host : {false, true}) {
      Variant run = near;
      run.optimizer = run.weights = true, run.tied = true;
      run.separate = run.on_host = on_host;
      SCOPED_TRACE(run.text());
      Training training(run);
      EXPECT_TRUE(training.state() == want);
      expect_same(run, training.run());
    }
  }
}

// Two segments and a bit, of whatever classes, on disk, in host memory and half and half.
TEST_F(Offload, ACutHeadGivesTheSameBits) {
  const auto run_one = [](const std::string& text, bool lora, int host, int slots) {
    const auto has = [&](const char* what) { return text.find(what) != std::string::npos; };
    Variant run;
    run.lora = lora, run.tied = false, run.vocab = 17000;
    run.weights = has("weights"), run.gradients = has("gradients"), run.optimizer = has("optimizer");
    run.activations = run.recompute = has("activations");
    run.separate = has("separate"), run.on_host = has("on host"), run.mixed = has("mixed"), run.host = host;
    run.micro_batches = 4, run.group = slots == 1 ? 4 : 3;
    run.granules = 40, run.slots = slots;
    SCOPED_TRACE(run.text());
    Training training(run);
    EXPECT_EQ(training.head_segments(), 3);
    expect_same(run, training.run());
  };
  run_one("weights", false, 0, 1);
  run_one("gradients", false, 0, 1);
  run_one("weights gradients", false, 0, 2);
  run_one("weights gradients optimizer", false, 0, 2);
  run_one("weights gradients optimizer mixed", false, 0, 3);
  run_one("weights gradients optimizer activations separate", false, 0, 2);
  run_one("weights gradients optimizer separate", false, 1, 2);
  run_one("weights optimizer separate on host", false, 2, 2);
  run_one("gradients optimizer separate on host", false, 0, 2);
  run_one("weights", true, 0, 1);
  run_one("weights optimizer activations separate", true, 2, 2);
  run_one("weights mixed", true, 0, 3);
}

// 80 seeded draws from {none, disk, mixed} x {optimizer, gradients, weights, activations} x tile sizes x
// threads x engines x recompute x accumulation x groups x clip modes x tied/untied x full/LoRA x masters.
TEST_F(Offload, DrawnRunsGiveTheSameBits) {
  std::mt19937 random(11);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  for (int i = 0; i < 80; ++i) {
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
    run.recompute = run.activations || draw(0, 1) == 1;
    run.mixed = draw(0, 2) == 0;
    run.granules = std::array<int64_t, 3>{1, 3, 1000}[static_cast<size_t>(draw(0, 2))];
    run.slots = draw(1, 4);
    run.group = draw(1, 4);
    run.optimizer_threads = draw(1, 2);
    run.engine = static_cast<Engine>(draw(0, 2));
    run.verify = draw(0, 3) > 0;
    run.separate = draw(0, 2) == 0;
    run.host = run.separate ? draw(0, 2) : 0;
    run.on_host = run.separate && run.optimizer && draw(0, 1) == 1;
    SCOPED_TRACE(run.text());
    try {
      expect_same(run, Training(run).run());
    } catch (const Error& error) {
      FAIL() << error.report() << run.text();
    }
    if (testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace lm
