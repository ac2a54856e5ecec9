#include "plan/gemm_library.h"

#include <array>
#include <set>
#include <utility>

#include "spec/block_layout.h"

namespace lm {
namespace {

constexpr int64_t kRowCounts =
    12;  // an octave and a half of rounded_rows: what batches of drawn lengths mostly fill
// Making one takes 1.1 ms, in which the slowest cores that have bf16 instructions do this much on their own.
constexpr double kFlopsOfAShape = 2.2e8;
constexpr double kShows = 0.04;  // of the work
// Different matrices among a block's adapted slices.
int64_t adapted_matrices(const ModelSpec& spec, const AdapterSpec& adapter) {
  const auto matrix = [&](const std::string& target) -> std::pair<int64_t, int64_t> {
    if (target == "q_proj") return {spec.q_rows(), spec.hidden};
    if (target == "o_proj") return {spec.hidden, spec.q_rows()};
    if (target == "gate_proj" || target == "up_proj") return {spec.ffn, spec.hidden};
    if (target == "down_proj") return {spec.hidden, spec.ffn};
    return {spec.kv_rows(), spec.hidden};
  };
  std::set<std::pair<int64_t, int64_t>> different;
  for (const std::string& target : adapter.targets) different.insert(matrix(target));
  return std::ssize(different);
}

}  // namespace

bool rounds_rows(DType dtype, DeviceType device) {
  return dtype == DType::kBF16 && device == DeviceType::kCpu;
}

GemmShapes gemm_shapes(const ModelSpec& spec, const AdapterSpec* adapter, const NumericsPlan& numerics,
                       double flops, bool trains) {
  if (!numerics.round_rows) return {};
  const int64_t widths = spec.vocab > kVocabularySegment && spec.vocab % kVocabularySegment != 0 ? 2 : 1;
  if (!trains) {
    // Four projections, per adapted matrix down and up, and logits.
    const int64_t least = 4 + (adapter != nullptr ? 2 * adapted_matrices(spec, *adapter) : 0) + 2 * widths;
    return {least, kRowCounts * least};
  }
  // Four projections forward and for their inputs; four weight gradients, which the GEMM itself may add to
  // those of the micro-batches before; per adapted matrix down, up, and the gradients of both, of the input
  // and between.
  const bool added = numerics.gradient_dtype == numerics.dtype && numerics.micro_batches > 1;
  const int64_t block = adapter != nullptr ? 8 + 6 * adapted_matrices(spec, *adapter) : added ? 16 : 12;
  // Logits and gradients of the two widths that a segment has, for a whole chunk of rows and for the last.
  const int64_t head = (adapter != nullptr ? 2 : added ? 4 : 3) * widths;
  const int64_t micro = block + 2 * head;
  const bool shows = static_cast<double>(micro) * kFlopsOfAShape > kShows * flops;
  return {micro, (shows ? kRowCounts : 1) * micro};
}

}  // namespace lm
