// The engines and how one is chosen.
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
// Of "auto", "uring" or "threads", the words of io.engine. Throws Error(70) for another one.
IoEngineKind engine_kind(std::string_view name);

// Why io_uring_setup may have answered with this errno; "": nobody knows.
const char* cause_of_refusal(int error);
// "io_uring unavailable (EPERM: seccomp or kernel.io_uring_disabled)".
std::string no_ring(int error);

struct EngineSetup {
  std::span<const IoFile> files;
  std::span<const std::span<std::byte>> buffers;  // memory that most transfers use; registered where possible
  int depth = 64;
};

// Both throw Error(21) naming the refused call and its errno; a ring also where registration of the files is
// refused. Refused registration of buffers (RLIMIT_MEMLOCK) is no error: the description says so.
std::unique_ptr<IoEngine> make_uring_engine(const EngineSetup& setup);
std::unique_ptr<IoEngine> make_threads_engine(const EngineSetup& setup);
// kAuto: the ring, or threads where a ring is refused; `note` then says why in one line.
std::unique_ptr<IoEngine> make_engine(IoEngineKind kind, const EngineSetup& setup, std::string* note);

}  // namespace lm
