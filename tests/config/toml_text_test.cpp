// Text that is no TOML, and text that is meant to harm the parser: the first mistake is told, with its place.
#include <gtest/gtest.h>

#include "config/config_toml.h"
#include "tests/config/failure.h"

namespace lm {
namespace {

TEST(Config, OfMistakesInTomlTheFirstIsToldAndTheKeysAboveItAreStillChecked) {
  std::string text = failure("[train]\nstpes = 1\n[model]\npath = \"m\n[data]\n= 1\n", {"train.epoch=1"});
  EXPECT_HAS(text, "3 mistakes");
  EXPECT_HAS(text, "c.toml:2:1: unknown key `stpes`");
  EXPECT_HAS(text, "c.toml:4:10: the string is not closed in its line");
  EXPECT_HAS(text, "command line: unknown key `train.epoch`");
  text = failure("[train]\nstpes = 1\n[train]\nepoch = 1\n");
  EXPECT_HAS(text, "2 mistakes");
  EXPECT_HAS(text, "c.toml:2:1: unknown key `stpes`");
  EXPECT_HAS(text, "c.toml:3:1: table [train] is given twice; first in line 1");
}

TEST(Config, ADuplicateIsToldWithItsFirstLine) {
  const std::pair<const char*, const char*> texts[] = {
      {"[train]\nsteps = 1\n\tsteps = 2  # 'more'\n",
       "key `steps` of [train] is given twice; first in line 2 at c.toml:3:2"},
      {"[data.eval]\na = [\"a\"]\na = [\"b\"]\n",
       "key `a` of [data.eval] is given twice; first in line 2 at c.toml:3:1"},
      {"train.steps = 1\ntrain.steps = 2\n",
       "key `train.steps` is given twice; first in line 1 at c.toml:2:1"},
      {"data.columns = {prompt = \"a\", prompt = \"b\"}\n", "key `prompt` is given twice at c.toml:1:40"},
      {"train = 1\n[train]\n", "cannot redefine existing integer 'train' as table"}};
  for (const auto& [text, told] : texts) EXPECT_HAS(failure(text), told);
}

TEST(Config, NumbersTooLargeForTheMachineAreRefusedAsWritten) {
  EXPECT_HAS(failure(std::string(kLeast) + "[train]\nsteps = 9_223_372_036_854_775_808\n"),
             "the number 9_223_372_036_854_775_808 does not fit 64 bits at c.toml:6:9");
  EXPECT_HAS(failure(std::string(kLeast) + "[optimizer]\nbetas=[0.9,1e999]\n"),
             "the number 1e999 does not fit 64 bits at c.toml:6:12");
  EXPECT_HAS(failure(kLeast, {"train.steps=9223372036854775808"}),
             "`train.steps`: expected an integer of at least 1, or \"auto\", got the string "
             "\"9223372036854775808\" at command line");
}

TEST(Config, HostileTextIsRefusedBeforeItIsParsed) {
  for (const std::string& deep :
       {"x = " + std::string(200000, '['), "x = " + std::string(200000, '{'), "[" + [] {
          std::string s;
          for (int i = 0; i < 100000; ++i) s += "a.";
          return s;
        }() + "a]"}) {
    EXPECT_HAS(failure(deep), "nested deeper than 32 levels");
  }
  EXPECT_HAS(failure(std::string(2 << 20, '#')), "at most 1048576 are read");
  EXPECT_HAS(failure(std::string("a = 1\0", 6)), "at c.toml:1:6");
  EXPECT_HAS(failure(std::string(kLeast) + "[run]\ndir = \"a\\u0000b\"\n"), "control characters");
  EXPECT_HAS(failure("[{["), "c.toml:1:");  // trips an assertion of the parser
  EXPECT_HAS(failure("x = [{["), "c.toml:1:");
  EXPECT_HAS(failure("# \xc3\xa9\nx = \xc3\xa9\n"),
             "a character that is not ASCII, outside of a string at c.toml:2:5");
  EXPECT_HAS(failure("x = \"\"\"a\"\"\"\"\ny = \xc3\xa9\n"), "c.toml:2:5");
  EXPECT_EQ(failure("\xEF\xBB\xBF" + std::string(kLeast) + "# \xc3\xa9\n[run]\ndir = \"\xc3\xa9\"\n"), "");
  // Where toml++ looks for white space: in a string that goes on in the next line, and to the end of a
  // number.
  EXPECT_EQ(failure(std::string(kLeast) + "[run]\ndir = \"\"\"\\\n \xc2\xa7\"\"\"\n"), "");
  EXPECT_HAS(failure("x = 1979-05-2T077:\"\xcb\xa5"), "c.toml:1:");
  EXPECT_HAS(failure("x = 1[\"\xcb\xa5"), "c.toml:1:");
  // A string that looks deep is not.
  EXPECT_EQ(failure(std::string(kLeast) + "[run]\ndir = \"" + std::string(100, '[') + std::string(100, '.') +
                    "\"\n"),
            "");
}

}  // namespace
}  // namespace lm
