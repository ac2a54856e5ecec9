// Any bytes as a PEFT adapter: refused with Error(11), or an adapter that can be laid out and, if its tensors
// are those of a small model, loaded. The input is adapter_config.json, a byte 0xFF, the size of the tensors'
// data in decimal digits and the header of adapter_model.safetensors.
#include <charconv>
#include <cmath>

#include "tests/fuzz/support.h"
#include "weights/adapter_files.h"

namespace {

using lm::fuzz::require;

struct Adapter {
  Adapter() {
    directory.link("adapter_config.json", config);
    directory.link("adapter_model.safetensors", weights);
  }
  lm::fuzz::MemoryFile config, weights;
  lm::fuzz::Directory directory;
};

lm::ModelSpec small_model() {
  return lm::parse_model_spec(
      R"({"model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 3})",
      "small");
}

void check(const lm::AdapterSpec& spec, const std::string& directory) {
  static const lm::ModelSpec model = small_model();
  require(spec.r >= 1 && spec.r <= 65536 && spec.dropout >= 0 && spec.dropout < 1 &&
          std::isfinite(spec.scale()));
  require(!spec.targets.empty());
  const lm::ModelLayout layout = lm::make_layout(model, &spec, lm::DType::kBF16);
  require(layout.trainable_elements > 0 && layout.trainable_elements <= layout.flat_elements);
  const bool fits = layout.trainable_elements < 4096;
  std::vector<std::vector<float>> loaded;
  const auto target = [&](size_t, const lm::TensorPlace& place) {
    if (!fits) return lm::LoadTarget{};
    loaded.emplace_back(static_cast<size_t>(place.parameter.elements()));
    return lm::LoadTarget{reinterpret_cast<std::byte*>(loaded.back().data()), lm::DType::kF32};
  };
  const auto bytes =
      lm::fuzz::parse(lm::Exit::kInput, [&] { return lm::load_adapter(directory, layout, target, {}); });
  require(!bytes || *bytes > 0 || !fits);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Adapter adapter;
  std::string_view rest = lm::fuzz::text_of(data, size);
  adapter.config.set({lm::fuzz::next_text(rest)});
  uint32_t data_bytes = 0;
  const auto digits = std::from_chars(rest.data(), rest.data() + rest.size(), data_bytes);
  rest.remove_prefix(static_cast<size_t>(digits.ptr - rest.data()));
  adapter.weights.set_safetensors(rest, data_bytes);
  const std::string& directory = adapter.directory.path();
  static const lm::ModelSpec model = small_model();
  const auto config =
      lm::fuzz::parse(lm::Exit::kInput, [&] { return lm::read_adapter_config(directory, &model); });
  if (config) check(config->spec, directory);
  return 0;
}
