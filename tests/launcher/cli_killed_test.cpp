// What is left of a run whose CLI process is killed, and what follows the loss of a rank.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

#include "base/json.h"
#include "launcher/status.h"
#include "tests/support/cli.h"

namespace lm {
namespace {

// What the status says once nobody is left who would write it.
Json status_after_the_kill(Cli& cli) {
  kill(cli.pid(), SIGKILL);
  cli.finish();
  Json status;
  for (int i = 0; i < 3000; ++i) {
    status = Json::parse(cli.read("run/status.json"));
    if (status["state"] != "running") break;
    usleep(10000);
  }
  return status;
}

TEST(CliKilled, ACliThatIsKilledLeavesAFinalStatus) {
  Cli cli;
  cli.write_config("c.toml");
  cli.start({"--gpus", "0", "c.toml"}, "running");
  cli.wait_for("has written its status");
  const pid_t pid = cli.pid();
  const Json before = Json::parse(cli.read("run/status.json"));
  EXPECT_EQ(before["pid"], 0 + pid);
  const Json status = status_after_the_kill(cli);
  EXPECT_EQ(status["state"], "failed");
  EXPECT_EQ(status["reason"], "killed:lmlaunch");
  EXPECT_EQ(status["exit_code"], 40);
  EXPECT_EQ(status["step"], 12);
  EXPECT_EQ(status["repeat"], 2);
  EXPECT_EQ(status["pid"], 0 + pid);
  EXPECT_EQ(status["host"], host_name());
  EXPECT_EQ(status["updated_at"].get<std::string>().size(), std::string("2026-01-31T12:00:00Z").size());
}

// As mpirun kills it, a second after its SIGTERM.
TEST(CliKilled, ACliThatIsKilledOnceItsRankHasStoppedLeavesThat) {
  Cli cli;
  cli.write_config("c.toml");
  cli.start({"--gpus", "0", "c.toml"}, "stopping");
  cli.wait_for("ready");
  cli.send(SIGTERM);
  cli.wait_for("has written its status");
  const Json status = status_after_the_kill(cli);
  EXPECT_EQ(status["state"], "stopped");
  EXPECT_EQ(status["reason"], "signal:SIGTERM");
  EXPECT_EQ(status["exit_code"], 75);
  EXPECT_EQ(status["checkpoint"], "/c/step_00000012");
  EXPECT_EQ(status["repeat"], 0);
}

// Whoever has the directory by then says how it stands.
TEST(CliKilled, AStatusOfAnotherRunIsLeftAsItIs) {
  Cli cli;
  cli.write_config("c.toml");
  cli.start({"--gpus", "0", "c.toml"}, "running");
  cli.wait_for("has written its status");
  cli.write("run/.lock", "another run's");
  kill(cli.pid(), SIGKILL);
  cli.finish();
  usleep(300000);
  EXPECT_EQ(Json::parse(cli.read("run/status.json"))["state"], "running");
}

// How often a fake rank was started.
int64_t starts_of(const CliResult& result) {
  int64_t out = 0;
  const std::string ready = "fake rank: ready";
  for (size_t at = 0; (at = result.err.find(ready, at)) != std::string::npos; at += ready.size()) ++out;
  return out;
}

TEST(CliKilled, ALostRankIsStartedAgainAsOftenAsTheCommandLineAllows) {
  Cli cli;
  cli.write_config("c.toml");
  const auto run = [&](const std::string& script, const std::string& most) {
    return cli.run({"--gpus", "0", "--restarts", most, "c.toml"}, script);
  };
  for (const std::string script : {"exit:40", "exit:41", "signal:9"}) {
    const CliResult result = run(script, "2");
    EXPECT_EQ(starts_of(result), 3) << result.err;
    EXPECT_EQ(result.code, script == "exit:41" ? 41 : 40) << result.err;
    EXPECT_NE(result.err.find("note RUN-42: restart 2 of 2: code 4"), std::string::npos) << result.err;
    EXPECT_EQ(starts_of(run(script, "0")), 1);
  }
  // Ends that another start would not change. (31 without a kill by the kernel: what the rank itself found.)
  for (const char* script : {"exit:11", "exit:31", "exit:50", "exit:70", "exit:75", "done"})
    EXPECT_EQ(starts_of(run(script, "2")), 1) << script;
}

TEST(CliKilled, AnElasticRunContinuesWithoutARankThatIsKilledTwiceBeforeItsFirstStep) {
  Cli cli;
  cli.write_config("c.toml");
  const CliResult result = cli.run({"--ranks", "4", "--restarts", "3", "--elastic", "c.toml"}, "lost:3");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(starts_of(result), 4 + 4 + 3) << result.err;
  EXPECT_NE(
      result.err.find("restart 1 of 3: code 40 (killed:SIGKILL) after step 0; there is no checkpoint yet\n"),
      std::string::npos)
      << result.err;
  EXPECT_NE(result.err.find("; with 3 of 4 ranks: rank 3 was killed before its first step, twice in a row"),
            std::string::npos)
      << result.err;
  const Json status = Json::parse(cli.read("run/status.json"));
  EXPECT_EQ(status["state"], "done");
  EXPECT_EQ(status["ranks"], 3);
  EXPECT_EQ(status["ranks_asked"], 4);
}

TEST(CliKilled, OnlyAnElasticRunAndOnlyADeathBeforeTheFirstStepChangeTheNumberOfRanks) {
  Cli cli;
  cli.write_config("c.toml");
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--ranks", "4", "--restarts", "3", "c.toml"},
        {"--ranks", "4", "--restarts", "3", "--elastic", "c.toml"}}) {
    const bool elastic = arguments.size() == 6;
    const CliResult result = cli.run(arguments, elastic ? "lost:3:7" : "lost:3");
    EXPECT_EQ(result.code, 40) << result.err;
    EXPECT_EQ(starts_of(result), 4 * 4) << result.err;
    EXPECT_EQ(result.err.find("; with "), std::string::npos) << result.err;
    EXPECT_FALSE(Json::parse(cli.read("run/status.json")).contains("ranks"));
  }
}

TEST(CliKilled, ElasticIsRefusedWhereItCannotChangeAnything) {
  Cli cli;
  cli.write_config("c.toml");
  for (const auto& [arguments, why] :
       {std::pair<std::vector<std::string>, std::string>(
            {"--ranks", "4", "--elastic", "c.toml"}, "--elastic without --restarts: only a run that starts"),
        {{"--ranks", "4", "--restarts", "0", "--elastic", "c.toml"}, "--elastic without --restarts"},
        {{"--ranks", "1", "--restarts", "2", "--elastic", "c.toml"}, "--elastic with one rank"},
        {{"--gpus", "0", "--restarts", "2", "--elastic", "c.toml"}, "--elastic with one rank"},
        {{"--restarts", "2", "--elastic", "c.toml"}, "--elastic with one rank"}}) {
    const CliResult result = cli.run(arguments);
    EXPECT_EQ(result.code, 2) << result.err;
    EXPECT_NE(result.err.find(why), std::string::npos) << result.err;
    EXPECT_FALSE(cli.exists("run"));
  }
}

}  // namespace
}  // namespace lm
