#include "model/uploads.h"

#include <fmt/format.h>
#include <cstring>
#include <string>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {

void Uploads::send(void* to, const void* from, int64_t bytes, StreamView stream) {
  if (bytes == 0) return;
  if (stream.device == DeviceType::kCpu) return copy_bytes(to, from, bytes, stream);
  const int64_t half = std::ssize(memory_) / (2 * kAlignment) * kAlignment;
  LM_CHECK(bytes <= half - used_,
           fmt::format("uploads of a step: {} B planned, {} B used, {} B more", half, used_, bytes));
  std::byte* const staged = memory_.data() + (second_ ? half : 0) + used_;
  used_ += round_up(bytes, kAlignment);
  std::memcpy(staged, from, static_cast<size_t>(bytes));
  copy_bytes(to, staged, bytes, stream);
}

}  // namespace lm
