// The products that a dry run tells apart against the code that oneDNN makes for a real step: as many.
#include <gtest/gtest.h>

#include <cstdlib>

#include "kernels/gemm_panels.h"
#include "kernels/runtime.h"
#include "plan/update_work.h"
#include "shapes.h"
#include "train/rank.h"

namespace lm {
namespace {

// Before oneDNN is first used: it then prints a line for everything that it makes or finds again.
const int kTold = setenv("ONEDNN_VERBOSE", "profile_create", 1);

// Every token but the last has a target.
Batch batch_of(int64_t tokens, int64_t vocab) {
  Batch batch;
  for (int64_t t = 0; t < tokens; ++t) {
    batch.token.push_back(static_cast<int32_t>(t * 7919 % vocab));
    batch.position.push_back(static_cast<int32_t>(t));
    batch.target.push_back(t + 1 < tokens ? static_cast<int32_t>((t + 1) * 7919 % vocab) : -1);
    batch.sample.push_back(0);
  }
  batch.document_start = {0, static_cast<int32_t>(tokens)};
  return batch;
}

int64_t made(const std::string& printed) {
  int64_t lines = 0;
  for (size_t at = 0; (at = printed.find("create:cache_miss,cpu,matmul", at)) != std::string::npos; ++at)
    ++lines;
  return lines;
}

// What a step of two micro-batches makes, and what was planned for.
void expect_planned(const Case& c, const AdapterSpec* adapter) {
  static const StreamView stream = start_torch(DeviceType::kCpu, 1, true);
  const ModelLayout layout = c.layout(adapter);
  const Plan plan = make_plan({c.config, c.spec, adapter, layout, DeviceType::kCpu}, c.machine);
  const int64_t planned =
      gemm_shapes({c.spec, layout, adapter}, plan.step, plan.micro_tokens, plan.numerics.micro_batches);
  Rank rank({.spec = c.spec,
             .layout = layout,
             .adapter = adapter,
             .optimizer = c.config.optimizer,
             .plan = plan,
             .seed = 1,
             .max_length = c.config.data.max_length,
             .tokens_per_step = 2 * c.config.data.max_length,
             .max_grad_norm = 1},
            stream);
  rank.weights_ready();
  const Batch batch = batch_of(plan.micro_tokens, c.spec.vocab);
  testing::internal::CaptureStdout();
  rank.step().run({.micro = {batch, batch}, .target_tokens = 2 * (plan.micro_tokens - 1)}, 1, 1e-3);
  std::set<GemmShape> of_updates;
  for (const BlockLayout& block : layout.blocks)
    update_products(block, 0, block.flat_elements, c.config.optimizer.name, DeviceType::kCpu, &of_updates);
  const std::string printed = testing::internal::GetCapturedStdout();
  EXPECT_GE(plan.gemm_shapes, planned + std::ssize(of_updates));
  // One of an update's may be one of the pass.
  EXPECT_NEAR(made(printed), planned + std::ssize(of_updates), of_updates.empty() ? 0 : 1)
      << plan.micro_tokens << " tokens, hidden " << c.spec.hidden;
}

TEST(GemmShapes, AreAsManyAsTheLibraryMakes) {
  if (!library_multiplies_bf16(best_instructions())) GTEST_SKIP() << "the products of bf16 are ours here";
  ASSERT_EQ(kTold, 0);
  int64_t turn = 0;  // sizes that no case before has made code for
  for (const int64_t tokens : {128, 600}) {
    for (const GradientDType gradients : {GradientDType::kF32, GradientDType::kBF16}) {
      for (int kind = 0; kind < 3; ++kind) {
        const int64_t more = 16 * ++turn;
        Case c{.spec =
                   make_spec({128 + 4 * more, 352 + 3 * more, 2, 4, 2, 32 + more, 9000 + more}, kind == 1)};
        c.machine.instructions = Instructions::kAvx512Bf16;
        c.config.data.max_length = tokens;
        c.config.train.global_batch = 2;
        c.config.train.micro_batch = 1;
        c.config.train.gradients = gradients;
        if ((kind == 0) == (gradients == GradientDType::kBF16)) c.config.optimizer.name = Rules::id<Muon>();
        AdapterSpec lora = adapter_r16();
        lora.r += turn;
        lora.dropout = kind == 2 ? 0.1 : 0;
        expect_planned(c, kind == 0 ? nullptr : &lora);
      }
    }
  }
}

}  // namespace
}  // namespace lm
