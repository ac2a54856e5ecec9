#include "weights/loftq.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "weights/convert.h"
#include "weights/low_rank.h"

namespace lm {
namespace {

// Reads elements as fp32, in chunks.
void read_floats(const MatrixElements& elements, DType dtype, int64_t first, std::span<float> out) {
  static thread_local std::vector<std::byte> raw;
  raw.resize(out.size() * dtype_size(dtype));
  elements(first, std::ssize(out), raw.data());
  convert_elements(raw.data(), dtype, reinterpret_cast<std::byte*>(out.data()), DType::kF32, std::ssize(out));
}

// Inputs near zero keep a small weight; otherwise the approximation would be unbounded in their columns.
void settle_sizes(std::vector<float>& sizes) {
  constexpr double kLeast = 0.05;  // of their root mean square
  double squares = 0;
  for (const float size : sizes) squares += double{size} * size;
  const double mean = std::sqrt(squares / static_cast<double>(sizes.size()));
  for (float& size : sizes) size = mean > 0 ? std::max(size, static_cast<float>(kLeast * mean)) : 1.0F;
}

}  // namespace

const TensorPlace* LoftqBlock::find_if(ParameterKind kind, const std::string& name) const {
  const auto found = std::ranges::find_if(block_.tensors, [&](const TensorPlace& place) {
    return place.parameter.kind == kind && place.parameter.name.ends_with("." + name);
  });
  return found != block_.tensors.end() ? &*found : nullptr;
}

const TensorPlace& LoftqBlock::find(ParameterKind kind, const std::string& name) const {
  const TensorPlace* const found = find_if(kind, name);
  LM_CHECK(found != nullptr, "no " + name + " in " + block_.name);
  return *found;
}

std::vector<float> LoftqBlock::gains(const char* norm) const {
  const TensorPlace* const place = find_if(ParameterKind::kNorm, norm);
  std::vector<float> out(static_cast<size_t>(setup_.spec.hidden), 1);
  if (place == nullptr) return out;
  read_floats(setup_.elements(*place, 0), setup_.dtype, 0, out);
  const float base = 1 - place->parameter.neutral;  // what the files hold is added to it
  for (float& gain : out) gain = std::abs(base + gain);
  return out;
}

std::vector<float> LoftqBlock::row_sizes(const char* matrix, int64_t first, int64_t rows,
                                         const std::vector<float>& inputs) const {
  const TensorPlace& place = find(ParameterKind::kMatrix, matrix);
  const std::vector<ParameterPart>& parts = place.parameter.parts;
  const int64_t columns = place.parameter.columns;
  std::vector<float> out(static_cast<size_t>(rows));
  for (size_t p = 0; p < parts.size(); ++p) {
    const int64_t begin = std::max(first, parts[p].first),
                  end = std::min(first + rows, parts[p].first + parts[p].rows);
    const MatrixElements elements = setup_.elements(place, p);
    for_each_range(setup_.threads, std::max<int64_t>(end - begin, 0), 16, [&](int64_t from, int64_t to) {
      std::vector<float> row(static_cast<size_t>(columns));
      for (int64_t i = begin + from; i < begin + to; ++i) {
        read_floats(elements, setup_.dtype, (i - parts[p].first) * columns, row);
        double squares = 0;
        for (size_t j = 0; j < row.size(); ++j) squares += std::pow(double{row[j]} * inputs[j], 2);
        out[static_cast<size_t>(i - first)] = static_cast<float>(std::sqrt(squares));
      }
    });
  }
  return out;
}

std::vector<float> LoftqBlock::input_sizes(const TensorPlace& weight) const {
  const char* norm = "";  // that the mixer reads
  for (const SublayerSpec& sublayer : layer_.sublayers) {
    if (!sublayer.beside) norm = sublayer.norm_name();
    for (const MatrixSpec& matrix : mixer_parameters(sublayer.mixer, setup_.spec.hidden).matrices) {
      if (&find(ParameterKind::kMatrix, matrix.name) != &weight) continue;
      std::vector<float> out = gains(norm);  // of size 1 before the gain
      if (!matrix.reads_norm)
        out = std::visit([&](const auto& mixer) { return inner_sizes(mixer, out); }, sublayer.mixer);
      settle_sizes(out);
      return out;
    }
  }
  fail_check("a mixer's matrix", __FILE__, __LINE__, weight.parameter.name);
}

// The sizes of the values, for each head those of its key-value head. Behind a norm all have size 1.
std::vector<float> LoftqBlock::inner_sizes(const AttentionSpec& attention,
                                           const std::vector<float>& inputs) const {
  if (attention.value_norm) return std::vector<float>(static_cast<size_t>(attention.q_rows()), 1);
  const int64_t keys = attention.q_rows();
  const std::vector<float> values = row_sizes(
      "attn.qkv", attention.values_are_keys ? keys : keys + attention.kv_rows(), attention.kv_rows(), inputs);
  std::vector<float> out;
  for (int64_t i = 0; i < attention.q_rows(); ++i) {
    const int64_t head = i / attention.head_dim / (attention.heads / attention.kv_heads);
    out.push_back(values[static_cast<size_t>(head * attention.head_dim + i % attention.head_dim)]);
  }
  return out;
}

// activation(gate) * up
std::vector<float> LoftqBlock::gated_sizes(const char* matrix, int64_t ffn,
                                           const std::vector<float>& inputs) const {
  std::vector<float> out = row_sizes(matrix, 0, ffn, inputs);
  const std::vector<float> up = row_sizes(matrix, ffn, ffn, inputs);
  for (size_t i = 0; i < out.size(); ++i) out[i] *= up[i];
  return out;
}
std::vector<float> LoftqBlock::inner_sizes(const GatedMlpSpec& mlp, const std::vector<float>& inputs) const {
  return gated_sizes("mlp.gate_up", mlp.ffn, inputs);
}

// A token's factor is one for all of them.
std::vector<float> LoftqBlock::inner_sizes(const SharedExpertSpec& mlp,
                                           const std::vector<float>& inputs) const {
  return gated_sizes("shared.gate_up", mlp.ffn, inputs);
}

// activation(up)
std::vector<float> LoftqBlock::inner_sizes(const PlainMlpSpec& mlp, const std::vector<float>& inputs) const {
  std::vector<float> out = row_sizes("mlp.up", 0, mlp.ffn, inputs);
  switch (mlp.activation) {
    case Activation::kSilu:
    case Activation::kGeluTanh:
    case Activation::kRelu:
      break;
    case Activation::kRelu2:
      for (float& size : out) size *= size;
  }
  return out;
}

// activation(gate) * what the embedding stage has made, of size 1
std::vector<float> LoftqBlock::inner_sizes(const LayerInputSpec& mixer,
                                           const std::vector<float>& inputs) const {
  return row_sizes("input.gate", 0, mixer.width, inputs);
}

std::vector<float> LoftqBlock::inner_sizes(const ExpertsSpec& /*mixer*/,
                                           const std::vector<float>& /*inputs*/) const {
  fail_check("no adapter is on an expert", __FILE__, __LINE__, layer_.sublayers.back().norm_name());
}

std::vector<float> LoftqBlock::lost(const TensorPlace& place, size_t part,
                                    const std::vector<float>& sizes) const {
  const int64_t rows = place.parameter.parts[part].rows, columns = place.parameter.columns;
  PieceMemory pieces;
  const EncodedMatrix matrix = matrix_in(pieces, place.encoding(), rows, columns);
  const MatrixElements elements = setup_.elements(place, part);
  encode(matrix, setup_.dtype, elements, setup_.threads);
  std::vector<float> out(static_cast<size_t>(rows * columns));
  decode(matrix, out.data(), setup_.threads);
  for_each_range(setup_.threads, rows, 16, [&](int64_t from, int64_t to) {
    std::vector<float> row(static_cast<size_t>(columns));
    for (int64_t i = from; i < to; ++i) {
      read_floats(elements, setup_.dtype, i * columns, row);
      float* const at = out.data() + i * columns;
      for (size_t j = 0; j < row.size(); ++j) at[j] = (row[j] - at[j]) * sizes[j];
    }
  });
  return out;
}

void LoftqBlock::start(const TensorPlace& weight, size_t part, uint64_t seed, std::span<float> a,
                       std::span<float> b) const {
  const int64_t rows = weight.parameter.parts[part].rows;
  const std::vector<float> sizes = input_sizes(weight);
  const auto rank = static_cast<size_t>(std::ssize(b) / rows);
  const LowRank near = low_rank(lost(weight, part, sizes), rows, weight.parameter.columns,
                                static_cast<int64_t>(rank), seed, setup_.threads);
  // A and B share the scale and the singular value of a direction equally, measured by A's output for inputs
  // of their size. (So A learns as fast as in a fresh adapter: with as many steps the loss falls further than
  // if A and B have equal norms regardless of the inputs.)
  const auto share = static_cast<float>(1 / std::sqrt(setup_.scale));
  for (size_t k = 0; k < rank; ++k) {
    if (near.strengths[k] == 0) continue;
    for (size_t j = 0; j < sizes.size(); ++j) {
      const size_t at = k * sizes.size() + j;
      a[at] = near.right[at] * share / sizes[j];
    }
  }
  for (size_t i = 0; i < b.size(); ++i) b[i] = near.left[i] * share;
}

}  // namespace lm
