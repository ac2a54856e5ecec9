#include "weights/stored.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "base/json.h"
#include "kernels/encoding_tables.h"
#include "weights/mxfp4.h"

namespace lm {
namespace {

constexpr int64_t kMostStateBytes = 1 << 16;
constexpr float kMapError = 1e-6F;  // older releases computed the maps in another precision

[[noreturn]] void fail(const ModelFiles::Tensor& tensor, const std::string& what) {
  throw Error(
      Exit::kInput,
      {.area = "FILE-23",
       .what = tensor.entry->name + ": " + what,
       .place = tensor.file->path(),
       .next = "save the model again with transformers and bitsandbytes, or use its bf16, fp16 or fp32 "
               "version"});
}

// Checks the tensors of one matrix.
class Reader {
 public:
  Reader(const ModelFiles& files, const ModelFiles::Tensor& codes) : files_(files), codes_(codes) {}

  // The tensor of that name with that type and so many elements.
  ModelFiles::Tensor beside(const std::string& name, DType dtype, int64_t elements) {
    const auto tensor = files_.find(name);
    if (!tensor) fail(codes_, "there is no " + name + " beside it");
    names.push_back(name);
    if (tensor->entry->dtype != dtype || tensor->entry->elements() != elements) {
      fail(*tensor,
           fmt::format("is {} {}, but this matrix needs {} [{}]", safetensors_dtype(tensor->entry->dtype),
                       shape_text(tensor->entry->shape), safetensors_dtype(dtype), elements));
    }
    return *tensor;
  }

  void map(const std::string& name, std::span<const float> expected) {
    const ModelFiles::Tensor tensor = beside(name, DType::kF32, std::ssize(expected));
    std::vector<float> values(expected.size());
    tensor.file->read(*tensor.entry, 0, std::as_writable_bytes(std::span(values)));
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::abs(values[i] - expected[i]) <= kMapError) continue;
      fail(tensor, fmt::format("entry {} is {:f}, but the type has {:f}", i, values[i], expected[i]));
    }
  }

  std::vector<std::string> names;

 private:
  const ModelFiles& files_;
  const ModelFiles::Tensor& codes_;
};

// The JSON with the format of the codes.
class State {
 public:
  explicit State(const ModelFiles::Tensor& tensor) : tensor_(tensor) {
    const int64_t bytes = tensor.entry->bytes();
    if (tensor.entry->dtype != DType::kU8 || bytes > kMostStateBytes)
      fail(tensor, "is no quant_state: it must be at most 65536 bytes of JSON as U8");
    std::string text(static_cast<size_t>(bytes), '\0');
    tensor.file->read(*tensor.entry, 0, std::as_writable_bytes(std::span(text)));
    json_ = parse_json(text, tensor.file->path() + ": " + tensor.entry->name,
                       {.bytes = kMostStateBytes, .depth = 4});
    if (!json_.is_object()) fail(tensor, "must be a JSON object");
  }

  bool has(const char* key) const { return json_.contains(key); }
  void require(const char* key, const Json& expected) const {
    const Json value = has(key) ? json_[key] : Json();
    if (value != expected)
      fail(tensor_, std::string(key) + " is " + value.dump().substr(0, 100) + ", and only " +
                        expected.dump() + " is supported for this matrix");
  }
  float number(const char* key) const {
    const Json value = has(key) ? json_[key] : Json();
    if (!value.is_number() || !std::isfinite(value.get<float>()))
      fail(tensor_, std::string(key) + " is " + value.dump().substr(0, 100) + ", no number");
    return value.get<float>();
  }

 private:
  const ModelFiles::Tensor& tensor_;
  Json json_;
};

StoredMatrix find_four_bits(const ModelFiles& files, const ModelFiles::Tensor& codes, int64_t rows,
                            int64_t columns) {
  const std::string name = codes.name, state_name = name + ".quant_state.bitsandbytes__";
  const auto nf4 = files.find(state_name + "nf4"), fp4 = files.find(state_name + "fp4");
  if (!nf4 == !fp4)
    fail(codes,
         "is U8, and exactly one of " + state_name + "nf4 and " + state_name + "fp4 must be beside it");
  const ModelFiles::Tensor of_state = nf4 ? *nf4 : *fp4;
  const State state(of_state);
  Reader reader(files, codes);
  reader.names.push_back(of_state.name);
  state.require("quant_type", nf4 ? "nf4" : "fp4");
  state.require("blocksize", kScaleBlock);
  state.require("shape", {rows, columns});
  const bool twice = state.has("nested_offset");
  const int64_t n = rows * columns, scales = ceil_div(n, kScaleBlock);
  if (codes.entry->elements() != ceil_div(n, 2))
    fail(codes, fmt::format("has {} bytes of codes, and {} needs {}", codes.entry->elements(),
                            shape_text({rows, columns}), ceil_div(n, 2)));
  StoredMatrix out{.codes = codes};
  out.scales = reader.beside(name + ".absmax", twice ? DType::kU8 : DType::kF32, scales);
  reader.map(name + ".quant_map", four_bit_table(nf4 ? EncodingKind::kNf4 : EncodingKind::kFp4).value);
  if (twice) {
    state.require("nested_blocksize", kNestedBlock);
    state.require("nested_dtype", "float32");
    out.mean = state.number("nested_offset");
    out.nested = reader.beside(name + ".nested_absmax", DType::kF32, ceil_div(scales, kNestedBlock));
    reader.map(name + ".nested_quant_map", kDynamicMap);
  }
  out.kind = nf4     ? twice ? EncodingKind::kNf4Double : EncodingKind::kNf4
             : twice ? EncodingKind::kFp4Double
                     : EncodingKind::kFp4;
  out.beside = std::move(reader.names);
  return out;
}

StoredMatrix find_eight_bits(const ModelFiles& files, const ModelFiles::Tensor& codes, int64_t rows,
                             int64_t columns) {
  const std::string& name = codes.name;
  if (codes.entry->shape != std::vector<int64_t>{rows, columns})
    fail(codes, "is " + shape_text(codes.entry->shape) + ", the model needs " + shape_text({rows, columns}));
  if (!name.ends_with(".weight")) fail(codes, "is I8, but not the weight of a linear layer");
  const std::string module = name.substr(0, name.size() - std::string(".weight").size());
  Reader reader(files, codes);
  StoredMatrix out{.kind = EncodingKind::kInt8, .codes = codes};
  out.scales = reader.beside(module + ".SCB", DType::kF32, rows);
  if (const auto format = files.find(module + ".weight_format")) {
    reader.names.push_back(format->name);
    uint8_t value = 1;
    if (format->entry->bytes() == 1)
      format->file->read(*format->entry, 0, std::as_writable_bytes(std::span(&value, 1)));
    if (value != 0) fail(*format, "must be one byte, 0: rows one after the other");
  }
  out.beside = std::move(reader.names);
  return out;
}

void read_piece(const StoredMatrix& stored, const ModelFiles::Tensor& tensor, std::byte* to, int64_t bytes) {
  LM_CHECK(tensor.entry->bytes() == bytes * stored.slices, tensor.entry->name);
  tensor.file->read(*tensor.entry, bytes * stored.slice, {to, static_cast<size_t>(bytes)});
}

}  // namespace

std::optional<StoredMatrix> find_stored(const ModelFiles& files, const std::string& name, int64_t rows,
                                        int64_t columns) {
  const auto tensor = files.find(name);
  if (!tensor) return std::nullopt;
  if (tensor->entry->dtype == DType::kU8) return find_four_bits(files, *tensor, rows, columns);
  if (tensor->entry->dtype == DType::kI8) return find_eight_bits(files, *tensor, rows, columns);
  return std::nullopt;
}

std::optional<StoredMatrix> find_stored(const ModelFiles& files, const ParameterPart& part, int64_t columns) {
  const auto codes = find_mxfp4(files, part, columns);
  if (!codes) return find_stored(files, part.name, part.rows, columns);
  StoredMatrix out;
  out.kind = EncodingKind::kMxfp4;
  out.slice = part.slice;
  out.slices = part.slices;
  out.codes = codes->codes;
  out.scales = codes->scales;
  out.beside = {codes->codes.name, codes->scales.name};
  return out;
}

void read_stored(const StoredMatrix& stored, const EncodedMatrix& to) {
  if (stored.kind != to.encoding->kind) {
    fail(stored.codes, std::string("is stored as ") + encoding_of(stored.kind).name + ", and this run has " +
                           to.encoding->name + " (config.json: quantization_config; model.quantize)");
  }
  read_piece(stored, stored.codes, to.pieces[0], to.bytes[0]);
  read_piece(stored, stored.scales, to.pieces[1], to.bytes[1]);
  if (!has_double_scales(stored.kind)) return;
  constexpr int64_t kFloat = sizeof stored.mean;
  std::memcpy(to.pieces[2], &stored.mean, kFloat);
  read_piece(stored, stored.nested, to.pieces[2] + kFloat, to.bytes[2] - kFloat);
}

void decode_stored(const StoredMatrix& stored, int64_t rows, int64_t columns, float* out, int threads) {
  PieceMemory pieces;
  const EncodedMatrix matrix = matrix_in(pieces, encoding_of(stored.kind), rows, columns);
  read_stored(stored, matrix);
  decode(matrix, out, threads);
}

}  // namespace lm
