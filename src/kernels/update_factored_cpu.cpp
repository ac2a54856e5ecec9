// A rule whose second moment is factored, on the CPU. Three passes over the gradient: sums of its squares,
// the size of what the step will be, and the step.
#include "kernels/factored_formula.h"
#include "kernels/norms_formula.h"
#include "kernels/update_range.h"

namespace lm::LM_ISA {
namespace {

// A row's sum.
struct RowSum {
  F32 lanes[kRowLanes / kLanes];
  RowSum() {
    for (F32& lane : lanes) lane = F32(0.f);
  }
  float total() const { return sum_lanes((lanes[0] + lanes[2]) + (lanes[1] + lanes[3])); }
};
static_assert(kRowLanes == 4 * kLanes);

// body(j, the number of its register of lanes, count) for the vectors of a row.
template <class Body>
LM_INLINE void each_of_row(int64_t columns, const Body& body) {
  int64_t j = 0;
  for (; j + kRowLanes <= columns; j += kRowLanes) {
    each_of<4>([&](auto k) LM_BODY { body(j + k * kLanes, k, Whole{}); });
  }
  each_of<4>([&](auto k) LM_BODY {
    const int64_t at = j + k * kLanes;
    if (at + kLanes <= columns) {
      body(at, k, Whole{});
    } else if (at < columns) {
      body(at, k, Part{static_cast<int>(columns - at)});
    }
  });
}

double sum_numbers(const float* x, int64_t n) {
  double lane[kNormLanes] = {};
  for (int64_t i = 0; i < n; ++i) lane[i % kNormLanes] += double{x[i]};
  return add_norm_lanes(lane);
}

template <class R, class G, MasterForm form>
class Update {
 public:
  using T = std::conditional_t<R::kStateTensors[0].type == DType::kBF16, Bf16, float>;

  Update(const RuleUpdate& a, StreamView stream)
      : a_(a),
        state_(a.factored),
        rule_(a.rule.as<R>()),
        scratch_(divide_scratch(a.factored)),
        threads_(stream.threads) {}

  void run() {
    if (state_.vector != nullptr) {
      move_vector();
    } else {
      sum_squares();
      move_columns();
      move_rows();
    }
    measure();
    const FactoredSums sums{
        .directions = static_cast<float>(sum_numbers(scratch_.row_sum, state_.rows)),
        .weights =
            R::counts_weights(rule_) ? static_cast<float>(sum_numbers(scratch_.row_weights, state_.rows)) : 0,
        .elements = static_cast<float>(a_.elements)};
    const FactoredStep step = R::step(rule_, sums);
    scratch_.step[0] = step.factor, scratch_.step[1] = step.decay;
    apply(step);
  }

 private:
  template <class Count>
  LM_INLINE F32 gradient(const RuleUpdate& a, int64_t i, Count count) {
    return load(static_cast<const G*>(a.gradient) + i, count) * F32(a.gradient_scale);
  }

  void sum_squares() {
    const int64_t each = factored_part(state_.rows), columns = state_.columns;
    const F32 eps(rule_.square_eps);
    parallel_for(threads_, factored_parts(state_.rows), kGrainElements / (each * columns) + 1,
                 [&](int64_t begin, int64_t end) {
                   const RuleUpdate a = a_;
                   for (int64_t part = begin; part < end; ++part) {
                     float* const partial = scratch_.partial + part * columns;
                     const int64_t first = part * each, past = std::min(first + each, state_.rows);
                     for (int64_t r = first; r < past; ++r) {
                       RowSum sum;
                       each_of_row(columns, [&](int64_t j, auto k, auto count) LM_BODY {
                         const F32 g = gradient(a, r * columns + j, count);
                         F32 square = squared(g, eps);
                         store(partial + j, r == first ? square : load(partial + j, count) + square, count);
                         // What a part of a vector lacks is no element: eps alone.
                         sum.lanes[k] = sum.lanes[k] + tail_or(square, count, 0.f);
                       });
                       scratch_.row_sum[r] = sum.total();
                     }
                   }
                 });
  }

  // A statistic's next value as it is stored, which is what counts from here on.
  template <class Count>
  LM_INLINE F32 move(const R& rule, T* state, F32 mean, Count count) {
    const F32 next = round_as<T>(one_nan(averaged(rule, mean, load(state, count))));
    store_rounded(state, next, count);
    return next;
  }

  void move_columns() {
    const int64_t parts = factored_parts(state_.rows), columns = state_.columns;
    const F32 rows(static_cast<float>(state_.rows));
    parallel_elements(threads_, columns, [&](int64_t begin, int64_t end) {
      each_vector(end - begin, [&](int64_t i, auto count) LM_BODY {
        const int64_t j = begin + i;
        F32 sum = load(scratch_.partial + j, count);
        for (int64_t part = 1; part < parts; ++part)
          sum = sum + load(scratch_.partial + part * columns + j, count);
        const F32 next = move(rule_, static_cast<T*>(state_.column) + j, sum / rows, count);
        store(scratch_.column_factor + j, factor_of(rule_, next), count);
      });
    });
  }

  void move_rows() {
    const F32 columns(static_cast<float>(state_.columns));
    each_vector(state_.rows, [&](int64_t r, auto count) LM_BODY {
      const F32 mean = load(scratch_.row_sum + r, count) / columns;
      store(scratch_.row_factor + r, move(rule_, static_cast<T*>(state_.row) + r, mean, count), count);
    });
    scratch_.step[2] = mean_of_rows(sum_numbers(scratch_.row_factor, state_.rows), state_.rows);
    const F32 mean(scratch_.step[2]);
    each_vector(state_.rows, [&](int64_t r, auto count) LM_BODY {
      const F32 share = load(scratch_.row_factor + r, count) / mean;
      store(scratch_.row_factor + r, factor_of(rule_, share), count);
    });
  }

  void move_vector() {
    const F32 eps(rule_.square_eps);
    scratch_.row_factor[0] = 1;
    each_vector(state_.columns, [&](int64_t j, auto count) LM_BODY {
      const F32 square = squared(gradient(a_, j, count), eps);
      const F32 next = move(rule_, static_cast<T*>(state_.vector) + j, square, count);
      store(scratch_.column_factor + j, factor_of(rule_, next), count);
    });
  }

  // Squares of each row's directions and weights.
  void measure() {
    const int64_t columns = state_.columns;
    const bool weights = R::counts_weights(rule_);
    parallel_for(threads_, state_.rows, row_grain(columns), [&](int64_t begin, int64_t end) {
      const RuleUpdate a = a_;
      for (int64_t r = begin; r < end; ++r) {
        const F32 row_factor(scratch_.row_factor[r]);
        RowSum of_directions, of_weights;
        each_of_row(columns, [&](int64_t j, auto k, auto count) LM_BODY {
          const int64_t i = r * columns + j;
          const F32 direction =
              direction_of(gradient(a, i, count), row_factor, load(scratch_.column_factor + j, count));
          of_directions.lanes[k] = of_directions.lanes[k] + direction * direction;
          if (!weights) return;
          const F32 p = load_weight<form>(a, i, count);
          of_weights.lanes[k] = of_weights.lanes[k] + p * p;
        });
        scratch_.row_sum[r] = of_directions.total();
        if (weights) scratch_.row_weights[r] = of_weights.total();
      }
    });
  }

  void apply(const FactoredStep& step) {
    const int64_t columns = state_.columns;
    const F32 factor(step.factor), decay(step.decay);
    parallel_for(threads_, state_.rows, row_grain(columns), [&](int64_t begin, int64_t end) {
      const RuleUpdate a = a_;
      Numbers numbers(a);
      for (int64_t r = begin; r < end; ++r) {
        const F32 row_factor(scratch_.row_factor[r]);
        each_vector(columns, [&](int64_t j, auto count) LM_BODY {
          const int64_t i = r * columns + j;
          const F32 direction =
              direction_of(gradient(a, i, count), row_factor, load(scratch_.column_factor + j, count));
          U32 random(0);
          if constexpr (rounds_stochastically(form)) random = numbers.at(i);
          store_weight<form>(a, i, stepped(load_weight<form>(a, i, count), direction, factor, decay), random,
                             count);
        });
      }
    });
  }

  const RuleUpdate& a_;
  const FactoredState& state_;
  const R rule_;
  const FactoredScratch scratch_;
  const int threads_;
};

}  // namespace

void update_factored(const RuleUpdate& a, StreamView stream) {
  if (a.elements != a.factored.rows * a.factored.columns)
    refuse_arguments("update", "a matrix's elements are not its rows x columns");
  if (a.elements == 0) return;
  Rules::with(a.rule.id, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (kIsFactored<R>) {
      if (a.factored.dtype != R::kStateTensors[0].type) refuse_dtype("update (statistics)", a.factored.dtype);
      with_gradient_dtype("update", a.gradient_dtype, [&](auto gradient) {
        with_form<R>(a.form, [&](auto form) {
          Update<R, decltype(gradient), decltype(form)::value>(a, stream).run();
        });
      });
    } else {
      refuse_arguments("update", "rows and columns for a rule that has none");
    }
  });
}

}  // namespace lm::LM_ISA
