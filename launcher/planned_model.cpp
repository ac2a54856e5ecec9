#include "launcher/planned_model.h"

#include <algorithm>

#include "base/error.h"
#include "launcher/model_place.h"
#include "plan/adapter.h"
#include "plan/base_encoding.h"
#include "weights/adapter_files.h"

namespace lm {
namespace {

AdapterSpec make_adapter(const NameMap& names, const LoraConfig& lora) {
  if (lora.init.empty()) return configured_adapter(names, lora);
  return continued_adapter(names, lora, read_adapter_config(lora.init, &names).spec, lora.init);
}

// A model that its files have quantised tells no more what that lost.
void require_elements(EncodingKind stored, const std::string& directory) {
  if (stored == EncodingKind::kPlain) return;
  throw Error(Exit::kConfig,
              {.area = "CONFIG-20",
               .what = "lora.start = \"loftq\" needs the weights that were quantised, and these files have "
                       "their codes alone",
               .place = directory,
               .next = "set model.path to the model before it was quantised, or leave lora.start out",
               .kept = "nothing was started or written"});
}

const ModelShape* find_shape(std::string_view name, std::span<const ModelShape> known) {
  for (const std::string_view tuned : {"-Instruct", "-Chat", "-it"}) {
    if (name.ends_with(tuned)) name.remove_suffix(tuned.size());
  }
  const auto shape = std::ranges::find(known, name, &ModelShape::name);
  return shape == known.end() ? nullptr : &*shape;
}

}  // namespace

bool model_is_known(const std::string& path, std::span<const ModelShape> known) {
  return find_shape(path, known) != nullptr;
}

PlannedModel open_model(const Config& config, const Environment& environment,
                        std::span<const ModelShape> known) {
  PlannedModel out;
  const ModelShape* const shape = find_shape(config.model.path, known);
  if (shape != nullptr && !model_is_here(config.model.path, environment)) {
    out.spec = parse_model_spec(shape->config, shape->name);
  } else {
    out.directory = resolve_model(config.model.path, environment);
    out.spec = read_model_spec(out.directory);
  }
  if (config.lora.start == LoraStart::kLoftq) require_elements(out.spec.stored, out.directory);
  if (config.train.method == Method::kLora) out.adapter = make_adapter(out.spec.names, config.lora);
  const DType dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  out.layout = make_layout(out.spec, out.adapter_spec(), dtype,
                           base_encoding(config.model, out.spec.stored, out.adapter.has_value()));
  return out;
}

}  // namespace lm
