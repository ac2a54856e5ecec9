#include "launcher/command_line.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "launcher/cli/device_choice.h"

namespace lm {
namespace {

using Words = std::vector<std::string>;

CommandLine parse(const Words& words, Reader reader = Reader::kCli) {
  return parse_command_line(words, reader);
}

std::string refusal(const Words& words) {
  try {
    parse(words);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kUsage);
    return error.what();
  }
  return "";
}

TEST(CommandLine, AConfigurationAloneIsTraining) {
  const CommandLine line = parse({"--gpus", "1", "a.toml", "train.steps=3", "--dry-run", "x.y=a=b"});
  EXPECT_EQ(line.command, "train");
  EXPECT_EQ(line.positional, Words{"a.toml"});
  EXPECT_EQ(line.overrides, (Words{"train.steps=3", "x.y=a=b"}));
  EXPECT_EQ(line.integer("--gpus"), 1);
  EXPECT_TRUE(line.has("--dry-run"));
  EXPECT_EQ(parse({"train", "a.toml"}).command, "train");
}

TEST(CommandLine, FlagsTakeTheirValueEitherWay) {
  EXPECT_EQ(parse({"plan", "a.toml", "--gpu-memory=24GiB"}).bytes("--gpu-memory"), int64_t{24} << 30);
  EXPECT_EQ(parse({"plan", "a.toml", "--gpu-memory", "24GiB"}).bytes("--gpu-memory"), int64_t{24} << 30);
  EXPECT_EQ(parse({"generate", "m", "--prompt=", "--max-tokens", "5"}).value("--prompt"), "");
  EXPECT_EQ(parse({"generate", "m", "--prompt", "--json"}).value("--prompt"), "--json");
}

TEST(CommandLine, MistakesAreNamed) {
  EXPECT_NE(refusal({"--gpus", "two", "a.toml"}).find("expected a number"), std::string::npos);
  EXPECT_NE(refusal({"--gpus", "-1", "a.toml"}).find("expected a number"), std::string::npos);
  EXPECT_NE(refusal({"--gpus", "1", "--gpus", "1", "a.toml"}).find("given twice"), std::string::npos);
  EXPECT_NE(refusal({"--gpus", "1", "--ranks", "1", "a.toml"}).find("exclude each other"), std::string::npos);
  EXPECT_NE(refusal({"--gpus"}).find("needs a value"), std::string::npos);
  EXPECT_NE(refusal({"export", "a", "-o", "b", "--gpus", "1"}).find("export takes no GPU"),
            std::string::npos);
  EXPECT_NE(refusal({"verify", "a", "--gpus", "1"}).find("verify takes no GPU"), std::string::npos);
  EXPECT_EQ(parse({"verify", "a", "--gpus", "0"}).integer("--gpus"), 0);
  EXPECT_NE(refusal({"--ranks", "4", "--elastic", "a.toml"}).find("--elastic without --restarts"),
            std::string::npos);
  EXPECT_NE(refusal({"--elastic", "--restarts", "1", "a.toml"}).find("--elastic with one rank"),
            std::string::npos);
  EXPECT_NE(refusal({"plan"}).find("plan needs CONFIG.toml"), std::string::npos);
  EXPECT_NE(refusal({"plan", "a.toml", "--host-memory", "lots"}).find("expected a size"), std::string::npos);
  for (const char* flag : {"--gpu-memory", "--host-memory"}) {
    EXPECT_NE(refusal({"plan", "a.toml", flag, "24"}).find("got \"24\" without a unit: 24GiB?"),
              std::string::npos);
  }
  EXPECT_NE(refusal({"plan", "a.toml", "--jsn"}).find("did you mean `--json`?"), std::string::npos);
  EXPECT_NE(refusal({"a.toml", "b.toml"}).find("unexpected argument `b.toml`"), std::string::npos);
  EXPECT_NE(refusal({"export", "run"}).find("-o DIR"), std::string::npos);
  EXPECT_NE(refusal({"generate", "run"}).find("--prompt TEXT or --prompts FILE"), std::string::npos);
  EXPECT_NE(refusal({"generate", "run", "--prompt", "a", "--prompts", "f"}).find("exclude each other"),
            std::string::npos);
  EXPECT_NE(refusal({"export", "run", "-o=out"}).find("unknown flag `-o`"), std::string::npos);
  EXPECT_NE(refusal({"plan", "a.toml", "-host-memory", "4GiB"}).find("unknown flag `-host-memory`"),
            std::string::npos);
  EXPECT_NE(refusal({"--dry-run=yes", "a.toml"}).find("takes no value"), std::string::npos);
  EXPECT_NE(refusal({"quickstart"}).find("unknown command `quickstart`"), std::string::npos);
}

TEST(CommandLine, WhatIsHandedOnParsesToTheSame) {
  for (const Words& words :
       {Words{"--gpus", "0", "a.toml", "a.b=c d"}, Words{"a.toml", "x.y=--z"},
        Words{"generate", "m", "--prompt", "-- \"x\"", "--json"}, Words{"generate", "m", "--prompt=--x="},
        Words{"generate", "m", "--prompt", "-x y"}, Words{"generate", "m", "--prompt", "--"},
        Words{"export", "--merge", "-o", "out", "run"}, Words{"a.toml", "--trace", "t.json"},
        Words{"doctor", "--path", "/a", "--path=/b"}}) {
    const CommandLine line = parse(words), again = parse(to_arguments(line), Reader::kWorker);
    EXPECT_EQ(again.command, line.command);
    EXPECT_EQ(again.positional, line.positional);
    EXPECT_EQ(again.overrides, line.overrides);
    EXPECT_EQ(again.flags, line.flags);
    EXPECT_EQ(again.lists, line.lists);
  }
  EXPECT_EQ(parse({"doctor", "--path", "/a", "--path=/b"}).list("--path"), (Words{"/a", "/b"}));
  EXPECT_TRUE(parse({"doctor", "--copies"}, Reader::kWorker).has("--copies"));
  EXPECT_NE(refusal({"doctor", "--copies"}).find("unknown flag"), std::string::npos);
  CommandLine line = parse({"a.toml"});
  line.positional = {"--weird"};
  line.flags["--run-dir"] = "-r";
  const CommandLine again = parse(to_arguments(line), Reader::kWorker);
  EXPECT_EQ(again.positional, line.positional);
  EXPECT_EQ(again.value("--run-dir"), "-r");
}

TEST(CommandLine, WhatIsTypedAgainIsTheSameRun) {
  CommandLine line = parse({"--gpus", "0", "a.toml", "run.dir=b", "data.train=[\"it's\"]"});
  line.flags["--run-dir"] = "/x";
  EXPECT_EQ(typed(line), "lmlaunch a.toml run.dir=b 'data.train=[\"it'\\''s\"]' --gpus 0");
  EXPECT_EQ(typed(parse({"generate", "m", "--prompt", ""})), "lmlaunch generate m --prompt ''");
}

TEST(CommandLine, HelpEndsWithEveryExitCodeAndItsMeaning) {
  const std::string help = help_text("");
  size_t at = help.find("Exit codes:\n");
  ASSERT_NE(at, std::string::npos);
  int lines = 0;
  for (const ExitCode& row : exit_codes()) {
    char line[120];
    std::snprintf(line, sizeof line, "\n%4d  %s\n", static_cast<int>(row.code), row.meaning);
    at = help.find(line, at);
    ASSERT_NE(at, std::string::npos) << line;
    ++lines;
  }
  EXPECT_EQ(lines, 18);
  EXPECT_EQ(help.find('\n', at + 1), help.size() - 1);  // nothing behind the last
}

TEST(DeviceChoice, FollowsTheCommandLineThenTheConfigurationThenTheMachine) {
  const DeviceFacts none{.cuda_program = true}, one{.gpus = 1, .visible = 1, .cuda_program = true},
      unbuilt{.gpus = 1, .visible = 1};
  const auto decide = [](const Words& words, DeviceChoice configured, const DeviceFacts& facts) {
    return decide_device(parse(words), configured, facts);
  };
  EXPECT_TRUE(decide({"a.toml"}, DeviceChoice::kAuto, one).cuda);
  EXPECT_TRUE(decide({"a.toml"}, DeviceChoice::kAuto, one).note.empty());
  EXPECT_FALSE(decide({"a.toml"}, DeviceChoice::kAuto, none).cuda);
  EXPECT_FALSE(decide({"a.toml"}, DeviceChoice::kAuto, none).note.empty());
  EXPECT_NE(decide({"a.toml"}, DeviceChoice::kAuto, unbuilt).note.find("not built"), std::string::npos);
  EXPECT_FALSE(decide({"--gpus", "0", "a.toml"}, DeviceChoice::kAuto, one).cuda);
  EXPECT_TRUE(decide({"--gpus", "0", "a.toml"}, DeviceChoice::kAuto, none).note.empty());
  EXPECT_FALSE(decide({"--ranks", "1", "a.toml"}, DeviceChoice::kAuto, one).cuda);
  EXPECT_FALSE(decide({"a.toml"}, DeviceChoice::kCpu, one).cuda);
  EXPECT_TRUE(decide({"--gpus", "1", "a.toml"}, DeviceChoice::kCuda, one).cuda);
  EXPECT_THROW(decide({"--gpus", "1", "a.toml"}, DeviceChoice::kAuto, none), Error);
  EXPECT_THROW(decide({"a.toml"}, DeviceChoice::kCuda, none), Error);
  EXPECT_THROW(decide({"a.toml"}, DeviceChoice::kCuda, unbuilt), Error);
  EXPECT_THROW(decide({"--gpus", "0", "a.toml"}, DeviceChoice::kCuda, one), Error);
  EXPECT_THROW(decide({"--gpus", "1", "a.toml"}, DeviceChoice::kCpu, one), Error);
  const DeviceFacts two{.gpus = 4, .visible = 2, .cuda_program = true};
  EXPECT_TRUE(decide({"--gpus", "2", "a.toml"}, DeviceChoice::kAuto, two).cuda);
  EXPECT_TRUE(decide({"plan", "--gpus", "8", "a.toml"}, DeviceChoice::kAuto, two).cuda);
  const auto refusal = [&](const Words& words, const DeviceFacts& facts) -> std::string {
    try {
      decide(words, DeviceChoice::kAuto, facts);
    } catch (const Error& error) {
      return std::to_string(static_cast<int>(error.code())) + " " + error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal({"--gpus", "3", "a.toml"}, two),
            "12 3 GPUs are asked for, and 2 are visible here at --gpus 3");
  EXPECT_EQ(refusal({"--gpus", "2", "a.toml"}, one),
            "12 2 GPUs are asked for, and one is visible here at --gpus 2");
  EXPECT_EQ(refusal({"eval", "--gpus", "2", "a.toml"}, two),
            "2 --gpus 2: eval computes on one GPU at the command line");
}

TEST(CommandLine, AKeyThatNobodyHasCannotBeOverridden) {
  EXPECT_EQ(parse({"a.toml", "--override", "optimizer.lr", "--override", "lora.r"}).list("--override"),
            (Words{"optimizer.lr", "lora.r"}));
  // Of a rule that is not the one by default.
  EXPECT_EQ(refusal({"a.toml", "--override", "optimizer.nesterov"}), "");
  const std::string mistyped = refusal({"a.toml", "--override", "optimiser.lr"});
  EXPECT_NE(mistyped.find("there is no key `optimiser.lr`; did you mean `optimizer.lr`?"), std::string::npos)
      << mistyped;
  EXPECT_NE(refusal({"a.toml", "--override", "train"}).find("there is no key `train`"), std::string::npos);
  EXPECT_NE(refusal({"a.toml", "--override", "optimizer.lr=1"}).find("did you mean `optimizer.lr`"),
            std::string::npos);
}

}  // namespace
}  // namespace lm
