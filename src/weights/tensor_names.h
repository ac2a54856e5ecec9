// What tensors of a model's files are called here. The same text model has other names inside a wrapper (a
// model of pictures or sound, too), by the transformers version that wrote it, and in GPT-2's first files.
// Pure functions; the names are untrusted.
#pragma once

#include <cstdint>
#include <string>

namespace lm {

enum class TensorUse : uint8_t {
  kText,    // of the text model, or unknown
  kTower,   // of a wrapper's other parts: not loaded, and copied into a full export
  kUnused,  // a buffer that old files hold: not loaded, and copied into a full export
};

struct CanonicalName {
  std::string text;  // as NameMap has it; of a tower: as the file has it
  TensorUse use = TensorUse::kText;
};

// "model.language_model.X" and "language_model.model.X" are "model.X", "language_model.lm_head.X" is
// "lm_head.X", and "wte.X", "wpe.X", "h.3.X" and "ln_f.X" are "transformer.wte.X" and so on; all of them also
// behind an adapter's "base_model.model.".
CanonicalName canonical_name(const std::string& name);

// The name that the wrapper classes of transformers 5 have for a canonical name: "model.language_model.X"
// for "model.X".
std::string wrapped_name(const std::string& canonical);

}  // namespace lm
