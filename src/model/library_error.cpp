#include "model/library_error.h"

#include <c10/util/Exception.h>

namespace lm {
namespace {

// What of `text` stands between two of its phrases; "" unless both are there.
std::string between(const std::string& text, const std::string& before, const std::string& after) {
  const size_t at = text.find(before);
  if (at == std::string::npos) return "";
  const size_t begin = at + before.size(), end = text.find(after, begin);
  return end == std::string::npos ? "" : text.substr(begin, end - begin);
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

Error library_error(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  // cuBLAS and the runtime say it in words alone; and where NVML does not answer, the allocator fails while
  // it asks who has the memory, before it can say that there is none.
  const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
                      text.find("CUBLAS_STATUS_ALLOC_FAILED") != std::string::npos ||
                      text.find("CUDA error: out of memory") != std::string::npos ||
                      text.find("nvmlDeviceGetHandleByPciBusId") != std::string::npos;
  if (!memory) {
    return {Exit::kInternal,
            {.area = "BUG-70",
             .what = first_line(text),
             .place = "LibTorch",
             .next = "report this message; it is a bug in lmlaunch",
             .kept = ""}};
  }
  // "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.50
  // GiB is free. ..."
  const std::string asked = between(text, "Tried to allocate ", ". "),
                    free = between(text, "of which ", " is free");
  const bool told = !asked.empty() && !free.empty();
  return {Exit::kDeviceMemory,
          {.area = "MEM-15",
           .what = "GPU memory: " + (told ? "LibTorch asked for " + asked + ", " + free + " free"
                                          : "LibTorch got none: " + first_line(text)),
           .place = "",
           .next = "lower train.micro_batch or offload.device_memory, or set train.recompute = \"block\"",
           .kept = ""}};
}

}  // namespace lm
