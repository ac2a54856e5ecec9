// Settings that an fp16 model has, and those that it cannot have.
#include <gtest/gtest.h>

#include "config/config_print.h"
#include "config/config_toml.h"
#include "tests/config/failure.h"
#include "tests/support/same_config.h"

namespace lm {
namespace {

TEST(Config, AnFp16ModelHasAnFp32MasterAndALossScale) {
  const auto with = [](const std::string& more, const std::vector<std::string>& overrides = {}) {
    return parse_config("[model]\npath=\"m\"\ndtype=\"fp16\"\n[data]\ntrain=\"t\"\n" + more, "c.toml",
                        overrides);
  };
  const auto refused = [](const std::string& more) {
    return failure("[model]\npath=\"m\"\ndtype=\"fp16\"\n[data]\ntrain=\"t\"\n" + more);
  };
  const Config config = with("");
  EXPECT_EQ(config.optimizer.master, Master::kF32);
  EXPECT_EQ(config.train.loss_scale, 65536);
  EXPECT_EQ(with("[optimizer]\nmaster=\"none\"\n").optimizer.master, Master::kNone);
  // Unclipped it still has the check before any update.
  const Config unclipped = with("[optimizer]\nclip=\"none\"\n");
  EXPECT_EQ(unclipped.optimizer.clip, Clip::kGlobal);
  EXPECT_EQ(unclipped.train.max_grad_norm, 1e300);
  EXPECT_TRUE(same_config(parse_config(print_config(unclipped), "", {}), unclipped));
  EXPECT_HAS(refused("[optimizer]\nmaster=\"split\"\n"), "is not the upper half");
  EXPECT_HAS(refused("[optimizer]\nclip=\"block\"\n"), "checked for overflow");
  EXPECT_HAS(refused("[optimizer]\nname=\"adamw_bf16\"\n"), "trains bf16 weights");
  EXPECT_HAS(refused("[train]\ngradients=\"bf16\"\n"), "accumulated in fp32");
  EXPECT_HAS(refused("[train]\nmethod=\"lora\"\n[lora]\ndtype=\"bf16\"\n"), "fp16 or fp32");
  EXPECT_HAS(refused("[train]\nloss_scale_backoff=1.0\n"), "less than 1");
  EXPECT_HAS(failure(std::string(kLeast) + "[train]\nloss_scale = 1024.0\n"), "needs no loss scale");
  // On the command line it takes back what the file has for bf16.
  const Config over =
      parse_config(std::string(kLeast) + "[optimizer]\nmaster = \"split\"\n", "c.toml", {"model.dtype=fp16"});
  EXPECT_EQ(over.optimizer.master, Master::kF32);
}

}  // namespace
}  // namespace lm
