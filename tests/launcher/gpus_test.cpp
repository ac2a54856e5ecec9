// Which GPU a run takes: CUDA's rules as a function, then the CLI as a process on a machine whose cards are
// the emulator's (tests/emulator), so that it runs anywhere.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/error.h"
#include "base/json.h"
#include "launcher/machine/machine_survey.h"
#include "launcher/machine/visible_gpus.h"
#include "plan/plan.h"
#include "spec/block_layout.h"
#include "tests/emulator/settings.h"
#include "tests/support/cli.h"

namespace lm {
namespace {

using Strings = std::vector<std::string>;

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "no <" << (part) << "> in\n" << (text)

const std::string kA100 = "NVIDIA A100-SXM4-40GB", kH100 = "NVIDIA H100 80GB HBM3";
const std::string kFirst = "GPU-11111111-1111-1111-1111-111111111111",
                  kSecond = "GPU-22222222-2222-2222-2222-222222222222";

// ------------------------------------------------------------------------------------------- the rules alone

std::vector<GpuFacts> three_cards() {
  return {{kA100, "GPU-1a", 40, 40}, {kH100, "GPU-1b", 80, 80}, {kA100, "GPU-2c", 40, 40}};
}

Strings visible(const std::optional<std::string>& devices, const std::string& order = "PCI_BUS_ID") {
  Strings out;
  for (const GpuFacts& gpu : visible_gpus(three_cards(), devices, order).gpus) out.push_back(gpu.uuid);
  return out;
}

TEST(VisibleGpus, WithoutAListEveryCardIsVisibleInPciOrder) {
  EXPECT_EQ(visible(std::nullopt), (Strings{"GPU-1a", "GPU-1b", "GPU-2c"}));
}

TEST(VisibleGpus, NumbersChooseAndOrder) {
  EXPECT_EQ(visible("1"), (Strings{"GPU-1b"}));
  EXPECT_EQ(visible("2,0"), (Strings{"GPU-2c", "GPU-1a"}));
  EXPECT_EQ(visible("1, 2"), (Strings{"GPU-1b", "GPU-2c"}));
}

TEST(VisibleGpus, TheListEndsBeforeItsFirstInvalidEntry) {
  EXPECT_EQ(visible("0,2,-1,1"), (Strings{"GPU-1a", "GPU-2c"}));
  EXPECT_EQ(visible("1,3,0"), (Strings{"GPU-1b"}));
  EXPECT_EQ(visible("2,,1"), (Strings{"GPU-2c"}));
  EXPECT_EQ(visible("2,all"), (Strings{"GPU-2c"}));
  EXPECT_EQ(visible("99999999999999999999,0"), Strings());
}

TEST(VisibleGpus, NothingAndMinusOneHideAll) {
  for (const char* none : {"", "-1", ",", "none", "3"}) EXPECT_EQ(visible(none), Strings()) << none;
}

TEST(VisibleGpus, AnEntryThatComesTwiceHidesAll) {
  EXPECT_EQ(visible("0,0"), Strings());
  EXPECT_EQ(visible("0,1,0"), Strings());
  EXPECT_EQ(visible("GPU-2c,GPU-2"), Strings());
  EXPECT_EQ(visible("0,9,0"), (Strings{"GPU-1a"}));  // the list has ended before
}

TEST(VisibleGpus, TheUniqueBeginningOfAUuidChooses) {
  EXPECT_EQ(visible("GPU-2"), (Strings{"GPU-2c"}));
  EXPECT_EQ(visible("GPU-1b,GPU-1a"), (Strings{"GPU-1b", "GPU-1a"}));
  EXPECT_EQ(visible("GPU-1"), Strings());  // two cards
  EXPECT_EQ(visible("GPU-2c,GPU-7,GPU-1a"), (Strings{"GPU-2c"}));
}

TEST(VisibleGpus, AMigInstanceIsTakenAsItIs) {
  const VisibleGpus gpus = visible_gpus(three_cards(), "MIG-5f", "PCI_BUS_ID");
  ASSERT_EQ(gpus.gpus.size(), 1u);
  EXPECT_EQ(gpus.gpus[0].card, -1);
  EXPECT_EQ(gpus.gpus[0].uuid, "MIG-5f");
  EXPECT_EQ(gpus.gpus[0].memory, 0);
}

TEST(VisibleGpus, CardsThatNobodyDescribesAreCountedAndAUuidIsBelieved) {
  const std::vector<GpuFacts> nameless(2);
  EXPECT_EQ(visible_gpus(nameless, "1", "PCI_BUS_ID").gpus.size(), 1u);
  EXPECT_EQ(visible_gpus(nameless, "2", "PCI_BUS_ID").gpus.size(), 0u);
  const VisibleGpus by_uuid = visible_gpus(nameless, "GPU-2c", "PCI_BUS_ID");
  ASSERT_EQ(by_uuid.gpus.size(), 1u);
  EXPECT_EQ(by_uuid.gpus[0].uuid, "GPU-2c");
  EXPECT_EQ(visible_gpus({}, "GPU-2c", "PCI_BUS_ID").gpus.size(), 0u);
}

TEST(VisibleGpus, CudasOwnOrderIsAGuessUnlessItCannotMatter) {
  EXPECT_EQ(visible(std::nullopt, "FASTEST_FIRST"), (Strings{"GPU-1b", "GPU-1a", "GPU-2c"}));
  EXPECT_EQ(visible("0", "FASTEST_FIRST"), (Strings{"GPU-1b"}));
  EXPECT_TRUE(visible_gpus(three_cards(), "0", "FASTEST_FIRST").order_guessed);
  EXPECT_TRUE(visible_gpus(three_cards(), std::nullopt, "").order_guessed);
  EXPECT_FALSE(visible_gpus(three_cards(), "GPU-2c", "FASTEST_FIRST").order_guessed);
  EXPECT_FALSE(visible_gpus(three_cards(), "0", "PCI_BUS_ID").order_guessed);
  const std::vector<GpuFacts> alike(2, three_cards()[0]);
  EXPECT_FALSE(visible_gpus(alike, "0", "FASTEST_FIRST").order_guessed);
}

// The emulator has the rules a second time, written apart: what stands for CUDA and what predicts it must
// agree.
TEST(VisibleGpus, AgreeWithTheEmulatorsOnRandomLists) {
  std::mt19937 random(1);
  const Strings entries = {"0", "1", "2",  "3",       " 1",       "1x",      "-1",      "",
                           "x", "+", "01", "GPU-111", "GPU-2222", "GPU-333", "GPU-444", "GPU-"};
  setenv("EMULATOR_GPUS", "NVIDIA A100-SXM4-40GB:40,NVIDIA L4:24,NVIDIA H100 80GB HBM3:80", 1);
  std::vector<GpuFacts> cards;
  for (const emulator::Card& card : emulator::cards())
    cards.push_back({card.name, card.uuid_text(), card.memory, 0});
  ASSERT_EQ(cards.size(), 3u);
  for (int i = 0; i < 4000; ++i) {
    std::string list;
    const size_t count = random() % 4;
    for (size_t k = 0; k <= count; ++k) list += (k ? "," : "") + entries[random() % entries.size()];
    const std::string order = i % 2 ? "PCI_BUS_ID" : "FASTEST_FIRST";
    setenv("CUDA_VISIBLE_DEVICES", list.c_str(), 1);
    setenv("CUDA_DEVICE_ORDER", order.c_str(), 1);
    std::vector<int> ours;
    for (const GpuFacts& gpu : visible_gpus(cards, list, order).gpus) ours.push_back(gpu.card);
    EXPECT_EQ(ours, emulator::detail::read_cuda_order(emulator::cards())) << list << " " << order;
  }
  for (const char* name : {"EMULATOR_GPUS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}) unsetenv(name);
}

// ------------------------------------------------------------------------------------ the GPU that computes

TEST(ComputingGpu, IsNvmlsCardOfTheSameUuidWhateverItsPlace) {
  const GpuSurvey survey{three_cards(), ""};
  const ComputingGpu gpu =
      computing_gpu(survey, {.name = "by CUDA", .uuid = "GPU-1b", .total_bytes = 79, .free_bytes = 70});
  EXPECT_EQ(gpu.facts.name, kH100);
  EXPECT_EQ(gpu.facts.uuid, "GPU-1b");
  EXPECT_EQ(gpu.facts.memory, 80);
  EXPECT_EQ(gpu.facts.free_memory, 80);
  EXPECT_EQ(gpu.note, "");
  const Machine machine = survey_machine({gpu.facts});
  ASSERT_EQ(machine.gpus.size(), 1u);
  EXPECT_EQ(machine.gpus[0].name, kH100);
  EXPECT_EQ(machine.gpus[0].memory_bytes, 80);
  EXPECT_EQ(machine.gpus[0].free_bytes, 80);
  EXPECT_DOUBLE_EQ(machine.gpus[0].bf16_flops, 989.4e12);
}

TEST(ComputingGpu, HasCudasFiguresWhereNvmlHasNone) {
  const GpuInfo cuda{.name = "by CUDA", .uuid = "GPU-9", .total_bytes = 79, .free_bytes = 70};
  const auto expect_cudas = [](const ComputingGpu& gpu, const std::string& name, const std::string& why) {
    EXPECT_EQ(gpu.facts.name, name);
    EXPECT_EQ(gpu.facts.uuid, "GPU-9");
    EXPECT_EQ(gpu.facts.memory, 79);
    EXPECT_EQ(gpu.facts.free_memory, 70);
    EXPECT_HAS(gpu.note, why);
    EXPECT_HAS(gpu.note, "planning with CUDA's own figures");
  };
  expect_cudas(computing_gpu({three_cards(), ""}, cuda), "by CUDA", "NVML lists no GPU of this UUID");
  expect_cudas(computing_gpu({{}, "NVML cannot be loaded"}, cuda), "by CUDA", "NVML cannot be loaded");
  expect_cudas(computing_gpu({std::vector<GpuFacts>(2), "NVML cannot be loaded"}, cuda), "by CUDA",
               "NVML cannot be loaded");
  // A machine whose GPU shares the host's memory: NVML knows the card, not its size.
  expect_cudas(computing_gpu({{{"NVIDIA GB10", "GPU-9", 0, 0}}, ""}, cuda), "NVIDIA GB10",
               "NVML does not report its memory");
}

TEST(Plan, ForAGpuThatNobodyKnowsIsRefused) {
  Config config;
  ModelSpec spec;
  try {
    make_plan({config, spec, nullptr, ModelLayout(), DeviceType::kCuda}, Machine());
    FAIL() << "no refusal";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kDoesNotFit);
    EXPECT_HAS(error.report(), "--gpu-memory SIZE");
  }
}

// ------------------------------------------------------------------------- the CLI as a process

// A CLI process on a machine that has an A100 and, behind it, an H100, until `machine` says something else.
class GpuCli : public ::testing::Test {
 protected:
  void SetUp() override {
    cli_.write("model/config.json",
               R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":576,
      "intermediate_size":1536,"num_hidden_layers":30,"num_attention_heads":9,"num_key_value_heads":3,
      "vocab_size":49152,"tie_word_embeddings":true,"max_position_embeddings":8192,"hidden_act":"silu",
      "rms_norm_eps":1e-5})");
    cli_.write_config("c.toml", "train.steps = 10\n");
  }

  CliResult run(const Strings& arguments, Strings variables = {}, const std::string& script = "done") {
    for (const char* text :
         {"EMULATOR_GPUS=NVIDIA A100-SXM4-40GB:40,NVIDIA H100 80GB HBM3:80",
          "LD_PRELOAD=" LM_EMULATOR "/libemulator_devices.so", "LD_LIBRARY_PATH=" LM_EMULATOR,
          // In a sanitized build: the emulator's library comes before the sanitizer's.
          "ASAN_OPTIONS=verify_asan_link_order=0"}) {
      variables.push_back(text);
    }
    return cli_.run(arguments, script, variables);
  }

  Json plan(const Strings& variables, const Strings& more = {}) {
    Strings arguments = {"plan", "c.toml", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CliResult result = run(arguments, variables);
    EXPECT_EQ(result.code, 0) << result.err;
    err_ = result.err;
    return Json::parse(result.out);
  }

  Cli cli_;
  std::string err_;
};

TEST_F(GpuCli, PlansForTheGpuThatTheRunWillUse) {
  Json json = plan({});
  EXPECT_EQ(json["gpu"]["name"], kA100);
  EXPECT_EQ(json["gpu"]["uuid"], kFirst);
  EXPECT_EQ(json["tiers"][0]["capacity_bytes"], int64_t{40} << 30);
  for (const char* chosen : {"CUDA_VISIBLE_DEVICES=1", "CUDA_VISIBLE_DEVICES=1,0",
                             "CUDA_VISIBLE_DEVICES=GPU-22222222", "CUDA_VISIBLE_DEVICES=GPU-2,0"}) {
    json = plan({chosen});
    EXPECT_EQ(json["gpu"]["name"], kH100) << chosen;
    EXPECT_EQ(json["gpu"]["uuid"], kSecond) << chosen;
    EXPECT_EQ(json["tiers"][0]["capacity_bytes"], int64_t{80} << 30) << chosen;
  }
  EXPECT_HAS(run({"plan", "c.toml"}, {"CUDA_VISIBLE_DEVICES=1"}).out,
             "gpu: " + kH100 + ", compute capability 9.0 (" + kSecond + ")\n");
}

TEST_F(GpuCli, SaysThatCudasOwnOrderIsAGuess) {
  EXPECT_EQ(plan({"CUDA_DEVICE_ORDER=FASTEST_FIRST"})["gpu"]["name"], kH100);
  EXPECT_HAS(err_, "CUDA_DEVICE_ORDER=FASTEST_FIRST: only CUDA knows");
  plan({"CUDA_DEVICE_ORDER=PCI_BUS_ID"});
  EXPECT_EQ(err_.find("only CUDA knows"), std::string::npos);
}

TEST_F(GpuCli, HiddenGpusAreNotMissingOnes) {
  const std::string text = "no GPU is visible: CUDA_VISIBLE_DEVICES=\"7\" hides the 2 that are there";
  const Strings hidden = {"CUDA_VISIBLE_DEVICES=7"};
  const Json json = plan(hidden);
  EXPECT_HAS(err_, text + ": using the CPU; pass --gpus 0 to silence this");
  EXPECT_FALSE(json.contains("gpu"));
  for (const Strings& arguments :
       {Strings{"plan", "c.toml", "--gpus", "1"}, Strings{"--gpus", "1", "c.toml"}}) {
    const CliResult result = run(arguments, hidden);
    EXPECT_EQ(result.code, 12) << result.err;
    EXPECT_HAS(result.err, text);
  }
  const CliResult training = run({"c.toml"}, hidden, "facts:facts");
  EXPECT_EQ(training.code, 0) << training.err;
  EXPECT_HAS(training.err, text);
  EXPECT_HAS(cli_.read("facts"), "env CUDA_VISIBLE_DEVICES=7\n");
  EXPECT_HAS(run({"c.toml"}, {"CUDA_VISIBLE_DEVICES=", "EMULATOR_GPUS=X:1"}).err,
             "hides the one that is there");
}

TEST_F(GpuCli, AMachineWithoutGpusSaysSo) {
  const CliResult result =
      run({"plan", "c.toml", "--gpus", "1"}, {"EMULATOR_GPUS=", "CUDA_VISIBLE_DEVICES=0"});
  EXPECT_EQ(result.code, 12);
  EXPECT_HAS(result.err, "there is no GPU (no /dev/nvidia0)");
}

TEST_F(GpuCli, WithoutNvmlPlansOnlyForAGivenSizeAndTrainsAllTheSame) {
  cli_.add_cuda_program();
  for (const auto& [state, reason] :
       {std::pair("absent", "does not start: Driver Not Loaded"), std::pair("empty", "lists no GPU")}) {
    const Strings variables = {std::string("EMULATOR_NVML=") + state};
    const CliResult result = run({"plan", "c.toml"}, variables);
    EXPECT_EQ(result.code, 12) << result.err;
    EXPECT_HAS(result.err, std::string("NVML (libnvidia-ml.so.1) ") + reason);
    EXPECT_HAS(
        result.err,
        "reinstall the driver's libraries (after an update of the driver: reboot), or --gpu-memory SIZE");
    EXPECT_EQ(result.err.find("BUG-70"), std::string::npos);
    EXPECT_EQ(result.err.find("no /dev/nvidia0"), std::string::npos);
    const Json refused = Json::parse(run({"plan", "c.toml", "--json"}, variables).out);
    EXPECT_EQ(refused["fits"], false);
    const Json imagined = plan(variables, {"--gpu-memory", "24GiB"});
    EXPECT_EQ(imagined["gpu"]["memory_bytes"], int64_t{24} << 30);
    EXPECT_FALSE(imagined["gpu"].contains("name"));
    EXPECT_FALSE(plan(variables, {"--gpus", "0"}).contains("gpu"));
    const CliResult training = run({"--gpus", "1", "c.toml"}, variables);
    EXPECT_EQ(training.code, 0) << training.err;
  }
}

TEST_F(GpuCli, ACardThatCannotComputeIsNamedWithWhatWouldDo) {
  for (const auto& [cards, what] :
       {std::pair("EMULATOR_GPUS=Tesla T4:16:7.5",
                  "Tesla T4 has compute capability 7.5, and lmlaunch-cuda holds code for 9.0"),
        std::pair("EMULATOR_GPUS=NVIDIA A10:24:8.6",
                  "NVIDIA A10 has compute capability 8.6, and lmlaunch-cuda holds code for 9.0")}) {
    if (gpu_code() != "90" && std::string(what).find("holds code") != std::string::npos)
      continue;  // other architectures were asked for
    const CliResult result = run({"plan", "c.toml"}, {cards});
    EXPECT_EQ(result.code, 12) << result.err;
    EXPECT_HAS(result.err, what);
    EXPECT_HAS(result.err, "--gpus 0");
    EXPECT_FALSE(plan({cards}, {"--gpu-memory", "24GiB"})["gpu"].contains("name"))
        << "an imagined card is another one";
    const Json report = Json::parse(run({"doctor", "--json"}, {cards}).out);
    const auto gpu =
        std::ranges::find(report["checks"], "gpu", [](const Json& check) { return check["name"]; });
    ASSERT_NE(gpu, report["checks"].end());
    EXPECT_EQ((*gpu)["ok"], false);
    EXPECT_HAS((*gpu)["next"].get<std::string>(), "--gpus 0");
  }
  const Json newer = plan({"EMULATOR_GPUS=NVIDIA GeForce RTX 5090:32:12.0"});
  EXPECT_EQ(newer["gpu"]["compute_capability"], "12.0") << newer;
  EXPECT_EQ(newer["fits"], true);
}

TEST_F(GpuCli, TheSizeOfAMigInstanceIsNotKnownBeforehand) {
  const CliResult result = run({"plan", "c.toml"}, {"CUDA_VISIBLE_DEVICES=MIG-5f"});
  EXPECT_EQ(result.code, 12) << result.err;
  EXPECT_HAS(result.err, "the memory of MIG-5f is unknown before a run");
  EXPECT_EQ(result.err.find("reinstall"), std::string::npos);
}

TEST_F(GpuCli, AnElasticRunContinuesOnTheGpusThatAreThere) {
  cli_.add_cuda_program();
  const std::string third = "GPU-33333333-3333-3333-3333-333333333333";
  const auto lose = [&](const Strings& more) {
    Strings arguments = {"--gpus", "3", "--restarts", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::filesystem::remove(cli_.path("lost"));
    return run(arguments, {"EMULATOR_GPUS=X:80,X:80,X:80", "EMULATOR_LOST=" + cli_.path("lost")}, "lose:1");
  };
  const CliResult result = lose({"--elastic", "c.toml"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_HAS(result.err, "; with 2 of 3 ranks: " + kSecond + " gone");
  EXPECT_HAS(result.err, "fake rank: 1 of 3 on " + kSecond);
  EXPECT_HAS(result.err, "fake rank: 0 of 2 on " + kFirst);
  EXPECT_HAS(result.err, "fake rank: 1 of 2 on " + third);
  const Json status = Json::parse(cli_.read("run/status.json"));
  EXPECT_EQ(status["ranks"], 2);
  EXPECT_EQ(status["ranks_asked"], 3);
  std::filesystem::remove_all(cli_.path("run"));
  const CliResult rigid = lose({"c.toml"});
  EXPECT_EQ(rigid.code, 70) << rigid.err;
  EXPECT_EQ(rigid.err.find("RUN-42"), std::string::npos) << rigid.err;
}

TEST_F(GpuCli, TheRankNumbersAsNvidiaSmiDoesUnlessTheUserSaysOtherwise) {
  cli_.add_cuda_program();
  EXPECT_EQ(run({"c.toml"}, {}, "facts:facts").code, 0);
  EXPECT_HAS(cli_.read("facts"), "env CUDA_DEVICE_ORDER=PCI_BUS_ID\n");
  EXPECT_EQ(run({"c.toml"}, {"CUDA_DEVICE_ORDER=FASTEST_FIRST"}, "facts:facts").code, 0);
  EXPECT_HAS(cli_.read("facts"), "env CUDA_DEVICE_ORDER=FASTEST_FIRST\n");
  EXPECT_EQ(cli_.read("facts").find("PCI_BUS_ID"), std::string::npos);
}

TEST_F(GpuCli, DoctorListsEachCardAndWhetherARunSeesIt) {
  const auto gpus = [&](const Strings& variables) {
    Json out = Json::array();
    const Json report = Json::parse(run({"doctor", "--json"}, variables).out);
    for (const auto& check : report["checks"]) {
      if (check["name"] == "gpu" || check["name"] == "gpus") out.push_back(check);
    }
    return out;
  };
  Json list = gpus({"CUDA_VISIBLE_DEVICES=1"});
  ASSERT_EQ(list.size(), 2u) << list;
  EXPECT_HAS(list[0]["value"].get<std::string>(), kA100 + ", compute capability 9.0, " + kFirst);
  EXPECT_HAS(list[0]["value"].get<std::string>(), "hidden by CUDA_VISIBLE_DEVICES=\"1\"");
  EXPECT_EQ(list[0]["visible"], false);
  EXPECT_EQ(list[1]["uuid"], kSecond);
  EXPECT_EQ(list[1]["visible"], true);
  EXPECT_HAS(list[1]["value"].get<std::string>(), "CUDA device 0");
  list = gpus({"CUDA_VISIBLE_DEVICES=-1"});
  ASSERT_EQ(list.size(), 3u) << list;
  EXPECT_HAS(list[2]["value"].get<std::string>(), "hides the 2 that are there");
  EXPECT_EQ(list[2]["ok"], false);
  list = gpus({"EMULATOR_NVML=absent"});
  ASSERT_EQ(list.size(), 2u) << list;
  EXPECT_EQ(list[0]["ok"], false);
  EXPECT_HAS(list[0]["next"].get<std::string>(), "reinstall the driver's libraries");
}

}  // namespace
}  // namespace lm
