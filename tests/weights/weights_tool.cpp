// What interop_test.py asks of our side, one command per process:
//   spec DIR [LONGEST]           the model spec, its tensors and its RoPE frequencies, for texts of so many
//   tokens,
//                                as JSON
//   model DIR OUT DTYPE PART     load as DTYPE (fp32 | bf16), export in parts of PART bytes
//   adapter BASE DIR OUT         load a PEFT adapter of BASE, write it with one rank and alpha
//   adapter-patterns BASE DIR OUT   the same with its own ranks and alphas
//   quantize FILE OUT ENCODING   every matrix of a safetensors file: its codes, scales and their values
//   quantized DIR OUT DTYPE ENCODING   the same of a model's linear layers as it is loaded
//   copy FILE OUT                read every tensor of a safetensors file, write it again
//   verify DIR                   the result of verify_model as JSON
// Exit code: that of the error, with its report on stderr.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "export/export_adapter.h"
#include "export/export_model.h"
#include "kernels/cpu_features.h"
#include "tests/support/hf_names.h"
#include "tests/support/limit_processor.h"
#include "weights/adapter_files.h"
#include "weights/encode.h"
#include "weights/model_directory.h"
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

json norm_json(const std::optional<NormSpec>& norm) {
  if (!norm) return nullptr;
  return {{"kind", static_cast<int>(norm->kind)}, {"eps", norm->eps}};
}

json layer_json(const LayerSpec& layer) {
  const AttentionSpec& attention = layer.attention();
  json out = {{"window", attention.window},
              {"rope", attention.rotates()},
              {"table", attention.rope},
              {"qkv_bias", attention.qkv_bias},
              {"o_bias", attention.out_bias},
              {"qk_norm", attention.head_norm.has_value()},
              {"joint_norm", attention.joint_norm},
              {"value_norm", norm_json(attention.value_norm)},
              {"source", attention.source},
              {"scale", attention.scale()},
              {"softcap", attention.softcap},
              {"sinks", attention.sinks},
              {"position_slope", attention.position_slope},
              {"position_period", attention.position_period},
              {"scalar", layer.scalar}};
  for (const SublayerSpec& sublayer : layer.sublayers) {
    out["norms"].push_back({norm_json(sublayer.norm), norm_json(sublayer.norm_after)});
    out["joined"].push_back(norm_json(sublayer.norm_joined));
    out["beside"].push_back(sublayer.beside);
    out["residual_scale"].push_back(sublayer.residual_scale);
  }
  const auto mlp = [&](const auto* spec, bool gated) {
    if (spec == nullptr) return;
    out["gated"] = gated;
    out["ffn"] = spec->ffn;
    out["mlp_bias"] = spec->bias;
    out["activation"] = static_cast<int>(spec->activation);
  };
  mlp(layer.find<GatedMlpSpec>(), true);
  mlp(layer.find<PlainMlpSpec>(), false);
  if (const auto* const experts = layer.find<ExpertsSpec>()) {
    out["expert_ffn"] = experts->ffn;
    out["activation"] = static_cast<int>(experts->activation);
    out["experts"] = {experts->experts, experts->chosen};
    out["renormalise"] = experts->renormalise;
    out["round_weights"] = experts->round_weights;
    out["router"] = {{"sigmoid", experts->scores == RouterScores::kSigmoid},
                     {"groups", {experts->groups, experts->kept_groups}},
                     {"scale", experts->weight_scale},
                     {"wide_logits", experts->wide_logits},
                     {"factors", experts->factors},
                     {"norms", {norm_json(experts->input_norm), norm_json(experts->router_norm)}}};
    out["clamped"] = experts->clamped ? json{experts->clamped->alpha, experts->clamped->limit} : json();
  }
  if (const auto* const shared = layer.find<SharedExpertSpec>())
    out["shared"] = {{"ffn", shared->ffn}, {"gated", shared->gated}};
  return out;
}

// The shape of each tensor in the files.
json tensors_json(const ModelSpec& spec) {
  json out = json::object();
  for (const BlockParameters& block : list_parameters(spec, nullptr)) {
    for (const std::vector<Parameter>* list : {&block.trainable, &block.frozen})
      for (const Parameter& parameter : *list)
        for (const ParameterPart& part : parameter.parts) out[part.tensor()] = parameter.file_shape(part);
  }
  return out;
}

void print_spec(const std::string& directory, int64_t longest) {
  const ModelSpec spec = read_model_spec(directory);
  json layers = json::array(), ropes = json::array(), frequencies = json::array();
  for (const LayerSpec& layer : spec.layers) layers.push_back(layer_json(layer));
  for (const RopeSpec& rope : spec.ropes) {
    ropes.push_back({{"frequencies", rope_frequencies(rope, longest)},
                     {"neighbours", rope.neighbours},
                     {"attention_factor", rope.attention_factor}});
  }
  if (!spec.ropes.empty()) frequencies = ropes.front()["frequencies"];
  const AttentionSpec& attention = spec.layers.front().attention();
  const json out = {{"model_type", spec.model_type},
                    {"architecture", spec.architecture},
                    {"wrapper", spec.wrapper},
                    {"hidden", spec.hidden},
                    {"ffn", layers.front()["ffn"]},
                    {"layers", layers},
                    {"heads", attention.heads},
                    {"kv_heads", attention.kv_heads},
                    {"head_dim", attention.head_dim},
                    {"vocab", spec.vocab},
                    {"rms_eps", spec.final_norm.eps},
                    {"final_norm", norm_json(spec.final_norm)},
                    {"tied", spec.tied},
                    {"pad_token", spec.pad_token},
                    {"router_aux_loss", spec.router_aux_loss},
                    {"max_positions", spec.max_positions},
                    {"longest_text", spec.longest_text()},
                    {"embedding_scale", spec.embedding.scale},
                    {"round_scale", spec.embedding.round_scale},
                    {"positions", spec.embedding.positions},
                    {"logit_scale", spec.head.logit_scale},
                    {"logit_cap", spec.head.logit_cap},
                    {"frequencies", frequencies},
                    {"ropes", ropes},
                    {"tensors", tensors_json(spec)},
                    {"names", hf_names(spec)}};
  std::puts(out.dump().c_str());
}

void copy_model(const std::string& directory, const std::string& out, DType dtype, int64_t part_bytes) {
  const ModelSpec spec = read_model_spec(directory);
  const ModelLayout layout = make_layout(spec, nullptr, dtype);
  Memory memory;
  load_model(ModelFiles(directory), spec, layout,
             [&](size_t, const TensorPlace& place) { return target(memory, place, dtype); }, {.threads = 2});
  export_model(out, directory, layout,
               [&](size_t, const TensorPlace& place, int64_t) {
                 return WeightView{memory.at(place.parameter.name).data(), dtype};
               },
               {.dtype = dtype, .part_bytes = part_bytes, .replace = false});
}

void copy_adapter(const std::string& base, const std::string& directory, const std::string& out,
                  bool patterns) {
  const ModelSpec spec = read_model_spec(base);
  const AdapterConfig config = read_adapter_config(directory, &spec);
  const ModelLayout layout = make_layout(spec, &config.spec, DType::kF32);
  Memory memory;
  load_adapter(directory, layout,
               [&](size_t, const TensorPlace& place) { return target(memory, place, DType::kF32); },
               {.threads = 2, .base = &spec, .base_directory = base});
  write_adapter(out, config.spec, {.name = config.base_model, .directory = "", .spec = &spec}, layout,
                [&](size_t, const TensorPlace& place, int64_t) {
                  return WeightView{memory.at(place.parameter.name).data(), DType::kF32};
                },
                {.patterns = patterns});
}

void copy_file(const std::string& from, const std::string& to) {
  const SafetensorsFile file(from);
  std::vector<TensorInfo> tensors;
  for (const SafetensorsEntry& entry : file.entries())
    tensors.push_back({entry.name, entry.dtype, entry.shape});
  SafetensorsWriter writer(to, tensors, file.metadata());
  for (const TensorInfo& tensor : writer.order()) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()));
    file.read(*file.find(tensor.name), 0, bytes);
    writer.write(tensor.name, bytes);
  }
  writer.commit();
}

// What a matrix became, and what it stands for.
void add_encoded(const std::string& name, const EncodedMatrix& matrix, std::vector<TensorInfo>& infos,
                 Memory& memory) {
  static constexpr const char* kNames[] = {".codes", ".scales", ".nested"};
  const auto add = [&](const std::string& piece, DType dtype, int64_t bytes) -> std::vector<std::byte>& {
    infos.push_back({name + piece, dtype, {bytes / static_cast<int64_t>(dtype_size(dtype))}});
    return memory[name + piece] = std::vector<std::byte>(static_cast<size_t>(bytes));
  };
  const int64_t elements = matrix.rows * matrix.columns;
  for (size_t k = 0; k < kMostPieces && matrix.pieces[k] != nullptr; ++k)
    std::memcpy(add(kNames[k], DType::kU8, matrix.bytes[k]).data(), matrix.pieces[k],
                static_cast<size_t>(matrix.bytes[k]));
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const int64_t bytes = elements * static_cast<int64_t>(dtype_size(dtype));
    Materialise m{.kind = matrix.encoding->kind, .out = {}};
    std::copy(matrix.pieces.begin(), matrix.pieces.end(), m.pieces.begin());
    m.out = view_of(add(std::string(".") + dtype_name(dtype), dtype, bytes).data(), dtype, matrix.rows,
                    matrix.columns);
    cpu_kernels(cpu_level()).materialise(m, {DeviceType::kCpu, nullptr, 2});
  }
}

void write_all(const std::string& path, const std::vector<TensorInfo>& infos, const Memory& memory) {
  SafetensorsWriter writer(path, infos);
  for (const TensorInfo& info : writer.order()) writer.write(info.name, memory.at(info.name));
  writer.commit();
}

const Encoding& encoding_named(const std::string& name) {
  for (int kind = 1; kind <= static_cast<int>(EncodingKind::kMxfp4); ++kind) {
    const Encoding& one = encoding_of(static_cast<EncodingKind>(kind));
    if (one.name == name) return one;
  }
  LM_CHECK(false, name);
}

// Every matrix of a file by itself.
void quantize_file(const std::string& from, const std::string& to, const Encoding& encoding) {
  const SafetensorsFile file(from);
  std::vector<TensorInfo> infos;
  Memory memory;
  for (const SafetensorsEntry& entry : file.entries()) {
    EncodedMatrix matrix{.encoding = &encoding, .rows = entry.shape.at(0), .columns = entry.shape.at(1)};
    std::vector<std::vector<std::byte>> pieces;
    for (const int64_t bytes : encoding.piece_bytes(matrix.rows, matrix.columns))
      pieces.emplace_back(static_cast<size_t>(bytes));
    for (size_t k = 0; k < pieces.size(); ++k)
      matrix.pieces[k] = pieces[k].data(), matrix.bytes[k] = std::ssize(pieces[k]);
    const auto size = static_cast<int64_t>(dtype_size(entry.dtype));
    encode(
        matrix, entry.dtype,
        [&](int64_t first, int64_t n, std::byte* out) {
          file.read(entry, first * size, {out, static_cast<size_t>(n * size)});
        },
        2);
    add_encoded(entry.name, matrix, infos, memory);
  }
  write_all(to, infos, memory);
}

// The quantized matrices of a model.
void quantize_model(const std::string& directory, const std::string& to, DType dtype,
                    const Encoding& encoding) {
  const ModelSpec spec = read_model_spec(directory);
  const AdapterSpec adapter{.r = 1, .alpha = 1, .targets = resolve_targets(spec.names, {"all-linear"}, "")};
  const ModelLayout layout = make_layout(spec, &adapter, dtype, &encoding);
  std::vector<std::vector<std::byte>> blocks;
  for (const BlockLayout& block : layout.blocks) blocks.emplace_back(static_cast<size_t>(block.frozen_bytes));
  load_model(ModelFiles(directory), spec, layout,
             [&](size_t block, const TensorPlace& place) {
               return LoadTarget{blocks[block].data() + place.offset, dtype, 0, 0,
                                 place.encoded() ? &place : nullptr};
             },
             {.threads = 2});
  std::vector<TensorInfo> infos;
  Memory memory;
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (const TensorPlace& place : layout.blocks[b].tensors) {
      if (!place.encoded()) continue;
      for (size_t part = 0; part < place.parameter.parts.size(); ++part)
        write_encoded(place, part, blocks[b].data() + place.offset, nullptr,
                      [&](const EncodedMatrix& matrix) {
                        add_encoded(place.parameter.parts[part].name, matrix, infos, memory);
                      });
    }
  }
  write_all(to, infos, memory);
}

int run(const std::vector<std::string>& a) {
  const std::string command = a.empty() ? "" : a[0];
  if (command == "spec" && (a.size() == 2 || a.size() == 3)) {
    print_spec(a[1], a.size() == 3 ? std::atoll(a[2].c_str()) : 0);
  } else if (command == "quantize" && a.size() == 4) {
    quantize_file(a[1], a[2], encoding_named(a[3]));
  } else if (command == "quantized" && a.size() == 5) {
    quantize_model(a[1], a[2], a[3] == "fp32" ? DType::kF32 : DType::kBF16, encoding_named(a[4]));
  } else if (command == "model" && a.size() == 5) {
    copy_model(a[1], a[2], a[3] == "fp32" ? DType::kF32 : DType::kBF16, std::atoll(a[4].c_str()));
  } else if ((command == "adapter" || command == "adapter-patterns") && a.size() == 4) {
    copy_adapter(a[1], a[2], a[3], command == "adapter-patterns");
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
  lm::test::limit_processor();
  try {
    return lm::run({argv + 1, argv + argc});
  } catch (const lm::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  }
}
