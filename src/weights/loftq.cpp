#include "weights/loftq.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "weights/convert.h"
#include "weights/low_rank.h"

namespace lm {
namespace {

// Elements as fp32, some at a time.
void read_floats(const MatrixElements& elements, DType dtype, int64_t first, std::span<float> out) {
  static thread_local std::vector<std::byte> raw;
  raw.resize(out.size() * dtype_size(dtype));
  elements(first, std::ssize(out), raw.data());
  convert_elements(raw.data(), dtype, reinterpret_cast<std::byte*>(out.data()), DType::kF32, std::ssize(out));
}

// Inputs that are hardly ever there still count a little, or what makes up for the loss at the others could
// be as large as it likes in their columns.
void settle_sizes(std::vector<float>& sizes) {
  constexpr double kLeast = 0.05;  // of their root mean square
  double squares = 0;
  for (const float size : sizes) squares += double{size} * size;
  const double mean = std::sqrt(squares / static_cast<double>(sizes.size()));
  for (float& size : sizes) size = mean > 0 ? std::max(size, static_cast<float>(kLeast * mean)) : 1.0F;
}

}  // namespace

const TensorPlace& LoftqBlock::find(ParameterKind kind, const std::string& name) const {
  const auto found = std::ranges::find_if(block_.tensors, [&](const TensorPlace& place) {
    return place.parameter.kind == kind && place.parameter.name.ends_with("." + name);
  });
  LM_CHECK(found != block_.tensors.end(), "no " + name + " in " + block_.name);
  return *found;
}

Projection LoftqBlock::projection_of(const TensorPlace& weight) const {
  using enum Projection;
  for (const Projection which : {kQkv, kOut, kGateUp, kDown}) {
    if (&find(ParameterKind::kMatrix, projection_name(which)) == &weight) return which;
  }
  fail_check("a projection", __FILE__, __LINE__, weight.parameter.name);
}

std::vector<float> LoftqBlock::gains(const char* norm) const {
  const TensorPlace& place = find(ParameterKind::kNorm, norm);
  std::vector<float> out(static_cast<size_t>(place.parameter.rows));
  read_floats(setup_.elements(place, 0), setup_.dtype, 0, out);
  for (float& gain : out) gain = std::abs(gain);
  return out;
}

std::vector<float> LoftqBlock::row_sizes(Projection which, int64_t first, int64_t rows,
                                         const std::vector<float>& inputs) const {
  const TensorPlace& place = find(ParameterKind::kMatrix, projection_name(which));
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

std::vector<float> LoftqBlock::input_sizes(Projection which) const {
  const ModelSpec& spec = setup_.spec;
  std::vector<float> out;
  switch (which) {
    case Projection::kQkv:  // a norm's outputs: of size 1 before the gain
      out = gains("attn.norm");
      break;
    case Projection::kGateUp:
      out = gains("mlp.norm");
      break;
    case Projection::kOut: {  // means of values, each head's of the key-value head that it reads
      const std::vector<float> values =
          row_sizes(Projection::kQkv, spec.q_rows() + spec.kv_rows(), spec.kv_rows(), gains("attn.norm"));
      for (int64_t i = 0; i < spec.q_rows(); ++i) {
        const int64_t head = i / spec.head_dim / (spec.heads / spec.kv_heads);
        out.push_back(values[static_cast<size_t>(head * spec.head_dim + i % spec.head_dim)]);
      }
      break;
    }
    case Projection::kDown: {  // silu(gate) * up
      const std::vector<float> norm = gains("mlp.norm");
      out = row_sizes(Projection::kGateUp, 0, spec.ffn, norm);
      const std::vector<float> up = row_sizes(Projection::kGateUp, spec.ffn, spec.ffn, norm);
      for (size_t i = 0; i < out.size(); ++i) out[i] *= up[i];
      break;
    }
  }
  settle_sizes(out);
  return out;
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
  const std::vector<float> sizes = input_sizes(projection_of(weight));
  const auto rank = static_cast<size_t>(std::ssize(b) / rows);
  const LowRank near = low_rank(lost(weight, part, sizes), rows, weight.parameter.columns,
                                static_cast<int64_t>(rank), seed, setup_.threads);
  // The two halves share the scale as they share the strength of a direction: half of it is in what A makes
  // of inputs of their size. (So A learns as fast as in a fresh adapter: with as many steps the loss falls
  // further than with halves that are as large as each other whatever the inputs are.)
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
