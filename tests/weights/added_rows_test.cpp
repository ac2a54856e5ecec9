// Rows of new tokens beside a model's files: what they begin with, and that whoever reads a matrix reads it
// whole.
#include "weights/added_rows.h"

#include "base/host_device.h"
#include "tests/weights/support.h"
#include "weights/adapter_files.h"
#include "weights/base_copies.h"
#include "weights/loader.h"
#include "weights/read_part.h"

namespace lm {
namespace {

namespace fs = std::filesystem;
using test::contains;
using test::refusal;
using test::TemporaryDirectory;

constexpr int64_t kRows = 33, kColumns = 12;
const std::string kTable = "model.embed_tokens.weight", kHead = "lm_head.weight";

std::vector<float> matrix_of(const ModelFiles& files, const std::string& name) {
  const ModelFiles::Tensor tensor = files.find(name).value();
  const std::vector<int64_t>& shape = tensor.entry->shape;
  std::vector<float> out(static_cast<size_t>(shape[0] * shape[1]));
  read_part({.entry = tensor.entry, .file = tensor.file, .rows = shape[0], .columns = shape[1]}, 0,
            std::ssize(out), DType::kF32, reinterpret_cast<std::byte*>(out.data()));
  return out;
}

std::vector<float> row_of(const std::vector<float>& matrix, int64_t row) {
  return {matrix.begin() + row * kColumns, matrix.begin() + (row + 1) * kColumns};
}

std::vector<float> mean_of(const std::vector<float>& matrix, int64_t rows) {
  std::vector<float> out;
  for (int64_t c = 0; c < kColumns; ++c) {
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += matrix[static_cast<size_t>(r * kColumns + c)];
    out.push_back(static_cast<float>(sum / static_cast<double>(rows)));
  }
  return out;
}

// A tiny model, and beside it a directory of links to its files.
struct Model {
  explicit Model(DType dtype, bool tied = false)
      : spec(test::write_tiny_model(directory / "base", test::tiny_config("llama", tied), dtype)),
        base(directory / "base") {
    fs::create_directories(directory / "grown");
    fs::create_symlink(directory / "base/model.safetensors", directory / "grown/model.safetensors");
  }
  std::string path() const { return directory / "grown/" + kAddedRows; }
  ModelFiles grown() const { return ModelFiles(directory / "grown"); }

  TemporaryDirectory directory;
  ModelSpec spec;
  ModelFiles base;
};

TEST(AddedRows, BeginWithTheMeanAndFollowTheModelsOwn) {
  const Model model(DType::kF32);
  write_added_rows(model.base, model.spec, {.first = kRows, .end = kRows + 2, .rows = kRows + 2},
                   model.path());
  const ModelFiles grown = model.grown();
  for (const std::string& name : {kTable, kHead}) {
    const std::vector<float> before = matrix_of(model.base, name), after = matrix_of(grown, name);
    EXPECT_EQ(grown.find(name)->entry->shape, (std::vector<int64_t>{kRows + 2, kColumns}));
    EXPECT_TRUE(std::equal(before.begin(), before.end(), after.begin()));
    EXPECT_EQ(row_of(after, kRows), mean_of(before, kRows));
    EXPECT_EQ(row_of(after, kRows + 1), mean_of(before, kRows));
  }
  // Ranges across the border and behind it.
  const ModelFiles::Tensor tensor = grown.find(kTable).value();
  const std::vector<float> whole = matrix_of(grown, kTable);
  for (const int64_t first : {kRows * kColumns - 10, kRows * kColumns + 1}) {
    std::vector<float> some(std::min<int64_t>(30, std::ssize(whole) - first));
    tensor.file->read(*tensor.entry, first * 4, std::as_writable_bytes(std::span(some)));
    EXPECT_TRUE(std::equal(some.begin(), some.end(), whole.begin() + first)) << first;
  }
  ModelSpec more = model.spec;
  more.vocab += 2;
  EXPECT_NO_THROW(check_model_files(grown, more));
  EXPECT_EQ(grown.names().back(), kAddedRows);
}

TEST(AddedRows, TakeRowsThatNoTokenHasAndLeaveTheOthers) {
  const Model model(DType::kBF16);
  write_added_rows(model.base, model.spec, {.first = 20, .end = 23, .rows = kRows, .like = 4}, model.path());
  const std::vector<float> before = matrix_of(model.base, kHead), after = matrix_of(model.grown(), kHead);
  for (int64_t row = 0; row < kRows; ++row)
    EXPECT_EQ(row_of(after, row), row_of(before, row >= 20 && row < 23 ? 4 : row)) << row;
  const Model mean(DType::kBF16);
  write_added_rows(mean.base, mean.spec, {.first = 20, .end = 23, .rows = kRows}, mean.path());
  std::vector<float> expected = mean_of(before, 20);
  for (float& value : expected) value = to_float(to_bf16(value));
  EXPECT_EQ(row_of(matrix_of(mean.grown(), kHead), 22), expected) << "of the tokens alone";
}

TEST(AddedRows, OfATiedModelAreTheEmbeddings) {
  const Model model(DType::kF32, true);
  write_added_rows(model.base, model.spec, {.first = kRows, .end = kRows + 1, .rows = kRows + 1},
                   model.path());
  EXPECT_EQ(SafetensorsFile(model.path()).entries().size(), 1U);
}

TEST(AddedRows, OfAnAdapterAreThoseOfItsCopies) {
  const Model model(DType::kF32);
  const std::string adapter = model.directory / "adapter";
  fs::create_directories(adapter);
  const std::string copy = "base_model.model.model.embed_tokens.token_adapter.base_layer.weight";
  test::write_tensors(adapter + "/" + kAdapterWeights, {{copy, DType::kF32, {kRows + 3, kColumns}}});
  const ModelFiles files(adapter, kAdapterWeights);
  EXPECT_EQ(rows_of_copies(files, model.spec), kRows + 3);
  copy_added_rows(model.base, files, model.spec, {.first = kRows, .end = kRows + 3, .rows = kRows + 3},
                  model.path());
  const std::vector<float> copied = matrix_of(files, copy), table = matrix_of(model.grown(), kTable),
                           head = matrix_of(model.grown(), kHead);
  for (int64_t row = kRows; row < kRows + 3; ++row) {
    EXPECT_EQ(row_of(table, row), row_of(copied, row));
    EXPECT_EQ(row_of(head, row), mean_of(matrix_of(model.base, kHead), kRows)) << "which it has no copy of";
  }
}

TEST(AddedRows, OfATiedHeadInTheFilesAreTheEmbeddings) {
  const Model model(DType::kF32, true);
  const std::string base = model.directory / "base/model.safetensors";
  const std::vector<float> table = matrix_of(model.base, kTable);
  std::vector<TensorInfo> infos = test::tiny_tensors(model.spec, DType::kF32);
  infos.push_back({kHead, DType::kF32, {kRows, kColumns}});
  SafetensorsWriter writer(base, infos);
  for (const TensorInfo& tensor : writer.order()) {
    if (tensor.name == kHead || tensor.name == kTable)
      writer.write(tensor.name, std::as_bytes(std::span(table)));
    else
      writer.write(tensor.name, test::tiny_bytes(tensor));
  }
  writer.commit();
  const std::string adapter = model.directory / "adapter";
  fs::create_directories(adapter);
  test::write_tensors(
      adapter + "/" + kAdapterWeights,
      {{"base_model.model.model.embed_tokens.base_layer.weight", DType::kF32, {kRows + 2, kColumns}}});
  copy_added_rows(ModelFiles(model.directory / "base"), ModelFiles(adapter, kAdapterWeights), model.spec,
                  {.first = kRows, .end = kRows + 2, .rows = kRows + 2}, model.path());
  const ModelFiles grown = model.grown();
  ASSERT_TRUE(grown.find(kHead));
  EXPECT_EQ(matrix_of(grown, kHead), matrix_of(grown, kTable));
}

TEST(AddedRows, OfAnAdapterWithoutCopiesAreTheModelsOwn) {
  const Model model(DType::kF32);
  const std::string adapter = model.directory / "adapter";
  fs::create_directories(adapter);
  test::write_tensors(adapter + "/" + kAdapterWeights, {{"other", DType::kF32, {2, kColumns}}});
  copy_added_rows(model.base, ModelFiles(adapter, kAdapterWeights), model.spec,
                  {.first = 20, .end = 23, .rows = kRows}, model.path());
  EXPECT_EQ(matrix_of(model.grown(), kTable), matrix_of(model.base, kTable));
}

TEST(AddedRows, ThatDoNotFitTheModelAreRefused) {
  const Model model(DType::kF32);
  const auto with = [&](std::vector<TensorInfo> tensors, const std::string& rows) {
    SafetensorsWriter writer(model.path(), std::move(tensors), {{"rows", rows}});
    for (const TensorInfo& tensor : writer.order()) writer.write(tensor.name, test::tiny_bytes(tensor));
    writer.commit();
    return refusal([&] { model.grown(); });
  };
  EXPECT_TRUE(contains(with({{"other", DType::kF32, {2, kColumns}}}, "35"), "is no tensor of the model"));
  for (const TensorInfo& wrong :
       {TensorInfo{kTable, DType::kF32, {2, kColumns - 1}}, TensorInfo{kTable, DType::kBF16, {2, kColumns}},
        TensorInfo{kTable, DType::kF32, {1, kColumns}}, TensorInfo{kTable, DType::kF32, {40, kColumns}}})
    EXPECT_TRUE(contains(with({wrong}, "35"), "does not continue"));
  EXPECT_TRUE(contains(with({{kTable, DType::kF32, {2, kColumns}}}, "no"), "does not continue"));
}

TEST(BaseCopies, AllOfPeftsNamesOfAGrownMatrixAreKnown) {
  const TemporaryDirectory directory;
  const ModelSpec base = parse_model_spec(test::tiny_config("llama", true).dump(), "config.json");
  const std::string table = "base_model.model.model.embed_tokens", head = "base_model.model.lm_head";
  std::vector<TensorInfo> tensors;
  for (const char* end : {".token_adapter.base_layer.weight", ".token_adapter.trainable_tokens_delta"})
    for (const std::string& module : {table, head})
      tensors.push_back({module + end, DType::kF32, {2, kColumns}});
  test::write_tensors(directory / kAdapterWeights, tensors);
  const ModelFiles files(directory.path(), kAdapterWeights);
  const auto copies = base_copies(files, base, [&](const std::string& name) {
    return name == table + ".token_adapter.trainable_tokens_delta";
  });
  ASSERT_EQ(copies.size(), 3U);
  EXPECT_TRUE(std::ranges::any_of(copies, [&](const BaseCopy& copy) {
    return copy.name == head + ".token_adapter.trainable_tokens_delta" &&
           copy.of_adapter == table + ".token_adapter.trainable_tokens_delta";
  }));
}

}  // namespace
}  // namespace lm
