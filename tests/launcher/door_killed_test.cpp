// What is left of a run whose door is killed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

#include "base/json.h"
#include "launcher/status.h"
#include "tests/support/door.h"

namespace lm {
namespace {

// What the status says once nobody is left who would write it.
Json status_after_the_kill(Door& door) {
  kill(door.pid(), SIGKILL);
  door.finish();
  Json status;
  for (int i = 0; i < 3000; ++i) {
    status = Json::parse(door.read("run/status.json"));
    if (status["state"] != "running") break;
    usleep(10000);
  }
  return status;
}

TEST(DoorKilled, ADoorThatIsKilledLeavesAFinalStatus) {
  Door door;
  door.write_config("c.toml");
  door.start({"--gpus", "0", "c.toml"}, "running");
  door.wait_for("has written its status");
  const pid_t pid = door.pid();
  const Json before = Json::parse(door.read("run/status.json"));
  EXPECT_EQ(before["pid"], 0 + pid);
  const Json status = status_after_the_kill(door);
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
TEST(DoorKilled, ADoorThatIsKilledOnceItsRankHasStoppedLeavesThat) {
  Door door;
  door.write_config("c.toml");
  door.start({"--gpus", "0", "c.toml"}, "stopping");
  door.wait_for("ready");
  door.send(SIGTERM);
  door.wait_for("has written its status");
  const Json status = status_after_the_kill(door);
  EXPECT_EQ(status["state"], "stopped");
  EXPECT_EQ(status["reason"], "signal:SIGTERM");
  EXPECT_EQ(status["exit_code"], 75);
  EXPECT_EQ(status["checkpoint"], "/c/step_00000012");
  EXPECT_EQ(status["repeat"], 0);
}

// Whoever has the directory by then says how it stands.
TEST(DoorKilled, AStatusOfAnotherRunIsLeftAsItIs) {
  Door door;
  door.write_config("c.toml");
  door.start({"--gpus", "0", "c.toml"}, "running");
  door.wait_for("has written its status");
  door.write("run/.lock", "another run's");
  kill(door.pid(), SIGKILL);
  door.finish();
  usleep(300000);
  EXPECT_EQ(Json::parse(door.read("run/status.json"))["state"], "running");
}

}  // namespace
}  // namespace lm
