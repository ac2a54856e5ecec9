#include "export/plain_adapter.h"

#include <algorithm>
#include <numbers>

#include "base/error.h"
#include "weights/convert.h"

namespace lm {
namespace {

// alpha' / (2 r) = alpha / r, and alpha' / sqrt(2 r) = alpha / sqrt(r).
AdapterSpec with_starts(const AdapterSpec& adapter) {
  AdapterSpec out = adapter;
  const double factor = adapter.rslora ? std::numbers::sqrt2 : 2;
  out.pissa = false;
  out.r *= 2;
  out.alpha *= factor;
  for (auto& [name, rank] : out.ranks) rank *= 2;
  for (auto& [name, alpha] : out.alphas) alpha *= factor;
  return out;
}

std::vector<float> values_of(const WeightSource& source, size_t block, const TensorPlace& place) {
  std::vector<float> out(static_cast<size_t>(place.parameter.elements()));
  const int64_t columns = place.parameter.columns;
  for_each_view(source, block, place, 0, place.parameter.rows,
                [&](int64_t row, int64_t rows, const std::byte* from, DType dtype) {
                  convert_elements(from, dtype, reinterpret_cast<std::byte*>(out.data() + row * columns),
                                   DType::kF32, rows * columns);
                });
  return out;
}

// Row i of `left` and then row i of `right`.
void put_side_by_side(const std::vector<float>& left, const std::vector<float>& right, int64_t rows,
                      float* to) {
  const int64_t columns = std::ssize(left) / rows;
  for (int64_t i = 0; i < rows; ++i) {
    to = std::copy_n(left.begin() + i * columns, columns, to);
    to = std::copy_n(right.begin() + i * columns, columns, to);
  }
}

}  // namespace

PlainAdapter::PlainAdapter(const ModelSpec& model, const AdapterSpec& adapter, const ModelLayout& layout,
                           const WeightSource& source, const PrincipalPairs& starts)
    : spec_(with_starts(adapter)), layout_(make_layout(model, &spec_, DType::kF32)) {
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    const BlockLayout& from = layout.blocks[b];
    std::vector<float>& values = blocks_.emplace_back(static_cast<size_t>(layout_.blocks[b].flat_elements));
    const auto place = [&](const TensorPlace& of) {
      const TensorPlace* const found = layout_.blocks[b].find(of.parameter.name);
      LM_CHECK(found != nullptr && !found->frozen, of.parameter.name);
      return values.data() + found->offset;
    };
    for (const Trainable& entry : from.trainables) {
      const TensorPlace& trained = from.tensors[entry.tensor];
      if (entry.role == TrainableRole::kLoraB) continue;  // with its A
      const std::vector<float> own = values_of(source, b, trained);
      if (entry.role != TrainableRole::kLoraA) {
        std::ranges::copy(own, place(trained));
        continue;
      }
      PrincipalPair start = starts.pair(from, entry);
      for (float& value : start.b) value = -value;
      std::ranges::copy(start.a, std::ranges::copy(own, place(trained)).out);
      const TensorPlace& lora_b = *from.beside(from.tensors[entry.owner], entry.part, TrainableRole::kLoraB);
      put_side_by_side(values_of(source, b, lora_b), start.b, lora_b.parameter.rows, place(lora_b));
    }
  }
}

WeightSource PlainAdapter::source() const {
  return [this](size_t block, const TensorPlace& place, int64_t) {
    return WeightView{reinterpret_cast<const std::byte*>(blocks_.at(block).data() + place.offset),
                      DType::kF32};
  };
}

const std::byte* PlainAdapter::block(size_t block) const {
  return reinterpret_cast<const std::byte*>(blocks_.at(block).data());
}

}  // namespace lm
