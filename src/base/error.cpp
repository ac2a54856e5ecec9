#include "base/error.h"

#include <fmt/format.h>
#include <cstdio>
#include <cstring>

namespace lm {
namespace {

std::string one_line(const ErrorText& text) {
  return text.what + (text.place.empty() ? "" : " at " + text.place);
}

constexpr ExitCode kExitCodes[] = {
    {Exit::kDone, "done", "done"},
    {Exit::kDiffer, "differ", "diff: the two runs differ"},
    {Exit::kUsage, "error:usage", "the command line is wrong"},
    {Exit::kConfig, "error:config", "the configuration is wrong"},
    {Exit::kInput, "error:input", "a model, tokenizer or data file is missing or invalid"},
    {Exit::kDoesNotFit, "error:does-not-fit", "the plan or the machine does not fit; nothing was started"},
    {Exit::kInUse, "error:in-use", "another run is at work in the run directory"},
    {Exit::kIncompatible, "error:incompatible", "the run directory or output holds something to be kept"},
    {Exit::kNoSpace, "error:no-space", "a disk is full"},
    {Exit::kIo, "error:io", "a file could not be read or written"},
    {Exit::kIntegrity, "error:integrity", "a checksum does not match: data is corrupted"},
    {Exit::kDeviceMemory, "error:device-memory", "out of GPU memory"},
    {Exit::kHostMemory, "error:host-memory", "out of host memory"},
    {Exit::kPeerLost, "error:peer-lost",
     "a training process was killed from outside, or another rank has ended"},
    {Exit::kNoProgress, "error:no-progress", "a rank has made no progress within its deadline"},
    {Exit::kNumerics, "error:numerics", "the loss or the gradients are not finite"},
    {Exit::kInternal, "error:internal", "a bug in lmlaunch or in a library"},
    {Exit::kStopped, "stopped", "stopped on request"},
};

}  // namespace

std::span<const ExitCode> exit_codes() {
  return kExitCodes;
}

std::string ErrorText::advice() const {
  return next + (next.empty() || otherwise.empty() ? "" : ", or ") + otherwise;
}

Error::Error(Exit code, ErrorText text)
    : std::runtime_error(one_line(text)), code_(code), text_(std::move(text)) {}

Error setting_error(std::string what, std::string place, std::string next) {
  return Error(Exit::kConfig, {.area = "CONF-20",
                               .what = std::move(what),
                               .place = std::move(place),
                               .next = std::move(next),
                               .kept = "nothing was started or written"});
}

std::string Error::report() const {
  std::string out = fmt::format("lmlaunch: error {} (exit {}): {}\n", text_.area, static_cast<int>(code_),
                                escape_controls(one_line(text_)));
  if (!text_.kept.empty()) out += "  kept: " + escape_controls(text_.kept) + "\n";
  if (const std::string next = text_.advice(); !next.empty()) {
    out += "  next: " + escape_controls(next) + "\n";
  }
  return out;
}

void fail_check(const char* expression, const char* file, int line, const std::string& detail) {
  const char* name = std::strrchr(file, '/');
  throw Error(Exit::kInternal, {.area = "BUG-70",
                                .what = std::string("assumption does not hold: ") + expression +
                                        (detail.empty() ? "" : ": " + detail),
                                .place = fmt::format("{}:{}", name ? name + 1 : file, line),
                                .next = "report this message; it is a bug in lmlaunch"});
}

std::string escape_controls(const std::string& text) {
  std::string out;
  for (unsigned char c : text) {
    if (c == '\n' || c == '\t' || (c >= 0x20 && c != 0x7f)) {
      out += static_cast<char>(c);
    } else {
      char hex[8];
      std::snprintf(hex, sizeof hex, "\\x%02x", c);
      out += hex;
    }
  }
  return out;
}

}  // namespace lm
