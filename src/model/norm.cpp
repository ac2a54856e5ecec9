#include "model/norm.h"

namespace lm {
namespace {

void check_parameters(const Norm& norm) {
  LM_CHECK(norm.weight.weight.defined() == norm.spec.has_weight(),
           "a norm's weight is not as its kind has it");
  LM_CHECK(norm.bias.weight.defined() == norm.spec.has_bias(), "a norm's bias is not as its kind has it");
}

// The norm with its parameters in the model's type, which the kernels read: a trained copy of another type is
// converted into the arena.
Norm in_model_type(const Context& context, const Norm& norm) {
  Norm out = norm;
  for (View* const vector : {&out.weight.weight, &out.bias.weight}) {
    if (!vector->defined() || vector->dtype == context.dtype) continue;
    const View copy = context.tensor(1, vector->rows);
    context.kernels.copy_rows(
        {.from = view_of(static_cast<std::byte*>(vector->data), vector->dtype, 1, vector->rows), .to = copy},
        context.stream);
    vector->data = copy.data;
    vector->dtype = copy.dtype;
  }
  return out;
}

// Group `g` of a norm whose groups have weights of their own. Kernels take one weight for all groups of a
// row: each group has a call.
Norm norm_of_group(const Norm& norm, const Groups& groups, int64_t g) {
  LM_CHECK(!norm.spec.has_bias(), "norms of groups with biases of their own");
  const auto part = [&](const View& whole) {
    return whole.defined() ? whole.row_range(g * groups.width, groups.width) : whole;
  };
  return {norm.spec, {part(norm.weight.weight), part(norm.weight.gradient)}};
}
View columns_of_group(const View& x, const Groups& groups, int64_t g) {
  return x.column_range(g * groups.width, groups.width);
}
View rstd_of_group(const View& rstd, int64_t rows, int64_t g) {
  return rstd.defined() ? rstd.row_range(g * rows, rows) : rstd;
}

// How the weight of an RMSNorm multiplies; a LayerNorm's kernels round once.
WeightForm weight_form(NormKind kind) {
  switch (kind) {
    case NormKind::kRms:
      return WeightForm::kAfterRounding;
    case NormKind::kRmsOffset:
    case NormKind::kLayerOffset:
      return WeightForm::kOffset;
    case NormKind::kRmsLate:
    case NormKind::kRmsPlain:
    case NormKind::kLayer:
    case NormKind::kLayerNoBias:
      break;
  }
  return WeightForm::kBeforeRounding;
}

struct Forward {
  View x, out, rstd;
  View residual = {}, sum = {};  // as in ResidualNorm
  View add_to = {};              // as RmsNormForward has it
  float factor = 1;
};

void forward_centred(const Context& context, const Norm& norm, const Forward& pass, int64_t width) {
  context.kernels.layer_norm_forward({.x = pass.x.data,
                                      .residual = pass.residual.data,
                                      .weight = norm.weight.weight.data,
                                      .bias = norm.bias.weight.data,
                                      .sum = pass.sum.data,
                                      .out = pass.out.data,
                                      .rstd = pass.rstd.floats(),
                                      .rows = pass.x.rows,
                                      .width = width,
                                      .x_stride = pass.x.stride,
                                      .out_stride = pass.out.stride,
                                      .eps = static_cast<float>(norm.spec.eps),
                                      .offset = norm.spec.offset(),
                                      .dtype = context.dtype},
                                     context.stream);
}

void forward(const Context& context, const Norm& of_any_type, const Forward& pass, Groups groups) {
  check_parameters(of_any_type);
  const ArenaFrame frame(context.arena);
  const Norm norm = in_model_type(context, of_any_type);
  if (norm.spec.centred()) {
    LM_CHECK(groups.groups == 1 && !pass.add_to.defined(), "LayerNorm is of whole rows");
    return forward_centred(context, norm, pass, groups.width);
  }
  context.kernels.rms_norm_forward({.x = pass.x.data,
                                    .residual = pass.residual.data,
                                    .weight = norm.weight.weight.data,
                                    .sum = pass.sum.data,
                                    .add_to = pass.add_to.data,
                                    .out = pass.out.data,
                                    .rstd = pass.rstd.floats(),
                                    .rows = pass.x.rows,
                                    .groups = groups.groups,
                                    .width = groups.width,
                                    .x_stride = pass.x.stride,
                                    .out_stride = pass.out.stride,
                                    .eps = static_cast<float>(norm.spec.eps),
                                    .factor = pass.factor,
                                    .form = weight_form(norm.spec.kind),
                                    .dtype = context.dtype},
                                   context.stream);
}

// Sums over rows in fp32, before they are added to the gradients; undefined for what is frozen.
struct ParameterSums {
  View dweight, dbias, partial;
};

void backward_centred(const Context& context, const Norm& norm, const NormBackward& pass, int64_t width,
                      const ParameterSums& sums) {
  context.kernels.layer_norm_backward({.dy = pass.dy.data,
                                       .x = pass.x.data,
                                       .weight = norm.weight.weight.data,
                                       .rstd = pass.rstd.floats(),
                                       .dresidual = pass.dresidual.data,
                                       .dx = pass.dx.data,
                                       .dweight = sums.dweight.floats(),
                                       .dbias = sums.dbias.floats(),
                                       .partial = sums.partial.floats(),
                                       .rows = pass.x.rows,
                                       .width = width,
                                       .dy_stride = pass.dy.stride,
                                       .x_stride = pass.x.stride,
                                       .dx_stride = pass.dx.stride,
                                       .offset = norm.spec.offset(),
                                       .dtype = context.dtype},
                                      context.stream);
}

void backward(const Context& context, const Norm& norm, const NormBackward& pass, Groups groups,
              const ParameterSums& sums) {
  context.kernels.rms_norm_backward({.dy = pass.dy.data,
                                     .x = pass.x.data,
                                     .weight = norm.weight.weight.data,
                                     .rstd = pass.rstd.floats(),
                                     .dresidual = pass.dresidual.data,
                                     .dx = pass.dx.data,
                                     .dweight = sums.dweight.floats(),
                                     .partial = sums.partial.floats(),
                                     .rows = pass.x.rows,
                                     .groups = groups.groups,
                                     .width = groups.width,
                                     .dy_stride = pass.dy.stride,
                                     .x_stride = pass.x.stride,
                                     .dx_stride = pass.dx.stride,
                                     .form = weight_form(norm.spec.kind),
                                     .dtype = context.dtype},
                                    context.stream);
}

}  // namespace

void norm_forward(const Context& context, const Norm& norm, const View& x, const View& out, const View& rstd,
                  Groups groups) {
  if (!groups.own) return forward(context, norm, {.x = x, .out = out, .rstd = rstd}, groups);
  for (int64_t g = 0; g < groups.groups; ++g) {
    forward(context, norm_of_group(norm, groups, g),
            {.x = columns_of_group(x, groups, g),
             .out = columns_of_group(out, groups, g),
             .rstd = rstd_of_group(rstd, x.rows, g)},
            {1, groups.width});
  }
}

void norm_forward(const Context& context, const Norm& norm, const View& x, const View& out,
                  const View& rstd) {
  norm_forward(context, norm, x, out, rstd, {1, x.columns});
}

void norm_forward_residual(const Context& context, const Norm& norm, const ResidualNorm& pass) {
  forward(context, norm,
          {.x = pass.x, .out = pass.out, .rstd = pass.rstd, .residual = pass.residual, .sum = pass.sum},
          {1, pass.x.columns});
}

void norm_forward_added(const Context& context, const Norm& norm, const AddedNorm& pass) {
  const Groups whole{1, pass.x.columns};
  if (pass.sum.defined() && !norm.spec.centred()) {
    return forward(
        context, norm,
        {.x = pass.x, .out = pass.sum, .rstd = pass.rstd, .add_to = pass.residual, .factor = pass.factor},
        whole);
  }
  const ArenaFrame frame(context.arena);
  const View normed = context.like(pass.x);
  norm_forward(context, norm, pass.x, normed, pass.rstd, whole);
  if (!pass.sum.defined()) return;
  const View& sum = pass.sum;
  if (pass.factor != 1)
    context.kernels.scale({.x = normed, .out = normed, .factor = pass.factor}, context.stream);
  if (sum.data != pass.residual.data)
    context.kernels.copy_rows({.from = pass.residual, .to = sum}, context.stream);
  accumulate(context, sum, normed);
}

void norm_backward(const Context& context, const Norm& norm, const NormBackward& pass, Groups groups,
                   bool first) {
  if (groups.own) {
    LM_CHECK(!pass.dresidual.defined(), "norms of groups add nothing to the gradient");
    for (int64_t g = 0; g < groups.groups; ++g) {
      norm_backward(context, norm_of_group(norm, groups, g),
                    {.dy = columns_of_group(pass.dy, groups, g),
                     .x = columns_of_group(pass.x, groups, g),
                     .rstd = rstd_of_group(pass.rstd, pass.x.rows, g),
                     .dx = columns_of_group(pass.dx, groups, g)},
                    {1, groups.width}, first);
    }
    return;
  }
  check_parameters(norm);
  const ArenaFrame frame(context.arena);
  const Norm typed = in_model_type(context, norm);
  const bool centred = norm.spec.centred();
  const auto sums_of = [&](const Param& parameter) {
    return parameter.gradient.defined() ? context.tensor(groups.width, 1, DType::kF32) : View{};
  };
  ParameterSums sums{.dweight = sums_of(norm.weight), .dbias = sums_of(norm.bias), .partial = {}};
  if (sums.dweight.defined() || sums.dbias.defined()) {
    const int64_t blocks = (pass.x.rows + kRowBlock - 1) / kRowBlock;
    sums.partial = context.tensor(centred ? 2 * blocks : blocks, groups.width, DType::kF32);
  }
  if (centred) {
    LM_CHECK(groups.groups == 1, "LayerNorm is of whole rows");
    backward_centred(context, typed, pass, groups.width, sums);
  } else {
    backward(context, typed, pass, groups, sums);
  }
  if (sums.dweight.defined())
    add_vector_gradient(context, norm.weight.gradient, sums.dweight.floats(), first);
  if (sums.dbias.defined()) add_vector_gradient(context, norm.bias.gradient, sums.dbias.floats(), first);
}

void norm_backward(const Context& context, const Norm& norm, const NormBackward& pass, bool first) {
  norm_backward(context, norm, pass, {1, pass.x.columns}, first);
}

}  // namespace lm
