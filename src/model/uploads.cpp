#include "model/uploads.h"

#include <fmt/format.h>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {

void Uploads::send(void* to, const void* from, int64_t bytes, StreamView stream) {
  if (bytes == 0) return;
  if (stream.device == DeviceType::kCpu) return copy_bytes(to, from, bytes, stream);
  const int64_t part = std::ssize(memory_) / (parts_ * kAlignment) * kAlignment;
  LM_CHECK(bytes <= part - used_,
           fmt::format("uploads of a step: {} B planned, {} B used, {} B more", part, used_, bytes));
  std::byte* const staged = memory_.data() + part_ * part + used_;
  used_ += round_up(bytes, kAlignment);
  std::memcpy(staged, from, static_cast<size_t>(bytes));
  copy_bytes(to, staged, bytes, stream);
}

}  // namespace lm
