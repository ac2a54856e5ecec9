// Any bytes as a model's config.json: refused with Error(11), or a spec whose sizes can be multiplied safely.
#include "spec/block_layout.h"
#include "tests/fuzz/support.h"

namespace {

using lm::fuzz::require;

void check(lm::ModelSpec spec) {
  require(!spec.layers.empty());
  require(spec.pad_token >= -1 && spec.pad_token < spec.vocab);
  require(spec.longest_text() > 0);
  for (const lm::RopeSpec& rope : spec.ropes) {
    require(rope.attention_factor > 0);
    for (const int64_t longest : {int64_t{0}, spec.max_positions + 1}) {
      const std::vector<float> frequencies = lm::rope_frequencies(rope, longest);
      require(std::ssize(frequencies) == rope.dim / 2);
      for (const float f : frequencies) require(f >= 0);
    }
  }
  for (const lm::LayerSpec& layer : spec.layers) {
    const lm::AttentionSpec& attention = layer.attention();
    require(attention.window >= 0 && attention.heads % attention.kv_heads == 0 && attention.scale() > 0);
    require(attention.rope < std::ssize(spec.ropes));
    require(!attention.rotates() ||
            spec.ropes[static_cast<size_t>(attention.rope)].dim <= attention.head_dim);
  }
  // Two layers say what all need; laying out thousands of them takes a second.
  const int64_t layers = spec.layer_count();
  spec.layers.resize(static_cast<size_t>(std::min<int64_t>(layers, 2)));
  const lm::ModelLayout layout = lm::make_layout(spec, nullptr, lm::DType::kF32);
  require(layout.flat_elements >= layout.trainable_elements && layout.trainable_elements > 0);
  const __int128 most = __int128{layout.flat_elements} * layers * 16;  // bytes of weights and state
  require(most > 0 && most <= INT64_MAX);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(lm::fuzz::text_of(data, size));
  auto spec = lm::fuzz::parse(lm::Exit::kInput, [&] { return lm::parse_model_spec(text, "fuzz"); });
  if (spec) check(std::move(*spec));
  return 0;
}
