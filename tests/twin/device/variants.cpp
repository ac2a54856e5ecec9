// Each case of the GPU kernels' tests on the twin: forwards, backwards and in random orders, with NaNs and
// with small numbers in fresh memory. All must give the same bits.
#include "../twin.h"
#include "simt.h"
#include "tests/kernels/gpu_variants.h"
#include "tests/support/counts.h"

namespace lm {

int gpu_variants() {
  return test::counts(2, 3);  // the random order in --full alone
}
void use_gpu_variant(int variant) {
  using twin::simt::Order;
  static const int garbage = twin::garbage();
  static const twin::simt::Settings from_outside = twin::simt::settings();
  twin::simt::settings() = from_outside;
  if (variant == 1) twin::simt::settings().order = Order::kReverse;
  if (variant > 1) twin::simt::settings() = {.order = Order::kRandom, .seed = static_cast<uint32_t>(variant)};
  twin::set_garbage(variant % 2 == 0 ? garbage : 0x3C);  // 0.0115 in fp32 and in bf16
}

}  // namespace lm
