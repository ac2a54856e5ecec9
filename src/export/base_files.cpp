#include "export/base_files.h"

#include <algorithm>
#include <filesystem>

#include "base/bytes.h"
#include "base/error.h"
#include "weights/convert.h"
#include "weights/loader.h"

namespace lm {
namespace {

constexpr int64_t kChunkBytes = 4 * kMiB;

bool holds_weights(const std::string& directory) {
  std::error_code ignored;
  return std::ranges::any_of(std::filesystem::directory_iterator(directory, ignored), [](const auto& file) {
    return file.path().filename().string().starts_with("model.safetensors");
  });
}

// The names of the files' tensors all of whose places are of this kind. A stack of experts' matrices has many
// places, of which some may be trained and others not.
std::set<std::string> names_where(const ModelLayout& layout, bool (*holds)(const TensorPlace&)) {
  std::set<std::string> out, others;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      std::set<std::string>& names = holds(place) ? out : others;
      for (const ParameterPart& part : place.parameter.parts) names.insert(part.tensor());
    }
  }
  std::erase_if(out, [&](const std::string& name) { return others.contains(name); });
  return out;
}

bool is_buffer(const TensorPlace& place) {
  return place.parameter.kind == ParameterKind::kBuffer;
}

bool is_frozen(const TensorPlace& place) {
  return place.frozen;
}

// Frozen tensors, which no adapter is merged into.
std::set<std::string> untouched(const ModelLayout& layout) {
  const auto adapter = [](const TensorPlace& place) { return in_adapter(place.parameter.role); };
  if (!names_where(layout, adapter).empty()) return names_where(layout, is_buffer);
  return names_where(layout, is_frozen);
}

// Whether the export has the tensor though the program did not load it. What belongs to a matrix of codes is
// left out with it.
bool passes(const ModelFiles::Tensor& tensor, const std::vector<std::string>& unread) {
  if (tensor.use != TensorUse::kText) return true;
  const bool plain = tensor.name.ends_with(".weight") || tensor.name.ends_with("bias");
  return plain && is_weight_type(tensor.entry->dtype) && belongs_to(tensor.name, unread);
}

void check_tower(const ModelFiles::Tensor& tensor) {
  if (tensor.entry->dtype != DType::kU8 && tensor.entry->dtype != DType::kI8) return;
  throw Error(
      Exit::kInput,
      {.area = "FILE-23",
       .what = tensor.entry->name +
               " is quantized: only the text model can be written unquantized, and config.json has one "
               "quantization for both",
       .place = tensor.file->path(),
       .next = "name the model's bf16, fp16 or fp32 version (export --merge --base)"});
}

}  // namespace

BaseFiles::BaseFiles(const std::string& directory, bool wrapped)
    : wrapped_(wrapped),
      files_(holds_weights(directory) ? std::make_unique<ModelFiles>(directory) : nullptr) {}

std::string BaseFiles::name_of(const std::string& ours) const {
  const auto tensor = files_ != nullptr ? files_->find(ours) : std::nullopt;
  if (tensor) return tensor->entry->name;
  return wrapped_ ? wrapped_name(ours) : ours;
}

TensorTypes BaseFiles::own_types(const ModelLayout& layout, DType dtype) const {
  if (files_ == nullptr) return {};
  TensorTypes out = file_types(*files_, layout).others;
  if (dtype != DType::kF32) return out;
  std::erase_if(out, [kept = untouched(layout)](const auto& one) { return !kept.contains(one.first); });
  return out;
}

std::vector<TensorInfo> BaseFiles::outgoing(std::vector<TensorInfo> ours, const ModelLayout& layout,
                                            const std::vector<std::string>& unread) {
  std::set<std::string> kept = names_where(layout, is_buffer);
  const TensorTypes others = files_ != nullptr ? file_types(*files_, layout).others : TensorTypes();
  for (const std::string& name : untouched(layout)) {
    if (others.contains(name)) kept.insert(name);
  }
  for (TensorInfo& info : ours) {
    const auto tensor = files_ != nullptr ? files_->find(info.name) : std::nullopt;
    if (tensor && kept.contains(info.name)) {
      info.dtype = tensor->entry->dtype;
      copied_.insert(info.name);
    }
    info.name = name_of(info.name);
  }
  if (files_ == nullptr) return ours;
  for (const ModelFiles::Tensor& tensor : files_->tensors()) {
    if (!passes(tensor, unread)) continue;
    if (tensor.use == TensorUse::kTower) check_tower(tensor);
    copied_.insert(tensor.name);
    ours.push_back({tensor.entry->name, tensor.entry->dtype, tensor.entry->shape});
  }
  return ours;
}

void BaseFiles::copy(const std::string& name, const TensorSink& sink) const {
  const ModelFiles::Tensor tensor = files_->find(name).value();
  const int64_t bytes = tensor.entry->bytes();
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(kChunkBytes, bytes)));
  for (int64_t offset = 0; offset < bytes; offset += kChunkBytes) {
    const auto piece = std::span(buffer).first(static_cast<size_t>(std::min(kChunkBytes, bytes - offset)));
    tensor.file->read(*tensor.entry, offset, piece);
    sink(piece);
  }
}

}  // namespace lm
