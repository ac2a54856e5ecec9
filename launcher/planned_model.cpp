#include "launcher/planned_model.h"

#include "plan/adapter.h"
#include "weights/adapter_files.h"

namespace lm {
namespace {

AdapterSpec make_adapter(const NameMap& names, const LoraConfig& lora) {
  if (lora.init.empty()) return configured_adapter(names, lora);
  return continued_adapter(names, lora, read_adapter_config(lora.init, &names).spec, lora.init);
}

}  // namespace

PlannedModel open_model(const Config& config, const Environment& environment) {
  PlannedModel out{.directory = resolve_model(config.model.path, environment),
                   .spec = {},
                   .adapter = std::nullopt,
                   .layout = {}};
  out.spec = read_model_spec(out.directory);
  if (config.train.method == Method::kLora) out.adapter = make_adapter(out.spec.names, config.lora);
  const DType dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  out.layout = make_layout(out.spec, out.adapter_spec(), dtype);
  return out;
}

}  // namespace lm
