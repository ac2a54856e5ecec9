#include "plan/planned_layout.h"

#include "plan/base_encoding.h"
#include "plan/trained_tensors.h"

namespace lm {

ModelLayout planned_layout(const Config& config, const ModelSpec& spec, const AdapterSpec* adapter,
                           const ExpertShare& share) {
  return make_layout(spec, adapter, storage_type(config.model.dtype),
                     base_encoding(config.model, spec.stored, adapter != nullptr),
                     trained_filter(config.train, spec), share);
}

}  // namespace lm
