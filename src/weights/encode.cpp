#include "weights/encode.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "kernels/cpu_features.h"
#include "kernels/kernels.h"

namespace lm {
namespace {

constexpr int64_t kChunkElements = int64_t{1} << 18;  // per thread: 1 MiB of fp32

StreamView here(int threads) {
  return {DeviceType::kCpu, nullptr, threads};
}

// Elements quantized at once: whole blocks, or whole rows.
int64_t chunk_of(const EncodedMatrix& matrix) {
  if (matrix.encoding->kind != EncodingKind::kInt8) return kChunkElements;
  return std::max<int64_t>(kChunkElements / matrix.columns, 1) * matrix.columns;
}

}  // namespace

void for_each_range(int threads, int64_t n, int64_t grain,
                    const std::function<void(int64_t, int64_t)>& body) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;  // guards error
  std::exception_ptr error;
  const auto work = [&] {
    for (int64_t begin = next.fetch_add(grain); begin < n; begin = next.fetch_add(grain)) {
      try {
        body(begin, std::min(begin + grain, n));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next = n;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    const int64_t most = std::min<int64_t>(threads, (n + grain - 1) / grain);
    for (int64_t t = 1; t < most; ++t) others.emplace_back(work);
    work();
  }
  if (error) std::rethrow_exception(error);
}

EncodedMatrix matrix_in(PieceMemory& memory, const Encoding& encoding, int64_t rows, int64_t columns) {
  EncodedMatrix matrix{.encoding = &encoding, .rows = rows, .columns = columns};
  size_t k = 0;
  for (const int64_t bytes : encoding.piece_bytes(rows, columns)) {
    memory[k].resize(static_cast<size_t>(bytes));
    matrix.pieces[k] = memory[k].data();
    matrix.bytes[k++] = bytes;
  }
  return matrix;
}

void encode(const EncodedMatrix& matrix, DType dtype, const MatrixElements& elements, int threads) {
  const EncodingKind kind = matrix.encoding->kind;
  const int64_t n = matrix.rows * matrix.columns,
                block = kind == EncodingKind::kInt8 ? matrix.columns : kScaleBlock;
  const bool twice = has_double_scales(kind);
  std::vector<float> all(twice ? static_cast<size_t>((n + block - 1) / block) : 0);
  auto* const codes = reinterpret_cast<uint8_t*>(matrix.pieces[0]);
  float* const scales = twice ? all.data() : reinterpret_cast<float*>(matrix.pieces[1]);
  const Kernels& cpu = cpu_kernels(cpu_level());
  for_each_range(threads, n, chunk_of(matrix), [&](int64_t begin, int64_t end) {
    static thread_local std::vector<std::byte> buffer;
    buffer.resize(static_cast<size_t>(end - begin) * dtype_size(dtype));
    elements(begin, end - begin, buffer.data());
    cpu.quantize({.kind = kind,
                  .x = buffer.data(),
                  .elements = end - begin,
                  .columns = matrix.columns,
                  .codes = codes + (kind == EncodingKind::kInt8 ? begin : begin / 2),
                  .scales = scales + begin / block,
                  .dtype = dtype},
                 here(1));
  });
  if (twice)
    quantize_scales(all, reinterpret_cast<uint8_t*>(matrix.pieces[1]),
                    reinterpret_cast<float*>(matrix.pieces[2]));
}

void decode(const EncodedMatrix& matrix, float* out, int threads) {
  Materialise m{.kind = matrix.encoding->kind, .out = view_of(out, DType::kF32, matrix.rows, matrix.columns)};
  std::copy(matrix.pieces.begin(), matrix.pieces.end(), m.pieces.begin());
  cpu_kernels(cpu_level()).materialise(m, here(threads));
}

void write_encoded(const TensorPlace& place, size_t part, std::byte* memory, Staging* staging,
                   const std::function<void(const EncodedMatrix&)>& fill) {
  const size_t count = place.pieces.size() / place.parameter.parts.size();
  const std::span pieces = std::span(place.pieces).subspan(part * count, count);
  const int64_t first = pieces.front().offset, bytes = pieces.back().offset + pieces.back().bytes - first;
  std::byte* const to = memory + (first - place.offset);
  std::vector<std::byte> own(staging != nullptr ? static_cast<size_t>(bytes) : 0);
  EncodedMatrix matrix{.encoding = &place.encoding(),
                       .rows = place.parameter.parts[part].rows,
                       .columns = place.parameter.columns};
  for (size_t k = 0; k < count; ++k) {
    matrix.pieces[k] = (staging != nullptr ? own.data() : to) + (pieces[k].offset - first);
    matrix.bytes[k] = pieces[k].bytes;
  }
  fill(matrix);
  if (staging == nullptr) return;
  staging->write(to, bytes, [&](int64_t offset, std::span<std::byte> out) {
    std::memcpy(out.data(), own.data() + offset, out.size());
  });
}

}  // namespace lm
