// The worker (lmlaunch-cpu, lmlaunch-cuda), which the CLI starts for everything that needs LibTorch.
// `<command> <arguments>`, as the CLI passes them; exit codes and messages as in base/error.h.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "base/error.h"
#include "kernels/library_error.h"
#include "launcher/environment.h"
#include "launcher/worker/worker_commands.h"

namespace {

using namespace lm;

Exit run(const std::vector<std::string>& arguments) {
  try {
    limit_processor();
    return run_worker_command(arguments);
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return error.code();
  } catch (const std::exception& error) {
    const Error ours = library_error(error);
    std::fputs(ours.report().c_str(), stderr);
    return ours.code();
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Skips destructors of static objects: LibTorch's operator tables take 0.15 s to destroy, for memory that the
// system reclaims anyway. But a GPU's profiler writes its trace at exit, and a sanitizer looks for leaks
// then.
[[noreturn]] void end_process(Exit code) {
  if (cuda_built() || kSanitized) std::exit(static_cast<int>(code));
  std::fflush(nullptr);
  _exit(static_cast<int>(code));
}

}  // namespace

int main(int argc, char** argv) {
  end_process(run({argv + 1, argv + argc}));
}
