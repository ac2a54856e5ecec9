#include "weights/principal_pairs.h"

#include <cmath>
#include <utility>

#include "base/philox.h"
#include "spec/adapter_sites.h"
#include "weights/convert.h"
#include "weights/encode.h"
#include "weights/initialise.h"
#include "weights/low_rank.h"
#include "weights/row_lengths.h"

namespace lm {
namespace {

std::vector<float> whole_matrix(const MatrixRows& rows_of, int64_t rows, int64_t columns, int threads) {
  std::vector<float> out(static_cast<size_t>(rows * columns));
  for_each_range(threads, rows, 16, [&](int64_t begin, int64_t end) {
    rows_of(begin, end - begin, out.data() + begin * columns);
  });
  return out;
}

void round_to(DType dtype, std::vector<float>& values) {
  if (dtype == DType::kF32) return;
  std::vector<std::byte> rounded(values.size() * dtype_size(dtype));
  auto* const floats = reinterpret_cast<std::byte*>(values.data());
  convert_elements(floats, DType::kF32, rounded.data(), dtype, std::ssize(values));
  convert_elements(rounded.data(), dtype, floats, DType::kF32, std::ssize(values));
}

}  // namespace

PrincipalPairs::PrincipalPairs(PairBase base, const AdapterSpec& adapter)
    : base_(std::move(base)), adapter_(adapter) {
  if (!base_.directory.empty()) files_.emplace(base_.directory);
}

PrincipalPair PrincipalPairs::pair(const BlockLayout& block, const Trainable& entry) const {
  const TensorPlace &weight = block.tensors[entry.owner], &a = block.tensors[entry.tensor];
  const ParameterPart& part = weight.parameter.parts[entry.part];
  const int64_t rows = part.rows, columns = weight.parameter.columns, rank = a.parameter.rows;
  const int64_t before = part.first * columns;
  const auto drawn = [&](int64_t first, int64_t n, std::byte* to) {
    initialise_elements({weight.parameter, base_.seed, weight.number, base_.dtype}, to, before + first, n);
  };
  const LowRank near = low_rank(
      whole_matrix(
          rows_of_base(weight, entry.part, files_ ? &*files_ : nullptr, drawn, base_.dtype, base_.threads),
          rows, columns, base_.threads),
      rows, columns, rank, philox_key(base_.seed, Purpose::kInit, 1, a.number), base_.threads);
  PrincipalPair out{std::vector<float>(static_cast<size_t>(rank * columns)),
                    std::vector<float>(near.left.size())};
  initialise({a.parameter, base_.seed, a.number, DType::kF32}, reinterpret_cast<std::byte*>(out.a.data()), 0,
             rank, base_.threads);
  // The scale of the adapter's output is shared, as the singular values are.
  const auto share = static_cast<float>(1 / std::sqrt(adapter_.scale_of(module_of(part.name))));
  for (size_t i = 0; i < out.a.size(); ++i) {
    if (near.strengths[i / static_cast<size_t>(columns)] != 0) out.a[i] = near.right[i] * share;
  }
  for (size_t i = 0; i < out.b.size(); ++i) out.b[i] = near.left[i] * share;
  round_to(base_.dtype, out.a);
  round_to(base_.dtype, out.b);
  return out;
}

}  // namespace lm
