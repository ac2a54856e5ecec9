#include "launcher/environment.h"

#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "launcher/machine/interface.h"
#include "launcher/model_place.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

class HubCache : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "lmlaunch-hub-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    environment_.hub_caches = {root_};
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path) << text;
  }
  std::string refusal(const std::string& path) {
    try {
      return "found " + resolve_model(path, environment_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
      return error.report();
    }
  }
  std::string root_;
  Environment environment_;
};

TEST_F(HubCache, RefsMainNamesTheSnapshot) {
  write("models--org--name/refs/main", "abc123");
  write("models--org--name/snapshots/abc123/config.json", "{}");
  write("models--org--name/snapshots/older/config.json", "{}");
  EXPECT_EQ(resolve_model("org/name", environment_), root_ + "/models--org--name/snapshots/abc123");
}

TEST_F(HubCache, ASingleSnapshotNeedsNoRef) {
  write("models--org--name/snapshots/abc123/config.json", "{}");
  EXPECT_EQ(resolve_model("org/name", environment_), root_ + "/models--org--name/snapshots/abc123");
}

TEST_F(HubCache, ARevisionIsABranchATagOrACommit) {
  write("models--org--name/refs/main", "abc123");
  write("models--org--name/refs/v1.0", "def456");
  write("models--org--name/refs/refs/pr/1", "def456");
  for (const char* commit : {"abc123", "def456"})
    write("models--org--name/snapshots/" + std::string(commit) + "/config.json", "{}");
  const std::string snapshots = root_ + "/models--org--name/snapshots/";
  EXPECT_EQ(resolve_model("org/name@main", environment_), snapshots + "abc123");
  for (const char* revision : {"v1.0", "refs/pr/1", "def456"})
    EXPECT_EQ(resolve_model("org/name@" + std::string(revision), environment_), snapshots + "def456");
  EXPECT_NE(refusal("org/name@v2").find("next: fetch it: lmlaunch fetch org/name@v2"), std::string::npos);
  for (const char* hostile :
       {"org/name@", "org/name@../../other", "org/name@a//b", "org/name@/etc", "org@v1/name"})
    EXPECT_NE(refusal(hostile).find("does not exist"), std::string::npos) << hostile;
}

TEST_F(HubCache, WeightsAreHereWhenEveryPartIs) {
  const std::string snapshot = "models--org--name/snapshots/abc123/";
  write(snapshot + "config.json", "{}");
  const auto missing = [&]() -> std::string {
    EXPECT_TRUE(model_is_here("org/name", environment_));
    try {
      require_weights(root_ + "/" + snapshot + "../abc123");
      EXPECT_TRUE(weights_are_here("org/name", environment_));
      return "";
    } catch (const Error& error) {
      EXPECT_FALSE(weights_are_here("org/name", environment_));
      return error.text().next;
    }
  };
  EXPECT_EQ(missing(), "fetch the rest: lmlaunch fetch org/name@abc123");
  write(snapshot + "model.safetensors.index.json",
        R"({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})");
  write(snapshot + "1.safetensors", "");
  EXPECT_NE(missing(), "");
  write(snapshot + "2.safetensors", "");
  EXPECT_EQ(missing(), "");
  write("elsewhere/config.json", "{}");
  require_weights(root_ + "/elsewhere");  // whoever reads it says what is missing
}

TEST_F(HubCache, AnAdapterOfTheHubIsFoundWithItsModel) {
  write("models--org--adapter/snapshots/abc/adapter_config.json",
        R"({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "org/base",
            "revision": "def"})");
  Config config;
  config.train.method = Method::kLora;
  config.model.path = "org/adapter";
  settle_model(config, environment_);
  EXPECT_EQ(config.model.path, "org/base@def");
  EXPECT_EQ(config.lora.init, root_ + "/models--org--adapter/snapshots/abc");
  EXPECT_NE(refusal("org/adapter").find("this is an adapter of \"org/base@def\""), std::string::npos);
}

TEST_F(HubCache, ADirectoryIsTakenAsItIs) {
  write("here/config.json", "{}");
  EXPECT_EQ(resolve_model(root_ + "/here", environment_), root_ + "/here");
  write("empty/x", "");
  EXPECT_NE(refusal(root_ + "/empty").find("without a config.json"), std::string::npos);
}

TEST_F(HubCache, ARefusalSaysWhatAConfigIsNeededFor) {
  write("empty/x", "");
  for (const std::string& path : {root_ + "/empty", std::string("org/name"), std::string("nowhere")}) {
    const std::string said = refusal(path);
    EXPECT_NE(said.find("config.json, which has the model's shape and vocabulary size"), std::string::npos)
        << said;
  }
}

TEST_F(HubCache, ARunStandsForItsModelAndAnyOtherDirectoryDoesNot) {
  write("run/config.toml", "");
  const std::string early = refusal(root_ + "/run");
  EXPECT_NE(early.find("no trained model yet"), std::string::npos) << early;
  EXPECT_NE(early.find("lmlaunch " + root_ + "/run/config.toml"), std::string::npos) << early;
  write("run/model/config.json", "{}");
  for (const char* name : {"/run", "/run/", "/run/model"})
    EXPECT_TRUE(fs::equivalent(resolve_model(root_ + name, environment_), root_ + "/run/model")) << name;
  write("other/model/config.json", "{}");
  EXPECT_NE(refusal(root_ + "/other").find("without a config.json"), std::string::npos);
  write("run/checkpoints/step_00000001/MANIFEST.json", "{}");
  const std::string checkpoint = root_ + "/run/checkpoints/step_00000001";
  EXPECT_NE(refusal(checkpoint).find("lmlaunch export " + checkpoint + " -o DIR"), std::string::npos);
}

TEST_F(HubCache, AnAdapterIsContinuedOrRefusedWithWhatMakesAModelOfIt) {
  const std::string adapter = R"({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"])";
  write("run/config.toml", "");
  write("run/model/adapter_config.json", adapter + R"(, "base_model_name_or_path": "org/base"})");
  Config config;
  config.train.method = Method::kLora;
  for (const char* name : {"/run", "/run/model"}) {
    config.model.path = root_ + name;
    config.lora.init = "";
    settle_model(config, environment_);
    EXPECT_EQ(config.model.path, "org/base");
    EXPECT_EQ(config.lora.init, root_ + "/run/model");
    EXPECT_NE(refusal(root_ + name).find("lmlaunch export " + root_ + name + " --merge -o DIR"),
              std::string::npos);
    // The same adapter twice is no contradiction, another one is.
    config.model.path = root_ + name;
    config.lora.init = root_ + "/run";
    settle_model(config, environment_);
    EXPECT_EQ(config.lora.init, root_ + "/run/model");
    config.model.path = root_ + name;
    config.lora.init = root_;
    EXPECT_THROW(settle_model(config, environment_), Error);
  }
  write("nameless/adapter_config.json", adapter + "}");
  EXPECT_NE(refusal(root_ + "/nameless").find("base_model_name_or_path"), std::string::npos);
}

TEST_F(HubCache, AnAdapterWhoseModelHasMovedSaysWhereItIsNamed) {
  const std::string adapter = root_ + "/adapter";
  const auto moved = [&](const std::string& base) {
    write("adapter/adapter_config.json",
          R"({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": ")" +
              base + "\"}");
    try {
      return "found " + resolve_model(base, environment_, adapter);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
      return error.report();
    }
  };
  const std::string here = fs::current_path().filename().string() + "-bases";
  fs::create_directory(here);  // that of the model is still there
  for (const std::string& base : {here + "/smol", root_ + "/bases/smol", std::string("smol")}) {
    const std::string said = moved(base);
    EXPECT_NE(said.find("the base model of this adapter was not found: \"" + base + "\""), std::string::npos)
        << said;
    EXPECT_NE(said.find("set base_model_name_or_path there"), std::string::npos) << said;
    EXPECT_NE(said.find(adapter + "/adapter_config.json"), std::string::npos) << said;
    EXPECT_EQ(said.find("lmlaunch fetch"), std::string::npos) << said;
  }
  EXPECT_EQ(refusal(here + "/smol").find("lmlaunch fetch"), std::string::npos);
  fs::remove(here);
  EXPECT_NE(moved("org/base").find("or fetch it: lmlaunch fetch org/base"), std::string::npos);
  // A model that the adapter does not name is not the adapter's fault.
  write("adapter/adapter_config.json",
        R"({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "x"})");
  try {
    resolve_model("org/base", environment_, adapter);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.report().find("this adapter"), std::string::npos);
  }
}

TEST_F(HubCache, WhatIsMissingOrHostileIsRefused) {
  EXPECT_NE(refusal("org/name").find(root_ + "/models--org--name"), std::string::npos);
  EXPECT_NE(refusal("no-such-directory").find("does not exist"), std::string::npos);
  EXPECT_NE(refusal("../..").find("FILE-21"), std::string::npos);
  EXPECT_NE(refusal("org/../../etc").find("does not exist"), std::string::npos);
  write("evil/config.json", "{}");
  write("models--org--evil/refs/main", "../../evil");
  EXPECT_NE(refusal("org/evil").find("no complete snapshot"), std::string::npos);
  write("models--org--half/refs/main", "abc");
  fs::create_directories(root_ + "/models--org--half/snapshots/abc");  // a download that was cut off
  EXPECT_NE(refusal("org/half").find("no complete snapshot"), std::string::npos);
}

TEST(Environment, AWheelIsMendedByPip) {
  namespace fs = std::filesystem;
  const fs::path site = fs::path(testing::TempDir()) / "site-packages";
  fs::remove_all(site);
  fs::create_directories(site / "lmlaunch" / "bin");
  const std::string program = site / "lmlaunch" / "bin" / "lmlaunch";
  EXPECT_EQ(how_to_mend(program), "./dev build");
  fs::create_directories(site / "lmlaunch-0.1.0.dist-info");
  EXPECT_EQ(how_to_mend(program), "pip install --force-reinstall lmlaunch");
  EXPECT_EQ(how_to_mend("/nowhere/bin/lmlaunch"), "./dev build");
}

TEST(Environment, HubAndCacheDirectoriesFollowTheirVariables) {
  const auto set = [](const char* name, const char* value) {
    value ? setenv(name, value, 1) : unsetenv(name);
  };
  const char* const names[] = {"HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME", "LMLAUNCH_PYTHON"};
  std::vector<std::pair<const char*, std::string>> before;
  for (const char* name : names) before.emplace_back(name, std::getenv(name) ? std::getenv(name) : "");
  for (const char* name : names) set(name, nullptr);
  EXPECT_TRUE(read_environment().hub_caches.empty());
  EXPECT_EQ(read_environment().token_cache(), "");
  set("HOME", "/h");
  EXPECT_EQ(read_environment().hub_caches, std::vector<std::string>{"/h/.cache/huggingface/hub"});
  EXPECT_EQ(read_environment().token_cache(), "/h/.cache/lmlaunch/tokens");
  set("XDG_CACHE_HOME", "/x");
  EXPECT_EQ(read_environment().hub_caches, std::vector<std::string>{"/x/huggingface/hub"});
  set("HF_HOME", "/hf");
  EXPECT_EQ(read_environment().hub_caches, std::vector<std::string>{"/hf/hub"});
  set("HF_HUB_CACHE", "/hub");
  EXPECT_EQ(read_environment().hub_caches, std::vector<std::string>{"/hub"});
  set("LMLAUNCH_PYTHON", "/p/python");
  EXPECT_EQ(read_environment().python, "/p/python");
  EXPECT_EQ(read_environment().python_from, "LMLAUNCH_PYTHON");
  for (const auto& [name, value] : before) set(name, value.empty() ? nullptr : value.c_str());
}

class Launcher : public ::testing::Test {
 protected:
  ~Launcher() override {
    for (const std::string& name : set_) unsetenv(name.c_str());
  }
  void set(const std::string& name, const std::string& value) {
    setenv(name.c_str(), value.c_str(), 1);
    set_.push_back(name);
  }
  std::vector<std::string> set_;
};

TEST_F(Launcher, TheHubIsReachedAsItsVariablesSay) {
  for (const char* name : {"HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"}) unsetenv(name);
  std::string home = (fs::temp_directory_path() / "lmlaunch-login-XXXXXX").string();
  ASSERT_NE(mkdtemp(home.data()), nullptr);
  set("HF_HOME", home);
  EXPECT_FALSE(read_hub_access().offline);
  EXPECT_EQ(read_hub_access().token, "");
  EXPECT_TRUE(read_hub_access().endpoint.starts_with("https://"));
  std::ofstream(home + "/token") << "hf_stored\n";
  EXPECT_EQ(read_hub_access().token, "hf_stored");
  EXPECT_EQ(read_hub_access().token_from, home + "/token");
  set("HF_TOKEN", " hf_given ");
  EXPECT_EQ(read_hub_access().token, "hf_given");
  EXPECT_EQ(read_hub_access().token_from, "HF_TOKEN");
  set("HF_ENDPOINT", "http://mirror:8080");
  EXPECT_EQ(read_hub_access().endpoint, "http://mirror:8080");
  for (const char* yes : {"1", "true", "ON", "Yes"}) {
    set("HF_HUB_OFFLINE", yes);
    EXPECT_TRUE(read_hub_access().offline) << yes;
  }
  set("HF_HUB_OFFLINE", "0");
  EXPECT_FALSE(read_hub_access().offline);
  fs::remove_all(home);
}

TEST_F(Launcher, WithoutOneAProcessIsTheOnlyRank) {
  const LauncherJob job = read_launcher_job();
  EXPECT_FALSE(job.shared());
  EXPECT_EQ(job.rank, 0);
  // A batch script is one process, whatever its job has asked for.
  set("SLURM_JOB_ID", "7");
  set("SLURM_NTASKS", "4");
  set("SLURM_PROCID", "0");
  EXPECT_FALSE(read_launcher_job().shared());
}

TEST_F(Launcher, MpirunNumbersItsProcesses) {
  set("OMPI_COMM_WORLD_RANK", "2");
  set("OMPI_COMM_WORLD_SIZE", "3");
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  set("PMIX_NAMESPACE", "12/3 4");
  LauncherJob job = read_launcher_job();
  EXPECT_TRUE(job.shared());
  EXPECT_EQ(job.rank, 2);
  EXPECT_EQ(job.ranks, 3);
  EXPECT_EQ(job.id, "12_3_4");  // part of a file's name
  EXPECT_FALSE(job.one_machine);
  EXPECT_EQ(job.machines, 1);  // not equally many on each
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "1");
  EXPECT_EQ(read_launcher_job().machines, 3);
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "3");
  EXPECT_TRUE(read_launcher_job().one_machine);
  EXPECT_EQ(read_launcher_job().machines, 1);
  set("OMPI_COMM_WORLD_LOCAL_RANK", "1");
  EXPECT_EQ(read_launcher_job().local_rank, 1);
  set("OMPI_COMM_WORLD_SIZE", "1");
  set("OMPI_COMM_WORLD_RANK", "0");
  EXPECT_FALSE(read_launcher_job().shared());
}

TEST_F(Launcher, SrunNeedsPmix) {
  set("SLURM_STEP_NUM_TASKS", "4");
  set("SLURM_PROCID", "3");
  set("SLURM_JOB_ID", "7");
  set("SLURM_STEP_ID", "0");
  set("SLURM_RESTART_COUNT", "1");
  EXPECT_NE(read_launcher_job().problem, "");
  set("PMIX_NAMESPACE", "slurm.pmix.7.0");
  set("SLURM_LOCALID", "1");
  const LauncherJob job = read_launcher_job();
  EXPECT_EQ(job.problem, "");
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_TRUE(job.launcher_addresses.empty());
  set("SLURM_LAUNCH_NODE_IPADDR", "10.2.0.7");
  EXPECT_EQ(read_launcher_job().launcher_addresses, std::vector<std::string>{"10.2.0.7"});
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.ranks, 4);
  EXPECT_EQ(job.id, "7.0.1");  // another start of the same job is another one
}

TEST_F(Launcher, SilenceIsANumberOfSeconds) {
  EXPECT_FALSE(silence_seconds());
  set("LMLAUNCH_SILENCE", "2.5");
  EXPECT_EQ(silence_seconds(), 2.5);
  for (const char* wrong : {"", "0", "-1", "2s", "nan"}) {
    set("LMLAUNCH_SILENCE", wrong);
    EXPECT_FALSE(silence_seconds()) << wrong;
  }
}

TEST_F(Launcher, WhatTheUserTellsOpenMpiStands) {
  EXPECT_EQ(one_machine_mpi().size(), 3U);
  set("OMPI_MCA_pml", "ucx");
  const std::vector<std::string> rest = one_machine_mpi();
  EXPECT_EQ(rest.size(), 2U);
  EXPECT_EQ(rest[0], "OMPI_MCA_btl=self,vader");
}

TEST_F(Launcher, ARankIsShownOneOfTheGpusThatAreShown) {
  using Variables = std::vector<std::string>;
  const std::string silent = "NCCL_RAS_ENABLE=0";
  EXPECT_EQ(gpu_of_rank(1, "lo"), (Variables{"CUDA_VISIBLE_DEVICES=1", "NCCL_SOCKET_IFNAME==lo", silent}));
  set("CUDA_VISIBLE_DEVICES", "3,GPU-1234,0");
  EXPECT_EQ(gpu_of_rank(0, ""), (Variables{"CUDA_VISIBLE_DEVICES=3", silent}));
  EXPECT_EQ(gpu_of_rank(1, "ib0"),
            (Variables{"CUDA_VISIBLE_DEVICES=GPU-1234", "NCCL_SOCKET_IFNAME==ib0", silent}));
  set("NCCL_SOCKET_IFNAME", "eth0");
  EXPECT_EQ(gpu_of_rank(2, "lo"), (Variables{"CUDA_VISIBLE_DEVICES=0", silent}));
  set("NCCL_RAS_ENABLE", "1");
  EXPECT_EQ(gpu_of_rank(2, "lo"), Variables{"CUDA_VISIBLE_DEVICES=0"});
}

TEST_F(Launcher, SaysWhereItIsReached) {
  set("OMPI_COMM_WORLD_RANK", "1");
  set("OMPI_COMM_WORLD_SIZE", "2");
  EXPECT_TRUE(read_launcher_job().launcher_addresses.empty());
  set("OMPI_MCA_orte_hnp_uri", "1037041664.0;tcp://10.0.0.1,192.0.2.2:39079;tcp6://[fd00::2]:44181");
  EXPECT_EQ(read_launcher_job().launcher_addresses, (std::vector<std::string>{"10.0.0.1", "192.0.2.2"}));
  set("OMPI_MCA_orte_hnp_uri", "1037041664.0;tcp6://[fd00::2]:44181");
  EXPECT_TRUE(read_launcher_job().launcher_addresses.empty());
}

TEST(Interface, IsTheOneThatHasTheAddressOrTheWayToIt) {
  EXPECT_EQ(interface_towards("127.0.0.1"), "");  // reaches nobody else
  EXPECT_EQ(interface_towards("no address"), "");
  ifaddrs* all = nullptr;
  ASSERT_EQ(getifaddrs(&all), 0);
  int asked = 0;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    if ((one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
    char own[NI_MAXHOST] = "";
    ASSERT_EQ(getnameinfo(one->ifa_addr, sizeof(sockaddr_in), own, sizeof own, nullptr, 0, NI_NUMERICHOST),
              0);
    EXPECT_EQ(interface_towards(own), one->ifa_name) << own;
    ++asked;
  }
  freeifaddrs(all);
  if (asked == 0) GTEST_SKIP() << "no network here but loopback";
}

}  // namespace
}  // namespace lm
