#include "plan/gemm_library.h"

namespace lm {
namespace {

constexpr int64_t kRowCounts =
    12;  // an octave and a half of rounded_rows: what batches of drawn lengths mostly fill
// Making one takes 1.1 ms, in which the slowest cores that have bf16 instructions do this much on their own.
constexpr double kFlopsOfAShape = 2.2e8;
constexpr double kShows = 0.04;  // of the work

}  // namespace

bool rounds_rows(DType dtype, DeviceType device) {
  return dtype == DType::kBF16 && device == DeviceType::kCpu;
}

int64_t gemm_shape_bytes(const Machine& machine) {
  if (machine.instructions == "avx2") return 0;  // bf16 products are LibTorch's own loops there
  return int64_t{machine.instructions == "amx_bf16" ? 912 : 860} << 10;
}

GemmShapes kept_shapes(int64_t micro, double flops, bool trains) {
  const bool shows = !trains || static_cast<double>(micro) * kFlopsOfAShape > kShows * flops;
  return {micro, (shows ? kRowCounts : 1) * micro};
}

}  // namespace lm
