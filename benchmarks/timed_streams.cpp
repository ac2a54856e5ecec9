#include "timed_streams.h"

#include <sys/prctl.h>

#include <chrono>
#include <thread>

#include "base/clock.h"
#include "tests/emulator/emulator.h"

namespace lm {
namespace {

struct Timing {
  const Kernels* real = nullptr;
  TimedStreams* streams = nullptr;
  const TimedRates* rates = nullptr;
} timing;

double seconds_of(const Gemm& gemm) {
  const int64_t inner = gemm.transpose_a ? gemm.a.rows : gemm.a.columns;
  return 2.0 * static_cast<double>(gemm.out.rows * gemm.out.columns * inner) / timing.rates->gemm_flops;
}
double seconds_of(const RuleUpdate& update) {
  return static_cast<double>(update.elements) / timing.rates->updated_elements;
}
template <class Args>
double seconds_of(const Args&) {
  return 0;
}

template <auto Entry>
struct Timed;
template <class Args, void (*Kernels::*Entry)(const Args&, StreamView)>
struct Timed<Entry> {
  static void call(const Args& args, StreamView stream) {
    timing.streams->begin(stream);
    (timing.real->*Entry)(args, stream);
    timing.streams->end(stream);
    if (const double seconds = seconds_of(args); seconds > 0) timing.streams->hold(stream, seconds);
  }
};

template <auto... Entries>
Kernels with(Kernels table) {
  ((table.*Entries = &Timed<Entries>::call), ...);
  return table;
}

}  // namespace

void TimedStreams::hold(StreamView stream, double seconds) {
  held_ += seconds;
  emulator::enqueue(stream.handle, emulator::Kind::kOrder, "time passes", [clock = clock(stream), seconds] {
    clock->owed += seconds;
    if (clock->owed <= 0) return;
    prctl(PR_SET_TIMERSLACK, 1000);  // ns
    const double start = monotonic_seconds();
    std::this_thread::sleep_for(std::chrono::duration<double>(clock->owed));
    clock->owed -= monotonic_seconds() - start;
  });
}

void TimedStreams::begin(StreamView stream) {
  emulator::enqueue(stream.handle, emulator::Kind::kOrder, "a kernel begins",
                    [clock = clock(stream)] { clock->began = monotonic_seconds(); });
}

void TimedStreams::end(StreamView stream) {
  emulator::enqueue(stream.handle, emulator::Kind::kOrder, "a kernel ends",
                    [clock = clock(stream)] { clock->owed -= monotonic_seconds() - clock->began; });
}

const Kernels& timed_kernels(const Kernels& real, TimedStreams& streams, const TimedRates& rates) {
  timing = {&real, &streams, &rates};
  static const Kernels table =
      with<&Kernels::rms_norm_forward, &Kernels::rms_norm_backward, &Kernels::rope, &Kernels::gated_forward,
           &Kernels::gated_backward, &Kernels::softmax_statistics, &Kernels::softmax_gradient,
           &Kernels::softmax_loss, &Kernels::gather_rows, &Kernels::scatter_rows, &Kernels::sum_rows,
           &Kernels::add_rows, &Kernels::accumulate, &Kernels::sum_columns, &Kernels::add_bias,
           &Kernels::dropout, &Kernels::granule_norms, &Kernels::normalise, &Kernels::update,
           &Kernels::materialise, &Kernels::attention_forward, &Kernels::attention_backward, &Kernels::gemm,
           &Kernels::copy_rows, &Kernels::scale, &Kernels::zero>(real);
  return table;
}

}  // namespace lm
