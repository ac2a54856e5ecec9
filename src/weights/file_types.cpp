#include "weights/file_types.h"

#include <algorithm>
#include <cstring>

#include "weights/convert.h"
#include "weights/loader.h"

namespace lm {
namespace {

constexpr int64_t kChunkElements = int64_t{1} << 20;

bool rounds(const ModelFiles::Tensor& tensor, DType dtype) {
  const DType type = tensor.entry->dtype;
  if (type == dtype || dtype == DType::kF32) return false;
  const auto size = static_cast<int64_t>(dtype_size(type));
  const int64_t elements = tensor.entry->elements();
  const auto room = static_cast<size_t>(std::min(elements, kChunkElements));
  std::vector<std::byte> stored(room * dtype_size(type)), held(room * dtype_size(dtype)), back(stored.size());
  for (int64_t first = 0; first < elements; first += kChunkElements) {
    const int64_t n = std::min(kChunkElements, elements - first);
    const std::span chunk = std::span(stored).first(static_cast<size_t>(n * size));
    tensor.file->read(*tensor.entry, first * size, chunk);
    convert_elements(chunk.data(), type, held.data(), dtype, n);
    convert_elements(held.data(), dtype, back.data(), type, n);
    if (std::memcmp(chunk.data(), back.data(), chunk.size()) != 0) return true;
  }
  return false;
}

}  // namespace

FileTypes file_types(const ModelFiles& files, const ModelLayout& layout) {
  TensorTypes types;
  std::map<DType, int64_t> elements;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      const Parameter parameter = stored_in_base(place.parameter);
      if (in_adapter(parameter.role) || parameter.kind == ParameterKind::kBuffer) continue;
      for (const ParameterPart& part : parameter.parts) {
        const auto tensor = files.find(part.tensor());
        if (!tensor || !is_weight_type(tensor->entry->dtype)) continue;
        if (types.emplace(part.tensor(), tensor->entry->dtype).second)
          elements[tensor->entry->dtype] += tensor->entry->elements();
      }
    }
  }
  FileTypes out;
  if (elements.empty()) return out;
  out.common = std::ranges::max_element(elements, {}, [](const auto& one) { return one.second; })->first;
  std::erase_if(types, [&](const auto& one) { return one.second == *out.common; });
  out.others = std::move(types);
  return out;
}

std::vector<std::string> rounded_tensors(const ModelFiles& files, const TensorTypes& tensors, DType dtype) {
  std::vector<std::string> out;
  for (const auto& [name, type] : tensors) {
    const auto tensor = files.find(name);
    if (tensor && rounds(*tensor, dtype)) out.push_back(name);
  }
  return out;
}

}  // namespace lm
