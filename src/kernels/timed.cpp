#include "kernels/timed.h"

#include <fmt/format.h>
#include <string>

#include "base/error.h"

namespace lm {
namespace {

// Entries of a table are plain functions: what they work with is the thread's.
struct Timing {
  const Kernels* inner = nullptr;
  DeviceClock* clock = nullptr;
};
thread_local Timing timing;

template <class Args>
std::string text(const char* name, const Args&) {
  return name;
}
std::string text(const char* name, const Gemm& g) {
  return fmt::format("{} {} x {} x {}{}", name, g.out.rows, g.out.columns,
                     g.transpose_a ? g.a.rows : g.a.columns, g.addend.defined() ? ", added" : "");
}
std::string text(const char* name, const AttentionForward& a) {
  return fmt::format("{} {} tokens, {} documents", name, a.tokens, a.documents.count);
}
std::string text(const char* name, const AttentionBackward& a) {
  return fmt::format("{} {} tokens, {} documents", name, a.tokens, a.documents.count);
}

template <class Args>
void time_call(const char* name, void (*kernel)(const Args&, StreamView), const Args& args,
               StreamView stream) {
  // Updates of offloaded state on the host come by another table.
  if (stream.device != DeviceType::kCuda || !timing.clock->recording()) return kernel(args, stream);
  const int64_t span =
      timing.clock->begin(DeviceClock::Kind::kKernel, stream, 0, [&] { return text(name, args); });
  kernel(args, stream);
  timing.clock->end(span, stream);
}

#define LM_KERNEL(name, Args)                           \
  void name(const Args& args, StreamView stream) {      \
    time_call(#name, timing.inner->name, args, stream); \
  }
#define LM_GPU_KERNEL LM_KERNEL
#define LM_LIBRARY_KERNEL LM_KERNEL
#include "kernels/kernels.inc"

}  // namespace

TimedKernels::TimedKernels(const Kernels& inner, DeviceClock& clock) : table_(inner) {
  LM_CHECK(timing.inner == nullptr, "kernels of this thread are timed already");
  timing = {&inner, &clock};
#define LM_KERNEL(name, Args) table_.name = inner.name == nullptr ? nullptr : name;
#define LM_GPU_KERNEL LM_KERNEL
#define LM_LIBRARY_KERNEL LM_KERNEL
#include "kernels/kernels.inc"
}

TimedKernels::~TimedKernels() {
  timing = {};
}

}  // namespace lm
