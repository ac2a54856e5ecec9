// Runs a program of prepare/ for one request: a JSON object on its standard input, one on its standard
// output, its standard error line by line to the log. It is killed with this process. Blocks; one thread.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace lm {

// Returns the response, an object. Throws Error(10) for an interpreter that cannot be started, Error(11) for
// an error reported by the program and for its failure, Error(75) if `stopped` returns true (polled ten times
// per second).
nlohmann::json ask_python(const std::string& python, const std::string& program,
                          const nlohmann::json& request, const std::function<bool()>& stopped = {});

// How long a session waits for its program: until it answers or ends, and once `stopped` returns true (polled
// ten times per second) for that many seconds more. A program that works answers in that time, and what asks
// for its rows ends its step; one that hangs does not keep the run.
struct SessionWait {
  std::function<bool()> stopped = {};
  int seconds_after_stop = 3;
};

// A persistent program of prepare/ that answers one request after another, each on one line. Its standard
// error is this process's, and stop signals of the terminal do not reach it.
class PythonSession {
 public:
  // Throws Error(10) for an interpreter that cannot be started.
  PythonSession(const std::string& python, const std::string& program, SessionWait wait = {});
  ~PythonSession();  // ends the program
  PythonSession(const PythonSession&) = delete;
  PythonSession& operator=(const PythonSession&) = delete;

  // Throws Error(11) for an error reported by the program, and if it has ended; Error(75) if it has not
  // answered after a stop request: the session cannot be used any more.
  nlohmann::json ask(const nlohmann::json& request);
  // The bytes that follow the last response; throws likewise.
  std::string take(size_t bytes);

 private:
  void receive();
  void await(int16_t events);  // of poll: until the program has an answer, or takes more of a request
  [[noreturn]] void refuse_ended() const;  // says how

  const std::string program_;
  const SessionWait wait_;
  int socket_ = -1;
  int pid_ = -1;
  std::string received_;  // bytes after the last response
};

}  // namespace lm
