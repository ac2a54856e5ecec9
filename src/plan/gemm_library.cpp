#include "plan/gemm_library.h"

#include "kernels/gemm_panels.h"

namespace lm {
namespace {

constexpr int64_t kRowCounts =
    12;  // an octave and a half of rounded_rows: what batches of drawn lengths mostly fill
// Making one takes 1.1 ms, in which the slowest cores that have bf16 instructions do this much on their own.
constexpr double kFlopsOfAShape = 2.2e8;
constexpr double kShows = 0.04;  // of the work

}  // namespace

bool rounds_rows(DType dtype, DeviceType device, const Machine& machine) {
  return dtype == DType::kBF16 && device == DeviceType::kCpu && library_multiplies_bf16(machine.instructions);
}

int64_t gemm_shape_bytes(const Machine& machine) {
  // Measured: 860 KiB and, on Zen 4, 917 KiB without AMX, 912 KiB with it.
  return library_multiplies_bf16(machine.instructions) ? int64_t{920} << 10 : 0;
}

int64_t gemm_panel_bytes(DType dtype, const Machine& machine, int threads) {
  const bool ours =
      dtype == DType::kF16 || (dtype == DType::kBF16 && !library_multiplies_bf16(machine.instructions));
  return ours ? threads * static_cast<int64_t>(sizeof(GemmPanels)) : 0;
}

GemmShapes kept_shapes(int64_t micro, double flops, bool trains) {
  const bool shows = !trains || static_cast<double>(micro) * kFlopsOfAShape > kShows * flops;
  return {micro, (shows ? kRowCounts : 1) * micro};
}

}  // namespace lm
