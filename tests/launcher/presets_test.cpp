#include <gtest/gtest.h>

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

}  // namespace
}  // namespace lm
