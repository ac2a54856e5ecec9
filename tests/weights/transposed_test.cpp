// Matrices that the files hold as [in, out] (ParameterPart::transposed): loading, quantizing and writing
// them, whole and in pieces.
#include <map>
#include <utility>

#include "export/export_model.h"
#include "tests/weights/support.h"
#include "weights/loader.h"
#include "weights/model_directory.h"
#include "weights/read_part.h"

namespace lm {
namespace {

using nlohmann::json;
using test::TemporaryDirectory;

// The layers' matrices are stored transposed; everything else is as it is.
ModelLayout transposed_layout(const ModelSpec& spec, DType dtype) {
  ModelLayout layout = make_layout(spec, nullptr, dtype);
  for (BlockLayout& block : layout.blocks) {
    for (TensorPlace& place : block.tensors) {
      for (ParameterPart& part : place.parameter.parts)
        part.transposed = block.body && place.parameter.kind == ParameterKind::kMatrix;
    }
  }
  return layout;
}

void write_files(const std::string& directory, const ModelLayout& layout, DType dtype) {
  std::vector<TensorInfo> infos;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      for (const ParameterPart& part : place.parameter.parts)
        infos.push_back({part.name, dtype, place.parameter.shape(part)});
    }
  }
  test::write_tensors(directory + "/model.safetensors", infos);
}

struct Model {
  Model(const std::string& directory, const json& config, DType stored, DType dtype) {
    std::filesystem::create_directories(directory);
    test::write_text(directory + "/config.json", config.dump(2));
    spec = read_model_spec(directory);
    layout = transposed_layout(spec, dtype);
    write_files(directory, layout, stored);
  }
  ModelSpec spec;
  ModelLayout layout;
};

using Memory = std::map<std::string, std::vector<std::byte>>;

Memory load(const std::string& directory, const Model& model, DType dtype, int threads) {
  Memory memory;
  const auto target = [&](size_t, const TensorPlace& place) {
    auto& bytes = memory[place.parameter.name];
    bytes.assign(static_cast<size_t>(place.parameter.elements()) * dtype_size(dtype), std::byte{0x5A});
    return LoadTarget{bytes.data(), dtype};
  };
  load_model(ModelFiles(directory), model.spec, model.layout, target, {.threads = threads});
  return memory;
}

float value_at(const std::vector<std::byte>& bytes, DType dtype, int64_t i) {
  uint32_t bits = 0;
  const size_t size = dtype_size(dtype);
  std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size, bytes.data() + static_cast<size_t>(i) * size, size);
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Element (r, c) of every part is the file's (c, r).
void expect_values(const Model& model, const Memory& memory, DType dtype) {
  int64_t transposed = 0;
  for (const BlockLayout& block : model.layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      const Parameter& p = place.parameter;
      for (const ParameterPart& part : p.parts) {
        transposed += part.transposed;
        for (int64_t r = 0; r < part.rows; ++r) {
          for (int64_t c = 0; c < p.columns; ++c) {
            const int64_t in_file = part.transposed ? c * part.rows + r : r * p.columns + c;
            ASSERT_EQ(value_at(memory.at(p.name), dtype, (part.first + r) * p.columns + c),
                      test::tiny_value(part.name, in_file))
                << part.name << " " << r << " " << c;
          }
        }
      }
    }
  }
  EXPECT_EQ(transposed, 7 * model.spec.layer_count());
}

// Matrices of several chunks: 4 MiB are 699 rows of 1500 columns in fp32.
json large_config() {
  json config = test::tiny_config();
  config["hidden_size"] = 1500, config["intermediate_size"] = 1700, config["num_hidden_layers"] = 1;
  config["num_attention_heads"] = 3, config["num_key_value_heads"] = 1, config["head_dim"] = 10;
  return config;
}

TEST(Transposed, EveryElementIsLoadedToItsPlaceInEitherType) {
  const TemporaryDirectory directory;
  for (const DType stored : {DType::kF32, DType::kBF16}) {
    const Model model(directory.path(), test::tiny_config("qwen3"), stored, DType::kF32);
    for (const DType dtype : {DType::kF32, DType::kBF16})
      expect_values(model, load(directory.path(), model, dtype, 3), dtype);
  }
}

TEST(Transposed, AMatrixOfManyChunksIsLoadedByManyThreads) {
  const TemporaryDirectory directory;
  const Model model(directory.path(), large_config(), DType::kF32, DType::kBF16);
  expect_values(model, load(directory.path(), model, DType::kBF16, 4), DType::kBF16);
}

TEST(Transposed, SomeRowsAtATimeAreTheSame) {
  const TemporaryDirectory directory;
  const Model model(directory.path(), test::tiny_config("qwen3"), DType::kBF16, DType::kF32);
  const Memory whole = load(directory.path(), model, DType::kF32, 1);
  Memory pieces = whole;
  for (auto& [name, bytes] : pieces) bytes.assign(bytes.size(), std::byte{0x5A});
  constexpr int64_t kRows = 5;  // across the parts of a tensor
  int64_t most = 0;
  for (int64_t first = 0; first == 0 || first < most; first += kRows) {
    const auto target = [&](size_t, const TensorPlace& place) -> LoadTarget {
      const Parameter& p = place.parameter;
      most = std::max(most, p.rows);
      if (first >= p.rows) return {};
      std::byte* const to = pieces.at(p.name).data() + first * p.columns * 4;
      return {to, DType::kF32, first, std::min(kRows, p.rows - first)};
    };
    load_model(ModelFiles(directory.path()), model.spec, model.layout, target, {.threads = 2});
  }
  EXPECT_TRUE(pieces == whole);
}

// As quantizing asks for a matrix: ranges that begin and end within rows.
TEST(Transposed, AnyRangeOfElementsIsRead) {
  const TemporaryDirectory directory;
  constexpr int64_t kRows = 37, kColumns = 23;
  test::write_tensors(directory / "model.safetensors", {{"w", DType::kBF16, {kColumns, kRows}}});
  const ModelFiles files(directory.path());
  const Parameter parameter{
      .name = "w", .rows = kRows, .columns = kColumns, .parts = {{"w", 0, kRows, true}}};
  const FilePart part = file_part(files, parameter, parameter.parts.front());
  for (const auto& [first, n] : std::vector<std::pair<int64_t, int64_t>>{
           {0, kRows * kColumns}, {0, 1}, {1, 22}, {22, 2}, {23, 23}, {30, 700}, {800, 51}, {850, 1}}) {
    std::vector<float> got(static_cast<size_t>(n) + 2, -7);
    read_part(part, first, n, DType::kF32, reinterpret_cast<std::byte*>(got.data() + 1));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = (first + i) / kColumns, column = (first + i) % kColumns;
      ASSERT_EQ(got[static_cast<size_t>(i) + 1], test::tiny_value("w", column * kRows + row))
          << first << " + " << i;
    }
    EXPECT_EQ(got.front(), -7) << first;
    EXPECT_EQ(got.back(), -7) << first;
  }
}

TEST(Transposed, IsQuantizedLikeTheSameMatrixStoredAsItIs) {
  const TemporaryDirectory directory;
  constexpr int64_t kRows = 48, kColumns = 40;
  std::vector<float> straight(kRows * kColumns), turned(straight.size());
  for (int64_t i = 0; i < std::ssize(straight); ++i) {
    const float value = test::tiny_value("w", i);
    straight[static_cast<size_t>(i)] = value;
    turned[static_cast<size_t>(i % kColumns * kRows + i / kColumns)] = value;
  }
  SafetensorsWriter writer(directory / "model.safetensors",
                           {{"a", DType::kF32, {kRows, kColumns}}, {"b", DType::kF32, {kColumns, kRows}}});
  writer.write("a", std::as_bytes(std::span(straight)));
  writer.write("b", std::as_bytes(std::span(turned)));
  writer.commit();
  const ModelFiles files(directory.path());
  const Parameter a{.name = "a", .rows = kRows, .columns = kColumns, .parts = {{"a", 0, kRows}}};
  const Parameter b{.name = "b", .rows = kRows, .columns = kColumns, .parts = {{"b", 0, kRows, true}}};
  for (const EncodingKind kind : {EncodingKind::kNf4Double, EncodingKind::kInt8}) {
    PieceMemory of_a, of_b;
    encode(matrix_in(of_a, encoding_of(kind), kRows, kColumns), DType::kF32,
           elements_of(files, a, 0, DType::kF32), 2);
    encode(matrix_in(of_b, encoding_of(kind), kRows, kColumns), DType::kF32,
           elements_of(files, b, 0, DType::kF32), 2);
    EXPECT_TRUE(of_a == of_b) << encoding_of(kind).name;
  }
}

// Views of a few rows; the larger model's matrices take several passes over them.
TEST(Transposed, IsWrittenAsItWasReadFromAnyViews) {
  const TemporaryDirectory directory;
  for (const auto& [config, rows] :
       {std::pair(test::tiny_config("qwen3"), 5), std::pair(large_config(), 400)}) {
    const Model model(directory / "base", config, DType::kF32, DType::kF32);
    const Memory memory = load(directory / "base", model, DType::kF32, 2);
    std::vector<std::byte> view;  // only what was asked for stays
    const auto source = [&](size_t, const TensorPlace& place, int64_t row) {
      const Parameter& p = place.parameter;
      const int64_t first = row / rows * rows, count = std::min<int64_t>(rows, p.rows - first);
      const std::byte* const bytes = memory.at(p.name).data() + first * p.columns * 4;
      view.assign(bytes, bytes + count * p.columns * 4);
      return WeightView{view.data(), DType::kF32, first, count};
    };
    export_model(directory / "out", directory / "base", model.layout, source,
                 {.dtype = DType::kF32, .part_bytes = kPartBytes, .replace = true});
    EXPECT_TRUE(test::read_text(directory / "out/model.safetensors") ==
                test::read_text(directory / "base/model.safetensors"));
    export_model(directory / "out", directory / "base", model.layout, source,
                 {.dtype = DType::kBF16, .part_bytes = kPartBytes, .replace = true});
    expect_values(model, load(directory / "out", model, DType::kF32, 1), DType::kF32);
  }
}

}  // namespace
}  // namespace lm
