// Lines about a run, with a terminal (a pty) and with a pipe as stderr.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <utility>

#include "base/log.h"
#include "launcher/worker/progress_line.h"

namespace lm {
namespace {

const StepView kUsual{.step = 12,
                      .total = 100,
                      .loss = 2.12345,
                      .grad_norm = 1.5,
                      .lr = 3e-4,
                      .tokens_per_s = 1234,
                      .sol_pct = 45,
                      .memory_bytes = int64_t{3} << 29,
                      .seconds_left = 41,
                      .seconds_to_eval = 8,
                      .seconds_to_save = 20};
const StepView kLong{.step = 1234567,
                     .total = 9999999,
                     .loss = 123.45678,
                     .grad_norm = 12345.678,
                     .lr = 3e-100,
                     .tokens_per_s = 123456789,
                     .sol_pct = 100,
                     .memory_bytes = int64_t{1023} << 40,
                     .seconds_left = 1e7,
                     .seconds_to_eval = 1e6,
                     .seconds_to_save = 1e6};

// What `act` leaves on stderr, which is a terminal of `columns` or a pipe (0), and in log.txt.
struct Seen {
  std::string screen, log;
};
Seen see(int columns, const std::function<void()>& act) {
  char name[] = "/tmp/lmlaunch-log-XXXXXX";
  close(mkstemp(name));
  int ours = -1, theirs = -1, ends[2];
  winsize size{};
  size.ws_col = static_cast<unsigned short>(columns);
  if (columns > 0) {
    EXPECT_EQ(openpty(&ours, &theirs, nullptr, nullptr, &size), 0);
  } else {
    EXPECT_EQ(pipe(ends), 0);
    ours = ends[0], theirs = ends[1];
  }
  const int before = dup(STDERR_FILENO);
  dup2(theirs, STDERR_FILENO);
  log_to_file(name);
  act();
  dup2(before, STDERR_FILENO);
  close(before);
  Seen out;
  fcntl(ours, F_SETFL, O_NONBLOCK);
  char buffer[16384];
  for (ssize_t n = 0; (n = read(ours, buffer, sizeof buffer)) > 0;)
    out.screen.append(buffer, static_cast<size_t>(n));
  close(ours);
  close(theirs);
  std::ostringstream text;
  text << std::ifstream(name).rdbuf();
  out.log = text.str();
  log_to_file("/dev/null");
  unlink(name);
  return out;
}

// A long run of a large model; more than that does not fit into 80 columns.
const StepView kLarge{.step = 10000,
                      .total = 10000,
                      .loss = 2.12345,
                      .grad_norm = 1.5,
                      .lr = 3e-4,
                      .tokens_per_s = 12345,
                      .sol_pct = 45,
                      .memory_bytes = (int64_t{159} << 29) + 1,
                      .seconds_left = 11 * 3600 + 130,
                      .seconds_to_eval = 725,
                      .seconds_to_save = 1799};

TEST(ProgressLine, SaysEverythingWhereThereIsRoom) {
  EXPECT_EQ(progress_line(kUsual),
            "step 12/100  loss 2.1235  norm 1.500  lr 3.00e-04  1234 tokens/s  45% utilization  "
            "1.50 GiB  eval 0:08  save 0:20  left 0:41");
  StepView rare = kUsual;
  rare.seconds_to_eval = rare.seconds_to_save = -1;  // there is none to come
  EXPECT_EQ(progress_line(rare).find("eval"), std::string::npos);
  EXPECT_EQ(progress_line(rare).find("save"), std::string::npos);
}

// A terminal of 80 columns has room for 79: its cursor stands in the last.
TEST(ProgressLine, In80ColumnsHasLossSpeedLimitMemoryWhatComesNextAndTheTimeLeft) {
  EXPECT_EQ(progress_line(kUsual, 79),
            "12/100  loss 2.123  1.2k tok/s  45% hw  1.5GiB  eval 8s  save 20s  left 41s");
  EXPECT_EQ(progress_line(kLarge, 79),
            "10000/10000 loss 2.123 12.3k tok/s 45% hw 79.5GiB eval 12m save 29m left 11h02m");
}

TEST(ProgressLine, LeavesOutTheLeastFirst) {
  EXPECT_EQ(progress_line(kLarge, 78),
            "10000/10000 loss 2.123 12.3k tok/s 45% hw 79.5GiB eval 12m left 11h02m");
  StepView saves = kLarge;
  std::swap(saves.seconds_to_eval, saves.seconds_to_save);
  EXPECT_EQ(progress_line(saves, 78),
            "10000/10000 loss 2.123 12.3k tok/s 45% hw 79.5GiB save 12m left 11h02m");
  const char* const kFewer[] = {"10000/10000 loss 2.123 12.3k tok/s 45% hw 79.5GiB left 11h02m",
                                "10000/10000 loss 2.123 12.3k tok/s 79.5GiB left 11h02m",
                                "10000/10000 loss 2.123 12.3k tok/s left 11h02m",
                                "10000/10000 loss 2.123 left 11h02m",
                                "10000/10000 loss 2.123",
                                "10000/10000 loss 2.12"};
  int columns = 69;
  for (const std::string fewer : kFewer) {
    EXPECT_EQ(progress_line(kLarge, columns), fewer);
    columns = static_cast<int>(fewer.size()) - 1;
  }
}

TEST(ProgressLine, FitsEveryWidth) {
  StepView ends = kUsual;
  ends.seconds_to_eval = ends.seconds_to_save = -1;
  for (const StepView& view : {kUsual, kLarge, kLong, ends}) {
    for (int columns = 1; columns < 200; ++columns) {
      const std::string line = progress_line(view, columns), wider = progress_line(view, columns + 1);
      EXPECT_LE(line.size(), static_cast<size_t>(columns));
      EXPECT_TRUE(wider.size() > static_cast<size_t>(columns) || line == wider) << line << '\n' << wider;
    }
  }
}

TEST(ProgressLine, OnATerminalEveryStepIsDrawnInItsWidthAndLogTxtGetsOneLinePerLogEvery) {
  const Seen seen = see(80, [] {
    for (StepView view = kLong; view.step < kLong.step + 6; ++view.step) show_step(view, 3);
    log_line("done");
  });
  int drawn = 0;
  std::istringstream lines(seen.screen);
  for (std::string line; std::getline(lines, line, '\r');) {
    if (line.empty() || line[0] == '\n') continue;  // around the log's last line
    ++drawn;
    EXPECT_EQ(line.substr(0, 3), "\x1b[K");
    EXPECT_LE(line.size() - 3, 79u) << line;
  }
  EXPECT_EQ(drawn, 6);
  EXPECT_EQ(std::count(seen.log.begin(), seen.log.end(), '\n'), 2 + 1) << seen.log;
  EXPECT_EQ(seen.log.find('\r'), std::string::npos);
  EXPECT_NE(seen.log.find("100% utilization"), std::string::npos);
}

TEST(ProgressLine, InAPipeALinePerLogEveryAndTheLastStep) {
  const Seen seen = see(0, [] {
    for (StepView view = kUsual; view.step <= view.total; ++view.step) show_step(view, 40);
  });
  EXPECT_EQ(std::count(seen.screen.begin(), seen.screen.end(), '\n'), 3) << seen.screen;  // 40, 80, 100
  EXPECT_EQ(seen.log, seen.screen);
}

TEST(Log, ALineAfterTheRedrawnOneBeginsANewLine) {
  const Seen seen = see(80, [] {
    show_line("step 1");
    log_line("eval loss");
    log_line("next");
  });
  EXPECT_EQ(seen.screen, "\r\x1b[Kstep 1\r\neval loss\r\nnext\r\n");
  EXPECT_EQ(seen.log, "eval loss\nnext\n");
}

TEST(Log, ColoursReachATerminalOnlyAndForeignControlsNobody) {
  const auto act = [] { log_coloured("a \xc2\xabtext\xc2\xbb \x1b]0;evil", "a \x1b[32mtext\x1b[0m"); };
  const Seen terminal = see(80, act), pipe = see(0, act);
  EXPECT_EQ(terminal.screen, "a \x1b[32mtext\x1b[0m\r\n");
  EXPECT_EQ(terminal.log, "a \xc2\xabtext\xc2\xbb \\x1b]0;evil\n");
  EXPECT_EQ(pipe.screen, terminal.log);
  EXPECT_EQ(pipe.log, terminal.log);
}

}  // namespace
}  // namespace lm
