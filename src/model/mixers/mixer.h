// What the mixers of a block share: where a mixer's output goes in the forward pass, and where its input
// comes from in the backward pass. A mixer is a struct of bound parameters (table.h lists them) with these
// members, which each declares for itself, since a block calls it by its type:
//
// - `Saved allocate(context, rows)`: what backward needs of the forward pass, in the arena.
//
// - `kKeptWithAttention`: whether train.recompute = "attention" keeps that; false: backward begins with
//   forward.
//
// - `View forward(context, batch, x, saved, output)`: of x [T, H]; returns the output, undefined where it
//   goes nowhere.
//
// - `void backward(context, batch, input, saved, dy, first)`: from dy [T, H] to the parameters' gradients and
//   the input's. `saved` is used up. `first`: the gradients are overwritten.
//
// - `static void visit(self, visitor)`: calls visitor(name, part) for each of its linear layers (Linear),
//   norms (Norm), prefixes (Prefix), buffers (Buffer), sinks (Sinks) and factors (Factors).
#pragma once

#include <optional>

#include "model/norm.h"

namespace lm {

// Where a mixer's output [T, H] goes.
struct MixerOutput {
  enum class Kind : uint8_t {
    kNone,   // nowhere: only what backward needs is computed
    kAlone,  // into memory of its own, in the arena
    kAdded,  // into `sum`, in the last product: sum = output (+ residual, rounded once); these may be one
  };
  Kind kind = Kind::kAlone;
  View residual = {}, sum = {};
};

// The mixer's last projection of x; returns the output, undefined where it goes nowhere.
View project_output(const Context& context, const Linear& linear, const DeviceBatch& batch, const View& x,
                    LinearSaved& saved, const MixerOutput& output);

// What a mixer's input is made of. Borrowed.
struct NormedStream {
  const std::optional<Norm>& norm;  // unset where none is before the mixer
  const View& x;                    // [T, H], the residual stream
  const View& normed;               // the norm of x, if that was kept; nobody writes it
};

// The input of a mixer in the backward pass: the output of the sublayer's norm, which is computed once more
// unless it was kept, and its gradient. Both lie in the arena from when they are asked for, which is late:
// what a mixer needs before has ended.
class MixerInput {
 public:
  // `wanted`: whether anybody wants the gradient. `gradient`: memory for it; undefined: the arena has some
  // when it is asked for.
  MixerInput(const Context& context, const NormedStream& stream, bool wanted, const View& gradient = {})
      : context_(context), stream_(stream), wanted_(wanted), gradient_(gradient) {}

  // [T, H]; the residual stream itself where no norm is before the mixer.
  View normed() const {
    if (!stream_.norm) return stream_.x;
    if (stream_.normed.defined()) return stream_.normed;
    const View out = context_.like(stream_.x);
    norm_forward(context_, *stream_.norm, stream_.x, out, {});
    return out;
  }
  // [T, H], uninitialised; undefined where nobody wants it.
  const View& gradient() {
    if (wanted_ && !gradient_.defined()) gradient_ = context_.like(stream_.x);
    return gradient_;
  }

 private:
  const Context& context_;
  NormedStream stream_;
  bool wanted_;
  View gradient_;
};

}  // namespace lm
