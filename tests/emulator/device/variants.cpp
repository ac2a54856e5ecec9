// Each case of the GPU kernels' tests on the emulator: forwards, backwards and in random orders, with NaNs
// and with small numbers in fresh memory. All must give the same bits.
#include "../emulator.h"
#include "simt.h"
#include "tests/kernels/gpu_variants.h"
#include "tests/support/counts.h"

namespace lm {

int gpu_variants() {
  return test::counts(2, 3);  // the random order in --full alone
}
void use_gpu_variant(int variant) {
  using emulator::simt::Order;
  static const int garbage = emulator::garbage();
  static const emulator::simt::Settings from_outside = emulator::simt::settings();
  emulator::simt::settings() = from_outside;
  if (variant == 1) emulator::simt::settings().order = Order::kReverse;
  if (variant > 1)
    emulator::simt::settings() = {.order = Order::kRandom, .seed = static_cast<uint32_t>(variant)};
  emulator::set_garbage(variant % 2 == 0 ? garbage : 0x3C);  // 0.0115 in fp32 and in bf16
}

}  // namespace lm
