#include "spec/block_layout.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/error.h"
#include "odd_model.h"
#include "tests/support/hf_names.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

ModelSpec llama_1b() {
  ModelSpec spec = llama_spec({.hidden = 2048,
                               .ffn = 8192,
                               .layers = 16,
                               .heads = 32,
                               .kv_heads = 8,
                               .head_dim = 64,
                               .vocab = 128256});
  spec.tied = true;
  return spec;
}

ModelSpec smollm2_135m() {
  ModelSpec spec = llama_spec(
      {.hidden = 576, .ffn = 1536, .layers = 30, .heads = 9, .kv_heads = 3, .head_dim = 64, .vocab = 49152});
  spec.tied = true;
  return spec;
}

void check_layout(const ModelSpec& spec, const AdapterSpec* lora, DType dtype) {
  const ModelLayout layout = make_layout(spec, lora, dtype);
  ASSERT_EQ(layout.blocks.size(), spec.layers.size() + 2);
  int64_t trainable = 0, frozen = 0, flat = 0, frozen_bytes = 0;
  std::set<std::string> names;
  for (const BlockLayout& block : layout.blocks) {
    int64_t end = 0, frozen_end = 0, covered = 0, elements = 0, frozen_elements = 0;
    for (const DecayRange& range : block.ranges) {
      EXPECT_EQ(range.first, covered);
      EXPECT_EQ(range.elements % kGranule, 0);
      EXPECT_GT(range.elements, 0);
      covered += range.elements;
    }
    EXPECT_EQ(covered, block.flat_elements);
    for (const TensorPlace& place : block.tensors) {
      const Parameter& parameter = place.parameter;
      EXPECT_TRUE(names.insert(parameter.name).second) << parameter.name;
      EXPECT_EQ(block.find(parameter.name), &place);
      int64_t row = 0;
      for (const ParameterPart& part : parameter.parts) {
        EXPECT_EQ(part.first, row) << parameter.name;
        row += part.rows;
      }
      EXPECT_EQ(row, parameter.rows) << parameter.name;
      if (place.frozen) {
        EXPECT_EQ(place.offset % 512, 0);
        EXPECT_GE(place.offset, frozen_end);
        frozen_end = place.offset + parameter.elements() * static_cast<int64_t>(dtype_size(dtype));
        frozen_elements += parameter.elements();
        continue;
      }
      EXPECT_EQ(frozen_end, 0) << "trainable tensors come first";
      EXPECT_EQ(place.offset % kTensorStart, 0);
      EXPECT_GE(place.offset, end);
      end = place.offset + parameter.elements();
      elements += parameter.elements();
      for (const DecayRange& range : block.ranges) {
        const bool inside = place.offset >= range.first && end <= range.first + range.elements;
        const bool outside = end <= range.first || place.offset >= range.first + range.elements;
        EXPECT_TRUE(inside || outside) << parameter.name;
        EXPECT_TRUE(outside || range.decay == !parameter.vector()) << parameter.name;
      }
    }
    EXPECT_LE(end, block.flat_elements);
    EXPECT_LT(block.flat_elements - end, kGranule);
    EXPECT_LE(frozen_end, block.frozen_bytes);
    EXPECT_EQ(elements, block.parameter_elements);
    EXPECT_EQ(frozen_elements, block.frozen_elements);
    trainable += elements;
    frozen += frozen_elements;
    flat += block.flat_elements;
    frozen_bytes += block.frozen_bytes;
  }
  EXPECT_EQ(layout.trainable_elements, trainable);
  EXPECT_EQ(layout.frozen_elements, frozen);
  EXPECT_EQ(layout.flat_elements, flat);
  EXPECT_EQ(layout.frozen_bytes, frozen_bytes);
}

TEST(BlockLayout, AlignsCoversAndNeverOverlaps) {
  const AdapterSpec all = adapter(5, {"all-linear"}), some = adapter(8, {"v_proj", "q_proj"});
  for (const ModelSpec& spec : {llama_1b(), smollm2_135m(), odd()}) {
    for (const AdapterSpec* lora : {static_cast<const AdapterSpec*>(nullptr), &all, &some}) {
      check_layout(spec, lora, DType::kBF16);
      check_layout(spec, lora, DType::kF32);
    }
  }
}

// Every granule and every frozen byte belongs to one unit; segments follow each other at granules.
void check_units(const ModelLayout& layout, int64_t vocab, int64_t hidden, bool frozen, DType dtype) {
  const std::vector<Unit> units = layout.units(true);
  const auto blocks = static_cast<int64_t>(layout.blocks.size());
  ASSERT_EQ(std::ssize(units), blocks + (vocab + kVocabularySegment - 1) / kVocabularySegment);
  int64_t flat = 0, frozen_bytes = 0, row = 0, end = 0, frozen_end = 0;
  for (int64_t u = 0; u < std::ssize(units); ++u) {
    const Unit& unit = units[static_cast<size_t>(u)];
    flat += unit.elements;
    frozen_bytes += unit.frozen_bytes;
    EXPECT_EQ(unit.first % kGranule, 0);
    EXPECT_EQ(unit.elements % kGranule, 0);
    EXPECT_EQ(unit.segment(), u >= blocks);
    if (!unit.segment()) {
      EXPECT_EQ(unit.block, u);
      continue;
    }
    EXPECT_EQ(unit.block, blocks - 1);
    EXPECT_EQ(unit.first_row, row);
    EXPECT_EQ(unit.first, end);
    EXPECT_EQ(unit.first_frozen_byte, frozen_end);
    if (frozen) {
      EXPECT_GE(unit.frozen_bytes, unit.rows * hidden * static_cast<int64_t>(dtype_size(dtype)));
    } else {
      EXPECT_GE(unit.elements, unit.rows * hidden);
    }
    row += unit.rows;
    end += unit.elements;
    frozen_end += unit.frozen_bytes;
  }
  EXPECT_EQ(row, vocab);
  EXPECT_EQ(flat, layout.flat_elements);
  EXPECT_EQ(frozen_bytes, layout.frozen_bytes);
  const Unit& rest = units[static_cast<size_t>(blocks - 1)];
  EXPECT_EQ(rest.first, end);
  EXPECT_EQ(rest.first_frozen_byte, frozen_end);
  EXPECT_TRUE(rest.holds(*layout.blocks.back().find("norm")));
  EXPECT_FALSE(rest.holds(*layout.blocks.back().find("head")));
}

TEST(Units, CutAnUntiedHeadIntoVocabularySegments) {
  const AdapterSpec lora = adapter(5, {"all-linear"});
  for (const int64_t vocab : {501, 8192, 8193, 20000}) {
    ModelSpec spec = odd();
    spec.vocab = vocab;
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      check_units(make_layout(spec, nullptr, dtype), vocab, 77, false, dtype);
      check_units(make_layout(spec, &lora, dtype), vocab, 77, true, dtype);
    }
  }
}

TEST(Units, AreTheBlocksWhereNothingIsCut) {
  for (const bool cut : {false, true}) {
    const ModelLayout layout = make_layout(cut ? llama_1b() : odd(), nullptr, DType::kBF16);
    const std::vector<Unit> units = layout.units(cut);  // a tied head has nothing to cut
    ASSERT_EQ(units.size(), layout.blocks.size());
    for (size_t b = 0; b < units.size(); ++b) {
      EXPECT_EQ(units[b].elements, layout.blocks[b].flat_elements);
      EXPECT_EQ(units[b].first, 0);
    }
  }
}

TEST(BlockLayout, CountsTheElementsOfKnownModels) {
  EXPECT_EQ(make_layout(llama_1b(), nullptr, DType::kBF16).trainable_elements, 1235814400);
  EXPECT_EQ(make_layout(smollm2_135m(), nullptr, DType::kBF16).trainable_elements, 134515008);
  const AdapterSpec lora = adapter(16, {"all-linear"});
  const ModelLayout layout = make_layout(llama_1b(), &lora, DType::kBF16);
  EXPECT_EQ(layout.trainable_elements, 11272192);
  EXPECT_EQ(layout.frozen_elements, 1235814400);
  EXPECT_EQ(layout.frozen_bytes,
            2 * int64_t{1235814400});  // every tensor of this model is a multiple of 512 bytes
}

TEST(Parameters, AreNamedAndOrderedAsDocumented) {
  const auto blocks = list_parameters(odd(), nullptr);
  ASSERT_EQ(blocks.size(), 5u);
  EXPECT_EQ(blocks[0].name, "embedding");
  EXPECT_EQ(blocks[2].name, "block 1");
  EXPECT_EQ(blocks[4].name, "head");
  std::vector<std::string> names;
  for (const Parameter& parameter : blocks[2].trainable) names.push_back(parameter.name);
  EXPECT_EQ(names, (std::vector<std::string>{"layers.1.attn.qkv", "layers.1.attn.out", "layers.1.mlp.gate_up",
                                             "layers.1.mlp.down", "layers.1.attn.norm", "layers.1.mlp.norm",
                                             "layers.1.attn.q_norm", "layers.1.attn.k_norm",
                                             "layers.1.attn.qkv_bias", "layers.1.attn.out_bias",
                                             "layers.1.mlp.gate_up_bias", "layers.1.mlp.down_bias"}));
  const Parameter& qkv = blocks[2].trainable[0];
  EXPECT_EQ(qkv.rows, 6 * 22 + 2 * 2 * 22);
  EXPECT_EQ(qkv.columns, 77);
  ASSERT_EQ(qkv.parts.size(), 3u);
  EXPECT_EQ(qkv.parts[1].name, "model.layers.1.self_attn.k_proj.weight");
  EXPECT_EQ(qkv.parts[1].first, 132);
  EXPECT_EQ(qkv.parts[1].rows, 44);
  EXPECT_EQ(blocks[2].trainable[11].parts[0].name, "model.layers.1.mlp.down_proj.bias");
  EXPECT_EQ(blocks[4].trainable[0].parts[0].name, "lm_head.weight");
  EXPECT_EQ(blocks[4].trainable[1].parts[0].name, "model.norm.weight");
}

// The same matrices by other names, two of them joined in the files as Phi-3's are.
ModelSpec joined() {
  ModelSpec spec = odd();
  spec.names.modules = {{"attn.qkv_proj", "attn.q", "attn.v"},
                        {"attn.o_proj", "attn.o"},
                        {"mlp.gate_up_proj", "mlp.gate", "mlp.up"},
                        {"mlp.down_proj", "mlp.down"}};
  return spec;
}

TEST(Parameters, AFamilysNamesAreData) {
  ModelSpec spec = joined();
  spec.names.layers = "h.";
  spec.names.head = "output";
  const auto blocks = list_parameters(spec, nullptr), llama = list_parameters(odd(), nullptr);
  for (size_t p = 0; p < blocks[2].trainable.size(); ++p) {
    const Parameter& ours = blocks[2].trainable[p];
    EXPECT_EQ(ours.name, llama[2].trainable[p].name);
    EXPECT_EQ(ours.rows, llama[2].trainable[p].rows);
    EXPECT_EQ(ours.columns, llama[2].trainable[p].columns);
    ASSERT_EQ(ours.parts.size(), 1u) << ours.name;
    EXPECT_EQ(ours.parts[0].rows, ours.rows);
  }
  EXPECT_EQ(blocks[2].trainable[0].parts[0].name, "h.1.attn.qkv_proj.weight");
  EXPECT_EQ(blocks[2].trainable[10].parts[0].name, "h.1.mlp.gate_up_proj.bias");
  EXPECT_EQ(blocks[4].trainable[0].parts[0].name, "output.weight");
}

TEST(Parameters, AdaptersTargetTheFamilysModules) {
  const AdapterSpec all{.r = 4, .alpha = 4, .targets = resolve_targets(joined().names, {"all-linear"}, "x")};
  EXPECT_EQ(all.targets, (std::vector<std::string>{"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}));
  const auto blocks = list_parameters(joined(), &all);
  ASSERT_EQ(blocks[2].trainable.size(), 8u);
  const Parameter& b = blocks[2].trainable[1];
  EXPECT_EQ(b.name, "layers.1.qkv_proj.lora_B");
  EXPECT_EQ(b.rows, 132 + 2 * 44);
  EXPECT_EQ(b.parts[0].name, "base_model.model.model.layers.1.attn.qkv_proj.lora_B.weight");
  try {
    resolve_targets(joined().names, {"q_proj"}, "x");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(error.text().next.find("qkv_proj, o_proj, gate_up_proj, down_proj"), std::string::npos);
  }
}

TEST(Parameters, LayersMayDiffer) {
  ModelSpec spec = odd();
  spec.layers[1] =
      llama_spec({.hidden = 77, .ffn = 131, .heads = 6, .kv_heads = 2, .head_dim = 22}).layers[0];
  const auto blocks = list_parameters(spec, nullptr);
  EXPECT_EQ(blocks[1].trainable.size(), 12u);
  EXPECT_EQ(blocks[2].trainable.size(), 6u);
  EXPECT_EQ(blocks[3].trainable.size(), 12u);
}

TEST(Parameters, AnAdapterFreezesTheModelAndFollowsThePeftNames) {
  const AdapterSpec lora = adapter(4, {"self_attn.o_proj", "q_proj"});
  const auto blocks = list_parameters(odd(), &lora);
  EXPECT_TRUE(blocks[0].trainable.empty());
  EXPECT_EQ(blocks[0].frozen.size(), 1u);
  ASSERT_EQ(blocks[1].trainable.size(), 4u);
  const Parameter& b = blocks[1].trainable[3];
  EXPECT_EQ(b.name, "layers.0.o_proj.lora_B");
  EXPECT_EQ(b.kind, ParameterKind::kMatrix);
  EXPECT_EQ(b.role, TrainableRole::kLoraB);
  EXPECT_EQ(b.owner, "model.layers.0.self_attn.o_proj.weight");
  EXPECT_EQ(b.rows, 77);
  EXPECT_EQ(b.columns, 4);
  EXPECT_EQ(b.parts[0].name, "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight");
  EXPECT_EQ(blocks[1].trainable[2].columns, 132);
}

TEST(Parameters, MagnitudesStandBehindAllMatricesAndHaveNoDecay) {
  AdapterSpec dora = adapter(4, {"self_attn.o_proj", "k_proj"});
  dora.dora = true;
  const ModelLayout layout = make_layout(odd(), &dora, DType::kF32);
  const BlockLayout& block = layout.blocks[1];
  ASSERT_EQ(block.trainables.size(), 6u);
  const TensorPlace& last = block.tensors[5];
  EXPECT_EQ(last.parameter.name, "layers.0.o_proj.lora_magnitude_vector");
  EXPECT_EQ(last.parameter.parts[0].name,
            "base_model.model.model.layers.0.self_attn.o_proj.lora_magnitude_vector");
  EXPECT_EQ(last.parameter.shape(last.parameter.parts[0]), std::vector<int64_t>{77});
  EXPECT_EQ(block.beside(*block.find("layers.0.attn.out"), 0, TrainableRole::kMagnitude), &last);
  ASSERT_EQ(block.ranges.size(), 2u);
  EXPECT_FALSE(block.ranges[1].decay);
  EXPECT_EQ(block.ranges[1].first, block.tensors[4].offset);
}

// PiSSA: the frozen pairs have no place in the flat array, whose sizes decide gradients and state.
TEST(Trainables, AreAllTrainedTensorsWithTheirOwners) {
  const AdapterSpec lora = adapter(4, {"self_attn.o_proj", "k_proj"});
  const ModelLayout full = make_layout(odd(), nullptr, DType::kF32),
                    adapted = make_layout(odd(), &lora, DType::kF32);
  for (const ModelLayout* layout : {&full, &adapted}) {
    uint32_t number = 0;
    for (const BlockLayout& block : layout->blocks) {
      size_t trained = 0;
      for (const TensorPlace& place : block.tensors) {
        EXPECT_EQ(place.number, ++number) << place.parameter.name;
        trained += place.frozen ? 0 : 1;
      }
      ASSERT_EQ(block.trainables.size(), trained);
      for (size_t i = 0; i < trained; ++i) {
        const Trainable& entry = block.trainables[i];
        const TensorPlace &place = block.tensors[entry.tensor], &owner = block.tensors[entry.owner];
        EXPECT_FALSE(place.frozen);
        EXPECT_EQ(entry.tensor, i);
        EXPECT_EQ(entry.decay, !place.parameter.vector()) << place.parameter.name;
        EXPECT_EQ(block.beside(owner, entry.part, entry.role), &place) << place.parameter.name;
        EXPECT_EQ(in_adapter(entry.role), layout == &adapted);
        EXPECT_EQ(&place == &owner, layout == &full) << place.parameter.name;
      }
    }
  }
  const BlockLayout& block = adapted.blocks[1];
  const TensorPlace &qkv = *block.find("layers.0.attn.qkv"), &out = *block.find("layers.0.attn.out");
  EXPECT_EQ(block.beside(qkv, 1, TrainableRole::kLoraA), block.find("layers.0.k_proj.lora_A"));
  EXPECT_EQ(block.beside(qkv, 1, TrainableRole::kLoraB), block.find("layers.0.k_proj.lora_B"));
  EXPECT_EQ(block.beside(out, 0, TrainableRole::kLoraB), block.find("layers.0.o_proj.lora_B"));
  for (const size_t part : {0, 2}) EXPECT_EQ(block.beside(qkv, part, TrainableRole::kLoraA), nullptr);
}

TEST(Parameters, EveryHuggingFaceNameStandsOnce) {
  const std::vector<std::string> names = hf_names(odd());
  const std::set<std::string> unique(names.begin(), names.end());
  EXPECT_EQ(unique.size(), names.size());
  EXPECT_EQ(names.size(), 3u + 3 * (7 + 7 + 4));
  EXPECT_EQ(names.front(), "model.embed_tokens.weight");
  ModelSpec tied = odd();
  tied.tied = true;
  EXPECT_EQ(hf_names(tied).size(), names.size() - 1);
}

TEST(Targets, AreResolvedInBlockOrderAndUnknownOnesNamed) {
  EXPECT_EQ(resolve_targets(llama_names(), {"down_proj", "mlp.up_proj", "q_proj", "q_proj"}, "x"),
            (std::vector<std::string>{"q_proj", "up_proj", "down_proj"}));
  EXPECT_EQ(resolve_targets(llama_names(), {"all-linear"}, "x").size(), 7u);
  for (const char* wrong : {"qproj", "proj", "lm_head", "layers.0.self_attn.q_proj", "mlp.q_proj", ""}) {
    try {
      resolve_targets(llama_names(), {"q_proj", wrong}, "train.toml:7:3");
      ADD_FAILURE() << wrong;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kConfig);
      EXPECT_NE(std::string(error.what()).find(std::string("\"") + wrong + "\""), std::string::npos);
      EXPECT_EQ(error.text().place, "train.toml:7:3");
    }
  }
  EXPECT_THROW(resolve_targets(llama_names(), {}, "x"), Error);
}

TEST(Targets, TheScaleIsAlphaOverTheRankOrItsRoot) {
  AdapterSpec lora = adapter(16, {"q_proj"});
  EXPECT_EQ(lora.scale(), 2.0);
  lora.rslora = true;
  EXPECT_EQ(lora.scale(), 8.0);
}

}  // namespace
}  // namespace lm
