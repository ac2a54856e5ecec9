// The plan's arena against the one that a step fills: the same high water, to the byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "base/bytes.h"
#include "kernels/kernels.h"
#include "kernels/runtime.h"
#include "plan/adapter.h"
#include "shapes.h"
#include "tests/support/counts.h"
#include "tests/support/on_emulator.h"
#include "train/rank.h"

namespace lm {
namespace {

constexpr int kThreads = 2;

// Of the executable: arena_test is the CPU's, arena_gpu_test a GPU's.
DeviceType device() {
  return cuda_built() ? DeviceType::kCuda : DeviceType::kCpu;
}

StreamView stream() {
  static const StreamView kStream = start_torch(device(), kThreads, true);
  return kStream;
}

class Arenas : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_built() && cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  }
};

// `documents` of equal length; the first token of the micro-batch alone has no target: as many as there can
// be.
Batch full_batch(int64_t tokens, int64_t documents, int64_t vocab, bool weighted) {
  std::mt19937 random(5);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(vocab) - 1);
  Batch batch;
  const int64_t length = tokens / documents;
  for (int64_t t = 0; t < tokens; ++t) {
    if (t % length == 0) batch.document_start.push_back(static_cast<int32_t>(t));
    batch.token.push_back(token(random));
    batch.position.push_back(static_cast<int32_t>(t % length));
    batch.target.push_back(t == 0 ? -1 : token(random));
    batch.sample.push_back(static_cast<int32_t>(t / length));
    if (weighted) batch.weight.push_back(0.5F);
  }
  batch.document_start.push_back(static_cast<int32_t>(tokens));
  return batch;
}

// Every document has a label, and its last token the scores.
void score_documents(Batch& batch) {
  std::ranges::fill(batch.target, -1);
  for (size_t d = 1; d < batch.document_start.size(); ++d) {
    batch.target[static_cast<size_t>(batch.document_start[d]) - 1] = 0;
    batch.label.push_back(0);
  }
}

struct Tried {
  int64_t planned = 0, used = 0;
};

// One optimizer step, and an evaluation.
Tried run_step(const Case& c, const AdapterSpec* adapter) {
  const ModelLayout layout = c.layout(adapter);
  const Plan plan = make_plan({c.config, c.spec, adapter, layout, device(), c.data}, c.machine);
  Rank rank({.spec = c.spec,
             .layout = layout,
             .adapter = adapter,
             .optimizer = c.config.optimizer,
             .plan = plan,
             .seed = 1,
             .max_length = c.config.data.max_length,
             .tokens_per_step = c.config.train.global_batch * c.config.data.max_length,
             .max_grad_norm = 1,
             .swap_paths = {{std::filesystem::temp_directory_path().string(), 1}},
             .objective = c.spec.scores() ? objectives::single_label : objectives::cross_entropy},
            stream());
  rank.weights_ready();
  StepBatches batches;
  for (int64_t m = 0; m < plan.numerics.micro_batches; ++m) {
    Batch& batch = batches.micro.emplace_back(
        full_batch(plan.micro_tokens, plan.numerics.micro_batch, c.spec.vocab, c.data.weighted));
    if (c.spec.scores()) score_documents(batch);
    batches.target_tokens += std::ranges::count_if(batch.target, [](int32_t target) { return target >= 0; });
  }
  rank.step().run(batches, 1, 1e-3);
  rank.step().evaluate(batches.micro[0]);
  EXPECT_EQ(rank.arena().mark(), 0);
  return {plan.arena.bytes, rank.arena().high_water()};
}

// The emulated GPU takes its time: in the short tier it has every second one of what a test tries in turn.
bool tried_now(int turn) {
  return !on_emulator() || test::full_counts() || turn % 2 == 0;
}

// Micro-batches of 2 x 96 tokens, so many sequences in a step; of fewer on the emulated GPU.
Case case_of(ModelSpec spec, int64_t sequences) {
  Case c{.config = {}, .spec = std::move(spec)};
  c.machine = device() == DeviceType::kCpu ? cpu_machine(kThreads) : gpu_machine("H200");
  c.machine.cores = kThreads;
  c.device = device();
  c.config.data.max_length = on_emulator() ? 32 : 96;
  c.config.train.global_batch = sequences;
  c.config.train.micro_batch = 2;
  return c;
}

TEST_F(Arenas, AreFilledAsPlanned) {
  ModelSpec everything = make_spec({48, 80, 3, 6, 2, 16, 8200}, false);
  add_biases(everything);
  norm_heads(everything);
  const ModelSpec specs[] = {make_spec({64, 128, 2, 4, 2, 16, 300}), make_spec({96, 512, 4, 4, 4, 24, 97}),
                             everything};
  AdapterSpec plain = adapter_r16(), dropping = adapter_r16(), some = adapter_r16();
  dropping.dropout = 0.1;
  some.targets = {"q_proj", "v_proj"};
  int turn = 0, fp32_adapters = 0;
  for (const ModelSpec& spec : specs) {
    for (const AdapterSpec* adapter :
         {static_cast<const AdapterSpec*>(nullptr), static_cast<const AdapterSpec*>(&plain),
          static_cast<const AdapterSpec*>(&dropping), static_cast<const AdapterSpec*>(&some)}) {
      // Two of {no recomputation, recomputation} x {bf16, bf16 gradients, fp32}, one of each policy; every
      // second adapter of a bf16 model is fp32.
      ++turn;
      for (const int kind : {turn % 6, (turn + 3) % 6}) {
        if (!tried_now(kind / 3)) continue;
        Case c = case_of(spec, 4);
        c.data.weighted = turn % 2 == 0;
        c.config.train.recompute = kind % 2 == 0 ? Recompute::kNone : Recompute::kBlock;
        c.config.model.dtype = kind < 4 ? ModelDType::kBF16 : ModelDType::kF32;
        if (kind == 2 || kind == 3) c.config.train.gradients = GradientDType::kBF16;
        if (adapter != nullptr && kind < 2) {
          c.config.train.method = Method::kLora;
          c.config.lora.dtype = LoraDType::kF32;
          ++fp32_adapters;
        }
        const Tried tried = run_step(c, adapter);
        EXPECT_EQ(tried.used, tried.planned) << "vocab " << spec.vocab << ", kind " << kind;
      }
    }
  }
  EXPECT_GT(fp32_adapters, tried_now(1) ? 3 : 1);
}

TEST_F(Arenas, AreFilledAsPlannedByAChunkedHead) {
  AdapterSpec lora = adapter_r16();
  for (const AdapterSpec* adapter :
       {static_cast<const AdapterSpec*>(nullptr), static_cast<const AdapterSpec*>(&lora)}) {
    for (const int64_t vocab : {5000, 17000}) {
      for (int kind = 0; kind < 6; ++kind) {
        if (!tried_now(kind / 2 + (vocab == 5000) + (adapter != nullptr))) continue;
        Case c = case_of(make_spec({64, 128, 2, 4, 2, 16, vocab}, false), 6);
        c.config.train.recompute = kind % 2 == 0 ? Recompute::kNone : Recompute::kBlock;
        c.config.model.dtype = kind < 4 ? ModelDType::kBF16 : ModelDType::kF32;
        if (kind == 2 || kind == 3) c.config.train.gradients = GradientDType::kBF16;
        c.config.offload.paths = {"."};
        c.config.offload.weights = OffloadTier::kNvme;
        c.data.weighted = kind % 3 == 0;
        if (kind == 5) c.config.offload.activations = OffloadTier::kNvme;
        const Plan plan = c.draft();
        ASSERT_GT(plan.placement.head_segments(), 0);
        ASSERT_EQ(plan.placement.group, kind % 2 == 0 ? 1 : 3);
        const Tried tried = run_step(c, adapter);
        EXPECT_EQ(tried.used, tried.planned) << "vocab " << vocab << ", kind " << kind;
      }
    }
  }
}

Case small_case(bool tied) {
  return case_of(make_spec({64, 128, 3, 4, 2, 16, 300}, tied), 12);
}

// What differs in a step from full fine-tuning; LoRA+ and where adapters begin do not.
struct Subject {
  const char* name;
  void (*configure)(Config& config);
  std::vector<int64_t> tokens = {};
  bool scores = false;
};

TEST_F(Arenas, AreFilledAsPlannedByEachMethod) {
  const Subject subjects[] = {
      {"full", [](Config&) {}},
      {"LoRA", [](Config& c) { c.train.method = Method::kLora; }},
      {"rsLoRA", [](Config& c) { c.train.method = Method::kLora, c.lora.rslora = true; }},
      {"DoRA", [](Config& c) { c.train.method = Method::kLora, c.lora.dora = true; }},
      {"biases", [](Config& c) { c.train.method = Method::kLora, c.lora.bias = AdapterBias::kAll; }},
      {"whole modules",
       [](Config& c) {
         c.train.method = Method::kLora, c.lora.also = {"embed_tokens", "norms"};
       }},
      {"tokens", [](Config& c) { c.train.method = Method::kLora; }, {3, 5, 8, 200}},
      {"PiSSA", [](Config& c) { c.train.method = Method::kLora, c.lora.start = LoraStart::kPissa; }},
      {"QLoRA", [](Config& c) { c.train.method = Method::kLora, c.model.quantize = Quantize::kNf4; }},
      {"IA3", [](Config& c) { c.train.method = Method::kIa3; }},
      {"norms", [](Config& c) { c.train.method = Method::kNorms; }},
      {"prefix", [](Config& c) { c.train.method = Method::kPrefix, c.prompt.length = 5; }},
      {"prompt", [](Config& c) { c.train.method = Method::kPrompt, c.prompt.length = 5; }},
      {"scores", [](Config& c) { c.train.objective = ObjectiveChoice::kClassify; }, {}, true},
      {"scores beside LoRA",
       [](Config& c) {
         c.train.objective = ObjectiveChoice::kClassify;
         c.train.method = Method::kLora;
       },
       {},
       true},
  };
  int turn = 0;
  for (const Subject& subject : subjects) {
    ++turn;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      if (!tried_now(turn + (recompute == Recompute::kBlock))) continue;
      Case c = small_case(turn % 2 == 0);
      add_biases(c.spec);
      if (subject.scores)
        set_score_head(c.spec, {.labels = {"bad", "fair", "good"}, .fresh = true}, subject.name);
      c.config.train.recompute = recompute;
      subject.configure(c.config);
      const bool adapts = trains_adapter(c.config);
      AdapterSpec adapter = adapts ? configured_adapter(c.spec, c.config) : AdapterSpec();
      adapter.tokens = subject.tokens;
      const Tried tried = run_step(c, adapts ? &adapter : nullptr);
      EXPECT_EQ(tried.used, tried.planned) << subject.name << ", recompute " << static_cast<int>(recompute);
    }
  }
}

TEST_F(Arenas, AreFilledAsPlannedByQuantizedBases) {
  const AdapterSpec lora = adapter_r16();
  for (const Quantize quantize : {Quantize::kNf4, Quantize::kFp4, Quantize::kInt8}) {
    for (int kind = 0; kind < 8; kind += cuda_built() ? 3 : 1) {  // the emulator takes its time
      Case c = small_case(kind % 2 == 0);
      c.config.train.method = Method::kLora;
      c.config.model.quantize = quantize;
      c.config.model.double_quantize = kind % 4 < 2;
      c.config.train.recompute = kind < 4 ? Recompute::kNone : Recompute::kBlock;
      c.config.model.dtype = kind % 3 == 0 ? ModelDType::kF32 : ModelDType::kBF16;
      if (kind % 4 == 3) {
        c.config.offload.paths = {"."};
        c.config.offload.weights = OffloadTier::kNvme;
      }
      const Tried tried = run_step(c, &lora);
      EXPECT_EQ(tried.used, tried.planned) << "encoding " << static_cast<int>(quantize) << ", kind " << kind;
    }
  }
}

TEST_F(Arenas, AreFilledAsPlannedByAdaptersOfTheVocabularysMatrices) {
  AdapterSpec lora = adapter_r16();
  lora.targets.insert(lora.targets.end(), {"embed_tokens", "lm_head"});
  for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
    Case c = small_case(false);
    c.config.train.method = Method::kLora;
    c.config.train.recompute = recompute;
    const Tried tried = run_step(c, &lora);
    EXPECT_EQ(tried.used, tried.planned) << static_cast<int>(recompute);
  }
}

TEST_F(Arenas, AreFilledAsPlannedByUpdatesInsideBackward) {
  const AdapterSpec lora = adapter_r16();
  int turn = 0;
  for (const AdapterSpec* adapter : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
    for (const Clip clip : {Clip::kGlobal, Clip::kBlock, Clip::kNone}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        if (!tried_now(++turn + (clip == Clip::kBlock))) continue;
        Case c = small_case(turn % 3 == 0);
        if (adapter != nullptr) c.config.train.method = Method::kLora;
        c.config.train.update = UpdateTime::kInBackward;
        c.config.optimizer.clip = clip;
        c.config.train.recompute = recompute;
        const Tried tried = run_step(c, adapter);
        EXPECT_EQ(tried.used, tried.planned)
            << "clip " << static_cast<int>(clip) << ", recompute " << static_cast<int>(recompute) << ", LoRA "
            << (adapter != nullptr);
      }
    }
  }
}

// All six micro-batches pass a block before the next one, or a few do; block inputs may lie on a disk.
TEST_F(Arenas, AreFilledAsPlannedByGroups) {
  const AdapterSpec lora = adapter_r16();
  for (const AdapterSpec* adapter : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
    for (const int64_t micro_batches : {1, 4, 5, 7}) {
      for (const bool inputs_off_device : {false, true}) {
        if (!tried_now(static_cast<int>(micro_batches / 2) + inputs_off_device + (adapter != nullptr)))
          continue;
        Case c = small_case(true);
        if (adapter != nullptr) c.config.train.method = Method::kLora;
        c.config.train.global_batch = 2 * micro_batches;
        c.config.train.recompute = Recompute::kBlock;
        c.config.offload.paths = {"."};
        c.config.offload.weights = OffloadTier::kNvme;
        c.config.offload.activations = inputs_off_device ? OffloadTier::kNvme : OffloadTier::kNone;
        ASSERT_EQ(c.draft().placement.group, micro_batches);
        const Tried tried = run_step(c, adapter);
        EXPECT_EQ(tried.used, tried.planned)
            << micro_batches << " micro-batches, inputs off the device: " << inputs_off_device;
      }
    }
  }
}

// Plans of evaluation and of generation have room for a pass forward alone.
TEST_F(Arenas, AreFilledAsPlannedByAnEvaluation) {
  for (const PlanPurpose purpose : {PlanPurpose::kEvaluate, PlanPurpose::kGenerate}) {
    for (int kind = 0; kind < 4; ++kind) {
      Case c = small_case(kind % 2 == 0);
      c.purpose = purpose;
      c.config.model.dtype = kind < 2 ? ModelDType::kBF16 : ModelDType::kF32;
      const ModelLayout layout = c.layout(nullptr);
      const Plan plan = c.plan();
      Rank rank({.spec = c.spec,
                 .layout = layout,
                 .adapter = nullptr,
                 .optimizer = c.config.optimizer,
                 .plan = plan,
                 .seed = 1,
                 .max_length = c.config.data.max_length},
                stream());
      rank.weights_ready();
      rank.step().evaluate(
          full_batch(plan.micro_tokens, plan.micro_tokens / c.config.data.max_length, c.spec.vocab, false));
      EXPECT_EQ(rank.arena().high_water(), plan.arena.bytes)
          << "purpose " << static_cast<int>(purpose) << ", kind " << kind;
    }
  }
}

}  // namespace
}  // namespace lm
