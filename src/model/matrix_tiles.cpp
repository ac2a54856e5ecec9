#include "model/matrix_tiles.h"

namespace lm {

int64_t tile_of(const Context& context, int64_t all, int64_t elements) {
  const int64_t fit = tile_elements(context.device) / elements / kScaleBlock * kScaleBlock;
  const int64_t most = std::max(fit, kScaleBlock);
  const int64_t tiles = (all + most - 1) / most, each = (all + tiles - 1) / tiles;
  return std::min(all, (each + kScaleBlock - 1) / kScaleBlock * kScaleBlock);
}

void materialise_part(const Context& context, const Param& param, const Param::EncodedPart& part,
                      const View& out, int64_t first) {
  context.kernels.materialise({.kind = param.encoding,
                               .pieces = part.pieces,
                               .out = out,
                               .first = first,
                               .columns = param.weight.columns},
                              context.stream);
}

void materialise_columns(const Context& context, const Param& param, const View& out, int64_t first) {
  int64_t row = 0;
  for (const Param::EncodedPart& part : param.parts) {
    if (part.rows == 0) break;
    materialise_part(context, param, part, out.row_range(row, part.rows), first);
    row += part.rows;
  }
}

}  // namespace lm
