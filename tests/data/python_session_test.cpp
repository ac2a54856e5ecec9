#include <gtest/gtest.h>
#include <csignal>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.h"
#include "data/python.h"

namespace lm {
namespace {

// A session of a program that reads a request and then does this.
PythonSession session_of(const std::string& name, const std::string& then, const SessionWait& wait = {}) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << "import json, os, sys, time\nsys.stdin.readline()\n" << then;
  return PythonSession(LM_TEST_PYTHON, path, wait);
}

std::string refusal(const std::string& name, const std::string& then) {
  PythonSession session = session_of(name, then);
  try {
    session.ask({{"next", 1}});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
    return error.text().what;
  }
  return "answered";
}

TEST(PythonSession, SaysHowItsProgramHasEnded) {
  EXPECT_EQ(refusal("exits.py", "sys.exit(3)\n"), "the data program has ended with status 3");
  EXPECT_EQ(refusal("killed.py", "os.kill(os.getpid(), 9)\n"), "the data program has ended with signal 9");
  EXPECT_EQ(refusal("talks.py", "print('hello')\n"), "the data program's answer is no JSON object");
}

TEST(PythonSession, OfAProgramThatHangsEndsAtAStopRequest) {
  int asked = 0;
  const SessionWait wait{.stopped = [&] { return ++asked > 2; }, .seconds_after_stop = 1};
  for (const char* const then :
       {"time.sleep(1000)\n", "print(json.dumps({'bytes': 4}), flush=True)\ntime.sleep(1000)\n"}) {
    PythonSession session = session_of("hangs.py", then, wait);
    asked = 0;
    try {
      const auto bytes = session.ask({{"next", 1}}).at("bytes").get<size_t>();
      session.take(bytes);
      ADD_FAILURE() << "answered";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kStopped);
    }
    EXPECT_GT(asked, 2);
  }
}

TEST(PythonSession, OfAProgramThatWorksAnswersAfterAStopRequest) {
  PythonSession session =
      session_of("slow.py", "time.sleep(0.3)\nprint(json.dumps({'there': 1}), flush=True)\n",
                 {.stopped = [] { return true; }, .seconds_after_stop = 1000});
  EXPECT_EQ(session.ask({{"next", 1}}).at("there"), 1);
}

// It would go on for a while.
TEST(PythonSession, KillsItsProgramAtItsEnd) {
  const std::string finished = testing::TempDir() + "/works_finished";
  std::filesystem::remove(finished);
  pid_t program = 0;
  {
    PythonSession session = session_of("works.py",
                                       "print(json.dumps({'pid': os.getpid()}), flush=True)\ntime.sleep(5)\n"
                                       "open('" +
                                           finished + "', 'w').close()\n");
    program = session.ask({{"next", 1}}).at("pid").get<pid_t>();
    EXPECT_EQ(::kill(program, 0), 0);
  }
  EXPECT_EQ(::kill(program, 0), -1) << "it runs on";
  EXPECT_FALSE(std::filesystem::exists(finished)) << "its end was awaited";
}

}  // namespace
}  // namespace lm
