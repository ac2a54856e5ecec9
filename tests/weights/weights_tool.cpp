// What interop_test.py asks of our side, one command per process:
//   spec DIR                     the model spec and its RoPE frequencies as JSON
//   model DIR OUT DTYPE PART     load as DTYPE (fp32 | bf16), export in parts of PART bytes
//   adapter BASE DIR OUT         load a PEFT adapter of the model BASE, write it again
//   copy FILE OUT                read every tensor of a safetensors file, write it again
//   verify DIR                   the result of verify_model as JSON
// Exit code: that of the error, with its report on stderr.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "weights/adapter_files.h"
#include "weights/export_model.h"
#include "weights/verify.h"

namespace lm {
namespace {

using nlohmann::json;
using Memory = std::map<std::string, std::vector<std::byte>>;

LoadTarget target(Memory& memory, const TensorPlace& place, DType dtype) {
  auto& bytes = memory[place.parameter.name];
  bytes.resize(static_cast<size_t>(place.parameter.elements()) * dtype_size(dtype));
  return {bytes.data(), dtype};
}

void print_spec(const std::string& directory) {
  const ModelSpec spec = read_model_spec(directory);
  std::vector<double> frequencies;
  for (const float f : rope_frequencies(spec)) frequencies.push_back(f);
  json layers = json::array();
  for (const LayerSpec& layer : spec.layers) {
    layers.push_back({{"window", layer.window},
                      {"rope", layer.rope},
                      {"qkv_bias", layer.qkv_bias},
                      {"o_bias", layer.o_bias},
                      {"mlp_bias", layer.mlp_bias},
                      {"qk_norm", layer.qk_norm()}});
  }
  const json out = {{"hidden", spec.hidden},
                    {"ffn", spec.ffn},
                    {"layers", layers},
                    {"heads", spec.heads},
                    {"kv_heads", spec.kv_heads},
                    {"head_dim", spec.head_dim},
                    {"vocab", spec.vocab},
                    {"rms_eps", spec.rms_eps},
                    {"tied", spec.tied},
                    {"pad_token", spec.pad_token},
                    {"max_positions", spec.max_positions},
                    {"frequencies", frequencies},
                    {"names", hf_names(spec)}};
  std::puts(out.dump().c_str());
}

void copy_model(const std::string& directory, const std::string& out, DType dtype, int64_t part_bytes) {
  const ModelSpec spec = read_model_spec(directory);
  const ModelLayout layout = make_layout(spec, nullptr, dtype);
  Memory memory;
  load_model(ModelFiles(directory), spec, layout,
             [&](size_t, const TensorPlace& place) { return target(memory, place, dtype); },
             {.threads = 2, .progress = {}});
  export_model(out, directory, layout,
               [&](size_t, const TensorPlace& place, int64_t) {
                 return WeightView{memory.at(place.parameter.name).data(), dtype};
               },
               {.dtype = dtype, .part_bytes = part_bytes, .replace = false});
}

void copy_adapter(const std::string& base, const std::string& directory, const std::string& out) {
  const ModelSpec spec = read_model_spec(base);
  const AdapterConfig config = read_adapter_config(directory, &spec.names);
  const ModelLayout layout = make_layout(spec, &config.spec, DType::kF32);
  Memory memory;
  load_adapter(directory, layout,
               [&](size_t, const TensorPlace& place) { return target(memory, place, DType::kF32); },
               {.threads = 2, .progress = {}});
  write_adapter(
      out, config.spec, {config.base_model, ""}, layout,
      [&](size_t, const TensorPlace& place, int64_t) {
        return WeightView{memory.at(place.parameter.name).data(), DType::kF32};
      },
      false);
}

void copy_file(const std::string& from, const std::string& to) {
  const SafetensorsFile file(from);
  std::vector<TensorInfo> tensors;
  for (const SafetensorsEntry& entry : file.entries())
    tensors.push_back({entry.name, entry.dtype, entry.shape});
  SafetensorsWriter writer(to, tensors, file.metadata());
  for (const TensorInfo& tensor : writer.order()) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()));
    file.read(tensor.name, bytes);
    writer.write(tensor.name, bytes);
  }
  writer.commit();
}

int run(const std::vector<std::string>& a) {
  const std::string command = a.empty() ? "" : a[0];
  if (command == "spec" && a.size() == 2) {
    print_spec(a[1]);
  } else if (command == "model" && a.size() == 5) {
    copy_model(a[1], a[2], a[3] == "fp32" ? DType::kF32 : DType::kBF16, std::atoll(a[4].c_str()));
  } else if (command == "adapter" && a.size() == 4) {
    copy_adapter(a[1], a[2], a[3]);
  } else if (command == "copy" && a.size() == 3) {
    copy_file(a[1], a[2]);
  } else if (command == "verify" && a.size() == 2) {
    const VerifyResult result = verify_model(a[1]);
    const json out = {{"ok", result.ok}, {"weights_hash", result.weights_hash}, {"files", result.files}};
    std::puts(out.dump().c_str());
  } else {
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace lm

int main(int argc, char** argv) {
  try {
    return lm::run({argv + 1, argv + argc});
  } catch (const lm::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  }
}
