// One question to a program of prepare/: a JSON object on its standard input, one on its standard output, its
// standard error line by line into the log. It dies with this process. Blocks; one thread.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace lm {

// The answer, an object. Throws Error(10) for an interpreter that cannot be started, Error(11) for what the
// program refuses and for its failure, Error(75) when `stopped` says so (asked ten times per second).
nlohmann::json ask_python(const std::string& python, const std::string& program,
                          const nlohmann::json& request, const std::function<bool()>& stopped = {});

// A program of prepare/ that stays and answers one question after the other, each a line. Its standard error
// is this process's, and stop signals of the terminal do not reach it.
class PythonSession {
 public:
  // Throws Error(10) for an interpreter that cannot be started.
  PythonSession(const std::string& python, const std::string& program);
  ~PythonSession();  // ends it
  PythonSession(const PythonSession&) = delete;
  PythonSession& operator=(const PythonSession&) = delete;

  // Throws Error(11) for what the program refuses, and when it has ended.
  nlohmann::json ask(const nlohmann::json& request);

 private:
  std::string program_;
  int socket_ = -1;
  int pid_ = -1;
  std::string received_;  // behind the last answer
};

}  // namespace lm
