// What the families with mixtures of experts read: which layers have them, how many, and the files' names.
#include <algorithm>

#include "family_files.h"
#include "spec/parameter.h"

namespace lm {
namespace {

using namespace family_files;

json qwen3_moe() {
  json config = small("qwen3_moe");
  config.update({{"num_experts", 8}, {"num_experts_per_tok", 3}, {"moe_intermediate_size", 40}});
  return config;
}

std::vector<bool> sparse(const ModelSpec& spec) {
  std::vector<bool> out;
  for (const LayerSpec& layer : spec.layers) out.push_back(layer.find<ExpertsSpec>() != nullptr);
  return out;
}

std::vector<std::string> names_of(const ModelSpec& spec, size_t block, const std::string& parameter) {
  std::vector<std::string> out;
  const std::vector<BlockParameters> blocks = list_parameters(spec, nullptr);
  for (const Parameter& one : blocks[block].trainable)
    if (one.name == parameter)
      for (const ParameterPart& part : one.parts) out.push_back(part.name);
  return out;
}

TEST(ExpertFamilies, LayersWithoutExpertsAreListedOrCounted) {
  EXPECT_EQ(sparse(parse(qwen3_moe())), std::vector<bool>(6, true));
  json config = with(qwen3_moe(), "decoder_sparse_step", 2);
  EXPECT_EQ(sparse(parse(config)), (std::vector<bool>{false, true, false, true, false, true}));
  config["mlp_only_layers"] = {3, 77, -1};  // as the reference has it: what is no layer means nothing
  const ModelSpec spec = parse(config);
  EXPECT_EQ(sparse(spec), (std::vector<bool>{false, true, false, false, false, true}));
  EXPECT_EQ(spec.layer(3).mlp().ffn, 96);
  const ExpertsSpec& experts = *spec.layer(5).find<ExpertsSpec>();
  EXPECT_EQ(experts, (ExpertsSpec{.experts = 8, .chosen = 3, .ffn = 40, .round_weights = true}));
  EXPECT_TRUE(parse(with(config, "norm_topk_prob", true)).layer(5).find<ExpertsSpec>()->renormalise);
}

TEST(ExpertFamilies, BothWordsForTheirNumberAreRead) {
  json config = qwen3_moe();
  config.erase("num_experts");
  EXPECT_EQ(parse(config).layer(0).find<ExpertsSpec>()->experts, 128);
  EXPECT_EQ(parse(with(config, "num_local_experts", 5)).layer(0).find<ExpertsSpec>()->experts, 5);
  expect_refused(with(config, "num_local_experts", 2), "num_experts_per_tok");
}

TEST(ExpertFamilies, EachExpertsMatricesHaveTheFilesNames) {
  EXPECT_EQ(names_of(parse(qwen3_moe()), 3, "layers.2.experts.7.gate_up"),
            (std::vector<std::string>{"model.layers.2.mlp.experts.7.gate_proj.weight",
                                      "model.layers.2.mlp.experts.7.up_proj.weight"}));
  EXPECT_EQ(names_of(parse(qwen3_moe()), 1, "layers.0.experts.router"),
            (std::vector<std::string>{"model.layers.0.mlp.gate.weight"}));
  const ModelSpec mixtral = parse(with(small("mixtral"), "num_local_experts", 4));
  EXPECT_EQ(names_of(mixtral, 1, "layers.0.experts.3.gate_up"),
            (std::vector<std::string>{"model.layers.0.block_sparse_moe.experts.3.w1.weight",
                                      "model.layers.0.block_sparse_moe.experts.3.w3.weight"}));
  EXPECT_EQ(names_of(mixtral, 1, "layers.0.experts.3.down"),
            (std::vector<std::string>{"model.layers.0.block_sparse_moe.experts.3.w2.weight"}));
  const ExpertsSpec& experts = *mixtral.layer(0).find<ExpertsSpec>();
  EXPECT_EQ(experts, (ExpertsSpec{.experts = 4, .chosen = 2, .ffn = 96, .renormalise = true}));
}

TEST(ExpertFamilies, WhatTheirRoutersDoBesideIsRefused) {
  expect_refused(with(small("mixtral"), "router_jitter_noise", 0.1), "router_jitter_noise");
  expect_refused(with(small("olmoe"), "clip_qkv", 8.0), "clip_qkv");
  expect_refused(with(qwen3_moe(), "mlp_only_layers", "1"), "mlp_only_layers");
}

}  // namespace
}  // namespace lm
