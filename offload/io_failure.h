// Errors of failed disk operations: the errno's name and text, and the exit code for it.
#pragma once

#include <string>
#include <utility>

#include "base/error.h"

namespace lm {

// "ENOSPC: No space left on device".
std::string errno_text(int error);
// "ENOSPC" alone, for a note in parentheses.
std::string errno_name(int error);

// Out of space: the disk, a quota or the process's file size limit.
bool is_no_space(int error);

// "device 259:1", for messages.
std::string device_of(int descriptor);

// Error(20) for no room, Error(21) for the rest; `what` is followed by the errno's text.
Error disk_error(int error, const std::string& what, const std::string& place);

// A system call that this machine refuses; callers with a fallback read its errno.
class RefusedCall : public Error {
 public:
  RefusedCall(int error, ErrorText text) : Error(Exit::kIo, std::move(text)), error_(error) {}
  int error() const { return error_; }

 private:
  int error_;
};

}  // namespace lm
