#include "weights/added_rows.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/error.h"
#include "weights/base_copies.h"
#include "weights/convert.h"
#include "weights/read_part.h"

namespace lm {
namespace {

constexpr int64_t kElementsAtOnce = int64_t{1} << 20;

// A matrix of some files.
struct Matrix {
  ModelFiles::Tensor tensor;
  int64_t rows = 0, columns = 0;

  FilePart part() const {
    return {.entry = tensor.entry, .file = tensor.file, .rows = rows, .columns = columns};
  }
};

std::optional<Matrix> find_matrix(const ModelFiles& files, const std::string& name) {
  const auto tensor = files.find(name);
  if (!tensor || tensor->entry->shape.size() != 2 || !is_weight_type(tensor->entry->dtype))
    return std::nullopt;
  return Matrix{*tensor, tensor->entry->shape[0], tensor->entry->shape[1]};
}

// The embedding, and the head where the files have one. What is not of the model's shape is left to whoever
// loads it.
std::vector<std::string> matrix_paths(const ModelFiles& base, const ModelSpec& spec) {
  std::vector<std::string> out;
  for (const char* const path : {spec.names.embedding, spec.names.head}) {
    if (path == spec.names.head && spec.scores()) continue;
    const auto matrix = find_matrix(base, path + std::string(".weight"));
    if (matrix && matrix->columns == spec.hidden) out.emplace_back(path);
  }
  return out;
}

// The mean of rows [0, count), summed in fp64 in their order.
std::vector<float> mean_row(const Matrix& matrix, int64_t count) {
  std::vector<double> sums(static_cast<size_t>(matrix.columns));
  const int64_t together = std::max<int64_t>(kElementsAtOnce / matrix.columns, 1);
  std::vector<float> rows(static_cast<size_t>(std::min(together, count) * matrix.columns));
  for (int64_t row = 0; row < count; row += together) {
    const int64_t n = std::min(together, count - row);
    read_part(matrix.part(), row * matrix.columns, n * matrix.columns, DType::kF32,
              reinterpret_cast<std::byte*>(rows.data()));
    for (int64_t r = 0; r < n; ++r) {
      const float* const from = rows.data() + r * matrix.columns;
      for (size_t c = 0; c < sums.size(); ++c) sums[c] += from[c];
    }
  }
  std::vector<float> out(sums.size());
  for (size_t c = 0; c < out.size(); ++c)
    out[c] = static_cast<float>(sums[c] / static_cast<double>(std::max<int64_t>(count, 1)));
  return out;
}

std::vector<float> first_values(const Matrix& matrix, const AddedRows& added) {
  if (added.like < 0) return mean_row(matrix, std::min(added.first, matrix.rows));
  LM_CHECK(added.like < matrix.rows, "the token whose row is copied has one");
  std::vector<float> out(static_cast<size_t>(matrix.columns));
  read_part(matrix.part(), added.like * matrix.columns, matrix.columns, DType::kF32,
            reinterpret_cast<std::byte*>(out.data()));
  return out;
}

// What has the rows of a matrix: itself, or the copy of an adapter. Rows that neither has are made.
struct RowSource {
  const Matrix& matrix;
  const Matrix* copy = nullptr;
  bool remakes = false;  // new tokens' rows are made even where the matrix has rows there
};

void write_rows(const RowSource& source, const AddedRows& added, SafetensorsWriter& writer) {
  const Matrix& matrix = source.matrix;
  const std::string& name = matrix.tensor.entry->name;
  const DType type = matrix.tensor.entry->dtype;
  const std::vector<float> fresh =
      source.copy == nullptr ? first_values(matrix, added) : std::vector<float>();
  std::vector<std::byte> row(static_cast<size_t>(matrix.columns) * dtype_size(type));
  for (int64_t r = added.first; r < added.rows; ++r) {
    const bool own = r < matrix.rows && (!source.remakes || r >= added.end);
    if (source.copy != nullptr || own) {
      const Matrix& from = source.copy != nullptr ? *source.copy : matrix;
      read_part(from.part(), r * matrix.columns, matrix.columns, type, row.data());
    } else {
      convert_elements(reinterpret_cast<const std::byte*>(fresh.data()), DType::kF32, row.data(), type,
                       matrix.columns);
    }
    writer.write(name, row);
  }
}

// The copy of that matrix in an adapter's file.
std::optional<Matrix> find_copy(const ModelFiles& adapter, const std::string& path) {
  for (const std::string& name : names_of_copies(path))
    if (auto found = find_matrix(adapter, name)) return found;
  return std::nullopt;
}

void write_file(const ModelFiles& base, const ModelFiles* adapter, const ModelSpec& spec,
                const AddedRows& added, const std::string& path) {
  LM_CHECK(added.first < added.end && added.end <= added.rows, "rows of new tokens");
  std::vector<TensorInfo> infos;
  std::vector<std::string> paths = matrix_paths(base, spec);
  for (const std::string& module : paths) {
    const Matrix matrix = find_matrix(base, module + ".weight").value();
    infos.push_back(
        {matrix.tensor.entry->name, matrix.tensor.entry->dtype, {added.rows - added.first, matrix.columns}});
  }
  SafetensorsWriter writer(path, infos, {{"format", "pt"}, {"rows", std::to_string(added.rows)}});
  for (const TensorInfo& info : writer.order()) {
    const auto module = std::ranges::find_if(
        paths, [&](const std::string& one) { return canonical_name(info.name).text == one + ".weight"; });
    const Matrix matrix = find_matrix(base, *module + ".weight").value();
    // A tied head that the files have all the same stays equal to the embedding.
    const std::string of_copy = spec.tied ? spec.names.embedding : *module;
    const std::optional<Matrix> copy = adapter == nullptr ? std::nullopt : find_copy(*adapter, of_copy);
    const bool usable = copy && copy->rows >= added.rows && copy->columns == matrix.columns;
    write_rows({matrix, usable ? &*copy : nullptr, adapter == nullptr}, added, writer);
  }
  writer.commit();
}

}  // namespace

void write_added_rows(const ModelFiles& base, const ModelSpec& spec, const AddedRows& added,
                      const std::string& path) {
  write_file(base, nullptr, spec, added, path);
}

void copy_added_rows(const ModelFiles& base, const ModelFiles& adapter, const ModelSpec& spec,
                     const AddedRows& added, const std::string& path) {
  write_file(base, &adapter, spec, added, path);
}

int64_t rows_of_copies(const ModelFiles& adapter, const ModelSpec& spec) {
  const std::optional<Matrix> copy = find_copy(adapter, spec.names.embedding);
  return copy && copy->columns == spec.hidden ? copy->rows : 0;
}

}  // namespace lm
