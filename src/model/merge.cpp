#include "model/merge.h"

#include <ATen/ops/mm.h>

#include <string>

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

at::Tensor host_floats(const TensorPlace& place, const MergeTarget& target) {
  const auto size = static_cast<int64_t>(dtype_size(target.dtype));
  auto* const memory = const_cast<std::byte*>(target.trainable) + place.offset * size;
  return view_memory(memory, {place.parameter.rows, place.parameter.columns}, target.dtype,
                     target.stream.device)
      .to(at::kCPU, at::kFloat);
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
    at::Tensor weight =
        view_memory(target.weight, {parameter.rows, parameter.columns}, target.dtype, DeviceType::kCpu)
            .narrow(0, part.first, part.rows);
    const at::Tensor delta = at::mm(host_floats(*b, target), host_floats(*a, target)).mul_(adapter.scale());
    weight.copy_(weight.to(at::kFloat).add_(delta));
  }
}

}  // namespace lm
