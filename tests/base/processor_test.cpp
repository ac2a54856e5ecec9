#include "base/processor.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace lm {
namespace {

constexpr Instructions kKinds[] = {Instructions::kNone,       Instructions::kAvx2,
                                   Instructions::kAvx512Core, Instructions::kAvx512Vbmi,
                                   Instructions::kAvx512Bf16, Instructions::kAmx};

class Processor : public testing::Test {
 protected:
  ~Processor() override { limit_instructions(before_); }

 private:
  Instructions before_ = best_instructions();  // of LM_CPU, where it is set
};

TEST_F(Processor, HasNothingAboveItsLimit) {
  limit_instructions(Instructions::kAmx);
  const Instructions best = best_instructions();
  for (const Instructions most : kKinds) {
    limit_instructions(most);
    EXPECT_LE(best_instructions(), most);
    EXPECT_LE(best_instructions(), best) << "a limit gives a processor nothing that it has not";
    EXPECT_TRUE(has_instructions(best_instructions()));
    for (const Instructions kind : kKinds) {
      if (kind > most) {
        EXPECT_FALSE(has_instructions(kind)) << instructions_name(kind);
      }
    }
  }
}

TEST_F(Processor, LimitsTheLibrariesAlike) {
  const auto limited = [](const char* text) {
    const std::vector<std::string> limits = library_limits();
    return std::find(limits.begin(), limits.end(), text) != limits.end();
  };
  limit_instructions(Instructions::kAmx);
  EXPECT_TRUE(library_limits().empty());
  limit_instructions(Instructions::kAvx512Vbmi);
  EXPECT_TRUE(limited("ONEDNN_MAX_CPU_ISA=AVX512_CORE"));
  limit_instructions(Instructions::kAvx2);
  EXPECT_TRUE(limited("ONEDNN_MAX_CPU_ISA=AVX2"));
  EXPECT_TRUE(limited("MKL_ENABLE_INSTRUCTIONS=AVX2"));
  EXPECT_TRUE(limited("ATEN_CPU_CAPABILITY=avx2"));
}

TEST_F(Processor, KnowsItsKindsByName) {
  for (const Instructions kind : kKinds) EXPECT_EQ(instructions_of(instructions_name(kind)), kind);
  EXPECT_EQ(instructions_of("avx512"), std::nullopt);
  EXPECT_EQ(instructions_names(), "none, avx2, avx512_core, avx512_vbmi, avx512_bf16, amx");
}

}  // namespace
}  // namespace lm
