#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "data/loader.h"
#include "memory_source.h"

namespace lm {
namespace {

LoaderOptions small() {
  return {.seed = 7, .global_batch = 4, .micro_batch = 2, .vocab = 100};
}

// A text that is scored is one document; its target stands at its last token that is no padding.
TEST(Loader, AScoredTextHasATargetAtItsEnd) {
  MemorySource source;
  source.add({10, 11, 9});
  source.add({12, 13, 14, 15, 16});
  source.add({17});
  LoaderOptions options = small();
  options.max_length = 4;
  options.scored = ScoredData{.labels = 1, .pad_token = 9};
  options.labels = {2, 0, 1};
  Loader loader(source, nullptr, options);
  const StepBatches step = loader.next();
  EXPECT_EQ(step.target_tokens, 3);
  std::map<int32_t, std::vector<int32_t>> targets;
  for (const Batch& batch : step.micro) {
    for (int64_t d = 0; d < batch.documents(); ++d) {
      const auto begin = static_cast<size_t>(batch.document_start[static_cast<size_t>(d)]),
                 end = static_cast<size_t>(batch.document_start[static_cast<size_t>(d) + 1]);
      EXPECT_EQ(batch.label.at(static_cast<size_t>(d)),
                options.labels[static_cast<size_t>(batch.sample[begin])]);
      targets[batch.token[begin]].assign(batch.target.begin() + static_cast<int64_t>(begin),
                                         batch.target.begin() + static_cast<int64_t>(end));
    }
  }
  const std::map<int32_t, std::vector<int32_t>> expected{{10, {-1, 0, -1}}, {12, {-1, -1, -1, 0}}, {17, {0}}};
  EXPECT_EQ(targets, expected);
}

// A pair is one sequence of two documents, and is left out if it is longer than one.
TEST(Loader, APairOfScoredTextsStaysTogether) {
  MemorySource source;
  source.add({10, 11, 12, 13, 14}, {1, 1, 0, 1, 1});
  source.add({20, 21, 22, 23, 24, 25, 26, 27, 28}, {1, 1, 1, 1, 0, 1, 1, 1, 1});
  LoaderOptions options = small();
  options.max_length = 8;
  options.too_long = TooLong::kAuto;
  options.scored = ScoredData{.pairs = true};
  Loader loader(source, nullptr, options);
  const StepBatches step = loader.next();
  EXPECT_EQ(step.target_tokens, 1);
  ASSERT_EQ(step.micro.size(), 1U);
  const Batch& batch = step.micro.front();
  EXPECT_EQ(batch.document_start, (std::vector<int32_t>{0, 2, 5}));
  EXPECT_EQ(batch.position, (std::vector<int32_t>{0, 1, 0, 1, 2}));
  EXPECT_EQ(batch.target, (std::vector<int32_t>{-1, 0, -1, -1, 0}));
}

}  // namespace
}  // namespace lm
