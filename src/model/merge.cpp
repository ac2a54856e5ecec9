#include "model/merge.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "spec/adapter_sites.h"

namespace lm {
namespace {

// Scales each row to its length in `magnitude` (DoRA).
void set_lengths(const float* magnitude, float* weight, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    float* const row = weight + i * columns;
    double squares = 0;
    for (int64_t j = 0; j < columns; ++j) squares += double{row[j]} * row[j];
    const double factor = magnitude[i] / std::sqrt(squares);
    for (int64_t j = 0; j < columns; ++j) row[j] = static_cast<float>(row[j] * factor);
  }
}

// Of a merge in fp32: the trained values of a tensor.
const float* trained_values(const MergeTarget& target, const TensorPlace& of) {
  return reinterpret_cast<const float*>(target.trainable) + of.offset;
}

// Copies of norms, and of the biases of linear layers.
void merge_copies(const BlockLayout& layout, const TensorPlace& place, const MergeTarget& target) {
  auto* const values = reinterpret_cast<float*>(target.weight);
  if (const TensorPlace* const copy = layout.beside(place, 0, TrainableRole::kReplacement))
    std::copy_n(trained_values(target, *copy), place.parameter.elements(), values);
  for (size_t p = 0; p < place.parameter.parts.size(); ++p) {
    const TensorPlace* const copy = layout.beside(place, p, TrainableRole::kBias);
    const ParameterPart& part = place.parameter.parts[p];
    if (copy != nullptr) std::copy_n(trained_values(target, *copy), part.rows, values + part.first);
  }
}

// IA3's factors.
void merge_vectors(const BlockLayout& layout, const TensorPlace& place, const MergeTarget& target) {
  const Parameter& parameter = place.parameter;
  auto* const weight = reinterpret_cast<float*>(target.weight);
  // The factors of a projection's output are its bias's, too: the two have the same parts.
  constexpr std::string_view kBias = "_bias";
  const bool bias = parameter.kind == ParameterKind::kBias && parameter.name.ends_with(kBias);
  const TensorPlace* const owner =
      bias ? layout.find(parameter.name.substr(0, parameter.name.size() - kBias.size())) : &place;
  for (size_t p = 0; owner != nullptr && p < parameter.parts.size(); ++p) {
    const TensorPlace* const output = layout.beside(*owner, p, TrainableRole::kOutputScale);
    const TensorPlace* const input = bias ? nullptr : layout.beside(*owner, p, TrainableRole::kInputScale);
    const ParameterPart& part = parameter.parts[p];
    for (int64_t i = 0; i < part.rows * parameter.columns; ++i) {
      float& element = weight[part.first * parameter.columns + i];
      if (output != nullptr) element *= trained_values(target, *output)[i / parameter.columns];
      if (input != nullptr) element *= trained_values(target, *input)[i % parameter.columns];
    }
  }
}

// The trained rows of lora.tokens.
void merge_rows(const TensorPlace& rows, const std::vector<int64_t>& tokens, const MergeTarget& target) {
  const int64_t columns = rows.parameter.columns;
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::copy_n(trained_values(target, rows) + static_cast<int64_t>(i) * columns, columns,
                reinterpret_cast<float*>(target.weight) + tokens[i] * columns);
  }
}

}  // namespace

void merge_adapters(const BlockLayout& layout, const TensorPlace& place, const AdapterSpec& adapter,
                    const MergeTarget& target) {
  merge_copies(layout, place, target);
  if (adapter.kind != AdapterKind::kLora) return merge_vectors(layout, place, target);
  const Parameter& parameter = place.parameter;
  if (const TensorPlace* const rows = layout.beside(place, 0, TrainableRole::kTokenRows))
    return merge_rows(*rows, adapter.tokens, target);
  const auto matrix = [&](const TensorPlace& of) {
    // A view is of memory that may be written; these are only read.
    auto* const begin = const_cast<std::byte*>(target.trainable) + of.offset * int64_t{sizeof(float)};
    return view_of(begin, DType::kF32, of.parameter.rows, of.parameter.columns);
  };
  for (size_t p = 0; p < parameter.parts.size(); ++p) {
    const TensorPlace* const a = layout.beside(place, p, TrainableRole::kLoraA);
    const TensorPlace* const b = layout.beside(place, p, TrainableRole::kLoraB);
    if (a == nullptr || b == nullptr) continue;
    const ParameterPart& part = parameter.parts[p];
    const auto scale = static_cast<float>(adapter.scale_of(a->parameter.site));
    // Of an expert's pair all of the matrix's, from its first part on.
    const int64_t rows = b->parameter.rows;
    std::vector<float> delta(static_cast<size_t>(rows * parameter.columns));
    target.kernels.gemm({.a = matrix(*b),
                         .b = matrix(*a),
                         .out = view_of(delta.data(), DType::kF32, rows, parameter.columns)},
                        {DeviceType::kCpu, nullptr, target.threads});
    float* const weight = reinterpret_cast<float*>(target.weight) + part.first * parameter.columns;
    for (size_t i = 0; i < delta.size(); ++i) weight[i] += delta[i] * scale;
    const TensorPlace* const magnitude = layout.beside(place, p, TrainableRole::kMagnitude);
    if (magnitude != nullptr) set_lengths(matrix(*magnitude).floats(), weight, rows, parameter.columns);
  }
}

}  // namespace lm
