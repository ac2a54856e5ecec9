#include "data/python.h"

#include <sys/wait.h>

#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/process.h"

namespace lm {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse(Exit code, const std::string& what, const std::string& place,
                         const std::string& next) {
  throw Error(code, {.area = "DATA-24", .what = what, .place = place, .next = next, .kept = ""});
}

std::string end_of(int status) {
  return WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status))
                             : "status " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

Json ask_python(const std::string& python, const std::string& program, const Json& request,
                const std::function<bool()>& stopped) {
  // -I: no environment variable and no folder of the user's changes what runs; -B: no bytecode beside the
  // program.
  const ProgramResult result =
      run_program({.argv = {python, "-I", "-B", program}},
                  request.dump(-1, ' ', false, Json::error_handler_t::replace), log_line, stopped);
  if (result.error != 0)
    refuse(Exit::kConfig, std::string("cannot start Python for the data: ") + std::strerror(result.error),
           python, "set LMLAUNCH_PYTHON to a Python with requirements.txt installed");
  if (result.stopped)
    refuse(Exit::kStopped, "stopped while tokenising the data", python,
           "start again; tokenising begins anew");
  const Json answer = Json::parse(result.output, nullptr, false);
  if (answer.is_object() && answer.contains("error")) {
    const Json& error = answer["error"];
    throw Error(Exit::kInput, {.area = error.value("area", "DATA-24"),
                               .what = error.value("what", "unknown"),
                               .place = error.value("place", ""),
                               .next = error.value("next", ""),
                               .kept = ""});
  }
  if (result.status != 0 || !answer.is_object())
    refuse(Exit::kInput, "the data program ended with " + end_of(result.status), program,
           "its own message stands above");
  return answer;
}

}  // namespace lm
