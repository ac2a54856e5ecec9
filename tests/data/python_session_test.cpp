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
PythonSession session_of(const std::string& name, const std::string& then) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << "import json, os, sys, time\nsys.stdin.readline()\n" << then;
  return PythonSession(LM_TEST_PYTHON, path);
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
