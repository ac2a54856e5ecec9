#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "config/config_toml.h"
#include "launcher/door/commands.h"

namespace lm {
namespace {

TEST(Presets, EachIsAValidConfigurationThatSaysWhatItIsFor) {
  ASSERT_GE(presets().size(), 4u);
  for (const Preset& preset : presets()) {
    EXPECT_TRUE(preset.text.starts_with("# ")) << preset.name;
    EXPECT_NO_THROW(parse_config(preset.text, preset.name)) << preset.name;
  }
}

TEST(Presets, EachCanBePlannedWithoutItsModel) {
  const Environment nothing;
  for (const Preset& preset : presets()) {
    const Config config = parse_config(preset.text, preset.name);
    if (config.model.path.starts_with("build/")) continue;  // made by the quickstart itself
    const PlannedModel model = open_model(config, nothing, model_shapes());
    EXPECT_EQ(model.directory, "");
    EXPECT_GT(model.layout.trainable_elements, 0) << preset.name;
  }
}

// Parameters as their publishers say.
TEST(ModelShapes, HaveTheSizesOfTheModelsThatTheyAreNamedAfter) {
  const std::map<std::string, int64_t> published = {{"HuggingFaceTB/SmolLM2-135M", 134'515'008},
                                                    {"meta-llama/Llama-3.1-8B", 8'030'261'248},
                                                    {"meta-llama/Llama-3.2-1B", 1'235'814'400}};
  for (const ModelShape& shape : model_shapes()) {
    const ModelSpec spec = parse_model_spec(shape.config, shape.name);
    ASSERT_TRUE(published.contains(shape.name)) << shape.name;
    EXPECT_EQ(make_layout(spec, nullptr, DType::kBF16).trainable_elements, published.at(shape.name));
  }
  EXPECT_EQ(model_shapes().size(), published.size());
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
