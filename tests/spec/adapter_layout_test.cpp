// Where the tensors of adapters lie, kind by kind.
#include <gtest/gtest.h>

#include "base/error.h"
#include "odd_model.h"
#include "spec/block_layout.h"

namespace lm {
namespace {

TEST(Parameters, PairsThatTrainingBeganWithAreFrozenInTheModelsTypeBesideTheirOwners) {
  AdapterSpec pissa = adapter(4, {"self_attn.o_proj", "k_proj"});
  const ModelLayout plain = make_layout(odd(), &pissa, DType::kBF16, &encoding_of(EncodingKind::kNf4));
  pissa.pissa = true;
  const ModelLayout layout = make_layout(odd(), &pissa, DType::kBF16, &encoding_of(EncodingKind::kNf4));
  const BlockLayout &block = layout.blocks[1], &other = plain.blocks[1];
  EXPECT_EQ(block.trainables, other.trainables);
  EXPECT_EQ(block.flat_elements, other.flat_elements);
  EXPECT_EQ(block.frozen_elements, other.frozen_elements);
  ASSERT_EQ(block.starts.size(), 4u);
  for (const char* const owner : {"layers.0.attn.out", "layers.0.attn.qkv"}) {
    const TensorPlace& weight = *block.find(owner);
    const size_t part = weight.parameter.parts.size() > 1 ? 1 : 0;
    for (const auto& [start, trained] : {std::pair{TrainableRole::kStartA, TrainableRole::kLoraA},
                                         std::pair{TrainableRole::kStartB, TrainableRole::kLoraB}}) {
      const TensorPlace *const frozen = block.beside(weight, part, start), *const own = block.beside(
                                                                               weight, part, trained);
      ASSERT_TRUE(frozen != nullptr && own != nullptr) << owner;
      EXPECT_TRUE(frozen->frozen && !frozen->encoded());
      EXPECT_EQ(frozen->pieces.front().bytes, own->parameter.elements() * 2);
      EXPECT_EQ(frozen->parameter.rows, own->parameter.rows);
      EXPECT_EQ(frozen->number, 0u);
    }
    EXPECT_EQ(weight.number, other.find(owner)->number);  // it is drawn as without them
  }
}

TEST(Parameters, TrainedBiasesAreCopiesOfPartsUnderPeftsNames) {
  AdapterSpec some = adapter(4, {"self_attn.o_proj", "k_proj"});
  const auto biases = [&](AdapterBias which) {
    some.bias = which;
    const ModelLayout layout = make_layout(odd(), &some, DType::kF32);
    const BlockLayout& block = layout.blocks[1];
    std::vector<std::string> out;
    for (const Trainable& entry : block.trainables) {
      if (entry.role != TrainableRole::kBias) continue;
      const Parameter& copy = block.tensors[entry.tensor].parameter;
      const ParameterPart& own = block.tensors[entry.owner].parameter.parts[entry.part];
      EXPECT_TRUE(block.tensors[entry.owner].frozen && !entry.decay);
      EXPECT_EQ(copy.rows, own.rows);
      EXPECT_EQ(block.beside(block.tensors[entry.owner], entry.part, TrainableRole::kBias),
                &block.tensors[entry.tensor]);
      out.push_back(copy.parts.front().name);
    }
    return out;
  };
  const std::string layer = "base_model.model.model.layers.0.self_attn.";
  EXPECT_TRUE(biases(AdapterBias::kNone).empty());
  const std::vector<std::string> own = biases(AdapterBias::kLoraOnly), all = biases(AdapterBias::kAll);
  EXPECT_TRUE(std::ranges::find(own, layer + "k_proj.base_layer.bias") != own.end());
  EXPECT_TRUE(std::ranges::find(own, layer + "q_proj.bias") == own.end());
  EXPECT_TRUE(std::ranges::find(all, layer + "q_proj.bias") != all.end());
  EXPECT_TRUE(std::ranges::find(all, layer + "k_proj.base_layer.bias") != all.end());
  EXPECT_GT(all.size(), own.size());
}

TEST(Parameters, ABiasThatIsTrainedWholeHasNoCopy) {
  const ModelSpec spec = parse_model_spec(
      R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 8})",
      "small");
  AdapterSpec some{.r = 2, .alpha = 4, .targets = {"c_attn"}, .bias = AdapterBias::kAll};
  some.also = {"transformer.h.0.ln_1", "transformer.ln_f"};
  const ModelLayout layout = make_layout(spec, &some, DType::kF32);
  const auto count = [](const BlockLayout& block, TrainableRole role) {
    return std::ranges::count(block.trainables, role, &Trainable::role);
  };
  // Of ln_2 the bias is a copy; of the others weight and bias are trained themselves.
  for (const size_t block : {size_t{1}, size_t{2}}) {
    EXPECT_EQ(count(layout.blocks[block], TrainableRole::kWhole), 2);
    EXPECT_EQ(count(layout.blocks[block], TrainableRole::kReplacement), block == 1 ? 1 : 0);
  }
  EXPECT_EQ(count(layout.blocks[1], TrainableRole::kBias), 4);
}

TEST(Parameters, ScalesAreOfInputsOrOutputsAndHaveNoDecay) {
  AdapterSpec ia3;
  ia3.kind = AdapterKind::kIa3;
  ia3.targets = {"k_proj", "down_proj"};
  const ModelLayout layout = make_layout(odd(), &ia3, DType::kF32);
  const BlockLayout& block = layout.blocks[1];
  ASSERT_EQ(block.trainables.size(), 2u);
  const TensorPlace &qkv = *block.find("layers.0.attn.qkv"), &down = *block.find("layers.0.mlp.down");
  const TensorPlace* const key = block.beside(qkv, 1, TrainableRole::kOutputScale);
  const TensorPlace* const input = block.beside(down, 0, TrainableRole::kInputScale);
  ASSERT_TRUE(key != nullptr && input != nullptr);
  EXPECT_EQ(key->parameter.shape(key->parameter.parts[0]),
            (std::vector<int64_t>{qkv.parameter.parts[1].rows, 1}));
  EXPECT_EQ(input->parameter.shape(input->parameter.parts[0]),
            (std::vector<int64_t>{1, down.parameter.columns}));
  EXPECT_EQ(key->parameter.parts[0].name, "base_model.model.model.layers.0.self_attn.k_proj.ia3_l");
  ASSERT_EQ(block.ranges.size(), 1u);
  EXPECT_FALSE(block.ranges[0].decay);
}

TEST(Parameters, CopiesOfNormsAreInTheBlocksOfTheNorms) {
  AdapterSpec norms;
  norms.kind = AdapterKind::kNorms;
  norms.targets = {"input_layernorm", "norm"};
  const ModelLayout layout = make_layout(odd(), &norms, DType::kF32);
  EXPECT_TRUE(layout.blocks.front().trainables.empty());
  ASSERT_EQ(layout.blocks[1].trainables.size(), 1u);
  ASSERT_EQ(layout.blocks.back().trainables.size(), 1u);
  const BlockLayout& last = layout.blocks.back();
  const TensorPlace& norm = *last.find("norm");
  EXPECT_TRUE(norm.frozen);
  const TensorPlace* const copy = last.beside(norm, 0, TrainableRole::kReplacement);
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(copy->parameter.parts[0].name, "base_model.model.model.norm.ln_tuning_layers.weight");
  EXPECT_EQ(copy->parameter.elements(), norm.parameter.elements());
  EXPECT_EQ(layout.blocks[1].tensors[0].parameter.parts[0].name,
            "base_model.model.model.layers.0.input_layernorm.ln_tuning_layers.weight");
}

TEST(Parameters, APrefixIsInEveryLayerAndOneTensorOfTheFiles) {
  AdapterSpec prefix;
  prefix.kind = AdapterKind::kPrefix;
  prefix.virtual_tokens = 5;
  const ModelSpec spec = odd();
  const AttentionSpec& attention = spec.layer(0).attention();
  const ModelLayout layout = make_layout(spec, &prefix, DType::kF32);
  EXPECT_TRUE(layout.blocks.front().trainables.empty() && layout.blocks.back().trainables.empty());
  const int64_t columns = 2 * attention.kv_rows();
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    const BlockLayout& block = layout.blocks[static_cast<size_t>(i) + 1];
    ASSERT_EQ(block.trainables.size(), 1u);
    EXPECT_TRUE(block.trainables[0].decay);
    const Parameter& p = block.tensors[0].parameter;
    EXPECT_EQ(p.shape(p.parts[0]), (std::vector<int64_t>{5, columns}));
    EXPECT_EQ(p.file_shape(p.parts[0]), (std::vector<int64_t>{5, spec.layer_count() * columns}));
    EXPECT_EQ(p.parts[0].tensor(), "prompt_embeddings");
    EXPECT_EQ(p.parts[0].column, i * columns);
  }
}

TEST(Parameters, APromptIsInTheEmbeddingsBlock) {
  AdapterSpec prompt;
  prompt.kind = AdapterKind::kPrompt;
  prompt.virtual_tokens = 5;
  const ModelSpec spec = odd();
  const ModelLayout layout = make_layout(spec, &prompt, DType::kF32);
  EXPECT_EQ(layout.first_trained(), 0);
  EXPECT_EQ(layout.trainable_elements, 5 * spec.hidden);
  const Parameter& p = layout.blocks.front().tensors[0].parameter;
  EXPECT_EQ(p.file_shape(p.parts[0]), (std::vector<int64_t>{5, spec.hidden}));
  EXPECT_TRUE(layout.blocks.front().find("embed")->frozen);
}

TEST(Parameters, AnEncoderIsBesideItsPromptWithItsBiasesLast) {
  AdapterSpec adapter;
  adapter.kind = AdapterKind::kPrompt;
  adapter.virtual_tokens = 5;
  adapter.encoder = 7;
  const ModelSpec spec = odd();
  const int64_t hidden = spec.hidden;
  const ModelLayout layout = make_layout(spec, &adapter, DType::kF32);
  const BlockLayout& block = layout.blocks.front();
  struct Expected {
    const char *name, *file;
    std::vector<int64_t> shape;
    int64_t fan_in;
  };
  const Expected all[] = {
      {"prompt", "prompt_encoder.embedding.weight", {5, hidden}, 0},
      {"encoder.0.weight", "prompt_encoder.mlp_head.0.weight", {7, hidden}, hidden},
      {"encoder.2.weight", "prompt_encoder.mlp_head.2.weight", {7, 7}, 7},
      {"encoder.4.weight", "prompt_encoder.mlp_head.4.weight", {hidden, 7}, 7},
      {"encoder.0.bias", "prompt_encoder.mlp_head.0.bias", {7}, hidden},
      {"encoder.2.bias", "prompt_encoder.mlp_head.2.bias", {7}, 7},
      {"encoder.4.bias", "prompt_encoder.mlp_head.4.bias", {hidden}, 7},
  };
  ASSERT_EQ(block.trainables.size(), std::size(all));
  for (size_t i = 0; i < std::size(all); ++i) {
    SCOPED_TRACE(all[i].name);
    const Parameter& p = block.tensors[block.trainables[i].tensor].parameter;
    EXPECT_EQ(p.name, all[i].name);
    EXPECT_EQ(p.parts.front().name, all[i].file);
    EXPECT_EQ(p.shape(p.parts.front()), all[i].shape);
    EXPECT_EQ(p.fan_in, all[i].fan_in);
    EXPECT_EQ(block.trainables[i].decay, i < 4);
  }
}

TEST(Parameters, VirtualTokensThatAModelCannotHaveAreNamed) {
  ModelSpec spec = odd();
  EXPECT_EQ(virtual_token_mistake(spec, AdapterKind::kPrefix), "");
  spec.layers.back().attention().head_dim *= 2;
  EXPECT_NE(virtual_token_mistake(spec, AdapterKind::kPrefix).find("different sizes"), std::string::npos);
  EXPECT_EQ(virtual_token_mistake(spec, AdapterKind::kPrompt), "");
  spec.embedding.inputs.width = 4;
  EXPECT_NE(virtual_token_mistake(spec, AdapterKind::kPrompt).find("embeddings of their own"),
            std::string::npos);
}

}  // namespace
}  // namespace lm
