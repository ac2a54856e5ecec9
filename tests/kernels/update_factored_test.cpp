// Statistics of rows and columns: an update gives the same bits with every instruction set and number of
// threads, is the rule's formula in fp64, and rounds each weight with its own random number.
#include "base/philox.h"
#include "kernels/factored_formula.h"
#include "kernels/master_formula.h"

#include "tests/kernels/support.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

struct Shape {
  int64_t rows, columns;
  bool vector = false;
  int64_t elements() const { return rows * columns; }
};
// Rows shorter than a register and longer than its lanes; several parts of columns, of which the last is
// shorter.
const Shape kShapes[] = {{1, 300, true}, {1, 70}, {9, 4}, {70, 3}, {130, 64}, {200, 1000}, {5000, 17}};

struct Tensors {
  Values weight, master, rows, columns;
};

Tensors make_tensors(MasterForm form, DType statistics, const Shape& shape) {
  const int64_t n = shape.elements();
  Tensors out{Values::random(weight_type(form), n, 4, 0.05),
              Values::random(has_fp32_master(form) ? DType::kF32 : DType::kBF16, n, 5, 0.05),
              Values::random(statistics, shape.rows, 6, 0.1),
              Values::random(statistics, shape.columns, 7, 0.1)};
  for (Values* values : {&out.rows, &out.columns}) {
    for (int64_t i = 0; i < values->size(); ++i) values->set(i, std::abs((*values)[i]));
  }
  return out;
}

RuleUpdate arguments(const RuleScalars& rule, MasterForm form, const Shape& shape, const Values& gradient,
                     Tensors& t, std::vector<float>& scratch) {
  scratch.assign(static_cast<size_t>(factored_scratch(shape.rows, shape.columns)), -1.F);
  return {.rule = rule,
          .gradient = gradient.data(),
          .weight = t.weight.data(),
          .master = has_master(form) ? t.master.data() : nullptr,
          .factored = {.rows = shape.rows,
                       .columns = shape.columns,
                       .row = shape.vector ? nullptr : t.rows.data(),
                       .column = shape.vector ? nullptr : t.columns.data(),
                       .vector = shape.vector ? t.columns.data() : nullptr,
                       .scratch = scratch.data(),
                       .dtype = t.rows.dtype()},
          .elements = shape.elements(),
          .gradient_dtype = gradient.dtype(),
          .weight_dtype = t.weight.dtype(),
          .form = form,
          .gradient_scale = 0.7F,
          .rounding_key = 0x123456789u,
          .first_index = 4096 * 5 + 37};
}

Outputs updated(const Kernels& k, StreamView stream, const RuleScalars& rule, MasterForm form,
                DType statistics, const Shape& shape, const Values& gradient) {
  Tensors t = make_tensors(form, statistics, shape);
  std::vector<float> scratch;
  for (int step = 0; step < 2; ++step) k.update(arguments(rule, form, shape, gradient, t, scratch), stream);
  return {t.weight, t.master, t.rows, t.columns};
}

struct Rule {
  const char* name;
  RuleScalars scalars;
  DType statistics;
};
std::vector<Rule> rules() {
  Adafactor::Settings scaled;
  scaled.scale_parameter = true;
  const RulePass pass{.lr = 1e-2, .weight_decay = 0.1, .t = 5};
  return {{"adafactor", Adafactor::at({}, pass), DType::kF32},
          {"adafactor, scaled", Adafactor::at(scaled, pass), DType::kF32},
          {"adafactor_lowmem", AdafactorLowmem::at({}, pass), DType::kBF16}};
}

TEST(Factored, EveryInstructionSetAndThreadCountGivesTheSameBits) {
  for (const Rule& rule : rules()) {
    for (const MasterForm form :
         {MasterForm::kWeight, MasterForm::kSplit, MasterForm::kF32, MasterForm::kStochastic,
          MasterForm::kF32OfFp16, MasterForm::kStochasticFp16}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        if (weight_type(form) == DType::kF16 && dtype == DType::kBF16) continue;  // fp32 gradients alone
        for (const Shape& shape : kShapes) {
          // In the short tier a form has one type of gradients, and every shape both.
          if (!test::full_counts() &&
              (static_cast<int>(form) + (&shape - &kShapes[0])) % 2 != (dtype == DType::kF32))
            continue;
          SCOPED_TRACE(std::string(rule.name) + ", form " + std::to_string(static_cast<int>(form)) + ", " +
                       dtype_name(dtype) + " gradient, " + std::to_string(shape.rows) + " x " +
                       std::to_string(shape.columns));
          const Values gradient = Values::random(dtype, shape.elements(), 3);
          same_everywhere([&](const Kernels& k, StreamView stream) {
            return updated(k, stream, rule.scalars, form, rule.statistics, shape, gradient);
          });
        }
      }
    }
  }
}

// Weights after one update, in fp64.
std::vector<double> adafactor(const Adafactor& rule, const Shape& shape, const Values& gradient,
                              const Tensors& t) {
  const auto g = [&](int64_t r, int64_t j) { return 0.7 * gradient[r * shape.columns + j]; };
  std::vector<double> rows(static_cast<size_t>(shape.rows)), columns(static_cast<size_t>(shape.columns));
  double mean = 0, directions = 0, weights = 0;
  for (int64_t r = 0; r < shape.rows; ++r) {
    double& row = rows[static_cast<size_t>(r)];
    for (int64_t j = 0; j < shape.columns; ++j) {
      const double u = g(r, j) * g(r, j) + double{rule.square_eps};
      row += u / static_cast<double>(shape.columns);
      columns[static_cast<size_t>(j)] += u / static_cast<double>(shape.rows);
    }
    row = double{rule.beta2} * t.rows[r] + double{rule.one_minus_beta2} * row;
    mean += row / static_cast<double>(shape.rows);
  }
  std::vector<double> out;
  for (int64_t r = 0; r < shape.rows; ++r) {
    for (int64_t j = 0; j < shape.columns; ++j) {
      const double column =
          double{rule.beta2} * t.columns[j] + double{rule.one_minus_beta2} * columns[static_cast<size_t>(j)];
      const double row = shape.vector ? 1 : rows[static_cast<size_t>(r)] / mean;
      out.push_back(g(r, j) / std::sqrt(row * column));
      directions += out.back() * out.back();
      const double p = t.weight[r * shape.columns + j];
      weights += p * p;
    }
  }
  const auto n = static_cast<double>(shape.elements());
  const double size = std::max(std::sqrt(directions / n) / double{rule.clip_threshold}, 1.0);
  double lr = double{rule.lr};
  if (rule.least_weights >= 0) lr *= std::max(std::sqrt(weights / n), double{rule.least_weights});
  for (int64_t i = 0; i < shape.elements(); ++i) {
    double& p = out[static_cast<size_t>(i)];
    p = t.weight[i] * (1 - lr * double{rule.weight_decay}) - lr / size * p;
  }
  return out;
}

TEST(Factored, AdafactorIsItsFormula) {
  for (const bool scaled : {false, true}) {
    Adafactor::Settings settings;
    settings.scale_parameter = scaled;
    settings.clip_threshold = scaled ? 1 : 0.3;
    const Adafactor rule = Adafactor::at(settings, {.lr = 1e-2, .weight_decay = 0.1, .t = 3});
    for (const Shape& shape : kShapes) {
      Tensors t = make_tensors(MasterForm::kWeight, DType::kF32, shape);
      const Values gradient = Values::random(DType::kF32, shape.elements(), 3);
      const std::vector<double> want = adafactor(rule, shape, gradient, t);
      std::vector<float> scratch;
      kernels(DeviceType::kCpu).update(arguments(rule, MasterForm::kWeight, shape, gradient, t, scratch), {});
      expect_near(t.weight, want, 1e-6, 1e-8, std::to_string(shape.rows) + " rows");
    }
  }
}

TEST(Factored, StochasticRoundingHasTheNumbersOfItsElements) {
  for (const Rule& rule : rules()) {
    for (const Shape& shape : kShapes) {
      const Values gradient = Values::random(DType::kF32, shape.elements(), 3);
      std::vector<float> scratch;
      Tensors rounded = make_tensors(MasterForm::kStochastic, rule.statistics, shape);
      Tensors exact = make_tensors(MasterForm::kWeight, rule.statistics, shape);
      for (int64_t i = 0; i < shape.elements(); ++i) exact.weight.set(i, rounded.weight[i]);
      const RuleUpdate args =
          arguments(rule.scalars, MasterForm::kStochastic, shape, gradient, rounded, scratch);
      kernels(DeviceType::kCpu).update(args, {});
      kernels(DeviceType::kCpu)
          .update(arguments(rule.scalars, MasterForm::kWeight, shape, gradient, exact, scratch), {});
      for (int64_t i = 0; i < shape.elements(); ++i) {
        uint32_t bits = 0;
        std::memcpy(&bits, static_cast<const float*>(exact.weight.data()) + i, 4);
        const uint32_t number =
            philox_at(args.rounding_key, static_cast<uint64_t>(args.first_index + i), 0, 0);
        const uint16_t got = static_cast<const uint16_t*>(rounded.weight.data())[i];
        ASSERT_EQ(got, stochastic_weight(bits, number)) << i << " of " << shape.elements();
      }
    }
  }
}

TEST(Factored, GradientsOfZeroMoveNothing) {
  for (const Rule& rule : rules()) {
    const Shape shape{20, 30};
    Tensors t = make_tensors(MasterForm::kWeight, rule.statistics, shape);
    t.rows = Values(rule.statistics, shape.rows), t.columns = Values(rule.statistics, shape.columns);
    const Values before = t.weight, gradient(DType::kF32, shape.elements());
    std::vector<float> scratch;
    kernels(DeviceType::kCpu)
        .update(arguments(rule.scalars, MasterForm::kWeight, shape, gradient, t, scratch), {});
    for (int64_t i = 0; i < shape.elements(); ++i)
      ASSERT_NEAR(t.weight[i], before[i], 0.01 * std::abs(before[i])) << rule.name;
  }
}

}  // namespace
}  // namespace lm
