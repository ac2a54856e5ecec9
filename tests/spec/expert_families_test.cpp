// What the families with mixtures of experts read: which layers have them, how many, and the files' names.
#include <algorithm>

#include "family_files.h"
#include "spec/block_layout.h"
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

json qwen2_moe() {
  json config = small("qwen2_moe");
  config.update({{"num_experts", 8},
                 {"num_experts_per_tok", 3},
                 {"moe_intermediate_size", 40},
                 {"shared_expert_intermediate_size", 72}});
  return config;
}

TEST(ExpertFamilies, ASharedExpertStandsBesideTheOthers) {
  const ModelSpec spec = parse(with(qwen2_moe(), "mlp_only_layers", {1}));
  EXPECT_EQ(sparse(spec), (std::vector<bool>{true, false, true, true, true, true}));
  EXPECT_EQ(spec.layer(1).sublayers.size(), 2U);
  ASSERT_EQ(spec.layer(0).sublayers.size(), 3U);
  const SublayerSpec& last = spec.layer(0).sublayers.back();
  EXPECT_TRUE(last.beside && !last.norm);
  EXPECT_EQ(*spec.layer(0).find<SharedExpertSpec>(), (SharedExpertSpec{.ffn = 72, .gated = true}));
  EXPECT_TRUE(spec.layer(0).attention().qkv_bias);
  EXPECT_EQ(names_of(spec, 1, "layers.0.shared.gate_up"),
            (std::vector<std::string>{"model.layers.0.mlp.shared_expert.gate_proj.weight",
                                      "model.layers.0.mlp.shared_expert.up_proj.weight"}));
  EXPECT_EQ(names_of(spec, 1, "layers.0.shared.weight"),
            (std::vector<std::string>{"model.layers.0.mlp.shared_expert_gate.weight"}));
  EXPECT_EQ(names_of(spec, 2, "layers.1.mlp.down"),
            (std::vector<std::string>{"model.layers.1.mlp.down_proj.weight"}));
}

TEST(ExpertFamilies, AWindowIsOfEverySecondLayerOfTheFirst) {
  json config = with(qwen2_moe(), "max_window_layers", 3);
  config.update({{"use_sliding_window", true}, {"sliding_window", 9}});
  EXPECT_EQ(windows(parse(config)), (std::vector<int64_t>{9, 0, 9, 0, 0, 0}));
}

TEST(ExpertFamilies, AnAdapterIsOnTheAttentionAndTheSharedExpert) {
  const ModelSpec spec = parse(qwen2_moe());
  const auto targets = [&](const char* target) { return resolve_targets(spec.names, {target}, "x"); };
  EXPECT_EQ(targets("all-linear"),
            (std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj", "mlp.shared_expert.gate_proj",
                                      "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"}));
  EXPECT_EQ(targets("mlp.shared_expert.up_proj"), std::vector<std::string>{"mlp.shared_expert.up_proj"});
  // A name that experts have, too: the shared one alone would be less than was asked for.
  for (const char* wrong : {"gate_proj", "down_proj", "shared_expert_gate", "mlp.gate_proj"})
    EXPECT_THROW(targets(wrong), Error) << wrong;
}

TEST(ExpertFamilies, FilesMayHaveOneTensorForAllExperts) {
  const ModelSpec spec = parse(with(small("granitemoe"), "num_local_experts", 4));
  EXPECT_TRUE(spec.layer(0).find<ExpertsSpec>()->renormalise);
  const std::vector<BlockParameters> blocks = list_parameters(spec, nullptr);
  int64_t seen = 0;
  for (const Parameter& one : blocks[1].trainable) {
    if (!one.of_expert() || !one.name.ends_with("gate_up")) continue;
    ASSERT_EQ(one.parts.size(), 1U);
    const ParameterPart& part = one.parts.front();
    EXPECT_EQ(part.tensor(), "model.layers.0.block_sparse_moe.input_linear.weight");
    EXPECT_EQ(part.name, "model.layers.0.block_sparse_moe.input_linear." + std::to_string(seen) + ".weight");
    EXPECT_EQ(part.slice, seen++);
    EXPECT_EQ(one.file_shape(part), (std::vector<int64_t>{4, 2 * 96, spec.hidden}));
    EXPECT_EQ(one.shape(part), (std::vector<int64_t>{2 * 96, spec.hidden}));
  }
  EXPECT_EQ(seen, 4);
  for (const char* wrong : {"input_linear", "block_sparse_moe.output_linear", "layer"})
    EXPECT_THROW(resolve_targets(spec.names, {wrong}, "x"), Error) << wrong;
}

const Parameter& find(const BlockParameters& block, const std::string& name) {
  const auto found = std::ranges::find(block.trainable, name, &Parameter::name);
  EXPECT_NE(found, block.trainable.end()) << name;
  return *found;
}

TEST(ExpertFamilies, GptOssHasBiasesSinksAndInterleavedMatricesThatLieTransposed) {
  const ModelSpec spec = parse(with(small("gpt_oss"), "num_local_experts", 4));
  EXPECT_EQ(windows(spec), (std::vector<int64_t>{128, 0, 128, 0, 128, 0}));
  EXPECT_EQ(spec.ropes.at(0).factor, 32);
  EXPECT_FALSE(spec.ropes.at(0).truncate);
  EXPECT_EQ(*spec.layer(0).find<ExpertsSpec>(), (ExpertsSpec{.experts = 4,
                                                             .chosen = 4,
                                                             .ffn = 96,
                                                             .renormalise = true,
                                                             .round_weights = true,
                                                             .bias = true,
                                                             .router_bias = true,
                                                             .clamped = ClampedGlu{1.702, 7}}));
  const std::vector<BlockParameters> blocks = list_parameters(spec, nullptr);
  const std::string experts = "model.layers.0.mlp.experts.";
  struct Wanted {
    const char *ours, *file;
    std::string part;
    std::vector<int64_t> shape;
  };
  for (const Wanted& want : {Wanted{"gate_up", "gate_up_proj", "gate_up_proj.2.weight", {4, 64, 192}},
                             Wanted{"gate_up_bias", "gate_up_proj_bias", "gate_up_proj.2.bias", {4, 192}},
                             Wanted{"down", "down_proj", "down_proj.2.weight", {4, 96, 64}},
                             Wanted{"down_bias", "down_proj_bias", "down_proj.2.bias", {4, 64}}}) {
    const Parameter& one = find(blocks[1], "layers.0.experts.2." + std::string(want.ours));
    ASSERT_EQ(one.parts.size(), 1U) << want.ours;
    EXPECT_EQ(one.parts.front().name, experts + want.part);
    EXPECT_EQ(one.parts.front().tensor(), experts + want.file);
    EXPECT_EQ(one.parts.front().slice, 2);
    EXPECT_EQ(one.file_shape(one.parts.front()), want.shape) << want.ours;
  }
  const Parameter& sinks = find(blocks[1], "layers.0.attn.sinks");
  EXPECT_EQ(sinks.parts.front().name, "model.layers.0.self_attn.sinks");
  EXPECT_EQ(sinks.rows, 4);
  EXPECT_TRUE(sinks.vector()) << "it would be decayed";
  EXPECT_EQ(resolve_targets(spec.names, {"all-linear"}, "x"),
            (std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj"}));
}

TEST(ExpertFamilies, Mxfp4IsOfGptOssExpertsAlone) {
  json config = small("gpt_oss");
  config["quantization_config"] = {{"quant_method", "mxfp4"}};
  const ModelSpec spec = parse(config);
  EXPECT_EQ(spec.stored, EncodingKind::kMxfp4);
  const AdapterSpec adapter{.r = 1, .alpha = 1, .targets = {"q_proj"}};
  const ModelLayout layout = make_layout(spec, &adapter, DType::kBF16, &encoding_of(spec.stored));
  for (const TensorPlace& place : layout.blocks[1].tensors) {
    const bool wanted = place.parameter.of_expert() && place.parameter.kind == ParameterKind::kMatrix;
    EXPECT_EQ(place.encoded(), wanted) << place.parameter.name;
  }
  const TensorPlace& down = *layout.blocks[1].find("layers.0.experts.0.down");
  ASSERT_EQ(down.pieces.size(), 2U);
  EXPECT_EQ(down.pieces[0].bytes, 64 * 96 / 2);
  EXPECT_EQ(down.pieces[1].bytes, 64 * 96 / 32);
  expect_refused(with(config, "intermediate_size", 100), "MXFP4");
  json other = small("mixtral");
  other["quantization_config"] = config["quantization_config"];
  expect_refused(other, "mxfp4");
}

TEST(ExpertFamilies, TheirLoadsAreBalancedWhereTheFileSaysSo) {
  EXPECT_EQ(parse(qwen2_moe()).router_aux_loss, 0);
  EXPECT_EQ(parse(with(qwen2_moe(), "output_router_logits", true)).router_aux_loss, 0.001);
  EXPECT_EQ(parse(with(small("olmoe"), "output_router_logits", true)).router_aux_loss, 0.01);
  const json config = with(with(qwen2_moe(), "output_router_logits", true), "router_aux_loss_coef", 0.25);
  EXPECT_EQ(parse(config).router_aux_loss, 0.25);
  expect_refused(with(qwen2_moe(), "router_aux_loss_coef", -1), "router_aux_loss_coef");
}

json glm4_moe() {
  json config = small("glm4_moe");
  config.update({{"n_routed_experts", 12}, {"num_experts_per_tok", 3}, {"moe_intermediate_size", 20}});
  return config;
}

TEST(ExpertFamilies, OfGlmTheFirstLayersAreDenseAndARouterMayHaveGroups) {
  EXPECT_EQ(sparse(parse(glm4_moe())), (std::vector<bool>{false, true, true, true, true, true}));
  json config = with(glm4_moe(), "first_k_dense_replace", 3);
  config.update({{"n_group", 4}, {"topk_group", 2}, {"routed_scaling_factor", 2.5}, {"n_shared_experts", 2}});
  const ModelSpec spec = parse(with(config, "use_qk_norm", true));
  EXPECT_EQ(sparse(spec), (std::vector<bool>{false, false, false, true, true, true}));
  EXPECT_EQ(spec.layer(0).mlp().ffn, 96);
  EXPECT_EQ(*spec.layer(3).find<ExpertsSpec>(), (ExpertsSpec{.experts = 12,
                                                             .chosen = 3,
                                                             .ffn = 20,
                                                             .renormalise = true,
                                                             .scores = RouterScores::kSigmoid,
                                                             .groups = 4,
                                                             .kept_groups = 2,
                                                             .weight_scale = 2.5,
                                                             .wide_logits = true}));
  EXPECT_EQ(*spec.layer(3).find<SharedExpertSpec>(), (SharedExpertSpec{.ffn = 40}));
  EXPECT_TRUE(spec.layer(5).attention().head_norm && !spec.layer(5).attention().joint_norm);
  EXPECT_FALSE(parse(config).layer(5).attention().head_norm);
  EXPECT_EQ(spec.ropes.front().dim, 8);
  EXPECT_FALSE(spec.ropes.front().neighbours);
  expect_refused(with(config, "n_group", 5), "n_group");
  expect_refused(with(config, "n_group", 12), "n_group");                // of one expert each
  expect_refused(with(config, "topk_group", 5), "topk_group");           // more than there are
  expect_refused(with(config, "num_experts_per_tok", 7), "topk_group");  // two groups have six
  expect_refused(with(config, "n_shared_experts", 0), "n_shared_experts");
}

TEST(ExpertFamilies, LayersOfMultiTokenPredictionAreTheFilesAlone) {
  EXPECT_EQ(parse(glm4_moe()).predictors, 1);
  EXPECT_EQ(parse(with(glm4_moe(), "num_nextn_predict_layers", 2)).predictors, 2);
  EXPECT_EQ(parse(small("minimax_m2")).predictors, 0);
  EXPECT_EQ(parse(with(small("minimax_m2"), "num_mtp_modules", 3)).predictors, 3);
  EXPECT_EQ(parse(qwen3_moe()).predictors, 0);
}

TEST(ExpertFamilies, ACorrectionOfARoutersChoiceIsABufferOfFp32) {
  json minimax = small("minimax_m2");
  minimax["num_local_experts"] = 10;
  const std::pair<json, const char*> cases[] = {
      {glm4_moe(), "model.layers.1.mlp.gate.e_score_correction_bias"},
      {minimax, "model.layers.1.block_sparse_moe.e_score_correction_bias"}};
  for (const auto& [config, name] : cases) {
    const ModelSpec spec = parse(config);
    const std::vector<BlockParameters> blocks = list_parameters(spec, nullptr);
    ASSERT_EQ(blocks[2].frozen.size(), 1U);
    const Parameter& correction = blocks[2].frozen.front();
    EXPECT_EQ(correction.name, "layers.1.experts.correction");
    EXPECT_EQ(correction.kind, ParameterKind::kBuffer);
    EXPECT_EQ(correction.parts.front().name, name);
    EXPECT_TRUE(correction.fp32);
    EXPECT_EQ(correction.neutral, 0);
  }
  EXPECT_TRUE(list_parameters(parse(glm4_moe()), nullptr)[1].frozen.empty());  // dense
  EXPECT_TRUE(list_parameters(parse(qwen3_moe()), nullptr)[2].frozen.empty());
}

TEST(ExpertFamilies, MiniMaxNamesThemAsMixtralAndTurnsAPartOfAHead) {
  const ModelSpec spec = parse(with(small("minimax_m2"), "rotary_dim", 64));
  EXPECT_EQ(names_of(spec, 1, "layers.0.experts.255.down"),
            (std::vector<std::string>{"model.layers.0.block_sparse_moe.experts.255.w2.weight"}));
  const AttentionSpec& attention = spec.layer(0).attention();
  EXPECT_TRUE(attention.head_norm && attention.joint_norm);
  EXPECT_EQ(attention.head_dim, 128);
  EXPECT_EQ(spec.ropes.front().dim, 64);
  EXPECT_EQ(spec.ropes.front().theta, 5e6);
  EXPECT_EQ(parse(small("minimax_m2")).ropes.front().dim, 128);
  json both = with(small("minimax_m2"), "rotary_dim", 64);
  EXPECT_EQ(parse(with(both, "partial_rotary_factor", 0.25)).ropes.front().dim,
            32);  // as the reference has it
  EXPECT_EQ(
      *spec.layer(0).find<ExpertsSpec>(),
      (ExpertsSpec{
          .experts = 256, .chosen = 8, .ffn = 96, .renormalise = true, .scores = RouterScores::kSigmoid}));
}

TEST(ExpertFamilies, WhatTheirRoutersDoBesideIsRefused) {
  expect_refused(with(small("minimax_m2"), "router_jitter_noise", 0.1), "router_jitter_noise");
  expect_refused(with(small("mixtral"), "router_jitter_noise", 0.1), "router_jitter_noise");
  expect_refused(with(small("olmoe"), "clip_qkv", 8.0), "clip_qkv");
  expect_refused(with(qwen3_moe(), "mlp_only_layers", "1"), "mlp_only_layers");
}

}  // namespace
}  // namespace lm
