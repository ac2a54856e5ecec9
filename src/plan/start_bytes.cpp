#include "plan/start_bytes.h"

#include <algorithm>

namespace lm {

int64_t loftq_bytes(const ModelLayout& layout) {
  int64_t most = 0;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      if (!place.encoded()) continue;
      const size_t pieces = place.pieces.size() / place.parameter.parts.size();
      for (size_t part = 0; part < place.parameter.parts.size(); ++part) {
        int64_t bytes = place.parameter.parts[part].rows * place.parameter.columns * 4;
        for (size_t i = 0; i < pieces; ++i) bytes += place.pieces[part * pieces + i].bytes;
        most = std::max(most, bytes);
      }
    }
  }
  return most;
}

int64_t principal_pair_bytes(const ModelLayout& layout) {
  int64_t most = 0;
  for (const BlockLayout& block : layout.blocks) {
    for (const Trainable& start : block.starts) {
      const TensorPlace& weight = block.tensors[start.owner];
      const int64_t rows = weight.parameter.parts[start.part].rows, columns = weight.parameter.columns;
      int64_t bytes = rows * columns * 4;
      if (weight.encoded()) {
        bytes *= 2;
        for (const int64_t piece : weight.encoding().piece_bytes(rows, columns)) bytes += piece;
      }
      most = std::max(most, bytes);
    }
  }
  return most;
}

}  // namespace lm
