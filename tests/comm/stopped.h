// A process that is stopped and goes on, as by Ctrl-Z and `fg`, or by a scheduler that suspends jobs.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace lm {

// Work that is not done by the clock alone while its process stands still.
inline void work_a_second() {
  for (int i = 0; i < 10; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

using Work = std::function<std::vector<std::string>()>;

// Each work gives the errors of its ranks ("": none) in a process of its own. All of them stand still from
// 0.4 s after their start for `seconds`, and go on one after the other. No rank may have an error.
inline void expect_go_on_after(std::chrono::seconds seconds, const std::vector<Work>& works) {
  std::vector<pid_t> children;
  for (const Work& work : works) {
    children.push_back(::fork());
    ASSERT_GE(children.back(), 0);
    if (children.back() != 0) continue;
    int failed = 0;
    for (const std::string& error : work()) {
      if (error.empty()) continue;
      std::fprintf(stderr, "%s\n", error.c_str());
      failed = 1;
    }
    ::_exit(failed);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  for (const pid_t child : children) EXPECT_EQ(::kill(child, SIGSTOP), 0);
  std::this_thread::sleep_for(seconds);
  for (const pid_t child : children) {
    EXPECT_EQ(::kill(child, SIGCONT), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // in which it looks for the others
  }
  for (const pid_t child : children) {
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "its errors stand above";
  }
}

}  // namespace lm
