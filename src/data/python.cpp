#include "data/python.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/process.h"

namespace lm {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse(Exit code, const std::string& what, const std::string& place,
                         const std::string& next) {
  throw Error(code, {.area = "DATA-24", .what = what, .place = place, .next = next});
}

std::string end_of(int status) {
  return WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                             : fmt::format("status {}", WEXITSTATUS(status));
}

std::vector<std::string> command(const std::string& python, const std::string& program) {
  // -I: isolated from environment variables and the user's folders; -B: no bytecode beside the program.
  return {python, "-I", "-B", program};
}

[[noreturn]] void refuse_interpreter(const std::string& python, int error) {
  refuse(Exit::kConfig, std::string("cannot start Python for the data: ") + std::strerror(error), python,
         "set LMLAUNCH_PYTHON to a Python with requirements.txt installed");
}

// Rethrows an error reported by the program.
void throw_error_of(const Json& answer) {
  if (!answer.is_object() || !answer.contains("error")) return;
  const Json& error = answer["error"];
  throw Error(Exit::kInput, {.area = error.value("area", "DATA-24"),
                             .what = error.value("what", "unknown"),
                             .place = error.value("place", ""),
                             .next = error.value("next", ""),
                             .kept = error.value("kept", "")});
}

std::string line_of(const Json& request) {
  return request.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

Json ask_python(const std::string& python, const std::string& program, const Json& request,
                const std::function<bool()>& stopped) {
  const ProgramResult result =
      run_program({.argv = command(python, program)}, line_of(request), log_line, stopped);
  if (result.error != 0) refuse_interpreter(python, result.error);
  if (result.stopped)
    refuse(Exit::kStopped, "stopped while tokenising the data", python,
           "start again; tokenising resumes where it stopped");
  const Json answer = Json::parse(result.output, nullptr, false);
  throw_error_of(answer);
  if (result.status != 0 || !answer.is_object())
    throw Error(
        Exit::kInput,
        {.area = "DATA-24",
         .what = "the data program ended with " + end_of(result.status),
         .place = program,
         .next = "see its own message above; without one, free memory",
         .kept = WIFSIGNALED(result.status) ? "the progress so far: the next start resumes there" : ""});
  return answer;
}

PythonSession::PythonSession(const std::string& python, const std::string& program, SessionWait wait)
    : program_(program), wait_(std::move(wait)) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) refuse_interpreter(python, errno);
  pid_ = start_program({.argv = command(python, program), .stop_signals = StopSignals::kIgnored},
                       {.in = ends[1], .out = ends[1]});
  close(ends[1]);
  socket_ = ends[0];
  if (pid_ >= 0) return;
  close(socket_);
  refuse_interpreter(python, -pid_);
}

PythonSession::~PythonSession() {
  close(socket_);
  kill(pid_, SIGKILL);  // it may be reading for a request that nobody makes; it writes nothing
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void PythonSession::refuse_ended() const {
  constexpr int kLooks = 100;  // 1 s: it closes its output before it has ended
  siginfo_t end{};
  for (int look = 0; look < kLooks && end.si_pid == 0; ++look) {
    if (look > 0) poll(nullptr, 0, 10);
    // The destructor waits for it.
    if (waitid(P_PID, static_cast<id_t>(pid_), &end, WEXITED | WNOHANG | WNOWAIT) != 0) break;
  }
  std::string how;
  if (end.si_pid != 0)
    how = fmt::format(" with {} {}", end.si_code == CLD_EXITED ? "status" : "signal", end.si_status);
  refuse(Exit::kInput, "the data program has ended" + how, program_,
         "see its own message above; without one, free memory");
}

void PythonSession::await(int16_t events) {
  constexpr int kLooks = 10;  // per second
  for (int looks = 0;;) {
    pollfd program{.fd = socket_, .events = events, .revents = 0};
    const int ready = poll(&program, 1, wait_.stopped ? 1000 / kLooks : -1);
    if (ready > 0) return;
    LM_CHECK(ready == 0 || errno == EINTR, std::strerror(errno));
    if (ready < 0 || !wait_.stopped()) continue;
    if (looks++ < wait_.seconds_after_stop * kLooks) continue;
    refuse(Exit::kStopped, "stopped while the data program was at work", program_,
           "start again; the run resumes from its newest checkpoint");
  }
}

void PythonSession::receive() {
  char buffer[65536];
  await(POLLIN);
  const ssize_t n = recv(socket_, buffer, sizeof buffer, 0);
  if (n < 0 && errno == EINTR) return;
  if (n <= 0) refuse_ended();
  received_.append(buffer, static_cast<size_t>(n));
}

Json PythonSession::ask(const Json& request) {
  const std::string line = line_of(request) + "\n";
  for (size_t sent = 0; sent < line.size();) {
    await(POLLOUT);
    const ssize_t n = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EINTR && errno != EAGAIN) refuse_ended();
    if (n > 0) sent += static_cast<size_t>(n);
  }
  size_t end = 0;
  while ((end = received_.find('\n', end)) == std::string::npos) {
    end = received_.size();
    receive();
  }
  const Json answer = Json::parse(received_.substr(0, end), nullptr, false);
  received_.erase(0, end + 1);
  throw_error_of(answer);
  if (!answer.is_object())
    refuse(Exit::kInput, "the data program's answer is no JSON object", program_,
           "see its own message above; a program that Python starts may have written to its output");
  return answer;
}

std::string PythonSession::take(size_t bytes) {
  while (received_.size() < bytes) receive();
  std::string out = received_.substr(0, bytes);
  received_.erase(0, bytes);
  return out;
}

}  // namespace lm
