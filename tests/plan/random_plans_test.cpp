// Random legal configurations, models, machines and numbers of ranks through the planner: each is planned or
// refused in words, within a bound on memory and on work. The seed is printed, and LM_SEED repeats it;
// LM_COUNTS=full or LM_PLANS=N tries more.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <tuple>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "plan/adapter.h"
#include "plan/alternatives.h"
#include "plan/numerics.h"
#include "plan/placement.h"
#include "plan/scaling.h"
#include "plan/sizes.h"
#include "plan/step_lanes.h"
#include "shapes.h"
#include "tests/support/counts.h"

namespace {

// Of this process's heap. Work is counted as what is allocated in all: lists of operations and of arrays are
// what grows.
std::atomic<int64_t> live_bytes = 0, peak_bytes = 0, all_bytes = 0;

void* count_allocation(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  const auto bytes = static_cast<int64_t>(malloc_usable_size(memory));
  const int64_t now = live_bytes += bytes;
  if (now > peak_bytes) peak_bytes = now;
  all_bytes += bytes;
  return memory;
}
void count_free(void* memory) {
  if (memory == nullptr) return;
  live_bytes -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

// The program's own, for all of it.
void* operator new(size_t bytes) {
  return count_allocation(std::malloc(bytes));
}
// As std::stable_sort allocates: a sanitizer's own would not match our delete.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  void* const memory = std::malloc(bytes);
  return memory == nullptr ? nullptr : count_allocation(memory);
}
void operator delete(void* memory) noexcept {
  count_free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  count_free(memory);
}

namespace lm {
namespace {

constexpr int64_t kMostBytes = 200 * kMiB;

uint64_t seed() {
  const char* const given = std::getenv("LM_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
}
int64_t how_many() {
  const char* const given = std::getenv("LM_PLANS");
  return given != nullptr ? std::atoll(given) : test::counts<int64_t>(200, 2000);
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  double fraction() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  // As likely from 1 to 10 as from 10 to 100, and often a bound itself.
  int64_t number(int64_t low, int64_t high) {
    if (one_in(8)) return one_in(2) ? low : high;
    const double all = std::log2(static_cast<double>(high - low) + 1);
    const auto out = low + static_cast<int64_t>(std::exp2(fraction() * all)) - 1;
    return std::clamp(out, low, high);
  }
  template <class T>
  const T& of(const std::vector<T>& list) {
    return list[static_cast<size_t>(below(std::ssize(list)))];
  }

 private:
  std::mt19937_64 random_;
};

// Draws values for some keys, as one would type them.
class DrawKeys {
 public:
  explicit DrawKeys(Draw& draw) : draw_(draw) {}
  std::vector<std::string> settings;

  void table(const char*, const char*) {}
  template <class T>
  void key(const char* table, const char* name, T& field, const KeyInfo& info) {
    const std::string key = std::string(table) + "." + name;
    if (!info.used || key == "model.path" || key == "data.train" || !draw_.one_in(wanted(key))) return;
    std::string text = value(field, info);
    if (key == "train.global_batch") global_batch_ = std::atoll(text.c_str());
    // A micro-batch divides it.
    if (key == "train.micro_batch" && text != "\"auto\"") {
      int64_t micro_batch = std::min<int64_t>(std::atoll(text.c_str()), global_batch_);
      while (global_batch_ % micro_batch != 0) --micro_batch;
      text = std::to_string(micro_batch);
    }
    if (!text.empty()) settings.push_back(key + "=" + text);
  }

 private:
  // What sizes depend on comes more often.
  static int64_t wanted(const std::string& key) {
    for (const char* often : {"global_batch", "micro_batch", "max_length", "train.method", "zero.stage"}) {
      if (key.find(often) != std::string::npos) return 2;
    }
    // What no plan looks at and excludes other keys.
    for (const char* seldom : {"steps", "epochs", "eval", "early", "warmup", "schedule", "ratio", "answers",
                               "checkpoint", "lora.start", "lora.bias", "prompt."}) {
      if (key.find(seldom) != std::string::npos) return 60;
    }
    return key.starts_with("offload.") || key.starts_with("train.") ? 4 : 10;
  }
  std::string value(bool, const KeyInfo&) { return draw_.one_in(2) ? "true" : "false"; }
  std::string value(int64_t, const KeyInfo& info) {
    const auto bound = [](double b) { return static_cast<int64_t>(std::clamp(b, -9e18, 9e18)); };
    return std::to_string(draw_.number(bound(info.range.low), bound(info.range.high)));
  }
  std::string value(double, const KeyInfo& info) {
    const double high = std::min(info.range.high, 1e6), low = std::max(info.range.low, -1e6);
    const double out = low + (high - low) * std::pow(draw_.fraction(), 8);
    return value_text(info.range.low_open ? std::max(out, low + 1e-9) : out);
  }
  std::string value(const ByteSize&, const KeyInfo& info) {
    const int64_t bytes =
        draw_.number(static_cast<int64_t>(info.range.low), static_cast<int64_t>(info.range.high));
    return "\"" + std::to_string(std::max<int64_t>(bytes / 4096, 1) * 4) + "KiB\"";
  }
  std::string value(const Budget&, const KeyInfo&) {
    if (draw_.one_in(2)) return "\"" + std::to_string(draw_.number(1, 100)) + "%\"";
    return "\"" + std::to_string(draw_.number(1, 1 << 22)) + "MiB\"";
  }
  std::string value(const Duration&, const KeyInfo&) { return "\"8h\""; }
  std::string value(const Interval&, const KeyInfo&) { return "100"; }
  std::string value(const RecomputeChoice&, const KeyInfo& info) {
    return draw_.one_in(4) ? value(int64_t{1}, info) : value(Recompute::kAuto, info);
  }
  std::string value(const std::string&, const KeyInfo&) { return ""; }
  std::string value(const EvalSets&, const KeyInfo&) { return ""; }
  template <class E>
  requires std::is_enum_v<E> std::string value(const std::vector<E>&, const KeyInfo&) { return ""; }
  std::string value(const std::vector<OptimizerGroup>&, const KeyInfo&) { return ""; }
  std::string value(const std::vector<TokenName>&, const KeyInfo&) { return ""; }
  std::string value(const ColumnNames&, const KeyInfo&) { return ""; }
  std::string value(const std::vector<int64_t>&, const KeyInfo&) { return ""; }
  template <class T>
  std::string value(const ModuleValues<T>&, const KeyInfo&) {
    return "";
  }
  std::string value(const std::vector<double>&, const KeyInfo&) { return ""; }
  std::string value(const std::vector<std::string>&, const KeyInfo& info) {
    if (std::string_view(info.help).starts_with("modules trained whole"))
      return draw_.of<std::string>(
          {"[\"embed_tokens\"]", "[\"lm_head\", \"norms\"]", "[\"embed_tokens\", \"lm_head\", \"norms\"]"});
    const bool directories = std::string_view(info.help).starts_with("directories");
    return directories ? "[\"swap\"]" : std::string_view(info.help).starts_with("answered") ? "[\"Hi\"]" : "";
  }
  template <class E>
  requires std::is_enum_v<E> std::string value(E, const KeyInfo&) {
    const auto& all = EnumNames<E>::kAll;
    return "\"" +
           std::string(all[static_cast<size_t>(draw_.below(static_cast<int64_t>(std::size(all))))].name) +
           "\"";
  }
  template <class T>
  std::string value(const std::optional<T>&, const KeyInfo& info) {
    return draw_.one_in(4) ? "\"auto\"" : value(T{}, info);
  }

  Draw& draw_;
  int64_t global_batch_ = TrainConfig().global_batch;
};

ModelSpec draw_model(Draw& draw) {
  if (draw.one_in(4)) return smollm2_135m();
  if (draw.one_in(4)) return llama_8b();
  const int64_t head_dim = 2 * draw.number(1, 128), kv_heads = draw.number(1, 8);
  const int64_t heads = kv_heads * draw.number(1, 16);
  ModelSpec spec = make_spec({8 * draw.number(1, 2048), 8 * draw.number(1, 8192), draw.number(1, 128), heads,
                              kv_heads, head_dim, draw.number(8, 300'000)},
                             draw.one_in(2));
  const int64_t every = draw.number(1, 8);
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    AttentionSpec& attention = spec.layers[static_cast<size_t>(i)].attention();
    if (i % every == 0 && draw.one_in(2)) attention.window = 4096;
    attention.rope = i % every != 1 ? 0 : AttentionSpec::kNoRope;
  }
  return spec;
}

Machine draw_machine(Draw& draw, bool gpu) {
  Machine machine = cpu_machine(draw.number(1, 4096));
  machine.cores = static_cast<int>(draw.number(1, 256));
  if (draw.one_in(2)) machine.instructions = Instructions::kAvx512Bf16;
  if (gpu) machine.gpus.push_back(built_in_gpu("H100"));
  if (gpu) machine.gpus.front().memory_bytes = draw.number(4, 192) * kGiB;
  if (draw.one_in(4)) machine.host_available = machine.host_memory / 2;
  return machine;
}

World draw_world(Draw& draw) {
  if (draw.one_in(2)) return {};
  const int nodes = static_cast<int>(draw.number(1, 8)), each = static_cast<int>(draw.number(1, 8));
  return {nodes * each, nodes, draw.one_in(2)};
}

struct Tried {
  int64_t planned = 0, refused = 0, not_legal = 0;
  int64_t most_bytes = 0, most_allocated = 0;
};

// What a plan is made from; stays in its place.
struct Drawn {
  Drawn(Draw& draw, const Config& config)
      : spec(draw_model(draw)),
        gpu(draw.one_in(2)),
        node(draw_machine(draw, gpu)),
        world((add_disks(draw, config), draw_world(draw))),
        purpose(draw.one_in(4) ? static_cast<PlanPurpose>(draw.below(4)) : PlanPurpose::kTrain),
        compare(draw.one_in(10)) {
    spec.model_type = "llama";  // peft has default modules for it
    if (trains_adapter(config)) adapter = configured_adapter(spec, config);
    const AdapterSpec* const lora = adapter ? &*adapter : nullptr;
    const DType dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
    layout = make_layout(spec, lora, dtype, base_encoding(config.model, spec.stored, lora != nullptr));
    machine = share_of_machine(node, world.ranks_per_node());
  }
  Drawn(const Drawn&) = delete;
  Drawn& operator=(const Drawn&) = delete;

  PlanInputs inputs(const Config& config) const {
    return {
        config, spec,   adapter ? &*adapter : nullptr, layout, gpu ? DeviceType::kCuda : DeviceType::kCpu, {},
        {},     nullptr};
  }

  ModelSpec spec;
  bool gpu;
  Machine node, machine;  // of all ranks of a machine, and of one
  World world;
  PlanPurpose purpose;
  bool compare;
  std::optional<AdapterSpec> adapter = {};
  ModelLayout layout = {};

 private:
  void add_disks(Draw& draw, const Config& config) {
    for (const std::string& path : config.offload.paths)
      node.disks.push_back({path, draw.number(1, 8192) * kGiB, 3e9, 2e9, 4e9});
  }
};

// Plans as `lmlaunch plan` does, and every tenth as --compare.
void plan_once(Draw& draw, const Config& config, bool* planned) {
  const Drawn drawn(draw, config);
  const auto& [machine, world, purpose] = std::tie(drawn.machine, drawn.world, drawn.purpose);
  const PlanInputs inputs = drawn.inputs(config);
  if (drawn.compare && purpose == PlanPurpose::kTrain) {
    refuse_idle_ranks(world, config);
    EXPECT_FALSE(print_alternatives(best_alternatives(alternatives(inputs, machine, world)), 16).empty());
    return;
  }
  const Plan plan = make_plan(inputs, machine, world, purpose);
  *planned = true;
  EXPECT_FALSE(print_plan(plan).empty());
  EXPECT_FALSE(plan_json(plan).empty());
  for (const Tier& tier : plan.tiers) EXPECT_GE(tier.bytes, 0);
  for (const ClassBytes& row : plan.classes) EXPECT_GE(row.bytes, 0) << row.name;
  if (purpose != PlanPurpose::kTrain) return;
  EXPECT_TRUE(std::isfinite(plan.step_seconds) && plan.step_seconds > 0) << plan.step_seconds;
  step_lanes(inputs, machine, plan);
  if (world.ranks > 1) print_scaling(estimate_scaling(inputs, drawn.node, world), plan);
}

std::vector<std::string> draw_settings(Draw& draw) {
  DrawKeys keys(draw);
  Config defaults;
  visit_config(defaults, keys);
  return std::move(keys.settings);
}

Config configured(const std::vector<std::string>& settings) {
  return parse_config("[model]\npath = \"m\"\n[data]\ntrain = \"d\"\n", "c.toml", settings);
}

void try_one(uint64_t number, Tried& tried) {
  Draw draw(number);
  const std::vector<std::string> settings = draw_settings(draw);
  std::string command;
  for (const std::string& setting : settings) command += " " + setting;
  SCOPED_TRACE(fmt::format("LM_SEED={} LM_PLANS=1:{}", number, command));
  const int64_t before = live_bytes, allocated = all_bytes;
  peak_bytes = before;
  bool planned = false, legal = false;
  try {
    const Config config = configured(settings);
    legal = true;
    plan_once(draw, config, &planned);
    ++tried.planned;
  } catch (const Error& error) {
    EXPECT_NE(error.code(), Exit::kInternal) << error.report();
    ++(legal ? tried.refused : tried.not_legal);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  const int64_t peak = peak_bytes - before, work = all_bytes - allocated;
  EXPECT_LE(peak, kMostBytes);
  tried.most_bytes = std::max(tried.most_bytes, peak);
  if (work > tried.most_allocated && std::getenv("LM_PLANS") != nullptr)
    std::printf("seed %lu allocates %.0f MiB, at most %.1f at once:%s\n", number,
                static_cast<double>(work) / kMiB, static_cast<double>(peak) / kMiB, command.c_str());
  tried.most_allocated = std::max(tried.most_allocated, work);
}

TEST(RandomPlans, AreMadeOrRefusedWithinBounds) {
  const uint64_t first = seed();
  std::printf("LM_SEED=%lu\n", first);
  Tried tried;
  for (uint64_t i = 0; tried.planned + tried.refused < how_many() && !HasFailure(); ++i)
    try_one(first + i, tried);
  std::printf("%ld planned, %ld do not fit, %ld are not legal; at most %.1f MiB at once, %.0f MiB in all\n",
              tried.planned, tried.refused, tried.not_legal, static_cast<double>(tried.most_bytes) / kMiB,
              static_cast<double>(tried.most_allocated) / kMiB);
}

// What a search ends with before it looks at micro-batches.
void expect_no_fit_without_room(const PlanInput& in, const NumericsPlan& numerics, int64_t* fitting) {
  const int64_t batch = ceil_div(in.config.train.global_batch, in.world.ranks);
  for (const TierChoice& tiers : tier_candidates(in)) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      NumericsPlan n = numerics;
      n.recompute = recompute;
      bool fits = false;
      for (int64_t m = 1; m <= std::min<int64_t>(batch, 64) && !fits; m = m * 3 / 2 + 1) {
        n.micro_batch = m;
        n.micro_batches = ceil_div(batch, m);
        fits = fits_capacity(place(in, {n, {}, {}}, tiers));
      }
      *fitting += fits ? 1 : 0;
      EXPECT_TRUE(!fits || has_room_for_one(in, n, tiers, 1));
    }
  }
}

TEST(RandomPlans, NoMicroBatchFitsWhereOneAloneDoesNot) {
  const uint64_t first = seed();
  std::printf("LM_SEED=%lu\n", first);
  int64_t tried = 0, fitting = 0;
  for (uint64_t i = 0; tried < how_many() / 2 && !HasFailure(); ++i) {
    Draw draw(first + i);
    SCOPED_TRACE(fmt::format("LM_SEED={} LM_PLANS=2", first + i));
    try {
      const Config config = configured(draw_settings(draw));
      const Drawn drawn(draw, config);
      const PlanInput in{drawn.inputs(config), drawn.machine, drawn.world, PlanPurpose::kTrain};
      const NumericsPlan numerics = choose_numerics(in).numerics;
      ++tried;
      expect_no_fit_without_room(in, numerics, &fitting);
    } catch (const Error& error) {
      EXPECT_NE(error.code(), Exit::kInternal) << error.report();
    }
  }
  EXPECT_GT(fitting, tried);  // of some ten placements of each
}

// The list of a step of many micro-batches takes more than a large micro-batch does.
TEST(RandomPlans, TheShortListOfLargeMicroBatchesFits) {
  Case c{.config = configured({"train.global_batch=262144", "data.max_length=16"})};
  c.machine.host_memory = 6 * kGiB;
  const Plan plan = c.plan();
  EXPECT_EQ(plan.numerics.micro_batch, 128);
  c.config.train.micro_batch = 1;
  EXPECT_THROW(c.plan(), Error);
}

// 4140 has 36 divisors, 4139 has 2; the state alone is more than there is.
TEST(RandomPlans, MicroBatchesWithoutRoomAreNotTriedOneByOne) {
  const auto work = [](const char* batch) {
    Case c{.config = configured({batch, "data.max_length=7"}), .spec = llama_8b(), .machine = cpu_machine(4)};
    const int64_t allocated = all_bytes;
    EXPECT_THROW(c.plan(), Error);
    return static_cast<double>(all_bytes - allocated) / kMiB;
  };
  const double few = work("train.global_batch=4139"), many = work("train.global_batch=4140");
  std::printf("%.0f MiB, %.0f MiB\n", few, many);
  EXPECT_LE(many, 1.5 * few);
}

// Work does not grow with what a key asks for.
TEST(RandomPlans, LargeNumbersCostNoMoreThanSmallOnes) {
  const std::vector<std::vector<std::string>> asked = {
      {"train.global_batch=8"},
      {"train.global_batch=60000"},
      {"train.global_batch=1000000"},
      {"train.global_batch=8000000"},
      {"train.global_batch=4140", "data.max_length=7"},
      {"data.max_length=16777216", "train.global_batch=1024"},
      {"data.max_length=16777216", "train.global_batch=1024", "data.packing=true"},
      {"train.micro_batch=1000000", "train.global_batch=1000000", "data.packing=true"},
      {"train.micro_batch=1", "train.global_batch=50000", "data.max_length=2", "train.update=in_backward"},
      {"train.micro_batch=1", "train.global_batch=1000", "train.update=in_backward", "offload.paths=d"},
      {"offload.optimizer=nvme", "offload.weights=nvme", "offload.activations=nvme", "offload.paths=d",
       "train.recompute=block", "train.micro_batch=1", "train.global_batch=60000"},
      {"offload.optimizer=nvme", "offload.paths=d", "io.tile=40KiB"}};
  for (const bool gpu : {false, true}) {
    for (const std::vector<std::string>& keys : asked) {
      const Config config = configured(keys);
      Case c{.config = config, .spec = llama_8b(), .machine = gpu ? gpu_machine("H100") : cpu_machine(64)};
      c.machine.disks.push_back({"d", int64_t{1} << 40, 3e9, 2e9, 4e9});
      c.device = gpu ? DeviceType::kCuda : DeviceType::kCpu;
      const int64_t before = live_bytes, allocated = all_bytes;
      peak_bytes = before;
      std::string said = "planned";
      try {
        c.plan();
      } catch (const Error& error) {
        EXPECT_NE(error.code(), Exit::kInternal) << error.report();
        said = error.what();
      }
      const double peak = static_cast<double>(peak_bytes - before) / kMiB,
                   work = static_cast<double>(all_bytes - allocated) / kMiB;
      // A refusal looks at some 40 ways to train, for each at up to 7 micro-batches.
      EXPECT_LE(work, 5500) << keys.front();
      std::printf("%s %s: at most %.1f MiB at once, %.0f in all; %s\n", gpu ? "GPU" : "CPU",
                  keys.front().c_str(), peak, work, said.substr(0, 90).c_str());
      EXPECT_LE(peak, 200) << keys.front();
    }
  }
}

}  // namespace
}  // namespace lm
