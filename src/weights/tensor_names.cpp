#include "weights/tensor_names.h"

#include <algorithm>
#include <string_view>

namespace lm {
namespace {

constexpr std::string_view kAdapter = "base_model.model.";
constexpr std::string_view kText = "model.", kWrapped = "model.language_model.";

struct Renamed {
  std::string_view theirs, ours;
};
constexpr Renamed kPrefixes[] = {
    {kWrapped, kText}, {"language_model.model.", kText}, {"language_model.lm_head.", "lm_head."}};

// What follows a wrapper's "model." or stands alone.
constexpr std::string_view kTowers[] = {"vision_tower.",    "vision_model.",          "visual.",
                                        "vision_embedder.", "audio_tower.",           "embed_vision.",
                                        "embed_audio.",     "multi_modal_projector.", "mtp."};

constexpr std::string_view kGpt2[] = {"wte.", "wpe.", "ln_f."};

bool starts_with_one(std::string_view name, const auto& prefixes) {
  return std::ranges::any_of(prefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

// "h.3.X"
bool is_gpt2_layer(std::string_view name) {
  if (!name.starts_with("h.")) return false;
  const size_t end = name.find_first_not_of("0123456789", 2);
  return end != std::string_view::npos && end > 2 && name[end] == '.';
}

std::string canonical_text(std::string_view name) {
  for (const auto& [theirs, ours] : kPrefixes) {
    if (name.starts_with(theirs)) return std::string(ours) + std::string(name.substr(theirs.size()));
  }
  if (starts_with_one(name, kGpt2) || is_gpt2_layer(name)) return "transformer." + std::string(name);
  return std::string(name);
}

bool is_tower(std::string_view name) {
  if (name.starts_with(kText)) name.remove_prefix(kText.size());
  return starts_with_one(name, kTowers);
}

// GPT-2's causal mask, the number that stands for a masked score, and RoPE's frequencies.
bool is_unused(std::string_view canonical) {
  if (canonical.ends_with(".rotary_emb.inv_freq")) return true;
  return canonical.starts_with("transformer.h.") &&
         (canonical.ends_with(".attn.bias") || canonical.ends_with(".attn.masked_bias"));
}

}  // namespace

CanonicalName canonical_name(const std::string& name) {
  std::string_view rest = name;
  const bool adapter = rest.starts_with(kAdapter);
  if (adapter) rest.remove_prefix(kAdapter.size());
  if (is_tower(rest)) return {name, TensorUse::kTower};
  CanonicalName out{canonical_text(rest), TensorUse::kText};
  if (is_unused(out.text)) out.use = TensorUse::kUnused;
  // In peft's memory a magnitude is a module with a weight, and some files name it so.
  constexpr std::string_view kVector = ".lora_magnitude_vector", kOfModule = ".lora_magnitude_vector.weight";
  if (adapter && out.text.ends_with(kOfModule))
    out.text.resize(out.text.size() - kOfModule.size() + kVector.size());
  if (adapter) out.text.insert(0, kAdapter);
  return out;
}

std::string wrapped_name(const std::string& canonical) {
  const bool adapter = canonical.starts_with(kAdapter);
  const size_t at = adapter ? kAdapter.size() : 0;
  if (canonical.compare(at, kText.size(), kText) != 0) return canonical;
  return canonical.substr(0, at) + std::string(kWrapped) + canonical.substr(at + kText.size());
}

}  // namespace lm
