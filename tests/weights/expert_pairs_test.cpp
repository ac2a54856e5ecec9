// Pairs of experts in peft's files: those of all experts of a layer are two tensors, of which an expert's A
// is some rows and its B every so-manieth column.
#include <map>
#include <utility>

#include "export/export_adapter.h"
#include "spec/adapter_sites.h"
#include "spec/expert_adapters.h"
#include "tests/weights/support.h"
#include "weights/adapter_files.h"

namespace lm {
namespace {

using nlohmann::json;
using test::TemporaryDirectory;

constexpr int64_t kExperts = 3, kRank = 2, kWidth = 5, kHidden = 12;

ModelSpec mixture() {
  json config = test::tiny_config("qwen3_moe");
  config.update({{"num_experts", kExperts}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", kWidth}});
  return parse_model_spec(config.dump(), "tiny");
}

AdapterSpec pairs() {
  return {.r = kRank, .alpha = 4, .targets = {"q_proj", "experts.gate_up_proj", "experts.down_proj"}};
}

std::vector<float> values_of(const Parameter& parameter) {
  std::vector<float> out;
  for (int64_t i = 0; i < parameter.elements(); ++i) out.push_back(test::tiny_value(parameter.name, i));
  return out;
}

void write(const std::string& directory, const ModelSpec& base, const AdapterSpec& adapter, bool patterns) {
  const ModelLayout layout = make_layout(base, &adapter, DType::kBF16);
  std::vector<float> values;
  const auto source = [&](size_t, const TensorPlace& place, int64_t) {
    values = values_of(place.parameter);
    return WeightView{reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
  };
  write_adapter(directory, adapter, {.name = "org/base", .directory = "", .spec = &base}, layout, source,
                {.replace = false, .patterns = patterns});
}

using Values = std::map<std::string, std::vector<float>>;  // by our names

Values load(const std::string& directory, const ModelSpec& base, const AdapterSpec& adapter) {
  Values out;
  load_adapter(directory, make_layout(base, &adapter, DType::kF32),
               [&](size_t, const TensorPlace& place) {
                 auto& to = out[place.parameter.name];
                 to.resize(static_cast<size_t>(place.parameter.elements()));
                 return LoadTarget{reinterpret_cast<std::byte*>(to.data()), DType::kF32};
               },
               {.base = &base});
  return out;
}

std::vector<float> in_file(const std::string& directory, const std::string& name) {
  const ModelFiles files(directory, kAdapterWeights);
  const auto tensor = files.find(name);
  std::vector<float> out(static_cast<size_t>(tensor->entry->bytes()) / 4);
  tensor->file->read(*tensor->entry, 0, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST(ExpertPairs, LieAsPeftHasThem) {
  const TemporaryDirectory directory;
  const ModelSpec base = mixture();
  write(directory / "out", base, pairs(), false);
  const std::string module = "base_model.model.model.layers.1.mlp.experts";
  const std::vector<float> a = in_file(directory / "out", module + ".base_layer.lora_A.weight"),
                           b = in_file(directory / "out", module + ".lora_B.weight");
  ASSERT_EQ(std::ssize(a), kExperts * kRank * kHidden);
  ASSERT_EQ(std::ssize(b), kHidden * kRank * kExperts);
  for (int64_t e = 0; e < kExperts; ++e) {
    const std::string expert = "layers.1.experts." + std::to_string(e);
    for (int64_t i = 0; i < kRank * kHidden; ++i)
      EXPECT_EQ(a[static_cast<size_t>(e * kRank * kHidden + i)],
                test::tiny_value(expert + ".gate_up.lora_A", i));
    for (int64_t row = 0; row < kHidden; ++row)
      for (int64_t j = 0; j < kRank; ++j)
        EXPECT_EQ(b[static_cast<size_t>(row * kRank * kExperts + j * kExperts + e)],
                  test::tiny_value(expert + ".down.lora_B", row * kRank + j));
  }
}

TEST(ExpertPairs, AreReadAsTheyWereWritten) {
  const TemporaryDirectory directory;
  const ModelSpec base = mixture();
  write(directory / "out", base, pairs(), false);
  const AdapterSpec again = read_adapter_config(directory / "out", &base).spec;
  EXPECT_EQ(again, pairs());
  check_adapter(directory / "out", base);
  const Values values = load(directory / "out", base, again);
  const ModelLayout layout = make_layout(base, &again, DType::kF32);
  int64_t seen = 0;
  for (const BlockLayout& block : layout.blocks) {
    for (const Trainable& entry : block.trainables) {
      const Parameter& parameter = block.tensors[entry.tensor].parameter;
      EXPECT_EQ(values.at(parameter.name), values_of(parameter)) << parameter.name;
      ++seen;
    }
  }
  EXPECT_EQ(seen, 2 * (2 + 4 * kExperts));
}

TEST(ExpertPairs, SomeRowsOfAPairAreReadAlone) {
  const TemporaryDirectory directory;
  const ModelSpec base = mixture();
  write(directory / "out", base, pairs(), false);
  const AdapterSpec adapter = pairs();
  std::vector<float> rows(static_cast<size_t>(4 * kRank));
  load_adapter(directory / "out", make_layout(base, &adapter, DType::kF32),
               [&](size_t, const TensorPlace& place) {
                 if (place.parameter.name != "layers.0.experts.2.gate_up.lora_B") return LoadTarget{};
                 return LoadTarget{.memory = reinterpret_cast<std::byte*>(rows.data()),
                                   .dtype = DType::kF32,
                                   .first_row = 3,
                                   .rows = 4};
               },
               {.base = &base});
  for (int64_t i = 0; i < 4 * kRank; ++i)
    EXPECT_EQ(rows[static_cast<size_t>(i)],
              test::tiny_value("layers.0.experts.2.gate_up.lora_B", 3 * kRank + i));
}

TEST(ExpertPairs, OfOtherRanksAndAlphasAreFilledUp) {
  const TemporaryDirectory directory;
  const ModelSpec base = mixture();
  AdapterSpec adapter = pairs();
  adapter.ranks = {{"experts.down_proj", 3}};
  adapter.alphas = {{"experts.down_proj", 3}};
  for (const bool patterns : {true, false}) {
    const std::string path = directory / (patterns ? "patterns" : "one");
    write(path, base, adapter, patterns);
    const AdapterSpec again = read_adapter_config(path, &base).spec;
    EXPECT_EQ(again.ranks.empty(), !patterns);
    const Values values = load(path, base, again);
    // The product stays: s B A.
    for (const char* matrix : {"gate_up", "down"}) {
      const std::string name = std::string("layers.0.experts.1.") + matrix,
                        site = std::string("model.layers.0.mlp.experts.") + matrix + "_proj";
      const auto product = [&](const std::vector<float>& a, const std::vector<float>& b,
                               const AdapterSpec& spec) {
        const int64_t r = spec.rank_of(site), columns = std::ssize(a) / r;
        double sum = 0;  // of the second row and the third column
        for (int64_t j = 0; j < r; ++j)
          sum += double{b[static_cast<size_t>(r + j)]} * a[static_cast<size_t>(j * columns + 2)];
        return sum * spec.scale_of(site);
      };
      const ModelLayout layout = make_layout(base, &adapter, DType::kF32);
      const auto own = [&](const char* half) {
        return values_of(layout.blocks[1].find(name + half)->parameter);
      };
      const double want = product(own(".lora_A"), own(".lora_B"), adapter);
      EXPECT_NEAR(product(values.at(name + ".lora_A"), values.at(name + ".lora_B"), again), want, 1e-5)
          << matrix << patterns;
    }
  }
}

TEST(ExpertPairs, OneOfTheTwoHasNoWrapperInside) {
  const TemporaryDirectory directory;
  const ModelSpec base = mixture();
  AdapterSpec adapter = pairs();
  adapter.targets = {"experts.gate_up_proj"};
  write(directory / "out", base, adapter, false);
  const ModelFiles files(directory / "out", kAdapterWeights);
  EXPECT_TRUE(files.find("base_model.model.model.layers.0.mlp.experts.lora_A.weight").has_value());
  EXPECT_EQ(files.tensors().size(), 4u);
  const json config = json::parse(test::read_text(directory / "out/adapter_config.json"));
  EXPECT_EQ(config["target_parameters"], json({"mlp.experts.gate_up_proj"}));
  EXPECT_TRUE(config["target_modules"].empty());
  EXPECT_EQ(read_adapter_config(directory / "out", &base).spec, adapter);
}

TEST(ExpertPairs, InSomeLayersAreNamedByWholePaths) {
  const TemporaryDirectory directory;
  const ModelSpec base = mixture();
  AdapterSpec adapter = pairs();
  adapter.layers = {1};
  write(directory / "out", base, adapter, false);
  const json config = json::parse(test::read_text(directory / "out/adapter_config.json"));
  EXPECT_EQ(config["target_parameters"],
            json({"model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"}));
  EXPECT_EQ(read_adapter_config(directory / "out", &base).spec, adapter);
}

}  // namespace
}  // namespace lm
