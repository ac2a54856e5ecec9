// The rank's executable (lmlaunch-cpu, lmlaunch-cuda): what the door starts for everything that needs
// LibTorch.
// `<command> <arguments>`, as the door hands them on; exit codes and messages as base/error.h says.
#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "base/error.h"
#include "launcher/rank_commands.h"
#include "model/library_error.h"

int main(int argc, char** argv) {
  using namespace lm;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    return static_cast<int>(run_rank_command(arguments));
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  } catch (const std::bad_alloc&) {
    const Error error(Exit::kHostMemory,
                      {.area = "MEM-16",
                       .what = "out of host memory",
                       .place = "",
                       .next = "lower train.micro_batch, or set train.recompute = \"block\"",
                       .kept = ""});
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  } catch (const c10::Error& error) {
    const Error ours = library_error(error);
    std::fputs(ours.report().c_str(), stderr);
    return static_cast<int>(ours.code());
  } catch (const std::exception& error) {
    const Error bug(Exit::kInternal, {.area = "BUG-70",
                                      .what = error.what(),
                                      .place = "",
                                      .next = "report this message; it is a bug in lmlaunch",
                                      .kept = ""});
    std::fputs(bug.report().c_str(), stderr);
    return static_cast<int>(bug.code());
  }
}
