#include "checkpoint/trained_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "optim/open_tile.h"
#include "weights/adapter_files.h"
#include "weights/convert.h"
#include "weights/encoded_prompt.h"
#include "weights/verify.h"

namespace lm {

void TrainedValues::read(int64_t block, int64_t first, int64_t elements, float* out) const {
  const std::string name = fmt::format("block{}.", block), weight = name + "weight", master = name + "master";
  const SavedArray *const weights = reader_.find(weight), *const masters =
                                                              masters_ ? reader_.find(master) : nullptr;
  const auto read = [&](const std::string& array, void* to, int64_t size) {
    reader_.read(array, first * size, {static_cast<std::byte*>(to), static_cast<size_t>(elements * size)});
  };
  if (weights == nullptr || weights->dtype == DType::kF32) return read(weight, out, 4);
  if (masters != nullptr && masters->dtype == DType::kF32) {
    read(master, out, 4);
  } else if (weights->dtype == DType::kF16) {
    std::vector<std::byte> half(static_cast<size_t>(elements) * 2);
    read(weight, half.data(), 2);
    convert_elements(half.data(), DType::kF16, reinterpret_cast<std::byte*>(out), DType::kF32, elements);
  } else {
    std::vector<uint16_t> high(static_cast<size_t>(elements)), low(high.size(), 0);
    read(weight, high.data(), 2);
    if (masters != nullptr) read(master, low.data(), 2);
    join_masters(high, low, out);
  }
  if (masters != nullptr && weights->dtype == DType::kBF16) settle_ties({out, static_cast<size_t>(elements)});
}

int64_t elements_of(const SavedTensor& tensor, const std::string& place) {
  int64_t out = 1;
  for (const int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(out, size, &out) || out > (int64_t{1} << 60)) {
      throw Error(Exit::kInput, {.area = "CKPT-07",
                                 .what = "tensor " + tensor.name + " has a shape that cannot be counted",
                                 .place = place,
                                 .next = "use another checkpoint"});
    }
  }
  return out;
}

namespace {

// Whether an adapter's tensor is one of the model that is trained whole, which is exported from its working
// weights: a weight under its own name, or the bias beside one. Other biases are copies.
bool is_whole(const std::vector<const SavedTensor*>& tensors, const std::string& name) {
  constexpr std::string_view kWeight = ".weight", kBias = ".bias";
  if (!name.starts_with(kAdapterPrefix)) return false;
  if (name.ends_with(kBias)) {
    const std::string weight = name.substr(0, name.size() - kBias.size()) + std::string(kWeight);
    return std::ranges::any_of(tensors, [&](const SavedTensor* one) { return one->name == weight; });
  }
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  return name.ends_with(kWeight) && !has(".lora_") && !has(".ln_tuning_layers.");
}

// A prefix: the layers' parts side by side, as its one tensor in the export.
void hash_prefix(const TrainedValues& values, std::vector<const SavedTensor*> parts, WeightsHash& hash) {
  std::ranges::sort(parts, {}, [](const SavedTensor* part) { return part->block; });
  const int64_t rows = parts.front()->shape.at(0);
  int64_t columns = 0;
  for (const SavedTensor* part : parts) columns += part->shape.at(1);
  hash.tensor(std::string(kPromptTensor), DType::kF32, {rows, columns});
  std::vector<float> floats;
  for (int64_t row = 0; row < rows; ++row) {
    for (const SavedTensor* part : parts) {
      const int64_t width = part->shape.at(1);
      floats.resize(static_cast<size_t>(width));
      values.read(part->block, part->first + row * width, width, floats.data());
      hash.bytes(std::as_bytes(std::span(floats)));
    }
  }
}

// The sizes of P-tuning's encoder, if these are its tensors; else no tokens.
EncoderShape encoder_of(const std::vector<const SavedTensor*>& tensors) {
  constexpr int64_t kMostSize = int64_t{1} << 20;
  const std::string prefix(kEncoderPrefix);
  const auto shape_of = [&](const std::string& end) {
    const auto found =
        std::ranges::find(tensors, prefix + end, [](const SavedTensor* one) { return one->name; });
    return found == tensors.end() ? std::vector<int64_t>() : (*found)->shape;
  };
  const std::vector<int64_t> tokens = shape_of("embedding.weight"), first = shape_of("mlp_head.0.weight");
  if (tokens.size() != 2 || first.size() != 2 || tensors.size() != 7) return {};
  const int64_t width = tokens[1], hidden = first[0];
  for (const int64_t size : {tokens[0], width, hidden})
    if (size < 1 || size > kMostSize) return {};
  // Of all tokens at once. prompt.length and prompt.hidden are at most 65536; what a damaged manifest says
  // beyond that is not allocated.
  if (tokens[0] * std::max(width, hidden) > int64_t{1} << 32) return {};
  const bool fits =
      first == std::vector{hidden, width} && shape_of("mlp_head.2.weight") == std::vector{hidden, hidden} &&
      shape_of("mlp_head.4.weight") == std::vector{width, hidden} &&
      shape_of("mlp_head.0.bias") == std::vector{hidden} &&
      shape_of("mlp_head.2.bias") == std::vector{hidden} && shape_of("mlp_head.4.bias") == std::vector{width};
  return fits ? EncoderShape{tokens[0], width, hidden} : EncoderShape{};
}

// P-tuning's: the embeddings that the encoder makes, as in the export.
void hash_encoded(const TrainedValues& values, const std::vector<const SavedTensor*>& tensors,
                  const EncoderShape& shape, WeightsHash& hash) {
  const std::vector<float> prompt =
      encoded_prompt(shape, [&](const std::string& name, int64_t first, int64_t elements, float* out) {
        const SavedTensor& tensor =
            **std::ranges::find(tensors, name, [](const SavedTensor* one) { return one->name; });
        values.read(tensor.block, tensor.first + first, elements, out);
      });
  hash.tensor(std::string(kPromptTensor), DType::kF32, {shape.tokens, shape.width});
  hash.bytes(std::as_bytes(std::span(prompt)));
}

}  // namespace

std::string trained_hash(CheckpointReader& reader) {
  constexpr int64_t kChunk = int64_t{1} << 20;  // elements
  const Manifest& manifest = reader.manifest();
  std::vector<const SavedTensor*> tensors;
  for (const SavedTensor& tensor : manifest.tensors) tensors.push_back(&tensor);
  std::ranges::sort(tensors, {}, [](const SavedTensor* tensor) { return tensor->name; });
  const bool adapter = std::ranges::any_of(tensors, [](const SavedTensor* tensor) {
    return tensor->name.starts_with(kAdapterPrefix) || tensor->name.starts_with(kPromptTensor) ||
           tensor->name.starts_with(kEncoderPrefix);
  });
  DType dtype = DType::kF32;
  for (const DType half : {DType::kBF16, DType::kF16}) {
    if (!adapter && manifest.numerics.value("dtype", "") == dtype_name(half)) dtype = half;
  }
  const TrainedValues values(reader, adapter), working(reader, false);
  WeightsHash hash;
  if (const EncoderShape encoder = encoder_of(tensors); encoder.tokens > 0) {
    hash_encoded(values, tensors, encoder, hash);
    return hash.hex();
  }
  const std::string part = std::string(kPromptTensor) + ".";
  constexpr int64_t kMostElements = int64_t{1} << 31;  // of a layer
  const bool prefix = !tensors.empty() && std::ranges::all_of(tensors, [&](const SavedTensor* one) {
    return one->name.starts_with(part) && one->shape.size() == 2 && one->shape[0] == tensors[0]->shape[0] &&
           elements_of(*one, reader.directory()) <= kMostElements;
  });
  if (prefix) {
    hash_prefix(values, tensors, hash);
    return hash.hex();
  }
  std::vector<float> floats;
  std::vector<std::byte> bytes;
  for (const SavedTensor* tensor : tensors) {
    hash.tensor(tensor->name, dtype, tensor->shape);
    const TrainedValues& from = is_whole(tensors, tensor->name) ? working : values;
    const int64_t elements = elements_of(*tensor, reader.directory());
    for (int64_t first = 0; first < elements; first += kChunk) {
      const auto n = static_cast<size_t>(std::min(kChunk, elements - first));
      floats.resize(n);
      bytes.resize(n * dtype_size(dtype));
      from.read(tensor->block, tensor->first + first, static_cast<int64_t>(n), floats.data());
      convert_elements(reinterpret_cast<const std::byte*>(floats.data()), DType::kF32, bytes.data(), dtype,
                       static_cast<int64_t>(n));
      hash.bytes(bytes);
    }
  }
  return hash.hex();
}

}  // namespace lm
