// Frozen matrices as codes: the same bits with every instruction set and number of threads, and what they
// stand for is near. (tests/weights/quantize_test.py holds the bits against bitsandbytes.)
#include "base/error.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr EncodingKind kKinds[] = {EncodingKind::kNf4, EncodingKind::kFp4, EncodingKind::kNf4Double,
                                   EncodingKind::kFp4Double, EncodingKind::kInt8};

// Bytes as fp32 numbers, to be compared bit for bit.
Values bytes_as_values(const std::vector<uint8_t>& bytes) {
  Values out(DType::kF32, static_cast<int64_t>(bytes.size() + 3) / 4);
  std::memset(out.data(), 0, static_cast<size_t>(out.size()) * 4);
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// Some rows or columns of a matrix that `whole` makes have its bits.
void expect_tile(const Kernels& k, StreamView stream, const Materialise& whole, int64_t row, int64_t rows,
                 int64_t column, int64_t columns) {
  Values tile(whole.out.dtype, rows * columns);
  Materialise m = whole;
  m.out = view_of(tile.data(), whole.out.dtype, rows, columns);
  m.first = row * whole.out.columns + column, m.columns = whole.out.columns;
  k.materialise(m, stream);
  const View from = whole.out.row_range(row, rows).column_range(column, columns);
  const auto size = static_cast<size_t>(columns) * dtype_size(from.dtype);
  for (int64_t r = 0; r < rows; ++r) {
    ASSERT_EQ(std::memcmp(m.out.row_range(r, 1).data, from.row_range(r, 1).data, size), 0)
        << "rows " << row << " + " << rows << ", columns " << column << " + " << columns;
  }
}

// Where a multiple of 64 elements begins a row, or a column of all rows; of int8 anywhere.
void expect_tiles(const Kernels& k, StreamView stream, const Materialise& whole) {
  const int64_t rows = whole.out.rows, columns = whole.out.columns;
  const bool eight = whole.kind == EncodingKind::kInt8;
  const int64_t row_step = eight ? 7 : 64, column_step = eight ? 17 : 64;
  for (int64_t row = 0; row < rows; row += row_step)
    expect_tile(k, stream, whole, row, std::min(row_step, rows - row), 0, columns);
  if (!eight && columns % kScaleBlock != 0) return;
  for (int64_t column = 0; column < columns; column += column_step)
    expect_tile(k, stream, whole, 0, rows, column, std::min(column_step, columns - column));
}

// Codes and scales of x [rows, columns], and its values in `type` again.
Outputs there_and_back(const Kernels& k, StreamView stream, EncodingKind kind, const Values& x, int64_t rows,
                       int64_t columns, DType type) {
  const int64_t n = rows * columns;
  const bool eight = kind == EncodingKind::kInt8;
  std::vector<uint8_t> codes(static_cast<size_t>(eight ? n : (n + 1) / 2));
  std::vector<float> scales(static_cast<size_t>(eight ? rows : (n + kScaleBlock - 1) / kScaleBlock));
  k.quantize({.kind = kind,
              .x = x.data(),
              .elements = n,
              .columns = columns,
              .codes = codes.data(),
              .scales = scales.data(),
              .dtype = x.dtype()},
             stream);
  std::vector<uint8_t> scale_codes(scales.size());
  std::vector<float> nested(1 + (scales.size() + kNestedBlock - 1) / kNestedBlock);
  Values out(type, n);
  Materialise m{.kind = kind, .out = view_of(out.data(), type, rows, columns)};
  m.pieces[0] = reinterpret_cast<const std::byte*>(codes.data());
  m.pieces[1] = reinterpret_cast<const std::byte*>(scales.data());
  if (has_double_scales(kind)) {
    quantize_scales(scales, scale_codes.data(), nested.data());
    m.pieces[1] = reinterpret_cast<const std::byte*>(scale_codes.data());
    m.pieces[2] = reinterpret_cast<const std::byte*>(nested.data());
  }
  k.materialise(m, stream);
  expect_tiles(k, stream, m);
  Values of_scales(DType::kF32, std::ssize(scales));
  std::memcpy(of_scales.data(), scales.data(), scales.size() * 4);
  return {bytes_as_values(codes), of_scales, out};
}

TEST(Encoded, HasTheSameBitsOnEveryLevelAndIsNear) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1},   {1, 63}, {1, 64},   {3, 43},    {7, 129}, {40, 48},
                                               {64, 64}, {5, 16}, {577, 64}, {300, 577}, {65, 192}};
  for (const EncodingKind kind : kKinds) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      for (const auto& [rows, columns] : sizes) {
        SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + " " + dtype_name(type) + " " +
                     std::to_string(rows) + " x " + std::to_string(columns));
        const Values x = Values::random(type, rows * columns, 5, 0.02);
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          return there_and_back(k, stream, kind, x, rows, columns, type);
        });
        double most = 0, error = 0;
        for (int64_t i = 0; i < x.size(); ++i) {
          most = std::max(most, std::abs(x[i]));
          error = std::max(error, std::abs(x[i] - got[2][i]));
        }
        // Half of the widest gap between codes, and what double scales and rounding lose.
        EXPECT_LE(error, most * (kind == EncodingKind::kInt8 ? 0.008 : is_fp4(kind) ? 0.18 : 0.16));
        EXPECT_GT(x.size() > 1000 ? error : 1, 0);
      }
    }
  }
}

TEST(Encoded, ZerosStayZerosWhateverIsBesideThem) {
  for (const EncodingKind kind : kKinds) {
    Values x(DType::kF32, 3 * 64);
    for (int64_t i = 0; i < x.size(); ++i) x.set(i, i < 64 || i % 5 == 0 ? 0 : i % 2 == 0 ? 1e-3 : -4);
    const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
      return there_and_back(k, stream, kind, x, 3, 64, DType::kF32);
    });
    for (int64_t i = 0; i < x.size(); ++i) EXPECT_TRUE(x[i] != 0 || got[2][i] == 0) << i;
  }
}

TEST(Encoded, RefusesWhatHasNoCodes) {
  Values out(DType::kF32, 64);
  Materialise m{.kind = EncodingKind::kPlain, .out = view_of(out.data(), DType::kF32, 1, 64)};
  EXPECT_THROW(kernels(DeviceType::kCpu).materialise(m, {DeviceType::kCpu, nullptr, 1}), Error);
}

}  // namespace
}  // namespace lm
