#include "export/base_files.h"

#include <algorithm>
#include <filesystem>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kChunkBytes = 4 * kMiB;

bool holds_weights(const std::string& directory) {
  std::error_code ignored;
  return std::ranges::any_of(std::filesystem::directory_iterator(directory, ignored), [](const auto& file) {
    return file.path().filename().string().starts_with("model.safetensors");
  });
}

// The buffers' names in the files.
std::set<std::string> buffers_of(const ModelLayout& layout) {
  std::set<std::string> out;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      if (place.parameter.kind != ParameterKind::kBuffer) continue;
      for (const ParameterPart& part : place.parameter.parts) out.insert(part.name);
    }
  }
  return out;
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

std::vector<TensorInfo> BaseFiles::outgoing(std::vector<TensorInfo> ours, const ModelLayout& layout) {
  const std::set<std::string> buffers = buffers_of(layout);
  for (TensorInfo& info : ours) {
    const auto tensor = files_ != nullptr ? files_->find(info.name) : std::nullopt;
    if (tensor && buffers.contains(info.name)) {
      info.dtype = tensor->entry->dtype;
      copied_.insert(info.name);
    }
    info.name = name_of(info.name);
  }
  if (files_ == nullptr || !wrapped_) return ours;
  for (const ModelFiles::Tensor& tensor : files_->tensors()) {
    if (tensor.use != TensorUse::kTower) continue;
    check_tower(tensor);
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
