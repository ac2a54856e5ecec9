// Tests of what ends a process, or of settings, which the emulator reads once: EXPECT_EXIT(in_child(...),
// ...), with death tests that start a new process (GTEST_FLAG threadsafe, which including this sees to).
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

namespace emulator {

inline const bool kNewProcesses = [] {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  return true;
}();

inline constexpr int kFailed = 77;  // an exception left `body`

// With `settings` ("NAME=VALUE NAME=VALUE") in the environment: ends with what `body` returns.
[[noreturn]] inline void in_child(const std::string& settings, const std::function<int()>& body) {
  for (size_t at = 0; at < settings.size();) {
    const size_t end = std::min(settings.find(' ', at), settings.size()), equals = settings.find('=', at);
    setenv(settings.substr(at, equals - at).c_str(), settings.substr(equals + 1, end - equals - 1).c_str(),
           1);
    at = end + 1;
  }
  int code = kFailed;
  try {
    code = body();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
  }
  std::fflush(nullptr);
  _exit(code);
}

}  // namespace emulator
