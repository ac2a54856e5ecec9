// The rank's executable (lmlaunch-cpu, lmlaunch-cuda): what the door starts for everything that needs
// LibTorch.
// `<command> <arguments>`, as the door hands them on; exit codes and messages as base/error.h says.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/library_error.h"
#include "launcher/rank/rank_commands.h"

int main(int argc, char** argv) {
  using namespace lm;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    return static_cast<int>(run_rank_command(arguments));
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    const Error ours = library_error(error);
    std::fputs(ours.report().c_str(), stderr);
    return static_cast<int>(ours.code());
  }
}
