// The CLI as a process: exit codes, messages, signals, and what lies on disk afterwards.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "base/json.h"
#include "launcher/status.h"
#include "tests/support/cli.h"
#include "tests/support/sanitized.h"

namespace lm {
namespace {

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "no <" << (part) << "> in\n" << (text)

// (How soon: benchmarks/cli.py.)
TEST(Cli, HelpVersionAndPresetsAnswer) {
  Cli cli;
  for (const char* argument : {"--help", "--version", "presets", "help"}) {
    const CliResult result = cli.run({argument});
    EXPECT_EQ(result.code, 0) << argument;
    EXPECT_FALSE(result.out.empty()) << argument;
    EXPECT_TRUE(result.err.empty()) << result.err;
  }
  EXPECT_HAS(cli.run({"plan", "--help"}).out, "--gpu-memory");
}

TEST(Cli, HelpKnowsCommandsTablesAndKeys) {
  Cli cli;
  const auto help = [&](const std::string& word) {
    const CliResult result = cli.run({"help", word});
    EXPECT_EQ(result.code, 0) << result.err;
    return result.out;
  };
  EXPECT_HAS(help("optimizer.lr"), "peak learning rate");
  EXPECT_HAS(help("lr"), "--override optimizer.lr");
  EXPECT_HAS(help("offload"), "host_memory = \"90%\"");
  // A command and a table have this name; `--help` is about the command.
  EXPECT_HAS(help("train"), "--override KEY");
  EXPECT_HAS(help("train"), "[train]");
  EXPECT_EQ(cli.run({"train", "--help"}).out.find("[train]"), std::string::npos);
  const auto unknown = [&](const std::string& word) {
    const CliResult result = cli.run({"help", word});
    EXPECT_EQ(result.code, 2) << word;
    return result.err;
  };
  EXPECT_HAS(unknown("max_lenght"), "did you mean `data.max_length`?");
  EXPECT_HAS(unknown("learning_rate"), "`optimizer.lr`");
  EXPECT_HAS(unknown("offlod"), "did you mean `offload`?");
}

// Its target sees no LibTorch; neither may a library that it links.
TEST(Cli, LinksNoLibTorch) {
  const std::string out = "/tmp/cli_libraries." + std::to_string(getpid());
  ASSERT_EQ(std::system(("ldd " LM_BINARIES "/lmlaunch > " + out).c_str()), 0);
  std::ifstream file(out);
  const std::string libraries{std::istreambuf_iterator<char>(file), {}};
  std::remove(out.c_str());
  EXPECT_HAS(libraries, "libc.so");
  for (const char* torch : {"libtorch", "libc10"}) {
    EXPECT_EQ(libraries.find(torch), std::string::npos) << libraries;
  }
}

TEST(Cli, BadCommandLinesExitWith2AndNameTheNearest) {
  Cli cli;
  const auto usage = [&](const std::vector<std::string>& arguments) {
    const CliResult result = cli.run(arguments);
    EXPECT_EQ(result.code, 2);
    return result.err;
  };
  EXPECT_HAS(usage({"genrate", "x"}), "unknown command `genrate`; did you mean `generate`?");
  EXPECT_HAS(usage({"--gpu", "1", "c.toml"}), "unknown flag `--gpu` of train; did you mean `--gpus`?");
  EXPECT_HAS(usage({}), "needs a configuration or a command");
  EXPECT_HAS(usage({"presets", "quikstart-nothing"}), "unknown preset");
  EXPECT_HAS(usage({"--control-fd", "3", "c.toml"}), "unknown flag `--control-fd`");
}

TEST(Cli, AWrongKeyExitsWith10AndCreatesNothing) {
  Cli cli;
  cli.write_config("c.toml", "[train]\nstpes = 3\n[optimizer]\nlr = \"fast\"\n");
  const CliResult result = cli.run({"--gpus", "0", "c.toml"});
  EXPECT_EQ(result.code, 10);
  EXPECT_HAS(result.err, "c.toml:5:1: unknown key `stpes` in [train]; did you mean `steps`?");
  EXPECT_HAS(result.err, "c.toml:7:6: `optimizer.lr`: expected a number");
  EXPECT_EQ(result.last_line(),
            "lmlaunch: stop code=10 reason=error:CONF-20 step=0 checkpoint=none repeat=0");
  EXPECT_FALSE(cli.exists("run"));
  EXPECT_FALSE(cli.exists("runs"));
}

TEST(Cli, AMissingConfigurationOrModelIsNamedAndCreatesNothing) {
  Cli cli;
  CliResult result = cli.run({"--gpus", "0", "none.toml"});
  EXPECT_EQ(result.code, 10);
  EXPECT_HAS(result.err, "none.toml");
  cli.write_config("c.toml");
  result = cli.run({"--gpus", "0", "c.toml", "model.path=elsewhere"});
  EXPECT_EQ(result.code, 11);
  EXPECT_HAS(result.err, "model.path does not exist at elsewhere");
  result = cli.run({"--gpus", "0", "c.toml", "model.path=some-org/some-model"});
  EXPECT_EQ(result.code, 11);
  EXPECT_HAS(result.err, "models--some-org--some-model");
  EXPECT_FALSE(cli.exists("run"));
}

TEST(Cli, MoreGpusThanThereAreAreRefused) {
  Cli cli;
  cli.write_config("c.toml");
  EXPECT_HAS(cli.run({"--gpus", "200", "c.toml"}).err, "200 GPUs are asked for, and ");
  EXPECT_EQ(cli.run({"--gpus", "200", "c.toml"}).code, 12);
  EXPECT_FALSE(cli.exists("run"));
}

TEST(Cli, ARunThatEndsWellSaysSoOnTheLastLineAndInStatusJson) {
  Cli cli;
  cli.write_config("c.toml");
  const CliResult result = cli.run({"--gpus", "0", "c.toml"}, "exit:0");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.last_line(), "lmlaunch: stop code=0 reason=done step=7 checkpoint=none repeat=0");
  const Json status = Json::parse(cli.read("run/status.json"));
  EXPECT_EQ(status["state"], "done");
  EXPECT_EQ(status["step"], 7);
  EXPECT_EQ(status["exit_code"], 0);
  EXPECT_EQ(status["reason"], "done");
  EXPECT_EQ(status["checkpoint"], "");
  struct stat info {};
  ASSERT_EQ(stat(cli.path("run").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST(Cli, OnlyTheRunsDirectoryIsItsOwnersAloneAndTheModelGetsTheUsersUmask) {
  Cli cli;
  cli.write_config("c.toml");
  const mode_t ours = umask(027);
  const CliResult result = cli.run({"--gpus", "0", "c.toml", "run.dir=runs/deep/"}, "facts:facts");
  umask(ours);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_HAS(cli.read("facts"), "umask 27\n");
  struct stat info {};
  ASSERT_EQ(stat(cli.path("runs/deep").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  ASSERT_EQ(stat(cli.path("runs").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0750u);
}

TEST(Cli, TheRankGetsItsArgumentsAndACleanEnvironment) {
  Cli cli;
  cli.write_config("c.toml");
  const CliResult result =
      cli.run({"--gpus=0", "c.toml", "train.steps=3"}, "facts:facts",
              {"OMP_NUM_THREADS=7", "MKL_CBWR=x", "TORCH_LOGS=all", "PYTORCH_X=1", "ATEN_X=1", "DNNL_X=1",
               "ONEDNN_X=1", "CUBLAS_WORKSPACE_CONFIG=:16:8", "LMLAUNCH_PYTHON=/p", "KEPT=1"});
  EXPECT_EQ(result.code, 0) << result.err;
  const std::string facts = cli.read("facts");
  EXPECT_EQ(facts.find("arg train\n"), 0u);
  for (const char* part :
       {"arg --run-dir\narg run\n", "arg --control-fd\n", "arg --lock-fd\n",
        "arg --\narg c.toml\narg train.steps=3\n", "env KEPT=1\n", "env LMLAUNCH_PYTHON=/p\n",
        "env CUBLAS_WORKSPACE_CONFIG=:4096:8\n", "ignored SIGINT\n", "ignored SIGTERM\n", "ignored SIGHUP\n",
        "ignored SIGUSR1\n"}) {
    EXPECT_HAS(facts, part);
  }
  for (const char* part : {"OMP_NUM", "MKL_", "TORCH_", "PYTORCH_", "ATEN_", "DNNL_X", "ONEDNN_X", ":16:8"}) {
    EXPECT_EQ(facts.find(part), std::string::npos) << part;
  }
}

TEST(Cli, AStopSignalIsRelayedAndTheRunExitsWith75) {
  for (int signal : {SIGUSR1, SIGTERM, SIGINT, SIGHUP}) {
    Cli cli;
    cli.write_config("c.toml");
    cli.start({"--gpus", "0", "c.toml"}, "stop");
    cli.wait_for("ready");
    // A terminal or scheduler signals the whole group: the rank ignores it, only the CLI process counts.
    kill(-cli.pid(), signal);
    const CliResult result = cli.finish();
    EXPECT_EQ(result.code, 75);
    const std::string name = signal == SIGUSR1   ? "SIGUSR1"
                             : signal == SIGTERM ? "SIGTERM"
                             : signal == SIGINT  ? "SIGINT"
                                                 : "SIGHUP";
    EXPECT_EQ(result.last_line(), "lmlaunch: stop code=75 reason=signal:" + name +
                                      " step=12 checkpoint=\"/a run/step_00000010\" repeat=2");
    const Json status = Json::parse(cli.read("run/status.json"));
    EXPECT_EQ(status["state"], "stopped");
    EXPECT_EQ(status["exit_code"], 75);
    EXPECT_EQ(status["checkpoint"], "/a run/step_00000010");
  }
}

// Before main a signal ends any program. Its first line blocks signals that stop, and then ignores SIGPIPE,
// which /proc tells.
bool counts_signals(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigIgn:"))
      return (std::stoull(line.substr(7), nullptr, 16) >> (SIGPIPE - 1) & 1) != 0;
  }
  return false;
}

TEST(Cli, ASignalAtAnyTimeAfterTheStartEndsWith75) {
  Cli cli;
  cli.write_config("c.toml");
  signal(SIGPIPE, SIG_DFL);  // which a program inherits
  for (int delay_us = 0; delay_us < 40000; delay_us += 2000) {
    cli.start({"--gpus", "0", "c.toml"}, "stop");
    for (int tries = 0; tries < 10000 && !counts_signals(cli.pid()); ++tries) usleep(500);
    usleep(static_cast<useconds_t>(delay_us));
    cli.send(SIGUSR1);
    const CliResult result = cli.finish();
    EXPECT_EQ(result.code, 75) << delay_us << " us, signal " << result.signal;
    EXPECT_HAS(result.last_line(), "reason=signal:SIGUSR1 step=12");
  }
}

TEST(Cli, TheSecondSignalEndsTheRankAtOnceStillWith75) {
  Cli cli;
  cli.write_config("c.toml");
  cli.start({"--gpus", "0", "c.toml"}, "deaf");
  cli.wait_for("ready");
  cli.send(SIGTERM);
  cli.wait_for("finishing the step");
  cli.send(SIGINT);
  const CliResult result = cli.finish();
  EXPECT_EQ(result.code, 75);  // the rank would live on
  EXPECT_HAS(result.err, "SIGINT: stopping at once");
  EXPECT_HAS(result.last_line(), "lmlaunch: stop code=75 reason=signal:SIGTERM ");
}

TEST(Cli, AKilledRankIsReportedWithItsFirstCause) {
  Cli cli;
  cli.write_config("c.toml");
  CliResult result = cli.run({"--gpus", "0", "c.toml"}, "signal:9");
  EXPECT_EQ(result.code, 40);
  EXPECT_HAS(result.err, "the worker was killed by signal 9 (SIGKILL)");
  EXPECT_HAS(result.err, "cgroup limit");
  EXPECT_HAS(result.err, "at rank 0, step 7");
  EXPECT_EQ(result.last_line(),
            "lmlaunch: stop code=40 reason=killed:SIGKILL step=7 checkpoint=none repeat=0");
  EXPECT_EQ(Json::parse(cli.read("run/status.json"))["state"], "failed");
  result = cli.run({"--gpus", "0", "c.toml"}, "signal:11");
  EXPECT_EQ(result.code, 70);
  EXPECT_HAS(result.err, "SIGSEGV");
}

TEST(Cli, ARankThatHangsOnceAnotherHasEndedIsNotTheCause) {
  Cli cli;
  cli.write_config("c.toml");
  const CliResult result = cli.run({"--ranks", "2", "c.toml"}, "left:1");
  EXPECT_EQ(result.code, 40);
  EXPECT_HAS(result.err,
             "error PEER-08 (exit 40): rank 1 has lost another rank and ended; rank 0 did not end");
  EXPECT_HAS(result.err, " at rank 0, step 7");
  EXPECT_HAS(result.err, "log.rank1.txt");
  EXPECT_EQ(result.err.find("killed by signal"), std::string::npos) << result.err;
  EXPECT_HAS(result.last_line(), "lmlaunch: stop code=40 reason=error:peer-lost step=7 ");
}

// Threads that the kernel holds may keep it from ending.
TEST(Cli, ARankThatHasSaidHowItEndsAndDoesNotIsKilled) {
  Cli cli;
  cli.write_config("c.toml");
  const CliResult result = cli.run({"--gpus", "0", "c.toml"}, "ends:21");
  EXPECT_EQ(result.code, 21);
  EXPECT_HAS(result.err, "fake rank: lives on");  // it had some seconds, counted as the CLI counts them
  EXPECT_EQ(result.last_line(), "lmlaunch: stop code=21 reason=error:io step=7 checkpoint=none repeat=0");
  // And at once where a signal asks for it twice.
  cli.start({"--gpus", "0", "c.toml", "run.dir=other"}, "ends:21:8");
  cli.wait_for("ready");
  cli.send(SIGTERM);
  cli.wait_for("finishing the step");
  cli.send(SIGTERM);
  EXPECT_EQ(cli.finish().err.find("lives on"), std::string::npos);
}

// Libraries do not check what they are given: without the limit each of these is a bug, with it 31.
TEST(Cli, UnderALimitOfAddressesStrangeEndsAreMemory) {
  if (test::kLiftsAddressLimit) GTEST_SKIP() << "a thread sanitizer's program has no such limit";
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit limit{rlim_t{1} << 45, before.rlim_max};
  Cli cli;
  cli.write_config("c.toml");
  for (const char* end : {"signal:11", "signal:6", "exit:127", "exit:1"}) {
    EXPECT_EQ(cli.run({"--gpus", "0", "c.toml"}, end).code, 70) << end;
    setrlimit(RLIMIT_AS, &limit);
    const CliResult result = cli.run({"--gpus", "0", "c.toml"}, end);
    setrlimit(RLIMIT_AS, &before);
    EXPECT_EQ(result.code, 31) << end;
    EXPECT_HAS(result.err, "error MEM-16 (exit 31)");
    EXPECT_HAS(result.err, "the limit of address space (RLIMIT_AS) is 32.00 TiB");
    EXPECT_HAS(result.err, "ulimit -v");
  }
}

TEST(Cli, TheRanksOwnCodesPassAndStrangeOnesAreBugs) {
  Cli cli;
  cli.write_config("c.toml");
  CliResult result = cli.run({"--gpus", "0", "c.toml"}, "exit:50");
  EXPECT_EQ(result.code, 50);
  EXPECT_HAS(result.last_line(), "code=50 reason=error:numerics");
  result = cli.run({"--gpus", "0", "c.toml"}, "exit:3");
  EXPECT_EQ(result.code, 70);
  EXPECT_HAS(result.err, "ended with exit code 3");
}

TEST(Cli, ADirectoryInUseExitsWith13AndNamesTheOwner) {
  Cli cli;
  cli.write_config("c.toml");
  cli.start({"--gpus", "0", "c.toml"}, "stop");
  cli.wait_for("ready");
  const pid_t owner = cli.pid();
  const std::string status_before = cli.read("run/status.json");
  // A second CLI process in the same directory.
  const std::string command =
      "cd " + cli.path("") + " && ./lmlaunch --gpus 0 c.toml 2> second; echo $? > code";
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(cli.read("code"), "13\n");
  EXPECT_HAS(cli.read("second"),
             "the run directory is in use by process " + std::to_string(owner) + " on host ");
  EXPECT_HAS(cli.read("second"), "lmlaunch: stop code=13 reason=error:LOCK-30");
  EXPECT_EQ(cli.read("run/status.json"), status_before);
  cli.send(SIGTERM);
  EXPECT_EQ(cli.finish().code, 75);
  // Given back: the next run starts, without a word about the last.
  const CliResult next = cli.run({"--gpus", "0", "c.toml"});
  EXPECT_EQ(next.code, 0);
  EXPECT_EQ(next.err.find("LOCK-31"), std::string::npos);
}

TEST(Cli, ACliThatIsKilledTakesItsRankWithItAndItsLockIsTakenOver) {
  Cli cli;
  cli.write_config("c.toml");
  cli.start({"--gpus", "0", "c.toml"}, "deaf");
  cli.wait_for("ready");
  const pid_t rank = cli.child();
  ASSERT_GT(rank, 0);
  cli.send(SIGKILL);
  const CliResult killed = cli.finish();
  EXPECT_EQ(killed.signal, SIGKILL);
  // Its stderr has been closed, so the rank, which would live on, is gone too; its lock with it.
  const CliResult next = cli.run({"--gpus", "0", "c.toml"});
  EXPECT_EQ(next.code, 0);
  EXPECT_HAS(next.err, "LOCK-31");
}

// Its CLI process is dead, and a rank still gives its memory back: the test has the lock for a second in its
// place.
TEST(Cli, AStartAfterAKillWaitsForTheLockOfTheDead) {
  Cli cli;
  cli.write_config("c.toml");
  cli.start({"--gpus", "0", "c.toml"}, "deaf");
  cli.wait_for("ready");
  const int holder = open(cli.path("run/.lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(holder, 0);
  cli.send(SIGKILL);
  cli.finish();
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  ASSERT_EQ(fcntl(holder, F_OFD_SETLKW, &lock), 0);
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    close(holder);
  });
  const CliResult next = cli.run({"--gpus", "0", "c.toml"});
  ends.join();
  EXPECT_EQ(next.code, 0) << next.err;
  EXPECT_HAS(next.err, "LOCK-31");
}

TEST(Cli, ADirectoryOfAnotherConfigurationExitsWith14) {
  Cli cli;
  cli.write_config("c.toml");
  mkdir(cli.path("run").c_str(), 0700);
  cli.write("run/config.toml", cli.read("c.toml"));
  cli.write("run/metrics.jsonl", "{}\n");
  EXPECT_EQ(cli.run({"--gpus", "0", "c.toml"}).code, 0);  // the same: starts again
  const std::string status = cli.read("run/status.json");
  const CliResult result = cli.run({"--gpus", "0", "c.toml", "optimizer.lr=1e-3"});
  EXPECT_EQ(result.code, 14);
  EXPECT_HAS(result.err, "optimizer.lr: 5e-05 there, 0.001 asked for");
  EXPECT_EQ(cli.read("run/status.json"), status);
  mkdir(cli.path("other").c_str(), 0700);
  cli.write("other/thesis.txt", "x");
  EXPECT_HAS(cli.run({"--gpus", "0", "c.toml", "run.dir=other"}).err, "not a run's");
  EXPECT_FALSE(cli.exists("other/.lock"));
}

TEST(Cli, OtherCommandsRunInTheRankAndPassItsCodeOn) {
  Cli cli;
  EXPECT_EQ(cli.run({"verify", "x"}, "exit:22").code, 22);
  // Libraries end with 1, too.
  EXPECT_EQ(cli.run({"verify", "x"}, "exit:1").code, 70);
  EXPECT_EQ(cli.run({"diff", "x", "y"}, "exit:1").code, 1);
  const CliResult result = cli.run({"generate", "m", "--prompt", "a b", "--gpus", "0"}, "facts:facts");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err.find("lmlaunch: stop"), std::string::npos);
  EXPECT_HAS(cli.read("facts"), "arg generate\n");
  EXPECT_HAS(cli.read("facts"), "arg --prompt\narg a b\n");
  EXPECT_HAS(cli.read("facts"), "default SIGINT\n");
  cli.start({"verify", "x"}, "deaf");
  cli.wait_for("ready");
  cli.send(SIGINT);
  EXPECT_EQ(cli.finish().signal, SIGINT);
}

TEST(Cli, AMissingRankIsNamed) {
  Cli cli;
  cli.write_config("c.toml");
  ASSERT_EQ(unlink(cli.path("lmlaunch-cpu").c_str()), 0);
  const CliResult result = cli.run({"--gpus", "0", "c.toml"});
  EXPECT_EQ(result.code, 12);
  EXPECT_HAS(result.err, "lmlaunch-cpu was not found beside lmlaunch");
  EXPECT_FALSE(cli.exists("run"));
}

TEST(Cli, DoctorReportsAsTextAndAsOneJsonObject) {
  Cli cli;
  const CliResult text = cli.run({"doctor", "--path", "nowhere"});
  EXPECT_EQ(text.code, 0);
  EXPECT_HAS(text.out, "io_uring");
  EXPECT_HAS(text.out, "io engine");
  EXPECT_HAS(text.out, "open mpi");
  EXPECT_HAS(text.out, "nowhere");
  const Json json = Json::parse(cli.run({"doctor", "--json", "--path", "model"}).out);
  int disks = 0;
  for (const auto& check : json["checks"]) {
    if (check["name"] != "disk rates") continue;
    ++disks;
    EXPECT_GT(check["read_bytes_per_s"].get<double>(), 0);
    EXPECT_GT(check["both_bytes_per_s"].get<double>(), 0);
  }
  EXPECT_EQ(disks, 2);  // the current directory's, and the one that was named
  ASSERT_GE(json["checks"].size(), 8u);
  for (const auto& check : json["checks"]) {
    EXPECT_TRUE(check["name"].is_string() && check["ok"].is_boolean() && check["value"].is_string() &&
                check["next"].is_string());
  }
}

TEST(Cli, PlansForThisMachineAndForImaginedOnes) {
  Cli cli;
  cli.write_config("c.toml", "train.steps = 10\n");
  cli.write("model/config.json",
            R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":576,
    "intermediate_size":1536,"num_hidden_layers":30,"num_attention_heads":9,"num_key_value_heads":3,"vocab_size":49152,
    "tie_word_embeddings":true,"max_position_embeddings":8192,"hidden_act":"silu","rms_norm_eps":1e-5})");
  const CliResult text = cli.run({"plan", "c.toml", "--gpus", "0", "--host-memory", "64GiB"});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_HAS(text.out, "weights");
  EXPECT_EQ(cli.run({"--dry-run", "--gpus", "0", "c.toml"}).err.find("lmlaunch: stop"), std::string::npos);
  const Json gpu =
      Json::parse(cli.run({"plan", "c.toml", "--json", "--gpu-memory", "24GiB", "train.method=lora"}).out);
  EXPECT_EQ(gpu["fits"], true);
  EXPECT_GT(gpu["peak"]["device_bytes"].get<int64_t>(), int64_t{270} << 20);  // the frozen weights alone
  EXPECT_LE(gpu["peak"]["device_bytes"].get<int64_t>(), int64_t{24} << 30);
  const CliResult small = cli.run({"plan", "c.toml", "--json", "--gpus", "0", "--host-memory", "512MiB"});
  EXPECT_EQ(small.code, 12);
  const Json refused = Json::parse(small.out);  // the whole plan, and why it is refused
  EXPECT_EQ(refused["fits"], false);
  EXPECT_GT(refused["peak"]["host_bytes"].get<int64_t>(), int64_t{512} << 20);
  EXPECT_EQ(refused["tiers"].size(), 1u);
  EXPECT_EQ(refused["tiers"][0]["bytes"], refused["peak"]["host_bytes"]);
  EXPECT_FALSE(refused["links"].empty());
  EXPECT_GT(refused["step_seconds"].get<double>(), 0.0);
  EXPECT_HAS(refused["why"].get<std::string>(), "does not fit");
  EXPECT_FALSE(refused["next"].get<std::string>().empty());
  EXPECT_EQ(cli.run({"plan", "c.toml", "--gpus", "0", "--gpu-memory", "8GiB"}).code, 2);
  EXPECT_FALSE(cli.exists("run"));
}

TEST(Cli, TheRunsNameIsTheConfigurationsWithoutItsEnding) {
  Cli cli;
  cli.write("my.first.toml", "model.path = \"model\"\ndata.train = [\"t.jsonl\"]\n");
  EXPECT_EQ(cli.run({"--gpus", "0", "my.first.toml"}).code, 0);
  EXPECT_TRUE(cli.exists("runs/my.first/status.json"));
}

}  // namespace
}  // namespace lm
