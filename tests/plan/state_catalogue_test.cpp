// The list of a run's state, from layout and plan alone: what has to be in it, once, whole and in order. That
// a rank moves exactly this: tests/train/offloaded_run.cpp.
#include "plan/state_catalogue.h"

#include <gtest/gtest.h>

#include <map>

#include "shapes.h"

namespace lm {
namespace {

ModelSpec small_spec(bool tied) {
  return make_spec({64, 160, 2, 4, 2, 16, 17000}, tied);
}

NumericsPlan numerics_of(Master master, RuleId rule = {}, DType dtype = DType::kBF16) {
  NumericsPlan out;
  out.master = master;
  out.rule = rule;
  out.dtype = dtype;
  return out;
}

std::string text(const StateEntry& entry) {
  std::string out = entry.name + " " + dtype_name(entry.dtype) + " [";
  for (const int64_t n : entry.shape) out += (out.back() == '[' ? "" : ", ") + std::to_string(n);
  return out + "] unit " + std::to_string(entry.unit) + " from " + std::to_string(entry.first) + ": " +
         std::to_string(entry.elements);
}

std::vector<std::string> texts(const StateCatalogue& catalogue, const std::string& beginning) {
  std::vector<std::string> out;
  for (const StateEntry& entry : catalogue) {
    if (entry.name.starts_with(beginning)) out.push_back(text(entry));
  }
  return out;
}

// Elements of each name: its parts follow one another from the first element to the last of its shape.
std::map<std::string, int64_t> whole_names(const StateCatalogue& catalogue) {
  std::map<std::string, int64_t> elements;
  std::string last;
  for (const StateEntry& entry : catalogue) {
    EXPECT_TRUE(entry.name == last || entry.state == StateClass::kOptimizer || !elements.contains(entry.name))
        << text(entry);
    EXPECT_EQ(entry.first, elements[entry.name]) << text(entry);
    elements[entry.name] += entry.elements;
    last = entry.name;
  }
  for (const StateEntry& entry : catalogue) {
    int64_t all = 1;
    for (const int64_t n : entry.shape) all *= n;
    EXPECT_EQ(elements[entry.name], all) << text(entry);
  }
  return elements;
}

// Each rank lists its shards, whole granules of one unit; together they are everything, once.
TEST(StateCatalogue, RanksTogetherListWhatOneRankLists) {
  const ModelLayout layout = make_layout(small_spec(false), nullptr, DType::kBF16);
  std::map<std::string, int64_t> whole;
  for (const StateEntry& entry : list_state(layout, {}, true, true)) whole[entry.name] += entry.elements;
  for (const int ranks : {2, 3, 5}) {
    NumericsPlan numerics;
    numerics.ranks = ranks;
    std::map<std::string, std::map<int64_t, int64_t>> parts;  // by name and first element
    for (int rank = 0; rank < ranks; ++rank) {
      for (const StateEntry& entry : list_state(layout, numerics, true, true, {{ranks, 1}, rank})) {
        EXPECT_TRUE(parts[entry.name].emplace(entry.first, entry.elements).second) << text(entry);
        EXPECT_TRUE(entry.unit < 0 || entry.first % kGranule + entry.elements % kGranule == 0) << text(entry);
      }
    }
    ASSERT_EQ(parts.size(), whole.size());
    for (const auto& [name, runs] : parts) {
      int64_t end = 0;
      for (const auto& [first, elements] : runs) {
        EXPECT_EQ(first, end) << name << " of " << ranks << " ranks";
        end = first + elements;
      }
      EXPECT_EQ(end, whole.at(name)) << name << " of " << ranks << " ranks";
    }
  }
}

// Of a shard with copies every rank that has one saves another part of it, and all are saved once.
TEST(StateCatalogue, RanksListTheirPartsOfShardsWithCopies) {
  const ModelLayout layout = make_layout(small_spec(false), nullptr, DType::kBF16);
  const std::vector<Unit> units = layout.units(true);
  for (const int ranks : {4, 6, 8}) {
    for (int group = 1; group <= ranks; ++group) {
      if (ranks % group != 0) continue;
      const Sharding sharding{ranks, group};
      NumericsPlan numerics;
      numerics.ranks = ranks;
      std::map<std::string, std::map<int64_t, int64_t>> parts;  // by name and first element
      for (int rank = 0; rank < ranks; ++rank) {
        for (const StateEntry& entry : list_state(layout, numerics, true, true, {sharding, rank})) {
          EXPECT_TRUE(parts[entry.name].emplace(entry.first, entry.elements).second) << text(entry);
          if (entry.unit < 0) continue;
          const Shard own = shard_of(units[static_cast<size_t>(entry.unit)], sharding, sharding.place(rank));
          EXPECT_GE(entry.shard.first, own.first) << text(entry) << ", groups of " << group;
          EXPECT_LE(entry.shard.end(), own.end()) << text(entry) << ", groups of " << group;
        }
      }
      const StateCatalogue whole = list_state(layout, {}, true, true);
      for (const auto& [name, runs] : parts) {
        int64_t end = 0, all = 0;
        for (const auto& [first, elements] : runs) {
          EXPECT_EQ(first, end) << name << " of " << ranks << " ranks";
          end = first + elements;
        }
        for (const StateEntry& entry : whole) all += entry.name == name ? entry.elements : 0;
        EXPECT_EQ(end, all) << name << " of " << ranks << " ranks";
      }
    }
  }
}

TEST(StateCatalogue, ListsEveryTrainableTensorAndEveryStateTensorOnce) {
  for (const bool tied : {false, true}) {
    for (const bool lora : {false, true}) {
      for (const bool cut : {false, true}) {
        const AdapterSpec adapter = adapter_r16();
        const ModelLayout layout = make_layout(small_spec(tied), lora ? &adapter : nullptr, DType::kBF16);
        const auto found = whole_names(list_state(layout, numerics_of(Master::kF32), cut, true));
        std::map<std::string, int64_t> wanted = {{"optimizer.t", 1}};
        for (size_t b = 0; b < layout.blocks.size(); ++b) {
          const BlockLayout& block = layout.blocks[b];
          if (block.flat_elements == 0) continue;
          for (const char* stream : {"weight", "m", "v", "master"})
            wanted["block" + std::to_string(b) + "." + stream] = block.flat_elements;
        }
        EXPECT_EQ(found, wanted) << "tied " << tied << ", LoRA " << lora << ", cut " << cut;
      }
    }
  }
}

TEST(StateCatalogue, NamesTypesSizesAndUnitsOfAChunkedHead) {
  const ModelLayout layout = make_layout(small_spec(false), nullptr, DType::kBF16);
  const StateCatalogue list = list_state(layout, {}, true, true);
  // Streams of a unit side by side, as they lie in its tiles; the segments' before the final norm's.
  const std::string weight = "block3.weight bf16 [1093632] unit ", m = "block3.m fp32 [1093632] unit ",
                    v = "block3.v fp32 [1093632] unit ", low = "block3.master i16 [1093632] unit ";
  const char* const places[] = {"4 from 0: 524288", "5 from 524288: 524288", "6 from 1048576: 40960",
                                "3 from 1089536: 4096"};
  std::vector<std::string> wanted;
  for (const char* where : places) wanted.push_back(weight + where);
  for (const char* where : places) {
    for (const std::string& stream : {m, v, low}) wanted.push_back(stream + where);
  }
  EXPECT_EQ(texts(list, "block3."), wanted);
}

TEST(StateCatalogue, HasTheStateTensorsOfRuleAndMaster) {
  const ModelLayout layout = make_layout(small_spec(true), nullptr, DType::kBF16);
  const auto streams = [&](const NumericsPlan& numerics) {
    std::string out;
    for (const StateEntry& entry : list_state(layout, numerics, false, true)) {
      if (entry.name.starts_with("block1.") && entry.state == StateClass::kOptimizer)
        out += entry.name.substr(7) + " " + dtype_name(entry.dtype) + "; ";
    }
    return out;
  };
  EXPECT_EQ(streams({}), "m fp32; v fp32; master i16; ");
  EXPECT_EQ(streams(numerics_of(Master::kF32)), "m fp32; v fp32; master fp32; ");
  EXPECT_EQ(streams(numerics_of(Master::kNone)), "m fp32; v fp32; ");
  EXPECT_EQ(streams(numerics_of(Master::kSplit, {}, DType::kF32)), "m fp32; v fp32; ");
  EXPECT_EQ(streams(numerics_of(Master::kSplit, Rules::id<Sgd>())), "m fp32; master i16; ");
  EXPECT_EQ(streams(numerics_of(Master::kSplit, Rules::id<Lion8bit>())),
            "m u8; m_scale fp32; m_small fp32; master i16; ");
}

// Of ranks' shards each array's parts lie one behind another and are the whole, whatever an element takes.
TEST(StateCatalogue, CodesAndScalesOfShardsAreTheWhole) {
  const ModelLayout layout = make_layout(small_spec(false), nullptr, DType::kBF16);
  NumericsPlan numerics = numerics_of(Master::kSplit, Rules::id<AdamW8bit>());
  for (const int ranks : {1, 2, 3, 7}) {
    numerics.ranks = ranks;
    std::map<std::string, int64_t> end, whole;
    for (const bool chunked_head : {false, true}) {
      end.clear();
      // A unit's parts come rank by rank, and units follow one another.
      std::map<std::string, std::map<int64_t, int64_t>> parts;
      for (int rank = 0; rank < ranks; ++rank) {
        for (const StateEntry& entry : list_state(layout, numerics, chunked_head, true, {{ranks, 1}, rank})) {
          if (entry.unit < 0) continue;
          EXPECT_TRUE(parts[entry.name].emplace(entry.first, entry.elements).second) << entry.name;
          whole[entry.name] = entry.shape.at(0);
        }
      }
      for (const auto& [name, of_array] : parts) {
        int64_t at = 0;
        for (const auto& [first, elements] : of_array) {
          EXPECT_EQ(first, at) << name << ", " << ranks << " ranks";
          at = first + elements;
        }
        EXPECT_EQ(at, whole[name]) << name << ", " << ranks << " ranks";
      }
      EXPECT_EQ(whole["block1.m"], whole["block1.m_scale"] * 256);
      EXPECT_EQ(whole["block1.m"] + whole["block1.m_small"], whole["block1.weight"]);
      EXPECT_GT(whole["block1.m_small"], 0);
    }
  }
}

TEST(StateCatalogue, OfARankThatDoesNotTrainHasWeightsAlone) {
  const ModelLayout layout = make_layout(small_spec(true), nullptr, DType::kBF16);
  const StateCatalogue all = list_state(layout, {}, false, true),
                       weights = list_state(layout, {}, false, false);
  ASSERT_LT(weights.size(), all.size());
  for (const StateEntry& entry : weights) EXPECT_EQ(entry.state, StateClass::kWeights);
  const StateCatalogue first(all.begin(), all.begin() + std::ssize(weights));
  EXPECT_EQ(texts(weights, ""), texts(first, ""));
}

}  // namespace
}  // namespace lm
