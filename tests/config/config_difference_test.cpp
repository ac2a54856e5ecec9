// How a configuration is printed, and which differences between two of them a run cannot go on with.
#include <gtest/gtest.h>

#include "config/config_print.h"
#include "config/config_toml.h"

namespace lm {
namespace {

constexpr const char* kLeast = "[model]\npath = \"m\"\n[data]\ntrain = [\"t.jsonl\"]\n";

TEST(Config, OnlyNumericsDiffer) {
  const Config a = parse_config(kLeast, "a");
  Config b = a;
  b.run.dir = "elsewhere";
  b.log.every = 10;
  b.optimizer.threads = 2;
  b.train.recompute = Recompute::kBlock;
  b.lora.r = 99;  // no adapters are trained
  EXPECT_TRUE(config_difference(a, b).empty());
  b.optimizer.lr = 1;
  b.train.steps = 3;
  const auto difference = config_difference(a, b);
  ASSERT_EQ(difference.size(), 2u);
  EXPECT_EQ(difference[0].key, "train.steps");
  EXPECT_EQ(difference[1].key, "optimizer.lr");
  EXPECT_EQ(difference[1].recorded, "5e-05");
  EXPECT_EQ(difference[1].asked, "1.0");
}

TEST(Config, AutoDiffersFromNothingThatItWasResolvedTo) {
  const Config asked = parse_config(kLeast, "a");
  Config recorded = asked;
  recorded.train.micro_batch = 2;
  recorded.run.threads = 4;
  recorded.run.device = DeviceChoice::kCpu;
  EXPECT_TRUE(config_difference(recorded, asked).empty());
  EXPECT_EQ(config_difference(asked, recorded).size(), 3u);
}

TEST(Config, PlainRenderingIsWhatAutoMeans) {
  const Config asked = parse_config(kLeast, "a"), plain = parse_config(kLeast, "a", {"data.render=plain"}),
               chat = parse_config(kLeast, "a", {"data.render=chat"});
  EXPECT_TRUE(config_difference(asked, plain).empty());
  EXPECT_TRUE(config_difference(plain, asked).empty());
  EXPECT_EQ(config_difference(asked, chat).size(), 1u);
  EXPECT_EQ(config_difference(chat, asked).size(), 1u);
}

TEST(ConfigLines, CommentsStandInOneColumnAndALaterValueReplacesAnEarlierOne) {
  ConfigLines lines;
  lines.set("train.steps", "1", "first");
  lines.table("lora", "adapters");
  lines.set("lora.r", "8");
  lines.set("train.method", "\"wider than the column\"", "second");
  lines.set("train.steps", "20", "third");
  EXPECT_EQ(lines.text(15),
            "[train]\nsteps = 20     # third\nmethod = \"wider than the column\"  # second\n"
            "\n[lora]  # adapters\nr = 8\n");
}

}  // namespace
}  // namespace lm
