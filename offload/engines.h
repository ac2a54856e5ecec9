// The I/O engines and the choice of one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "offload/io_engine.h"

namespace lm {

enum class IoEngineKind : uint8_t { kAuto, kUring, kThreads };
// Parses io.engine: "auto", "uring" or "threads". Throws Error(70) for another name.
IoEngineKind engine_kind(std::string_view name);

// The likely cause of this errno from io_uring_setup; "": unknown.
const char* cause_of_refusal(int error);
// "io_uring unavailable (EPERM: seccomp or kernel.io_uring_disabled)".
std::string no_ring(int error);

struct EngineSetup {
  std::span<const IoFile> files;
  std::span<const std::span<std::byte>> buffers;  // memory of most transfers; registered where possible
  int depth = 64;
};

// Both throw Error(21) with the refused call and its errno; the ring also if registration of the files is
// refused. Refused registration of buffers (RLIMIT_MEMLOCK) is no error: the description names it.
std::unique_ptr<IoEngine> make_uring_engine(const EngineSetup& setup);
std::unique_ptr<IoEngine> make_threads_engine(const EngineSetup& setup);
// kAuto: io_uring, or threads if io_uring is refused; `note` then gives the reason in one line.
std::unique_ptr<IoEngine> make_engine(IoEngineKind kind, const EngineSetup& setup, std::string* note);

}  // namespace lm
