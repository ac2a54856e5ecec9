#include "model/mixers/mixer.h"

namespace lm {

View project_output(const Context& context, const Linear& linear, const DeviceBatch& batch, const View& x,
                    LinearSaved& saved, const MixerOutput& output) {
  switch (output.kind) {
    case MixerOutput::Kind::kNone:  // what an adapter's backward wants is computed all the same
      linear_save(context, linear, batch, x, saved);
      return {};
    case MixerOutput::Kind::kAlone: {
      const View y = context.tensor(x.rows, linear.weight.weight.rows);
      linear_forward(context, linear, batch, {x, y}, saved);
      return y;
    }
    case MixerOutput::Kind::kAdded:
      linear_forward(context, linear, batch, {x, output.sum, output.residual}, saved);
      return output.sum;
  }
  return {};
}

}  // namespace lm
