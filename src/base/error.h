// The one family of errors. Every failure is an `Error` that reports where, what, why and what to type next;
// it carries the process's exit code. Libraries throw it; only `main` turns it into an exit.
#pragma once

#include <span>
#include <stdexcept>
#include <string>

namespace lm {

// Process exit codes; all below 126, so that mpirun passes them on unchanged. exit_codes() has their
// meanings.
enum class Exit : int {
  kDone = 0,
  kDiffer = 1,
  kUsage = 2,
  kConfig = 10,
  kInput = 11,
  kDoesNotFit = 12,
  kInUse = 13,
  kIncompatible = 14,
  kNoSpace = 20,
  kIo = 21,
  kIntegrity = 22,
  kDeviceMemory = 30,
  kHostMemory = 31,
  kPeerLost = 40,
  kNoProgress = 41,
  kNumerics = 50,
  kInternal = 70,
  kStopped = 75,
};

struct ExitCode {
  Exit code;
  const char* reason;   // for a run without its own reason; on its last line and in status.json
  const char* meaning;  // in help
};
// Every code, in order; help prints them, and other codes are not ours.
std::span<const ExitCode> exit_codes();

// `area` is a short tag such as "FILE-21" (the numbers are the failure catalogue's); `place` is a
// file:line:col, a path with an offset, or a rank and step; `kept`, `next` and `otherwise` may be empty.
struct ErrorText {
  std::string area;
  std::string what;
  std::string place = {};
  std::string next = {};
  std::string kept = {};
  // An alternative to `next`, such as another directory; code that knows the failing file's purpose may
  // replace it.
  std::string otherwise = {};

  // "<next>, or <otherwise>".
  std::string advice() const;
};

class Error : public std::runtime_error {
 public:
  Error(Exit code, ErrorText text);
  Exit code() const { return code_; }
  const ErrorText& text() const { return text_; }
  // The whole message as it is printed on stderr, control characters escaped:
  //   lmlaunch: error <area> (exit <code>): <what> at <place>
  //     kept: ...
  //     next: ...
  std::string report() const;

 private:
  Exit code_;
  ErrorText text_;
};

// Error(10), CONF-20: what a configuration asks for, this model or machine does not have. Before anything was
// started or written.
Error setting_error(std::string what, std::string place, std::string next);

// An `Error` with exit code 70 when a programmer's assumption does not hold; checked in every build.
[[noreturn]] void fail_check(const char* expression, const char* file, int line, const std::string& detail);
#define LM_CHECK(condition, detail)                                             \
  do {                                                                          \
    if (!(condition)) ::lm::fail_check(#condition, __FILE__, __LINE__, detail); \
  } while (false)

// Replaces control characters by \xNN, so that a hostile name cannot steer a terminal.
std::string escape_controls(const std::string& text);

}  // namespace lm
