// Our side of qlora_step.py: how fast do a model's matrices become codes while they are loaded? Matrices of
// bf16 are written to a file first; then each is read from it (out of the page cache) and quantized, and the
// quickest of some rounds counts. One JSON line {encoding, gbps}: bytes of the file per second.
//
//   bench_quantize DIRECTORY [threads = 2] [rounds = 5]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "weights/encode.h"
#include "weights/safetensors.h"

namespace {

using namespace lm;

constexpr int64_t kRows = 4096, kColumns = 4096, kMatrices = 4;  // 128 MiB

std::string write_matrices(const std::string& directory) {
  const std::string path = directory + "/matrices.safetensors";
  std::vector<TensorInfo> infos;
  for (int64_t m = 0; m < kMatrices; ++m)
    infos.push_back({"m" + std::to_string(m), DType::kBF16, {kRows, kColumns}});
  SafetensorsWriter writer(path, infos);
  std::vector<uint16_t> values(kRows * kColumns);
  uint32_t state = 1;
  for (uint16_t& value : values) {
    state = state * 1664525 + 1013904223;
    value =
        static_cast<uint16_t>((state >> 31 << 15) | 0x3C00 | (state >> 8 & 0x1FF));  // about 0.01, both signs
  }
  for (const TensorInfo& info : writer.order()) writer.write(info.name, std::as_bytes(std::span(values)));
  writer.commit();
  return path;
}

double seconds_of(const SafetensorsFile& file, const Encoding& encoding, int threads) {
  std::vector<std::vector<std::byte>> pieces;
  EncodedMatrix matrix{.encoding = &encoding, .rows = kRows, .columns = kColumns};
  for (const int64_t bytes : encoding.piece_bytes(kRows, kColumns))
    pieces.emplace_back(static_cast<size_t>(bytes));
  for (size_t k = 0; k < pieces.size(); ++k)
    matrix.pieces[k] = pieces[k].data(), matrix.bytes[k] = std::ssize(pieces[k]);
  const double start = monotonic_seconds();
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto elements = [&](int64_t first, int64_t n, std::byte* to) {
      file.read(entry, first * 2, {to, static_cast<size_t>(n * 2)});
    };
    encode(matrix, DType::kBF16, elements, threads);
  }
  return monotonic_seconds() - start;
}

}  // namespace

int main(int count, char** words) {
  if (count < 2) {
    std::fprintf(stderr, "usage: bench_quantize DIRECTORY [threads] [rounds]\n");
    return 2;
  }
  const int threads = count > 2 ? std::atoi(words[2]) : 2, rounds = count > 3 ? std::atoi(words[3]) : 5;
  try {
    const SafetensorsFile file(write_matrices(words[1]));
    for (const EncodingKind kind : {EncodingKind::kNf4Double, EncodingKind::kFp4, EncodingKind::kInt8}) {
      double best = 1e9;
      for (int round = 0; round < rounds; ++round)
        best = std::min(best, seconds_of(file, encoding_of(kind), threads));
      std::printf("{\"encoding\": \"%s\", \"gbps\": %.3f}\n", encoding_of(kind).name,
                  static_cast<double>(kMatrices * kRows * kColumns * 2) / best / 1e9);
    }
    return 0;
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  }
}
