#include "offload/engines.h"

#include <cerrno>

#include "offload/io_failure.h"

namespace lm {

std::unique_ptr<IoEngine> make_engine(IoEngineKind kind, const EngineSetup& setup, std::string* note) {
  if (kind == IoEngineKind::kUring) return make_uring_engine(setup);
  if (kind == IoEngineKind::kThreads) return make_threads_engine(setup);
  try {
    return make_uring_engine(setup);
  } catch (const RefusedCall& refused) {
    std::unique_ptr<IoEngine> engine = make_threads_engine(setup);
    if (note != nullptr) {
      const bool forbidden = refused.error() == EPERM || refused.error() == EACCES;
      *note = "io_uring unavailable (" + errno_name(refused.error()) +
              (forbidden ? ": seccomp or kernel.io_uring_disabled" : "") + "): using " +
              std::to_string(engine->depth()) + " I/O threads";
    }
    return engine;
  }
}

}  // namespace lm
