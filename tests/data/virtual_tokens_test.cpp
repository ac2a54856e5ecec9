// Batches whose documents begin with virtual tokens.
#include <gtest/gtest.h>

#include "data/loader.h"
#include "memory_source.h"

namespace lm {
namespace {

TEST(Loader, PutsVirtualTokensBeforeEachDocument) {
  MemorySource source;
  source.add({5, 6, 7, 8}, {0, 0, 1, 1});
  source.add({11, 12, 13, 14, 15, 16}, {1, 1, 1, 1, 1, 1});
  LoaderOptions options{.max_length = 12, .virtual_tokens = 2, .packing = true, .vocab = 100};
  Loader loader(source, nullptr, options);
  EXPECT_EQ(loader.sequences_in_epoch(0), 2);  // 2 + 4 and 2 + 6 tokens are more than 12
  options.max_length = 14;
  Loader wider(source, nullptr, options);
  EXPECT_EQ(wider.sequences_in_epoch(0), 1);
  const Batch batch = wider.next().micro.at(0);
  ASSERT_EQ(batch.documents(), 2);
  for (size_t d = 0; d < 2; ++d) {
    const auto begin = static_cast<size_t>(batch.document_start[d]),
               end = static_cast<size_t>(batch.document_start[d + 1]);
    for (size_t i = begin; i < end; ++i) {
      EXPECT_EQ(batch.position[i], static_cast<int32_t>(i - begin));
      EXPECT_EQ(batch.sample[i], batch.sample[begin]);
    }
    EXPECT_EQ(batch.target[begin], -1);
    EXPECT_EQ(batch.target[begin + 1], -1);
    const bool first = batch.token[begin + 2] == 5;
    EXPECT_EQ(end - begin, first ? 6u : 8u);
    EXPECT_EQ(batch.target[begin + 3], first ? 7 : 13);
  }
  EXPECT_EQ(wider.counts_of(0).tokens, 14);
  // A document has room for what they leave.
  options.max_length = 6;
  EXPECT_EQ(Loader(source, nullptr, options).counts_of(0).tokens, 12);
}

}  // namespace
}  // namespace lm
