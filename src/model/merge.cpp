#include "model/merge.h"

#include <string>
#include <vector>

#include "base/host_device.h"

namespace lm {
namespace {

constexpr const char* kAdapterPrefix = "base_model.model.";  // of an adapter's tensor names

// "model.layers.0.self_attn.q_proj.weight" and
// "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" share their module.
std::string module_of(const std::string& name, const std::string& suffix) {
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : "";
}

const TensorPlace* adapter_of(const BlockLayout& layout, const std::string& module,
                              const std::string& suffix) {
  for (const TensorPlace& place : layout.tensors) {
    if (!place.frozen && module_of(place.parameter.parts.front().name, suffix) == kAdapterPrefix + module)
      return &place;
  }
  return nullptr;
}

float load_float(const std::byte* from, DType dtype, size_t i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(from)[i];
  return to_float(reinterpret_cast<const Bf16*>(from)[i]);
}

void store_float(std::byte* to, DType dtype, size_t i, float value) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(to)[i] = value;
  } else {
    reinterpret_cast<Bf16*>(to)[i] = to_bf16(value);
  }
}

// The adapter's tensor in host memory, as fp32.
std::vector<float> host_floats(const TensorPlace& place, const MergeTarget& target) {
  const auto size = static_cast<int64_t>(dtype_size(target.dtype));
  std::vector<std::byte> bytes(static_cast<size_t>(place.parameter.elements() * size));
  copy_bytes(bytes.data(), target.trainable + place.offset * size, std::ssize(bytes), target.stream);
  synchronize(target.stream);
  std::vector<float> out(static_cast<size_t>(place.parameter.elements()));
  for (size_t i = 0; i < out.size(); ++i) out[i] = load_float(bytes.data(), target.dtype, i);
  return out;
}

}  // namespace

void merge_adapters(const BlockLayout& layout, const TensorPlace& place, const AdapterSpec& adapter,
                    const MergeTarget& target) {
  const Parameter& parameter = place.parameter;
  for (const ParameterPart& part : parameter.parts) {
    const std::string module = module_of(part.name, ".weight");
    if (module.empty()) continue;
    const TensorPlace* const a = adapter_of(layout, module, ".lora_A.weight");
    const TensorPlace* const b = adapter_of(layout, module, ".lora_B.weight");
    if (a == nullptr || b == nullptr) continue;
    std::vector<float> left = host_floats(*b, target), right = host_floats(*a, target);
    const int64_t rank = b->parameter.columns, columns = parameter.columns;
    std::vector<float> delta(static_cast<size_t>(part.rows * columns));
    const View product = view_of(delta.data(), DType::kF32, part.rows, columns);
    const StreamView cpu{DeviceType::kCpu, nullptr, target.stream.threads};
    target.kernels.gemm({.a = view_of(left.data(), DType::kF32, part.rows, rank),
                         .b = view_of(right.data(), DType::kF32, rank, columns),
                         .out = product},
                        cpu);
    const auto scale = static_cast<float>(adapter.scale());
    const auto first = static_cast<size_t>(part.first * columns);
    for (size_t i = 0; i < delta.size(); ++i) {
      const float sum = load_float(target.weight, target.dtype, first + i) + delta[i] * scale;
      store_float(target.weight, target.dtype, first + i, sum);
    }
  }
}

}  // namespace lm
