// The two halves of a plan, and what it is for.
#include <gtest/gtest.h>

#include <algorithm>

#include "shapes.h"

namespace lm {
namespace {

// LoRA trains nothing in the embedding and the head: their updates have no tile.
TEST(Purpose, OfTrainingCountsTheLinkOfUpdatesByTheCpuForEveryTileOnce) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.train.method = Method::kLora;
  c.config.offload.optimizer = OffloadTier::kHost;
  const AdapterSpec lora = adapter_r16();
  const ModelLayout layout = c.layout(&lora);
  const Plan plan = make_plan({c.config, c.spec, &lora, layout, c.device, {}, true}, c.machine);
  // Gradients in fp32 and weights in bf16 come, weights go back.
  const auto bytes = static_cast<double>(layout.flat_elements * (4 + 2 + 2));
  EXPECT_DOUBLE_EQ(plan.timeline.link_bytes, bytes);
}

TEST(Purpose, EvaluationAndGenerationNeedWeightsAndTheirArenaAlone) {
  for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
    for (const Method method : {Method::kFull, Method::kLora}) {
      Case c{.spec = llama_1b(), .machine = gpu_machine("H100"), .device = device};
      c.config.train.method = method;
      const Plan training = c.plan();
      for (const PlanPurpose purpose : {PlanPurpose::kEvaluate, PlanPurpose::kGenerate}) {
        c.purpose = purpose;
        const Plan plan = c.plan();
        EXPECT_EQ(plan.numerics, training.numerics);  // the loss on held-out data is the run's to the bit
        EXPECT_EQ(class_bytes(plan, "weights"), class_bytes(training, "weights"));
        EXPECT_EQ(class_bytes(plan, "frozen weights"), class_bytes(training, "frozen weights"));
        for (const char* none : {"gradients", "master", "first moment", "second moment", "activations"})
          EXPECT_EQ(class_bytes(plan, none), -1) << none;
        EXPECT_LE(plan.arena.bytes, training.arena.bytes);
        EXPECT_EQ(class_bytes(plan, "embedding rows"), 0);
      }
    }
  }
}

// Where training has room for fewer sequences at once than an evaluation has.
TEST(Purpose, EvaluationHasTheMicroBatchOfItsTraining) {
  Case c{.spec = llama_1b()};
  c.config.train.global_batch = 64;
  c.config.data.max_length = 512;
  for (int gib = 20; gib < 40; ++gib) {
    c.machine = cpu_machine(gib);
    c.purpose = PlanPurpose::kTrain;
    const NumericsPlan training = c.draft().numerics;
    c.purpose = PlanPurpose::kEvaluate;
    EXPECT_EQ(c.draft().numerics, training) << gib;
  }
}

TEST(Purpose, GenerationFitsWhereTrainingDoesNot) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(4)};
  c.config.train.global_batch = c.config.train.micro_batch.emplace(1);
  c.config.data.max_length = 256;
  EXPECT_FALSE(c.draft().fits);
  c.purpose = PlanPurpose::kGenerate;
  const Plan plan = c.plan();
  EXPECT_LT(plan.peak.host, (int64_t{31} << 30) / 10);  // 2.3 GiB of weights
  // A smaller machine is refused, and told of what there is to turn: nothing of training.
  c.machine = cpu_machine(2);
  try {
    c.plan();
    FAIL() << "fits";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("weights: "), std::string::npos) << error.what();
    EXPECT_NE(error.text().next.find("offload.paths"), std::string::npos) << error.text().next;
    EXPECT_EQ(error.text().next.find("lora"), std::string::npos) << error.text().next;
  }
}

TEST(Purpose, TextsThatAreGeneratedTogetherHaveACacheEach) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64), .purpose = PlanPurpose::kGenerate};
  c.config.data.max_length = 512;
  for (const int64_t texts : {1, 4, 100}) {
    c.config.train.global_batch = c.config.train.micro_batch.emplace(texts);
    const Plan plan = c.plan();
    EXPECT_EQ(plan.cache_texts, texts);
    EXPECT_EQ(class_bytes(plan, "key-value cache"), texts * 16 * 512 * 2 * 8 * 64 * 2);
    EXPECT_GE(plan.micro_tokens, texts);
  }
}

// Of a prompt so many tokens pass at once; what grows with the text is its cache and the table of angles.
TEST(Purpose, GenerationHasRoomForItsTextAndForAPartOfThePromptAtOnce) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64), .purpose = PlanPurpose::kGenerate};
  c.config.train.global_batch = c.config.train.micro_batch.emplace(1);
  std::vector<Plan> plans;
  for (const int64_t length : {2, 512, 1024, 65536}) {
    c.config.data.max_length = length;
    plans.push_back(c.plan());
    EXPECT_EQ(class_bytes(plans.back(), "key-value cache"), 16 * length * 2 * 8 * 64 * 2) << length;
  }
  EXPECT_LT(plans[0].arena.bytes, plans[1].arena.bytes);
  EXPECT_EQ(plans[1].arena.bytes, plans[3].arena.bytes);
  const auto grown = [&](const char* name) {
    return class_bytes(plans[3], name) - class_bytes(plans[2], name);
  };
  EXPECT_EQ(plans[3].peak.host - plans[2].peak.host, grown("key-value cache") + grown("tables"));
}

// The samples of a training run have at most so many tokens, and a run without them has no cache.
TEST(Purpose, TrainingHasRoomForItsSamples) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  c.config.data.max_length = 4096;
  c.config.train.global_batch = c.config.train.micro_batch.emplace(1);
  EXPECT_EQ(class_bytes(c.plan(), "key-value cache"), -1);
  c.config.train.sample_prompts = {"hello"};
  EXPECT_EQ(class_bytes(c.plan(), "key-value cache"), 16 * kSamplePositions * 2 * 8 * 64 * 2);
  c.config.data.max_length = 100;
  EXPECT_EQ(class_bytes(c.plan(), "key-value cache"), 16 * 100 * 2 * 8 * 64 * 2);
  // However little memory there is, the numerics are those of a run without samples.
  c.config.train.micro_batch.reset();
  c.config.train.global_batch = 64;
  for (int gib = 20; gib < 40; ++gib) {
    c.machine = cpu_machine(gib);
    c.config.train.sample_prompts = {"hello"};
    const NumericsPlan with = c.draft().numerics;
    c.config.train.sample_prompts.clear();
    EXPECT_EQ(with, c.draft().numerics) << gib;
  }
}

// Scored answers are generated several together, in training and in an evaluation.
TEST(Purpose, EvaluationsHaveRoomForScoredAnswers) {
  for (const PlanPurpose purpose : {PlanPurpose::kTrain, PlanPurpose::kEvaluate}) {
    Case c{.spec = llama_1b(), .machine = cpu_machine(64), .purpose = purpose};
    c.config.data.max_length = 4096;
    c.config.train.global_batch = c.config.train.micro_batch.emplace(1);
    EXPECT_EQ(class_bytes(c.plan(), "key-value cache"), -1);
    c.config.eval.generate.data = {"asked.jsonl"};
    const int64_t token = 16 * 2 * 8 * 64 * 2;
    EXPECT_EQ(c.plan().cache_texts, kScoredTexts);
    EXPECT_EQ(class_bytes(c.plan(), "key-value cache"), kScoredTexts * kSamplePositions * token);
    // A batch of texts has to fit the micro-batch's tables.
    c.config.data.max_length = 12;
    EXPECT_EQ(c.plan().cache_texts, 3);
    EXPECT_EQ(class_bytes(c.plan(), "key-value cache"), 3 * 12 * token);
  }
  // However little memory there is, the numerics are those of a run without them.
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  c.config.train.global_batch = 64;
  for (int gib = 20; gib < 40; gib += 4) {
    c.machine = cpu_machine(gib);
    c.config.eval.generate.data = {"asked.jsonl"};
    const NumericsPlan with = c.draft().numerics;
    c.config.eval.generate.data.clear();
    EXPECT_EQ(with, c.draft().numerics) << gib;
  }
}

// With too little memory for the weights they pass through slots; offload.* of the other classes is nobody's.
TEST(Purpose, WeightsOfAnEvaluationMayLiveOnDisk) {
  Case c{.spec = llama_8b(), .machine = cpu_machine(12), .purpose = PlanPurpose::kEvaluate};
  c.config.data.max_length = 256;
  c.config.offload.paths = {"/scratch"};
  c.config.offload.optimizer = c.config.offload.gradients = OffloadTier::kNvme;
  c.machine.disks = {{.path = "/scratch", .free_bytes = 1LL << 40}};
  const Plan plan = c.plan();
  EXPECT_GT(plan.placement.pool(Pool::kWeights).off_device_bytes(TierId::kNvme), 0);
  for (const Pool none : {Pool::kOptimizer, Pool::kGradients, Pool::kActivations})
    EXPECT_EQ(plan.placement.pool(none).slots, 0) << pool_name(none);
}

TEST(Numerics, AreKeptAsRecordedWhateverTheMachineHas) {
  Case c{.machine = cpu_machine(64)};
  c.machine.libraries = "LibTorch 2.11.0";
  c.config.train.global_batch = 16;
  c.config.data.max_length = 512;
  const NumericsPlan recorded = parse_numerics(numerics_json(c.plan().numerics), "numerics.json");
  EXPECT_EQ(recorded.micro_batch, 4);
  EXPECT_EQ(recorded.libraries, "LibTorch 2.11.0");
  Case later = c;
  later.machine = cpu_machine(2);
  later.machine.libraries = "LibTorch 2.12.0";
  later.machine.cores = 7;
  later.machine.instructions = Instructions::kAvx2;
  const NumericsPlan anew = later.draft().numerics;
  EXPECT_NE(anew.threads, recorded.threads);
  EXPECT_NE(anew.micro_batch, recorded.micro_batch);
  later.recorded = &recorded;
  const Plan plan = later.draft();
  EXPECT_EQ(plan.numerics, c.plan().numerics);
  // What is not as it was is said.
  const auto said = std::ranges::find(plan.choices, "kernels", &Choice::key);
  ASSERT_NE(said, plan.choices.end());
  EXPECT_NE(said->reason.find("losses differ"), std::string::npos);
  const auto libraries = std::ranges::find(plan.choices, "libraries", &Choice::key);
  ASSERT_NE(libraries, plan.choices.end());
  EXPECT_EQ(libraries->value, "LibTorch 2.12.0");
  EXPECT_NE(libraries->reason.find("began with LibTorch 2.11.0"), std::string::npos);
  // Who knows no versions, as the CLI process, says nothing of them.
  later.machine.libraries = "";
  const Plan of_the_cli = later.draft();
  EXPECT_EQ(std::ranges::find(of_the_cli.choices, "libraries", &Choice::key), of_the_cli.choices.end());
  // Recomputation changes no bit and may be asked for.
  later.config.train.recompute = Recompute::kBlock;
  EXPECT_TRUE(later.draft().numerics.recompute.whole());
  EXPECT_EQ(later.draft().numerics.micro_batch, recorded.micro_batch);
}

// Sums keep their order when as many ranks are spread otherwise; another number of ranks has another.
TEST(Numerics, KeepWhoseGradientsAreAddedUpFirst) {
  Case c;
  c.config.train.global_batch = 24;
  c.world = {.ranks = 6, .nodes = 2};
  const NumericsPlan recorded = parse_numerics(numerics_json(c.draft().numerics), "numerics.json");
  EXPECT_EQ(recorded.machine_ranks, 3);
  c.world.by_machine = false;
  EXPECT_FALSE(c.draft().numerics.two_levels());
  c.recorded = &recorded;
  for (const int nodes : {1, 2, 3, 6}) {
    c.world = {.ranks = 6, .nodes = nodes};
    const Plan plan = c.draft();
    EXPECT_EQ(plan.numerics.machine_ranks, 3) << nodes;
    const auto said = std::ranges::find(plan.choices, "ranks of a machine", &Choice::key);
    EXPECT_EQ(said != plan.choices.end(), nodes != 2) << nodes;
  }
  c.world = {.ranks = 8, .nodes = 2};
  EXPECT_EQ(c.draft().numerics.machine_ranks, 4);
  std::string damaged = numerics_json(recorded);
  damaged.replace(damaged.find("\"machine_ranks\": 3"), 18, "\"machine_ranks\": 4");
  EXPECT_THROW(parse_numerics(damaged, "numerics.json"), Error);
}

TEST(Sizes, OfTheGemmLibrarysCodeAreThoseOfTheProcessor) {
  Case c{.machine = cpu_machine(64)};
  c.machine.instructions = Instructions::kAvx512Bf16;
  const Plan avx512 = c.plan();
  c.machine.instructions = Instructions::kAmx;
  const Plan amx = c.plan();
  const int64_t shapes = avx512.gemm_shapes;
  ASSERT_GT(shapes, 0);
  EXPECT_EQ(amx.gemm_shapes, shapes);
  for (const Plan* plan : {&avx512, &amx}) EXPECT_EQ(class_bytes(*plan, "GEMM code"), shapes * (920 << 10));
  // Without instructions for bf16 the products are ours.
  for (const Instructions less :
       {Instructions::kAvx2, Instructions::kAvx512Core, Instructions::kAvx512Vbmi}) {
    c.machine.instructions = less;
    const Plan own = c.plan();
    EXPECT_EQ(class_bytes(own, "GEMM code"), -1);
    EXPECT_EQ(class_bytes(own, "GEMM panels"), own.numerics.threads * ((440 << 10) + 64));
    EXPECT_FALSE(own.numerics.round_rows);
  }
  EXPECT_EQ(class_bytes(avx512, "GEMM panels"), -1);
  EXPECT_TRUE(avx512.numerics.round_rows);
}

TEST(Numerics, AreRecordedWholeAndDamageIsRefused) {
  for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
    Case c{.machine = gpu_machine("H200"), .device = device};
    c.config.train.gradients = GradientDType::kBF16;
    c.config.train.recompute = Recompute::kBlock;
    c.config.run.threads = 5;
    if (device == DeviceType::kCuda) c.config.model.products = Products::kTF32;
    const NumericsPlan planned = c.plan().numerics;
    const std::string text = numerics_json(planned);
    const NumericsPlan read = parse_numerics(text, "numerics.json");
    c.recorded = &read;
    EXPECT_EQ(c.plan().numerics, planned);
    for (const char* name :
         {"\"micro_batch\"", "\"row_chunk\"", "\"threads\"", "\"kernel_set\"", "\"round_rows\""}) {
      std::string damaged = text;
      damaged.replace(damaged.find(name) + 1, 3, "xxx");
      EXPECT_THROW(parse_numerics(damaged, "numerics.json"), Error) << name;
    }
    for (const char* number : {"1e300", "2.5", "true", "18446744073709551615", "0", "1073741825"}) {
      std::string damaged = text;
      const size_t at = damaged.find(':', damaged.find("\"micro_batch\"")) + 1;
      damaged.replace(at, damaged.find(',', at) - at, number);
      EXPECT_THROW(parse_numerics(damaged, "numerics.json"), Error) << number;
    }
    EXPECT_THROW(parse_numerics("{", "numerics.json"), Error);
    EXPECT_THROW(parse_numerics("[]", "numerics.json"), Error);
  }
}

}  // namespace
}  // namespace lm
