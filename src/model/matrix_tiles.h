// A quantized matrix as its elements, all of it or tile by tile, in the arena: for products, which take
// elements.
#pragma once

#include <algorithm>

#include "model/linear.h"

namespace lm {

// Of an encoded matrix at most so many elements are materialised at once, or 64 rows or columns where that is
// more: a second copy only of what is smaller. On a CPU a tile stays in the cache until the product has read
// it; a GPU's product is fast when it is wide.
constexpr int64_t tile_elements(DeviceType device) {
  return int64_t{1} << (device == DeviceType::kCpu ? 20 : 24);
}

// How many of `all` rows (or columns) of so many elements are materialised at once: equal tiles, but for the
// last, of a multiple of 64.
int64_t tile_of(const Context& context, int64_t all, int64_t elements);

// Into `out`, which is contiguous, elements of a part from `first` on.
void materialise_part(const Context& context, const Param& param, const Param::EncodedPart& part,
                      const View& out, int64_t first);
// Some columns of all parts; of a whole matrix its shape.
void materialise_columns(const Context& context, const Param& param, const View& out, int64_t first = 0);

// Calls body(rows, first row) for the whole matrix where it lies, or for tiles of its rows, one at a time in
// the arena: all of it in one product where it is no larger than a tile.
template <class Body>
void each_row_tile(const Context& context, const Param& param, const Body& body) {
  if (param.encoding == EncodingKind::kPlain) return body(param.weight, 0);
  const int64_t columns = param.weight.columns;
  if (param.weight.elements() <= tile_elements(context.device)) {
    const ArenaFrame frame(context.arena);
    const View out = context.like(param.weight);
    materialise_columns(context, param, out, 0);
    return body(out, 0);
  }
  int64_t row = 0;
  for (const Param::EncodedPart& part : param.parts) {
    if (part.rows == 0) break;
    const int64_t tile = tile_of(context, part.rows, columns);
    for (int64_t first = 0; first < part.rows; first += tile) {
      const ArenaFrame frame(context.arena);
      const View out = context.tensor(std::min(tile, part.rows - first), columns, param.weight.dtype);
      materialise_part(context, param, part, out, first * columns);
      body(out, row + first);
    }
    row += part.rows;
  }
}

// The same for tiles of its columns. (4-bit codes of rows that are no multiple of 64 long make one tile:
// their blocks straddle rows.)
template <class Body>
void each_column_tile(const Context& context, const Param& param, const Body& body) {
  if (param.encoding == EncodingKind::kPlain) return body(param.weight, 0);
  const int64_t rows = param.weight.rows, columns = param.weight.columns;
  const bool whole_blocks = !is_four_bit(param.encoding) || columns % kScaleBlock == 0;
  const int64_t tile = whole_blocks ? tile_of(context, columns, rows) : columns;
  for (int64_t first = 0; first < columns; first += tile) {
    const ArenaFrame frame(context.arena);
    const View out = context.tensor(rows, std::min(tile, columns - first), param.weight.dtype);
    materialise_columns(context, param, out, first);
    body(out, first);
  }
}

}  // namespace lm
