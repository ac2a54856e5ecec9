// The list of a run's state, from layout and plan alone: what has to be in it, once, whole and in order. That
// a rank moves exactly this: tests/train/offloaded_run.cpp.
#include "plan/state_catalogue.h"

#include <gtest/gtest.h>

#include <map>

#include "shapes.h"

namespace lm {
namespace {

ModelSpec small_spec(bool tied) {
  return make_spec({64, 160, 2, 4, 2, 16, 17000, tied});
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
    EXPECT_EQ(entry.rank, 0);
    EXPECT_EQ(entry.ranks, 1);
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

TEST(StateCatalogue, ListsEveryTrainableTensorAndEveryStreamOnce) {
  for (const bool tied : {false, true}) {
    for (const bool lora : {false, true}) {
      for (const bool cut : {false, true}) {
        const AdapterSpec adapter = adapter_r16();
        const ModelLayout layout = make_layout(small_spec(tied), lora ? &adapter : nullptr, DType::kBF16);
        const auto found = whole_names(list_state(layout, {.master = Master::kF32}, cut, true));
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

TEST(StateCatalogue, NamesTypesSizesAndUnitsOfACutHead) {
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

TEST(StateCatalogue, HasTheStreamsOfRuleAndMaster) {
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
  EXPECT_EQ(streams({.master = Master::kF32}), "m fp32; v fp32; master fp32; ");
  EXPECT_EQ(streams({.master = Master::kNone}), "m fp32; v fp32; ");
  EXPECT_EQ(streams({.dtype = DType::kF32}), "m fp32; v fp32; ");
  EXPECT_EQ(streams({.rule = Rules::id<Sgd>()}), "m fp32; master i16; ");
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
