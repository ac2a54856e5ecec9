#include "kernels/library_error.h"

#include <c10/util/Exception.h>
#include <dnnl.hpp>

#include <new>

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

Error out_of_host_memory(const std::string& why) {
  return {Exit::kHostMemory,
          {.area = "MEM-16",
           .what = "out of host memory" + (why.empty() ? "" : ": " + why),
           .place = "",
           .next = "lower train.micro_batch, or set train.recompute = \"block\""}};
}

Error bug(const std::string& what, const std::string& place) {
  return {Exit::kInternal,
          {.area = "BUG-70",
           .what = what,
           .place = place,
           .next = "report this message; it is a bug in lmlaunch"}};
}

Error torch_error(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  // "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to
  // allocate 4096 bytes. Error code 12 (Cannot allocate memory)", or "... not enough memory: you tried ..."
  if (text.find("DefaultCPUAllocator: ") != std::string::npos) {
    const std::string asked = between(text, "you tried to allocate ", " bytes");
    return out_of_host_memory(asked.empty() ? "" : "LibTorch asked for " + asked + " bytes");
  }
  // cuBLAS and the runtime say it in words alone; and where NVML does not answer, the allocator fails while
  // it asks who has the memory, before it can say that there is none.
  const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
                      text.find("CUBLAS_STATUS_ALLOC_FAILED") != std::string::npos ||
                      text.find("CUDA error: out of memory") != std::string::npos ||
                      text.find("nvmlDeviceGetHandleByPciBusId") != std::string::npos;
  if (!memory) return bug(first_line(text), "LibTorch");
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
           .next = "lower train.micro_batch or offload.device_memory, or set train.recompute = \"block\""}};
}

}  // namespace

Error library_error(const std::exception& error) {
  if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) return torch_error(*torch);
  // What it compiles at run time needs pages; where it gets none its status is either of these.
  if (const auto* dnnl = dynamic_cast<const dnnl::error*>(&error)) {
    if (dnnl->status == dnnl_out_of_memory || dnnl->status == dnnl_runtime_error)
      return out_of_host_memory(std::string("oneDNN ") + dnnl->what());
    return bug(dnnl->what() + std::string(", status ") + std::to_string(dnnl->status), "oneDNN");
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return out_of_host_memory("");
  return bug(error.what(), "");
}

}  // namespace lm
