// `lmlaunch plan` for several ranks, through the CLI process.
#include <gtest/gtest.h>

#include "base/json.h"
#include "tests/support/cli.h"

namespace lm {
namespace {

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "no <" << (part) << "> in\n" << (text)

// On machines that nobody has to have; offline, and nothing is made.
TEST(Cli, PlansForRanksAndForClusters) {
  Cli cli;
  cli.write_config("c.toml");
  cli.write("model/config.json",
            R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":576,
    "intermediate_size":1536,"num_hidden_layers":30,"num_attention_heads":9,"num_key_value_heads":3,"vocab_size":49152,
    "tie_word_embeddings":true,"max_position_embeddings":8192,"hidden_act":"silu","rms_norm_eps":1e-5})");
  const std::vector<std::string> cluster = {"plan",
                                            "c.toml",
                                            "--gpus",
                                            "512",
                                            "--nodes",
                                            "64",
                                            "--gpu-memory",
                                            "80GiB",
                                            "--host-memory",
                                            "1TiB",
                                            "train.global_batch=1024"};
  const CliResult text = cli.run(cluster);
  EXPECT_EQ(text.code, 0) << text.err;
  for (const char* words : {"between machines", "gradients sent", "scaling", "fits on 1 GPU or more",
                            "no run of several GPUs has been measured yet", "links between ranks = assumed"})
    EXPECT_HAS(text.out, words);
  std::vector<std::string> json = cluster;
  json.insert(json.end(), {"--json", "--node-link", "1GB"});
  const Json plan = Json::parse(cli.run(json).out);
  EXPECT_EQ(plan["ranks"], 512);
  EXPECT_EQ(plan["nodes"], 64);
  EXPECT_EQ(plan["scaling"]["fewest_ranks"], 1);
  EXPECT_EQ(plan["scaling"]["rows"].back()["ranks"], 512);
  EXPECT_EQ(plan["scaling"]["rows"].back()["nodes"], 64);
  // In two levels: of each array a rank sends 7/8 to the ranks of its machine, and 1/512 to each of 63
  // machines.
  const double between = 63.0 / 512;
  EXPECT_NEAR(plan["traffic"]["between_machines_share"].get<double>(), between / (7.0 / 8 + between), 1e-9);
  EXPECT_GT(plan["traffic"]["gradient_bytes"], 0);
  EXPECT_EQ(plan["binding"], "between machines");
  // No GPU is needed to plan for some; processes are planned for, too.
  EXPECT_EQ(cli.run({"plan", "c.toml", "--gpus", "2"}).code, 0);
  const Json two = Json::parse(cli.run({"plan", "c.toml", "--ranks", "2", "--json"}).out);
  EXPECT_EQ(two["ranks"], 2);
  EXPECT_GT(two["traffic"]["seconds"], 0);
  // More than there are sequences, as a run would be told; machines that ranks do not fill.
  const CliResult idle = cli.run({"plan", "c.toml", "--ranks", "512"});
  EXPECT_EQ(idle.code, 10);
  EXPECT_HAS(idle.err, "some would have nothing to do");
  for (const std::vector<std::string>& wrong : {std::vector<std::string>{"--gpus", "8", "--nodes", "3"},
                                                {"--nodes", "2"},
                                                {"--gpus", "2", "--ranks", "2"},
                                                {"--gpus", "4", "--nodes", "0"}}) {
    std::vector<std::string> words = {"plan", "c.toml"};
    words.insert(words.end(), wrong.begin(), wrong.end());
    EXPECT_EQ(cli.run(words).code, 2) << wrong[0];
  }
  EXPECT_FALSE(cli.exists("run"));
}

}  // namespace
}  // namespace lm
