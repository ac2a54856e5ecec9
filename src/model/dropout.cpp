#include "model/dropout.h"

namespace lm {
namespace {

Dropout arguments(const DropoutMask& mask, const DeviceBatch& batch, const View& x, const View& out) {
  return {.x = x.data,
          .out = out.data,
          .sample = batch.sample,
          .position = batch.position,
          .rows = batch.tokens,
          .width = x.columns,
          .key = mask.key,
          .p = mask.p,
          .dtype = x.dtype};
}

}  // namespace

void drop(const Context& context, const DropoutMask& mask, const DeviceBatch& batch, const View& x,
          const View& out) {
  context.kernels.dropout(arguments(mask, batch, x, out), context.stream);
  zero_surplus(context, out, batch.tokens);
}

void add_dropped(const Context& context, const DropoutMask& mask, const DeviceBatch& batch, const View& x,
                 const View& out) {
  Dropout dropout = arguments(mask, batch, x, out);
  dropout.accumulate = true;
  context.kernels.dropout(dropout, context.stream);
}

}  // namespace lm
