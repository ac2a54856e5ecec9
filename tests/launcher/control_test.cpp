#include "launcher/control.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "base/error.h"
#include "comm/shared_region.h"
#include "launcher/status.h"

namespace lm {
namespace {

TEST(Control, StopRequestsAreCountedAndTheFirstSignalIsKept) {
  Control cli = Control::create();
  Control rank = Control::attach(dup(cli.fd()));
  EXPECT_EQ(rank.stop_requests(), 0);
  cli.request_stop(SIGUSR1);
  cli.request_stop(SIGTERM);
  EXPECT_EQ(rank.stop_requests(), 2);
  EXPECT_EQ(rank.first_signal(), SIGUSR1);
}

TEST(Control, TheLastWholeRecordIsRead) {
  Control cli = Control::create();
  EXPECT_EQ(cli.latest().step, 0);
  Control rank = Control::attach(dup(cli.fd()));
  for (int64_t step = 1; step <= 5; ++step)
    rank.publish({step, step - 1, "/c/" + std::to_string(step), "why"});
  const WorkerRecord last = cli.latest();
  EXPECT_EQ(last.step, 5);
  EXPECT_EQ(last.repeat, 4);
  EXPECT_EQ(last.checkpoint, "/c/5");
  EXPECT_EQ(last.reason, "why");
  rank.publish({6, 0, std::string(100000, 'x'), ""});  // longer than any path
  EXPECT_EQ(cli.latest().checkpoint.size(), 4095u);
}

TEST(Control, ARankKilledWhileItPublishesLeavesAWholeRecord) {
  for (int round = 0; round < 20; ++round) {
    Control cli = Control::create();
    const pid_t child = fork();
    if (child == 0) {
      Control rank = Control::attach(cli.fd());
      for (int64_t step = 1;; ++step)
        rank.publish({step, step, std::string(1 + step % 4000, static_cast<char>('a' + step % 26)), ""});
    }
    usleep(3000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const WorkerRecord last = cli.latest();
    EXPECT_EQ(last.repeat, last.step);
    if (last.step > 0) {
      EXPECT_EQ(last.checkpoint, std::string(1 + last.step % 4000, static_cast<char>('a' + last.step % 26)));
    }
  }
}

// The compute thread says how far it is, the watchdog that the rank ends.
TEST(Control, TwoThreadsThatPublishLeaveWholeRecords) {
  Control cli = Control::create();
  std::atomic<bool> over = false;
  const auto text_of = [](int64_t n) {
    return std::string(static_cast<size_t>(1 + n % 4000), static_cast<char>('a' + n % 26));
  };
  const auto publish = [&](int64_t first) {
    for (int64_t n = first; n < 4000; n += 2) cli.publish({n, n, text_of(n), std::to_string(n)});
  };
  std::thread one([&] { publish(1); });
  std::thread other([&] { publish(2); });
  std::thread reader([&] {
    while (!over) {
      const WorkerRecord last = cli.latest();
      if (last.step == 0) continue;
      ASSERT_EQ(last.repeat, last.step);
      ASSERT_EQ(last.checkpoint, text_of(last.step));
      ASSERT_EQ(last.reason, std::to_string(last.step));
    }
  });
  one.join();
  other.join();
  over = true;
  reader.join();
}

TEST(Control, ARecordAfterTheEndKeepsTheEnd) {
  Control cli = Control::create();
  cli.publish({3, 1, "/c/2", ""});
  cli.publish_end(41);
  cli.publish({4, 2, "/c/2", ""});
  EXPECT_EQ(cli.latest().exit_code, 41);
  EXPECT_EQ(cli.latest().step, 4);
}

TEST(Control, ARegionThatCannotBeMadeLeavesNoDescriptor) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit little{.rlim_cur = 16, .rlim_max = before.rlim_max};
  const int next = dup(0);
  close(next);
  setrlimit(RLIMIT_FSIZE, &little);
  EXPECT_THROW(Control::create(), Error);
  EXPECT_THROW(SharedRegion::create(2), Error);
  setrlimit(RLIMIT_FSIZE, &before);
  const int now = dup(0);
  EXPECT_EQ(now, next);
  close(now);
}

TEST(Control, AnotherFileIsRefused) {
  const int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_THROW(Control::attach(fd), Error);
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
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
