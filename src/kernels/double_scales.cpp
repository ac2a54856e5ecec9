// Scales of 4-bit codes as 8-bit codes of the signed dynamic map. bitsandbytes finds the nearest code by a
// table of 65536 places between -1 and 1, whose choice beside a midpoint differs from the nearest at times;
// so does this.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "kernels/encoding_tables.h"
#include "kernels/kernels.h"

namespace lm {
namespace {

constexpr int kPlaces = 65536;
using Codes = std::array<uint8_t, kPlaces>;

Codes list_codes() {
  Codes out;
  size_t code = 0;
  for (int place = 0; place < kPlaces; ++place) {
    const float value = -1.0F + 2.0F * static_cast<float>(place) / (kPlaces - 1);
    while (code < 255 && 0.5F * (kDynamicMap[code] + kDynamicMap[code + 1]) < value) ++code;
    out[static_cast<size_t>(place)] = static_cast<uint8_t>(code);
  }
  return out;
}

uint8_t nearest_code(float x) {
  static const Codes codes = list_codes();
  const float half = (std::clamp(x, -1.0F, 1.0F) + 1.0F) * 0.5F;
  return codes[static_cast<uint16_t>(std::fma(half, static_cast<float>(kPlaces - 1), 0.5F))];
}

}  // namespace

void quantize_scales(std::span<const float> scales, uint8_t* codes, float* nested) {
  const double sum = std::accumulate(scales.begin(), scales.end(), 0.0);
  const float mean = static_cast<float>(sum / static_cast<double>(scales.size()));
  *nested++ = mean;
  for (size_t first = 0; first < scales.size(); first += kNestedBlock) {
    const auto block = scales.subspan(first, std::min<size_t>(kNestedBlock, scales.size() - first));
    float most = 0;
    for (const float scale : block) most = std::max(most, std::abs(scale - mean));
    *nested++ = most;
    const float factor = most > 0 ? 1.0F / most : 0;
    for (const float scale : block) *codes++ = most > 0 ? nearest_code((scale - mean) * factor) : uint8_t{0};
  }
}

}  // namespace lm
