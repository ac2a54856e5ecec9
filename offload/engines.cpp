#include "offload/engines.h"

#include <fmt/format.h>
#include <cerrno>

#include "base/error.h"
#include "offload/io_failure.h"

namespace lm {

const char* cause_of_refusal(int error) {
  if (error == EPERM || error == EACCES) return "seccomp or kernel.io_uring_disabled";
  if (error == ENOMEM) return "RLIMIT_MEMLOCK is too low";  // newer kernels charge the ring itself
  return "";
}

std::string no_ring(int error) {
  const std::string cause = cause_of_refusal(error);
  return fmt::format("io_uring unavailable ({}{})", errno_name(error), cause.empty() ? "" : ": " + cause);
}

IoEngineKind engine_kind(std::string_view name) {
  if (name == "uring") return IoEngineKind::kUring;
  if (name == "threads") return IoEngineKind::kThreads;
  LM_CHECK(name == "auto", "an I/O engine called \"" + std::string(name) + "\"");
  return IoEngineKind::kAuto;
}

std::unique_ptr<IoEngine> make_engine(IoEngineKind kind, const EngineSetup& setup, std::string* note) {
  if (kind == IoEngineKind::kUring) return make_uring_engine(setup);
  if (kind == IoEngineKind::kThreads) return make_threads_engine(setup);
  try {
    return make_uring_engine(setup);
  } catch (const RefusedCall& refused) {
    std::unique_ptr<IoEngine> engine = make_threads_engine(setup);
    if (note != nullptr) {
      *note = fmt::format("{}: using {} I/O threads", no_ring(refused.error()), engine->depth());
    }
    return engine;
  }
}

}  // namespace lm
