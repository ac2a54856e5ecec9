#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <set>

#include "config/config_toml.h"
#include "launcher/door/commands.h"
#include "launcher/known_models.h"

namespace lm {
namespace {

TEST(Presets, EachIsAValidConfigurationThatSaysWhatItIsFor) {
  ASSERT_GE(presets().size(), 4u);
  for (const Preset& preset : presets()) {
    EXPECT_TRUE(preset.text.starts_with("# ")) << preset.name;
    EXPECT_NO_THROW(parse_config(preset.text, preset.name)) << preset.name;
  }
}

// The number before "gb" at the end of a preset's name; 0: it has none.
int gigabytes_of(const std::string& name) {
  const size_t at = name.rfind('-');
  return at != std::string::npos && name.ends_with("gb") ? std::atoi(name.c_str() + at + 1) : 0;
}

// Memory of the machine around a card, as such machines come.
int64_t host_gigabytes(int card) {
  return card <= 12 ? 32 : card <= 24 ? 64 : card == 48 ? 128 : 256;
}

TEST(Presets, EachIsPlannedWithoutItsModelAndFitsTheMemoryThatItIsNamedAfter) {
  constexpr int64_t kGigabyte = 1'000'000'000;
  const Environment nothing;
  int sized = 0;
  std::set<int> cards;
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const Config config = parse_config(preset.text, preset.name);
    if (config.model.path.starts_with("build/")) continue;  // made by the quickstart itself
    const PlannedModel model = open_model(config, nothing, model_shapes());
    EXPECT_EQ(model.directory, "");
    EXPECT_GT(model.layout.trainable_elements, 0);
    const int size = gigabytes_of(preset.name);
    if (size == 0) continue;
    ++sized;
    const bool cpu = preset.name.find("-cpu-") != std::string::npos;
    EXPECT_EQ(config.run.device, cpu ? DeviceChoice::kCpu : DeviceChoice::kCuda);
    EXPECT_LE(config.data.max_length, model.spec.max_positions);
    Machine machine;
    machine.cores = 8;
    machine.host_memory = (cpu ? size : host_gigabytes(size)) * kGigabyte;
    if (!cpu) {
      machine.gpus.resize(1);
      machine.gpus[0].memory_bytes = size * kGigabyte;
      cards.insert(size);
    }
    const Plan plan = draft_plan(model.inputs(config, cpu ? DeviceType::kCpu : DeviceType::kCuda), machine);
    EXPECT_TRUE(plan.fits);
    EXPECT_FALSE(plan.placement.on_disk());
  }
  EXPECT_GE(sized, 60);
  EXPECT_EQ(cards, (std::set<int>{8, 12, 16, 24, 48, 80}));
}

// Parameters as their publishers count them.
TEST(ModelShapes, HaveTheSizesOfTheModelsThatTheyAreNamedAfter) {
  EXPECT_GE(known_models().size(), 50U);
  EXPECT_EQ(known_models().size(), model_shapes().size());
  for (size_t i = 0; i < known_models().size(); ++i) {
    const ModelShape& shape = model_shapes()[i];
    const ModelSpec spec = parse_model_spec(shape.config, shape.name);
    EXPECT_EQ(shape.name, known_models()[i].name);
    EXPECT_EQ(make_layout(spec, nullptr, DType::kBF16).trainable_elements, known_models()[i].parameters)
        << shape.name;
  }
}

TEST(ModelShapes, ServeWhatWasTunedFromThem) {
  Config config;
  for (const auto& [name, hidden] : {std::pair("meta-llama/Llama-3.2-1B-Instruct", 2048),
                                     {"mistralai/Mistral-7B-Instruct-v0.3", 4096},
                                     {"mistralai/Mistral-Nemo-Instruct-2407", 5120},
                                     {"Qwen/Qwen2.5-Coder-7B-Instruct", 3584},
                                     {"Qwen/Qwen3-8B-Base", 4096},
                                     {"meta-llama/Llama-2-7b-chat-hf", 4096},
                                     {"tiiuae/Falcon3-7B-Instruct", 3072},
                                     {"Qwen/Qwen3-4B-Instruct-2507", 2560}}) {
    config.model.path = name;
    EXPECT_EQ(open_model(config, {}, model_shapes()).spec.hidden, hidden) << name;
  }
}

// A position without a row of the table would be read from behind it.
TEST(ModelShapes, TextsAreNoLongerThanATableOfLearnedPositions) {
  const std::vector<ModelShape> known = {
      {"some/gpt2", R"({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64,
                        "vocab_size": 30})"}};
  Config config;
  config.model.path = "some/gpt2";
  config.data.max_length = 64;
  EXPECT_EQ(open_model(config, {}, known).spec.embedding.positions, 64);
  config.data.max_length = 65;
  try {
    open_model(config, {}, known);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    EXPECT_NE(error.report().find("data.max_length = 65 is more than the 64 positions"), std::string::npos);
  }
}

TEST(ModelShapes, StandInOnlyForModelsThatAreNotHere) {
  Config config;
  config.model.path = "meta-llama/Llama-3.1-9B";
  EXPECT_THROW(open_model(config, {}, model_shapes()), Error);
  // A directory of that name is the model that is meant, whole or not.
  const auto before = std::filesystem::current_path();
  const auto work = std::filesystem::path(::testing::TempDir()) / "shapes_test";
  std::filesystem::create_directories(work / "meta-llama" / "Llama-3.1-8B");
  std::filesystem::current_path(work);
  config.model.path = "meta-llama/Llama-3.1-8B";
  EXPECT_THROW(open_model(config, {}, model_shapes()), Error);
  std::filesystem::current_path(before);
  std::filesystem::remove_all(work);
}

}  // namespace
}  // namespace lm
