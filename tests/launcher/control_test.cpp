#include "launcher/control.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "base/error.h"
#include "launcher/status.h"

namespace lm {
namespace {

TEST(Control, StopRequestsAreCountedAndTheFirstSignalIsKept) {
  Control door = Control::create();
  Control rank = Control::attach(dup(door.fd()));
  EXPECT_EQ(rank.stop_requests(), 0);
  door.request_stop(SIGUSR1);
  door.request_stop(SIGTERM);
  EXPECT_EQ(rank.stop_requests(), 2);
  EXPECT_EQ(rank.first_signal(), SIGUSR1);
}

TEST(Control, TheLastWholeRecordIsRead) {
  Control door = Control::create();
  EXPECT_EQ(door.latest().step, 0);
  Control rank = Control::attach(dup(door.fd()));
  for (int64_t step = 1; step <= 5; ++step)
    rank.publish({step, step - 1, "/c/" + std::to_string(step), "why"});
  const RankRecord last = door.latest();
  EXPECT_EQ(last.step, 5);
  EXPECT_EQ(last.repeat, 4);
  EXPECT_EQ(last.checkpoint, "/c/5");
  EXPECT_EQ(last.reason, "why");
  rank.publish({6, 0, std::string(100000, 'x'), ""});  // longer than any path
  EXPECT_EQ(door.latest().checkpoint.size(), 4095u);
}

TEST(Control, ARankKilledWhileItPublishesLeavesAWholeRecord) {
  for (int round = 0; round < 20; ++round) {
    Control door = Control::create();
    const pid_t child = fork();
    if (child == 0) {
      Control rank = Control::attach(door.fd());
      for (int64_t step = 1;; ++step)
        rank.publish({step, step, std::string(1 + step % 4000, static_cast<char>('a' + step % 26)), ""});
    }
    usleep(3000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const RankRecord last = door.latest();
    EXPECT_EQ(last.repeat, last.step);
    if (last.step > 0) {
      EXPECT_EQ(last.checkpoint, std::string(1 + last.step % 4000, static_cast<char>('a' + last.step % 26)));
    }
  }
}

TEST(Control, AnotherFileIsRefused) {
  const int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_THROW(Control::attach(fd), Error);
  close(fd);
  EXPECT_THROW(Control::attach(999), Error);
}

TEST(Status, TheLastLineCanBeSplitAtSpaces) {
  RunStatus status;
  status.exit_code = 75;
  status.reason = "signal:SIGUSR1";
  status.step = 1234;
  status.checkpoint = "/r/checkpoints/step_00001234";
  EXPECT_EQ(stop_line(status),
            "lmlaunch: stop code=75 reason=signal:SIGUSR1 step=1234 checkpoint=/r/checkpoints/step_00001234 "
            "repeat=0");
  status.checkpoint = "/a b/\"c\"\n";
  EXPECT_EQ(stop_line(status).find('\n'), std::string::npos);
}

}  // namespace
}  // namespace lm
