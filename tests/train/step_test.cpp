#include "train/step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "config/config_names.h"
#include "kernels/runtime.h"
#include "tests/support/family_shapes.h"
#include "tests/support/llama_spec.h"
#include "tests/support/rank_state.h"
#include "train/evaluate.h"
#include "train/rank.h"
#include "weights/load_store.h"

namespace lm {
namespace {

ModelSpec tiny_spec(bool qk_norm, bool biases, bool tied) {
  // Two segments of the vocabulary.
  ModelSpec spec = llama_spec({.hidden = 96, .ffn = 224, .layers = 3, .heads = 6, .vocab = 9000});
  spec.model_type = "qwen3";
  spec.max_positions = 512;
  spec.tied = tied;
  if (biases) add_biases(spec);
  if (qk_norm) norm_heads(spec);
  return spec;
}

Batch batch_of(int64_t documents, int64_t length, int64_t vocab) {
  Batch batch;
  for (int64_t d = 0; d < documents; ++d) {
    batch.document_start.push_back(static_cast<int32_t>(d * length));
    for (int64_t p = 0; p < length; ++p) {
      batch.token.push_back(static_cast<int32_t>((d * 7919 + p * 104729) % vocab));
      batch.position.push_back(static_cast<int32_t>(p));
      batch.sample.push_back(static_cast<int32_t>(d));
    }
  }
  batch.document_start.push_back(static_cast<int32_t>(documents * length));
  for (size_t i = 0; i < batch.token.size(); ++i) {
    const bool last = (static_cast<int64_t>(i) + 1) % length == 0;
    batch.target.push_back(last ? -1 : batch.token[i + 1]);
  }
  return batch;
}

// A rank of a tiny model with fresh weights, planned for two documents of 128 tokens.
struct Fixture {
  Fixture(const ModelSpec& model, bool lora, RecomputeChoice recompute, DType dtype, DType gradients,
          bool round_rows = false, bool weighted = false,
          const Objective& minimised = objectives::cross_entropy, bool keep_norms = false)
      : objective(minimised),
        spec(model),
        layout(make_layout(spec, lora ? &adapter : nullptr, dtype)),
        stream(start_torch(DeviceType::kCpu, 2, true)) {
    plan.numerics.dtype = dtype;
    plan.numerics.gradient_dtype = gradients;
    plan.numerics.row_chunk = 100;
    plan.numerics.recompute = recompute;
    plan.numerics.round_rows = round_rows;
    plan.numerics.threads = 2;
    plan.placement.blocks = std::ssize(layout.blocks);
    plan.placement.optimizer_threads = 2;
    plan.placement.keep_norms = keep_norms;
    plan.micro_tokens = 256;
    plan.step = step_config(spec, layout, plan, plan.micro_tokens, optimizer.clip);
    plan.step.weighted = weighted;
    plan.arena = arena_need({spec, layout, lora ? &adapter : nullptr}, plan.step, 256, 2);
    rank = std::make_unique<Rank>(setup(plan, lora), stream);
    const LoadSetup load{spec, layout, dtype, stream, 1};
    initialise_weights(load, 1, rank->weights());
    if (lora) initialise_adapter(load, 1, rank->weights());
    rank->weights_ready();
  }

  RankSetup setup(const Plan& of, bool lora) {
    return {.spec = spec,
            .layout = layout,
            .adapter = lora ? &adapter : nullptr,
            .optimizer = optimizer,
            .plan = of,
            .seed = 1,
            .max_length = 128,
            .tokens_per_step = 256,
            .max_grad_norm = 1.0,
            .objective = objective};
  }

  StepResult step(const StepBatches& batches, double lr = 1e-3) { return rank->step().run(batches, 1, lr); }

  const Objective& objective;
  AdapterSpec adapter{.r = 4,
                      .alpha = 8,
                      .rslora = false,
                      .dropout = 0.1,
                      .targets = {"q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}};
  OptimizerConfig optimizer;
  ModelSpec spec;
  ModelLayout layout;
  StreamView stream;
  Plan plan;
  std::unique_ptr<Rank> rank;
};

const RecomputeChoice kLevels[] = {
    Recompute::kNone, Recompute::kAttention, {Recompute::kBlock, 2}, Recompute::kBlock};

// What one step makes of a fresh rank, in a batch whose tokens are no round number.
struct Outcome {
  StepResult result;
  std::vector<float> moments;  // all of them
  double evaluated = 0;
};
Outcome step_on(const ModelSpec& spec, bool lora, RecomputeChoice recompute, bool round_rows, int fill,
                bool keep_norms = false) {
  Fixture f(spec, lora, recompute, DType::kF32, DType::kF32, round_rows, false, objectives::cross_entropy,
            keep_norms);
  auto& arena = const_cast<Arena&>(f.rank->arena());
  {
    const ArenaFrame frame(arena);
    std::memset(arena.allocate(arena.capacity()), fill, static_cast<size_t>(arena.capacity()));
  }
  Outcome out;
  StepBatches batches{{batch_of(2, 107, spec.vocab), batch_of(1, 33, spec.vocab)}, 2 * 106 + 32};
  batches.micro[1].target.assign(33, -1);  // learns nothing
  for (int32_t t = 0; t < 27; ++t) batches.micro[0].target[static_cast<size_t>(t)] = -1;
  out.result = f.rank->step().run(batches, 1, 1e-3);
  out.evaluated = f.rank->step().evaluate(batches.micro[0]).nll;
  struct Moments : StateSink {
    explicit Moments(std::vector<float>& to) : to_(to) {}
    void write(const StateEntry& entry, int64_t, std::span<const std::byte> bytes) override {
      if (entry.dtype != DType::kF32) return;
      const auto* from = reinterpret_cast<const float*>(bytes.data());
      to_.insert(to_.end(), from, from + bytes.size() / sizeof(float));
    }
    std::vector<float>& to_;
  } moments(out.moments);
  LiveState state = rank_state(*f.rank);
  move_state(f.rank->catalogue(), state, moments);
  return out;
}

TEST(Step, RowsMoreThanTokensAddNothing) {
  for (int kind = 0; kind < 8; ++kind) {
    const bool lora = kind % 2 == 1, rich = kind / 4 == 1;
    const RecomputeChoice recompute = kLevels[kind / 2];
    const ModelSpec spec = tiny_spec(rich, rich, !rich);
    const Outcome exact = step_on(spec, lora, recompute, false, 0),
                  more = step_on(spec, lora, recompute, true, 0);
    SCOPED_TRACE("kind " + std::to_string(kind));
    EXPECT_NEAR(more.result.loss, exact.result.loss, 1e-6 * exact.result.loss);
    EXPECT_NEAR(more.result.grad_norm, exact.result.grad_norm, 2e-6 * exact.result.grad_norm);
    EXPECT_NEAR(more.evaluated, exact.evaluated, 1e-6 * exact.evaluated);
    ASSERT_EQ(more.moments.size(), exact.moments.size());
    double error = 0, size = 0;
    for (size_t i = 0; i < exact.moments.size(); ++i) {
      error += std::pow(more.moments[i] - exact.moments[i], 2);
      size += std::pow(exact.moments[i], 2);
    }
    EXPECT_LT(std::sqrt(error / size), 2e-6);
  }
}

TEST(Step, NothingComesFromWhatLayInTheArena) {
  for (int kind = 0; kind < 8; ++kind) {
    const bool lora = kind % 2 == 1, rich = kind / 4 == 1;
    const RecomputeChoice recompute = kLevels[kind / 2];
    const ModelSpec spec = tiny_spec(rich, rich, !rich);
    // Ones in every bit: a number that is none.
    const Outcome zeros = step_on(spec, lora, recompute, true, 0),
                  ones = step_on(spec, lora, recompute, true, 255);
    EXPECT_EQ(zeros.result.loss, ones.result.loss) << kind;
    EXPECT_EQ(zeros.result.grad_norm, ones.result.grad_norm) << kind;
    EXPECT_EQ(zeros.evaluated, ones.evaluated) << kind;
    EXPECT_TRUE(zeros.moments == ones.moments) << kind;
  }
}

StepBatches one_batch(const ModelSpec& spec) {
  return {{batch_of(2, 128, spec.vocab)}, 2 * 127};
}

void expect_planned_arena(Fixture& f) {
  f.step(one_batch(f.spec));
  const int64_t used = f.rank->arena().high_water(), planned = f.plan.arena.bytes;
  // The plan knows of one document; of the two that there are each has a last token without target.
  EXPECT_LE(used, planned);
  EXPECT_GE(used, planned - 1024) << "recompute " << recompute_name(f.plan.numerics.recompute);
  EXPECT_EQ(f.rank->arena().mark(), 0);
}

TEST(Step, TakesFromTheArenaWhatThePlanSaid) {
  for (const bool qk_norm : {false, true}) {
    for (const bool lora : {false, true}) {
      for (const RecomputeChoice recompute : kLevels) {
        for (const DType gradients : {DType::kF32, DType::kBF16}) {
          Fixture f(tiny_spec(qk_norm, qk_norm, !qk_norm), lora, recompute, DType::kBF16, gradients);
          SCOPED_TRACE(qk_norm ? "q/k norm" : "no q/k norm");
          expect_planned_arena(f);
        }
      }
    }
  }
}

// One spec for each of them, tied or not.
std::vector<ModelSpec> other_shapes(bool tied) {
  std::vector<ModelSpec> out(5, tiny_spec(false, false, tied));
  like_gpt2(out[0], 128);
  like_gemma(out[1]);
  like_cohere(out[2]);
  like_granite(out[3]);
  like_gemma4(out[4]);
  return out;
}

TEST(Step, LevelsOfRecomputationChangeNoBit) {
  bool lora = false;
  for (const ModelSpec& spec : other_shapes(true)) {
    const Outcome none = step_on(spec, lora, Recompute::kNone, false, 0);
    for (size_t i = 0; i <= std::size(kLevels); ++i) {  // at last with outputs of norms kept
      const bool keep_norms = i == std::size(kLevels);
      const RecomputeChoice level = keep_norms ? Recompute::kNone : kLevels[i];
      const Outcome other = step_on(spec, lora, level, false, 255, keep_norms);
      EXPECT_EQ(other.result.loss, none.result.loss) << recompute_name(level);
      EXPECT_EQ(other.result.grad_norm, none.result.grad_norm) << recompute_name(level);
      EXPECT_EQ(other.moments, none.moments) << recompute_name(level);
    }
    lora = !lora;
  }
}

TEST(Step, TakesFromTheArenaWhatThePlanSaidOfOtherShapes) {
  for (const ModelSpec& spec : other_shapes(true)) {
    for (const bool lora : {false, true}) {
      for (const RecomputeChoice recompute : kLevels) {
        Fixture f(spec, lora, recompute, DType::kBF16, DType::kF32);
        expect_planned_arena(f);
      }
      Fixture kept(spec, lora, Recompute::kNone, DType::kBF16, DType::kF32, false, false,
                   objectives::cross_entropy, true);
      expect_planned_arena(kept);
    }
  }
}

// Of a step only: what one before it has left in the gradients' memory does not count.
TEST(Step, BeginsEveryGradientAnew) {
  for (const bool tied : {false, true}) {
    for (const ModelSpec& spec : other_shapes(tied)) {
      Fixture fresh(spec, false, Recompute::kNone, DType::kF32, DType::kF32),
          used(spec, false, Recompute::kNone, DType::kF32, DType::kF32);
      const StepBatches shorter{{batch_of(2, 50, spec.vocab)}, 2 * 49};
      // Without a learning rate the weights stay.
      used.step(one_batch(spec), 0);
      const StepResult first = fresh.step(shorter), second = used.step(shorter);
      EXPECT_EQ(second.loss, first.loss);
      EXPECT_EQ(second.grad_norm, first.grad_norm);
    }
  }
}

TEST(Step, SkipsANonFiniteStepWithoutTouchingWeightsOrMoments) {
  Fixture f(tiny_spec(false, false, true), false, Recompute::kNone, DType::kF32, DType::kF32);
  f.step(one_batch(f.spec));
  // An infinite weight makes the loss infinite or undefined.
  auto* const norm = reinterpret_cast<float*>(f.rank->weights().trainable_in_place(4));
  const float kept = norm[0];
  norm[0] = INFINITY;
  struct Copy : StateSink {
    void write(const StateEntry&, int64_t, std::span<const std::byte> bytes) override {
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    std::vector<std::byte> all;
  } before, after;
  const auto copy_to = [&](Copy& copy) {
    LiveState state = rank_state(*f.rank);
    move_state(f.rank->catalogue(), state, copy);
  };
  copy_to(before);
  const StepResult result = f.step(one_batch(f.spec));
  copy_to(after);
  EXPECT_TRUE(result.skipped);
  EXPECT_TRUE(before.all == after.all);
  norm[0] = kept;
  EXPECT_FALSE(f.step(one_batch(f.spec)).skipped);
}

// Twos change nothing but exponents. Zeros leave the other targets' loss and gradient.
TEST(Step, DividesTheWeightedLossByTheSumOfTheWeights) {
  const auto run = [](bool weighted, const StepBatches& batches) {
    Fixture f(tiny_spec(false, true, false), false, Recompute::kNone, DType::kF32, DType::kF32, false,
              weighted);
    return f.step(batches);
  };
  const StepBatches plain = one_batch(tiny_spec(false, true, false));
  StepBatches twos = plain, zeros = plain, fewer = plain;
  twos.micro[0].weight.assign(256, 2.F);
  twos.target_weight = 2 * 254;
  zeros.micro[0].weight.assign(256, 1.F);
  for (size_t t = 0; t < 100; ++t) zeros.micro[0].weight[t] = 0, fewer.micro[0].target[t] = -1;
  zeros.target_weight = fewer.target_tokens = 154;
  const StepResult one = run(false, plain), two = run(true, twos), some = run(true, zeros),
                   rest = run(false, fewer);
  EXPECT_EQ(two.loss, one.loss);
  EXPECT_EQ(two.grad_norm, one.grad_norm);
  EXPECT_NEAR(some.loss, rest.loss, 1e-6 * rest.loss);
  EXPECT_NEAR(some.grad_norm, rest.grad_norm, 1e-5 * rest.grad_norm);
  EXPECT_NE(some.grad_norm, one.grad_norm);
}

constexpr std::string_view kColumns[] = {"rows", "loss"};
const Objective kBySample{.columns = kColumns,
                          .weigh = [](std::span<const SampleRows> samples, std::span<double> columns) {
                            for (const SampleRows& rows : samples) {
                              for (size_t r = 0; r < rows.nll.size(); ++r) {
                                rows.weight[r] *= static_cast<float>(rows.sample + 1);
                                columns[0] += 1;
                                columns[1] += static_cast<double>(rows.weight[r]) * rows.nll[r];
                              }
                            }
                          }};

// Weights that an objective makes give the gradients of the same weights in the data.
TEST(Step, AnObjectiveWeighsRowsBySampleAndAddsToItsColumns) {
  const ModelSpec spec = tiny_spec(false, true, false);
  StepBatches made{{batch_of(2, 60, spec.vocab), batch_of(1, 90, spec.vocab)}, 118 + 89};
  made.micro[0].weight.assign(120, 0.5F);
  for (int32_t& sample : made.micro[1].sample) sample = 4;
  made.micro[1].target[7] = -1, --made.target_tokens;
  StepBatches known = made;
  for (size_t t = 0; t < 120; ++t) known.micro[0].weight[t] = t < 60 ? 0.5F : 1.F;
  known.micro[1].weight.assign(90, 5.F);
  made.target_weight = known.target_weight = 59 * 0.5 + 59 + 88 * 5;
  Fixture fused(spec, false, Recompute::kNone, DType::kF32, DType::kF32, false, true),
      phases(spec, false, Recompute::kNone, DType::kF32, DType::kF32, false, true, kBySample);
  for (int step = 0; step < 2; ++step) {  // columns begin anew
    const StepResult want = fused.step(known), got = phases.step(made);
    EXPECT_EQ(got.grad_norm, want.grad_norm);
    EXPECT_NEAR(got.loss, want.loss, 1e-12 * want.loss);
    EXPECT_EQ(got.columns, (NamedColumns{{"rows", 206 / *made.target_weight}}));
    EXPECT_TRUE(want.columns.empty());
  }
}

// -log softmax of the target, in fp64 from the rank's logits.
double reference_nll(const float* logits, int64_t vocab, int32_t target) {
  const double highest = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(logits[v] - highest);
  return std::log(sum) + highest - logits[target];
}

// Batches of which some have weights, and of these some are 0.
TEST(Step, AnEvaluationDividesByTheSumOfTheWeights) {
  const ModelSpec spec = tiny_spec(false, true, false);
  Fixture f(spec, false, Recompute::kNone, DType::kF32, DType::kF32, false, true);
  std::vector<Batch> batches = {batch_of(2, 40, spec.vocab), batch_of(1, 60, spec.vocab),
                                batch_of(1, 30, spec.vocab)};
  for (size_t t = 0; t < 80; ++t) batches[0].weight.push_back(static_cast<float>(t % 7) * 0.25F);
  batches[2].weight.assign(30, 3.F);
  double nll = 0, weights = 0, correct = 0;
  int64_t targets = 0;
  for (Batch& batch : batches) {
    std::vector<int32_t> rows;
    for (size_t t = 0; t < batch.target.size(); ++t) {
      if (batch.target[t] >= 0) rows.push_back(static_cast<int32_t>(t));
    }
    std::vector<float> logits = f.rank->step().logits(batch, rows);
    // Of every second row the model's own choice becomes the target.
    for (size_t r = 0; r < rows.size(); r += 2) {
      const auto row = logits.begin() + static_cast<int64_t>(r) * spec.vocab;
      batch.target[static_cast<size_t>(rows[r])] =
          static_cast<int32_t>(std::max_element(row, row + spec.vocab) - row);
    }
    for (size_t r = 0; r < rows.size(); ++r) {
      const auto t = static_cast<size_t>(rows[r]);
      const double weight = batch.weight.empty() ? 1 : batch.weight[t];
      nll += weight *
             reference_nll(logits.data() + static_cast<int64_t>(r) * spec.vocab, spec.vocab, batch.target[t]);
      weights += weight;
      const auto row = logits.begin() + static_cast<int64_t>(r) * spec.vocab;
      correct += std::max_element(row, row + spec.vocab) - row == batch.target[t] ? 1 : 0;
    }
    targets += std::ssize(rows);
  }
  const EvalResult result = evaluate(*f.rank, {.set = "", .batches = batches});
  EXPECT_FALSE(result.choices);
  EXPECT_EQ(result.token_accuracy, correct / static_cast<double>(targets));
  EXPECT_NEAR(result.loss, nll / weights, 1e-6 * nll / weights);
  EXPECT_EQ(result.target_tokens, targets);
  EXPECT_GT(std::abs(weights - static_cast<double>(targets)), 0.1 * weights);
}

// Two rows of choices whose endings are in batches in another order, as packing may leave them.
TEST(Step, AnEvaluationOfChoicesSumsTheLossOfEachEnding) {
  const ModelSpec spec = tiny_spec(false, true, false);
  Fixture f(spec, false, Recompute::kNone, DType::kF32, DType::kF32);
  EvalBatches set{
      .set = "",
      .batches = {batch_of(2, 40, spec.vocab), batch_of(1, 60, spec.vocab), batch_of(1, 30, spec.vocab)},
      .groups = {{.right = 1, .characters = {9, 1}}, {.right = 0, .characters = {5, 2}}}};
  const std::vector<std::vector<int32_t>> endings = {{2, 0}, {3}, {1}};
  std::vector<double> expected(4);
  double right = 0;
  int64_t right_targets = 0, right_first = 0;
  for (size_t b = 0; b < endings.size(); ++b) {
    Batch& batch = set.batches[b];
    const int64_t length = batch.tokens() / batch.documents();
    std::vector<int32_t> rows;
    for (int64_t t = 0; t < batch.tokens(); ++t) {
      const auto at = static_cast<size_t>(t);
      batch.sample[at] = endings[b][static_cast<size_t>(t / length)];
      if (t % length < 7) batch.target[at] = -1;  // the context
      if (batch.target[at] >= 0) rows.push_back(static_cast<int32_t>(t));
    }
    const std::vector<float> logits = f.rank->step().logits(batch, rows);
    for (size_t r = 0; r < rows.size(); ++r) {
      // Of every second row the model's own choice is the target, of the others another token.
      const auto row = logits.begin() + static_cast<int64_t>(r) * spec.vocab;
      const auto argmax = static_cast<int32_t>(std::max_element(row, row + spec.vocab) - row);
      int32_t& target = batch.target[static_cast<size_t>(rows[r])];
      target = r % 2 == 0 ? argmax : static_cast<int32_t>((argmax + 1) % spec.vocab);
      const auto at = static_cast<size_t>(rows[r]);
      const double nll =
          reference_nll(logits.data() + static_cast<int64_t>(r) * spec.vocab, spec.vocab, batch.target[at]);
      const int32_t ending = batch.sample[at];
      expected[static_cast<size_t>(ending)] -= nll;
      right += ending == 1 || ending == 2 ? nll : 0;
      right_targets += ending == 1 || ending == 2 ? 1 : 0;
      right_first += (ending == 1 || ending == 2) && r % 2 == 0 ? 1 : 0;
    }
  }
  const EvalResult result = evaluate(*f.rank, set);
  ASSERT_TRUE(result.choices);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(result.choices->log_likelihoods[i], expected[i], -1e-6 * expected[i]) << i;
  EXPECT_NEAR(result.loss, right / static_cast<double>(right_targets), 1e-6 * result.loss);
  EXPECT_EQ(result.target_tokens, right_targets);
  EXPECT_EQ(result.token_accuracy, static_cast<double>(right_first) / static_cast<double>(right_targets));
  const ChoiceScores scores = score_choices(set.groups, expected);
  EXPECT_EQ(result.choices->accuracy, scores.accuracy);
  EXPECT_EQ(result.choices->accuracy_norm, scores.accuracy_norm);
  EXPECT_EQ(result.choices->rows, 2);
}

TEST(Step, AStepWithoutTargetsHasLossZeroAndNoGradient) {
  Fixture f(tiny_spec(false, true, false), false, Recompute::kNone, DType::kF32, DType::kF32);
  f.step(one_batch(f.spec));  // leaves gradients that must not survive
  StepBatches batches = one_batch(f.spec);
  batches.micro[0].target.assign(256, -1);
  batches.target_tokens = 0;
  const StepResult result = f.step(batches);
  EXPECT_EQ(result.loss, 0.0);
  EXPECT_EQ(result.grad_norm, 0.0);
  EXPECT_FALSE(result.skipped);
}

// A plan for two ranks and a rank that is alone: it would never be given the others' gradients.
TEST(Step, OfRanksThatAreNotThereIsRefused) {
  Fixture f(tiny_spec(false, false, true), false, Recompute::kNone, DType::kF32, DType::kF32);
  Plan plan = f.plan;
  plan.placement.ranks = plan.numerics.ranks = plan.step.ranks = 2;
  EXPECT_THROW(Rank(f.setup(plan, false), f.stream), Error);
}

TEST(Loans, MisuseThrows) {
  Fixture f(tiny_spec(false, false, true), false, Recompute::kNone, DType::kF32, DType::kF32);
  WeightStore& store = f.rank->weights();
  {
    const Loan loan = store.acquire(1);
    EXPECT_NE(loan.trainable(), nullptr);
    EXPECT_THROW(store.trainable_in_place(1), Error) << "an update while the block is on loan";
    store.advance(1);
    EXPECT_THROW(loan.trainable(), Error) << "a loan that outlived an update";
  }
  EXPECT_NO_THROW(store.trainable_in_place(1));
}

// A stop that is asked for while a run is evaluated before its first step ends it after the batch at hand.
TEST(Evaluation, EndsAtTheNextBatchWhenItIsToStop) {
  Fixture f(tiny_spec(true, false, true), false, Recompute::kNone, DType::kF32, DType::kF32);
  const EvalBatches set{.set = "", .batches = std::vector<Batch>(5, batch_of(1, 20, f.spec.vocab))};
  int asked = 0;
  EXPECT_FALSE(evaluate_unless(*f.rank, set, [&] { return ++asked == 3; }));
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(evaluate_unless(*f.rank, set, [] { return false; }).value().loss, evaluate(*f.rank, set).loss);
}

}  // namespace
}  // namespace lm
