// What a step asks of a GPU, counted, since time cannot be measured on the emulator: how often the host
// waits, what it copies from pageable memory, what is allocated once the first step is over, what crosses the
// link against what the plan says, and every launch by name against the table of counters.txt.
#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/bytes.h"
#include "kernels/runtime.h"
#include "tests/emulator/emulator.h"
#include "tests/support/family_shapes.h"
#include "tests/support/llama_spec.h"
#include "train/rank.h"
#include "weights/load_store.h"

namespace lm {
namespace {

constexpr int64_t kLength = 64;  // tokens of a sequence, one per micro-batch

struct Subject {
  const char* name = "";
  bool lora = false;
  int64_t layers = 2, micro_batches = 2;
  bool recompute = false;
  OffloadTier optimizer = OffloadTier::kNone, gradients = OffloadTier::kNone, weights = OffloadTier::kNone,
              activations = OffloadTier::kNone;
  std::optional<bool> update_on_host = {};
  UpdateTime update = UpdateTime::kAfter;
  double dropout = 0.1;  // of adapters
  int64_t experts = 0;   // 0: an MLP
};

struct Counted {
  emulator::Counters step;
  int64_t aten_temporaries = 0;  // of ATen's allocator
  bool ahead = false;            // it was enqueued before the results of the step before were read
  double planned_link_bytes = 0;
  int64_t routed_waits = 0;  // of several steps
};

StreamView stream() {
  static const StreamView kStream = start_torch(DeviceType::kCuda, 2, true);
  return kStream;
}

int64_t aten_temporaries() {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocation[0].allocated;
}

StepBatches batches_of(const Subject& subject, int64_t vocab) {
  StepBatches out;
  for (int64_t m = 0; m < subject.micro_batches; ++m) {
    Batch batch;
    for (int64_t t = 0; t < kLength; ++t) {
      batch.token.push_back(static_cast<int32_t>((t * 7 + m) % vocab));
      batch.position.push_back(static_cast<int32_t>(t));
      batch.target.push_back(t + 1 < kLength ? static_cast<int32_t>(((t + 1) * 7 + m) % vocab) : -1);
      batch.sample.push_back(static_cast<int32_t>(m));
      out.target_tokens += batch.target.back() >= 0 ? 1 : 0;
    }
    batch.document_start = {0, static_cast<int32_t>(kLength)};
    out.micro.push_back(std::move(batch));
  }
  return out;
}

ModelSpec model_of(const Subject& subject) {
  ModelSpec spec = llama_spec({.layers = subject.layers});
  spec.max_positions = 512;
  if (subject.experts > 0) like_qwen3_moe(spec, subject.experts);
  spec.names.experts = "mlp.experts";
  return spec;
}

bool moves(const Subject& subject) {
  const OffloadTier tiers[] = {subject.optimizer, subject.gradients, subject.weights, subject.activations};
  return std::any_of(std::begin(tiers), std::end(tiers),
                     [](OffloadTier h) { return h != OffloadTier::kNone; });
}

Config config_of(const Subject& subject) {
  Config config;
  config.model.dtype = ModelDType::kBF16;
  config.data.max_length = kLength;
  config.train.method = subject.lora ? Method::kLora : Method::kFull;
  config.train.micro_batch = 1;
  config.train.global_batch = subject.micro_batches;
  // The plan's choice is to keep everything, outputs of norms too, where nothing moves.
  config.train.recompute = subject.recompute ? Recompute::kBlock
                           : moves(subject)  ? Recompute::kNone
                                             : Recompute::kAuto;
  config.train.update = subject.update;
  config.optimizer.threads = 2;
  config.offload.optimizer = subject.optimizer;
  config.offload.gradients = subject.gradients;
  config.offload.weights = subject.weights;
  config.offload.activations = subject.activations;
  return config;
}

// The least device memory that the subject fits into: with more the plan would keep on the device what it
// can.
Budget least_memory(Config config, const ModelSpec& spec, const AdapterSpec* adapter,
                    const ModelLayout& layout, const Machine& machine, const Subject& subject) {
  int64_t none = 0, fits = 4 * kGiB;
  while (fits - none > 4 * kKiB) {
    const int64_t middle = (none + fits) / 2;
    config.offload.device_memory = {.bytes = middle};
    const Plan plan =
        draft_plan({config, spec, adapter, layout, DeviceType::kCuda, {}, subject.update_on_host}, machine);
    (plan.fits ? fits : none) = middle;
  }
  return {.bytes = fits};
}

// `steps` after the second, all together; more than one: with what they leave to later ones.
Counted count(const Subject& subject, int64_t steps = 1) {
  const ModelSpec spec = model_of(subject);
  Config config = config_of(subject);
  AdapterSpec lora{
      .r = 4,
      .alpha = 8,
      .rslora = false,
      .dropout = subject.dropout,
      .targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "mlp.down_proj"}};
  // Pairs of experts have none.
  if (subject.experts > 0 && subject.dropout == 0)
    lora.targets.insert(lora.targets.end(), {"experts.gate_up_proj", "experts.down_proj"});
  const AdapterSpec* const adapter = subject.lora ? &lora : nullptr;
  const ModelLayout layout = make_layout(spec, adapter, DType::kBF16);
  Machine machine;
  machine.cores = 2;
  machine.gpus.push_back(built_in_gpu("H100"));
  if (moves(subject))
    config.offload.device_memory = least_memory(config, spec, adapter, layout, machine, subject);
  const Plan plan =
      make_plan({config, spec, adapter, layout, DeviceType::kCuda, {}, subject.update_on_host}, machine);
  Rank rank({.spec = spec,
             .layout = layout,
             .adapter = adapter,
             .optimizer = config.optimizer,
             .plan = plan,
             .seed = 1,
             .max_length = kLength,
             .tokens_per_step = kLength * subject.micro_batches,
             .max_grad_norm = 1,
             .swap_paths = {{std::filesystem::temp_directory_path().string(), 1}}},
            stream());
  const LoadSetup load{spec, layout, DType::kBF16, stream(), 1};
  initialise_weights(load, 1, rank.weights());
  if (subject.lora) initialise_adapter(load, 1, rank.weights());
  rank.weights_ready();
  const StepBatches batches = batches_of(subject, spec.vocab);
  for (int64_t step = 1; step <= 2; ++step) rank.step().run(batches, step, 1e-3);
  synchronize(stream());
  Counted out;
  if (steps > 1) rank.step().flush();
  out.ahead = rank.step().runs_ahead();
  if (steps == 1 && out.ahead) {
    rank.step().start(batches, 2, 1e-3);  // the counted step is enqueued while this one's results are unread
    synchronize(stream());
  }
  const int64_t temporaries = aten_temporaries();
  emulator::reset_counters();
  if (steps == 1) rank.step().start(batches, 3, 1e-3);
  for (int64_t step = 3; steps > 1 && step < 3 + steps; ++step)
    out.routed_waits += rank.step().run(batches, step, 1e-3).routed.waits;
  if (steps > 1) rank.step().flush();
  out.step = emulator::counters();
  out.aten_temporaries = aten_temporaries() - temporaries;
  synchronize(stream());  // what kernels touched counts when they have run
  out.step.by_name = emulator::counters().by_name;
  out.step.bytes_in_place = emulator::counters().bytes_in_place;
  out.planned_link_bytes = plan.timeline.link_bytes;
  return out;
}

// A step waits neither for itself nor for the one before, which is over here: it only asks whether it is.
TEST(Counters, AResidentStepNeverWaitsAndAllocatesNothing) {
  for (const bool lora : {false, true}) {
    for (const int kind : {0, 1, 2, 3}) {
      Subject subject;
      subject.lora = lora, subject.recompute = kind % 2 == 1, subject.experts = kind < 2 ? 0 : 5;
      if (subject.experts > 0) subject.dropout = 0;
      SCOPED_TRACE(std::string(lora ? "LoRA" : "full") + (subject.recompute ? ", recomputed" : "") +
                   (subject.experts > 0 ? ", experts" : ""));
      const Counted counted = count(subject);
      EXPECT_TRUE(counted.ahead);
      EXPECT_EQ(counted.step.host_waits, 0);
      EXPECT_EQ(counted.step.pageable_copies, 0);
      EXPECT_EQ(counted.step.allocations, 0);
      EXPECT_EQ(counted.step.registrations, 0);
    }
  }
}

// Transfers run ahead of their step by as much as the disk lets them, and the first of some steps finds empty
// slots: what more steps move more is what a step moves.
constexpr int64_t kFewSteps = 4, kMoreSteps = 8;

// With state off the device copies are as many bytes as the plan counts, beside a step's batches and results.
TEST(Counters, TheLinkCarriesThePlansBytes) {
  constexpr UpdateTime kInside = UpdateTime::kInBackward;
  constexpr OffloadTier kHost = OffloadTier::kHost, kNear = OffloadTier::kNone, kDisk = OffloadTier::kNvme;
  const Subject subjects[] = {
      {"optimizer on the host, updated by the CPU", false, 3, 2, false, kHost, kNear, kNear, kNear, true},
      {"optimizer on the host, updated by the GPU", false, 3, 2, false, kHost, kNear, kNear, kNear, false},
      {"optimizer on the host, whoever updates it", false, 3, 2, false, kHost, kNear, kNear, kNear, {}},
      {"optimizer on disk, updated by the GPU", false, 3, 2, false, kDisk, kNear, kNear, kNear, false},
      {"gradients on the host", false, 3, 2, false, kNear, kHost, kNear, kNear, {}},
      {"weights on the host", false, 3, 2, false, kNear, kNear, kHost, kNear, {}},
      {"block inputs on the host", false, 8, 2, true, kNear, kNear, kNear, kHost, {}},
      {"everything on the host", false, 3, 2, true, kHost, kHost, kHost, kHost, {}},
      {"LoRA, weights on the host", true, 3, 2, false, kNear, kNear, kHost, kNear, {}},
      {"in backward, optimizer on host", false, 3, 2, false, kHost, kNear, kNear, kNear, {}, kInside},
      {"in backward, weights on host", false, 3, 2, false, kNear, kNear, kHost, kNear, {}, kInside},
      {"experts, everything on the host",
       false,
       3,
       2,
       true,
       kHost,
       kHost,
       kHost,
       kHost,
       {},
       UpdateTime::kAfter,
       0.1,
       5},
      {"experts, LoRA, weights on the host",
       true,
       3,
       2,
       false,
       kNear,
       kNear,
       kHost,
       kNear,
       {},
       UpdateTime::kAfter,
       0.1,
       5},
  };
  for (const Subject& subject : subjects) {
    SCOPED_TRACE(subject.name);
    const Counted few = count(subject, kFewSteps), more = count(subject, kMoreSteps);
    const auto total = [](const emulator::Counters& c) {
      return c.bytes_to_device + c.bytes_to_host + c.bytes_in_place;
    };
    constexpr double kSteps = kMoreSteps - kFewSteps;
    const double moved = static_cast<double>(total(more.step) - total(few.step)) / kSteps;
    std::printf("%-44s planned %9.0f, moved %9.0f bytes a step, %.1f waits\n", subject.name,
                more.planned_link_bytes, moved,
                static_cast<double>(more.step.host_waits - few.step.host_waits) / kSteps);
    EXPECT_GT(more.planned_link_bytes, 0);
    const double own = 10e3;  // tokens, positions, rows and norms
    EXPECT_LE(moved, more.planned_link_bytes * 1.01 + own);
    EXPECT_GE(moved, more.planned_link_bytes * 0.99);
    EXPECT_EQ(more.step.pageable_copies, 0);
    EXPECT_EQ(more.step.allocations, 0);
  }
}

// The host reads what routers have chosen, and that in registered memory.
TEST(Counters, WhatRoutersChooseComesToRegisteredMemory) {
  Subject subject;
  subject.lora = true, subject.layers = 3, subject.micro_batches = 1, subject.weights = OffloadTier::kHost;
  subject.experts = 256;  // of which 64 tokens meet 40 %
  const Counted counted = count(subject, 2);
  EXPECT_GT(counted.routed_waits, 0);
  EXPECT_EQ(counted.step.pageable_copies, 0);
  EXPECT_EQ(counted.step.allocations, 0);
}

// Times and bytes of an operation in a step, as a sum: per step, per block, per micro-batch, and per block
// and micro-batch.
struct Row {
  int64_t step = 0, block = 0, micro = 0, both = 0;
};
using Rows = std::map<std::string, std::pair<Row, Row>>;  // times, bytes

Rows table_of(bool lora, double dropout = 0.1, int64_t experts = 0) {
  Counted counted[2][2];  // [more layers][more micro-batches]
  for (int l : {0, 1}) {
    for (int m : {0, 1}) {
      Subject subject;
      subject.lora = lora, subject.dropout = dropout, subject.layers = 2 + l, subject.micro_batches = 2 + m;
      subject.experts = experts;
      counted[l][m] = count(subject);
      // As an operation of its own: memory that ATen takes for itself.
      counted[l][m].step.by_name["temporaries of ATen"].times = counted[l][m].aten_temporaries;
    }
  }
  std::set<std::string> names;
  for (const auto& row : counted) {
    for (const Counted& c : row) {
      for (const auto& [name, ignored] : c.step.by_name) names.insert(name);
    }
  }
  Rows out;
  for (const std::string& name : names) {
    const auto row = [&](int64_t emulator::Counters::Name::*field) {
      const auto at = [&](int l, int m) { return counted[l][m].step.by_name[name].*field; };
      Row r;
      r.both = at(1, 1) - at(1, 0) - at(0, 1) + at(0, 0);
      r.block = at(1, 0) - at(0, 0) - 2 * r.both;
      r.micro = at(0, 1) - at(0, 0) - 2 * r.both;
      r.step = at(0, 0) - 2 * r.block - 2 * r.micro - 4 * r.both;
      return r;
    };
    out[name] = {row(&emulator::Counters::Name::times), row(&emulator::Counters::Name::bytes)};
  }
  return out;
}

std::string text_of(const char* method, const Rows& rows) {
  std::ostringstream out;
  for (const auto& [name, row] : rows) {
    char line[300];
    const auto& [times, bytes] = row;
    std::snprintf(line, sizeof line, "%s | %-46s | %3ld %3ld %3ld %3ld | %7ld %7ld %7ld %7ld\n", method,
                  name.c_str(), times.both, times.micro, times.block, times.step, bytes.both, bytes.micro,
                  bytes.block, bytes.step);
    out << line;
  }
  return out.str();
}

std::string kept_table() {
  std::ifstream file(EMULATOR_COUNTERS_TABLE);
  std::string text;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') text += line + "\n";
  }
  return text;
}

// Bytes of a product out [m, n] = a [m, k] b [k, n] (+ out), of bf16.
int64_t product_bytes(int64_t m, int64_t n, int64_t k, bool adds, int64_t of_out = 2) {
  return 2 * (m * k + k * n) + of_out * m * n * (adds ? 2 : 1);
}

// Without dropout, of a layer and micro-batch behind the first: 41 products (50 with each A by itself and
// each scale apart), which read and write 0.96 MB (1.07 MB with the base's product before its adapters'); no
// pass that only scales; the activation once.
TEST(Counters, LoraTakesTheFewestProductsOfALayer) {
  constexpr int64_t kTokens = kLength, kH = 64, kF = 160, kR = 4;
  struct Module {
    int64_t out, in;
    bool residual;
  };
  const Module modules[] = {{64, kH, false}, {32, kH, false}, {32, kH, false}, {kH, 64, true},
                            {kF, kH, false}, {kF, kH, false}, {kH, kF, false}};
  int64_t products = 0, bytes = 0;
  const auto add = [&](int64_t one) { ++products, bytes += one; };
  for (const Module& m : modules) {
    add(product_bytes(kTokens, m.out, kR, m.residual));  // B
    add(product_bytes(kTokens, kR, m.out, false));       // of dy
    add(product_bytes(m.out, kR, kTokens, true, 4));     // dB
  }
  // A's of a matrix together; their gradient goes through a scratch if there are several.
  const std::pair<Module, int64_t> matrices[] = {
      {{128, kH, false}, 3}, {{kH, 64, false}, 1}, {{2 * kF, kH, false}, 2}, {{kH, kF, false}, 1}};
  for (const auto& [m, adapters] : matrices) {
    add(product_bytes(kTokens, m.out, m.in, true));
    add(product_bytes(kTokens, m.in, m.out, true));
    add(product_bytes(kTokens, adapters * kR, m.in, false));
    add(product_bytes(kTokens, m.in, adapters * kR, false));
    add(product_bytes(adapters * kR, m.in, kTokens, adapters == 1, 4));
  }
  ASSERT_EQ(products, 41);
  Rows rows = table_of(true, 0);
  EXPECT_EQ(rows["gemm"].first.both, products);
  EXPECT_EQ(rows["gemm"].second.both, bytes);
  EXPECT_EQ(rows.count("aten::mul.out"), 0U);
  int64_t activations = 0, elementwise = 0;
  for (const auto& [name, row] : rows) {
    if (name.starts_with("gated.cu forward")) activations += row.first.both;
    if (name != "gemm" && !name.starts_with("flash")) elementwise += row.second.both;
  }
  EXPECT_EQ(activations, 1);
  // Before: 731648, of which 82944 were scales and a second activation, and 65536 two norms once more. A's
  // copies and gradients are small.
  std::printf("a layer's elementwise bytes: %ld\n", elementwise);
  EXPECT_LT(elementwise, 731648 - 82944 - 65536 + 30000);
}

// A layer of experts is as many launches as it has products, whatever the number of experts.
TEST(Counters, AllExpertsOfALayerAreAFewLaunches) {
  const std::pair<const char*, int64_t> launches[] = {{"route.cu route", 1},
                                                      {"route.cu list_rows", 1},
                                                      {"expert_products.cu multiply", 4},
                                                      {"expert_products.cu weight_gradient", 2},
                                                      {"rows.cu gather", 3},
                                                      {"experts.cu combine", 2},
                                                      {"experts.cu weigh", 2},
                                                      {"experts.cu router_gradient", 1},
                                                      {"router.cu count_range", 1},
                                                      {"router.cu add_ranges", 1}};
  int64_t gemms = 0;
  for (const int64_t experts : {5, 9}) {
    const Rows rows = table_of(false, 0, experts);
    for (const auto& [prefix, times] : launches) {
      int64_t found = 0;
      for (const auto& [name, row] : rows)
        if (name.starts_with(prefix)) found += row.first.both;
      EXPECT_EQ(found, times) << prefix << ", " << experts << " experts";
    }
    const int64_t all = rows.at("gemm").first.both;
    if (experts == 9) {
      EXPECT_EQ(all, gemms);
    }
    gemms = all;
  }
  EXPECT_EQ(gemms, 9) << "of q, k and v together, of the attention's output and of the router";
}

// So are their pairs' products: of each matrix two forward, and backward three, and one or two for what comes
// from them.
TEST(Counters, AllPairsOfALayerAreAFewLaunches) {
  for (const int64_t experts : {5, 9}) {
    const Rows rows = table_of(true, 0, experts);
    int64_t products = 0, gradients = 0;
    for (const auto& [name, row] : rows) {
      if (name.starts_with("expert_products.cu multiply")) products += row.first.both;
      if (name.starts_with("expert_products.cu weight_gradient")) gradients += row.first.both;
    }
    EXPECT_EQ(products, 4 + 2 * 2 + 4 + 3)
        << experts << " experts: gate_up and down, their pairs, and backward";
    EXPECT_EQ(gradients, 4) << experts << " experts";
  }
}

TEST(Counters, LaunchesAndBytesAreThoseOfTheTable) {
  const std::string now = text_of("full", table_of(false)) + text_of("lora", table_of(true));
  EXPECT_EQ(now, kept_table())
      << "more than in the table is a step backwards; less: write what is printed above into "
      << "tests/emulator/counters.txt";
}

}  // namespace
}  // namespace lm
