// A rule whose second moment is factored, on the GPU. A skipped step writes scratch alone. Compiled with
// -fmad=false: the CPU's bits.
#include "kernels/cuda_launchers.h"
#include "kernels/factored_formula.h"
#include "kernels/norms_formula.h"
#include "kernels/update_weights.cuh"

namespace lm::gpu {
namespace {

constexpr int kRowsAtOnce = kThreads / 32;  // a warp has a row

template <class G>
__device__ __forceinline__ float gradient(const RuleUpdate& a, int64_t i) {
  return to_float(static_cast<const G*>(a.gradient)[i]) * gradient_scale(a);
}

// The row of a warp, or none.
__device__ __forceinline__ int64_t row_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kRowsAtOnce + threadIdx.x / 32;
}
// Every thread of the warp has lanes t and t + 32 of a row.
__device__ __forceinline__ float row_sum(float low, float high) {
  return warp_sum(low + high);
}

// What is no element is 0, and so is its square.
template <class G>
__global__ void sum_rows_of_squares(RuleUpdate a, float eps) {
  const int64_t row = row_of_warp(), columns = a.factored.columns;
  if (row >= a.factored.rows) return;
  const int lane = threadIdx.x % 32;
  float sum[2] = {0, 0};
  for (int64_t j = lane; j < columns; j += kRowLanes) {
    for (int half = 0; half < 2; ++half) {
      const int64_t at = j + 32 * half;
      if (at < columns) sum[half] += squared(gradient<G>(a, row * columns + at), eps);
    }
  }
  const float total = row_sum(sum[0], sum[1]);
  if (lane == 0) divide_scratch(a.factored).row_sum[row] = total;
}

template <class G>
__global__ void sum_columns_of_squares(RuleUpdate a, float eps, int64_t each) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, columns = a.factored.columns;
  if (j >= columns) return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * each;
  const int64_t past = first + each < a.factored.rows ? first + each : a.factored.rows;
  float sum = squared(gradient<G>(a, first * columns + j), eps);
  for (int64_t r = first + 1; r < past; ++r) sum += squared(gradient<G>(a, r * columns + j), eps);
  divide_scratch(a.factored).partial[blockIdx.y * columns + j] = sum;
}

// A statistic's next value as it is stored, which is what counts from here on.
template <class R, class T>
__device__ __forceinline__ float move(const R& rule, T* state, float mean) {
  const float next = round_as<T>(one_nan(averaged(rule, mean, to_float(*state))));
  round_into(*state, next);
  return next;
}

template <class R, class T>
__global__ void move_columns(RuleUpdate a, R rule, int64_t parts) {
  if (skipped(a)) return;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, columns = a.factored.columns;
  if (j >= columns) return;
  const FactoredScratch scratch = divide_scratch(a.factored);
  float sum = scratch.partial[j];
  for (int64_t part = 1; part < parts; ++part) sum += scratch.partial[part * columns + j];
  const float next =
      move(rule, static_cast<T*>(a.factored.column) + j, sum / static_cast<float>(a.factored.rows));
  scratch.column_factor[j] = factor_of(rule, next);
}

template <class R, class T>
__global__ void move_rows(RuleUpdate a, R rule) {
  if (skipped(a)) return;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (r >= a.factored.rows) return;
  const FactoredScratch scratch = divide_scratch(a.factored);
  const float mean = scratch.row_sum[r] / static_cast<float>(a.factored.columns);
  scratch.row_factor[r] = move(rule, static_cast<T*>(a.factored.row) + r, mean);
}

template <class R, class G, class T>
__global__ void move_vector(RuleUpdate a, R rule) {
  if (skipped(a)) return;
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= a.factored.columns) return;
  const FactoredScratch scratch = divide_scratch(a.factored);
  const float square = squared(gradient<G>(a, j), rule.square_eps);
  scratch.column_factor[j] = factor_of(rule, move(rule, static_cast<T*>(a.factored.vector) + j, square));
  if (j == 0) scratch.row_factor[0] = 1;
}

// Of kNormLanes threads; what the first one gets counts.
__device__ __forceinline__ double sum_numbers(const float* x, int64_t n) {
  __shared__ double lane[kNormLanes];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kNormLanes) sum += static_cast<double>(x[i]);
  __syncthreads();  // the previous call's reader is done
  lane[threadIdx.x] = sum;
  __syncthreads();
  return threadIdx.x == 0 ? add_norm_lanes(lane) : 0;
}

__global__ void mean_rows(RuleUpdate a) {
  const FactoredScratch scratch = divide_scratch(a.factored);
  const double sum = sum_numbers(scratch.row_factor, a.factored.rows);
  if (threadIdx.x == 0) scratch.step[2] = mean_of_rows(sum, a.factored.rows);
}

template <class R>
__global__ void make_row_factors(RuleUpdate a, R rule) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (r >= a.factored.rows) return;
  const FactoredScratch scratch = divide_scratch(a.factored);
  scratch.row_factor[r] = factor_of(rule, scratch.row_factor[r] / scratch.step[2]);
}

// Squares of each row's directions and weights.
template <class G, MasterForm form>
__global__ void measure(RuleUpdate a, bool weights) {
  const int64_t row = row_of_warp(), columns = a.factored.columns;
  if (row >= a.factored.rows) return;
  const FactoredScratch scratch = divide_scratch(a.factored);
  const float row_factor = scratch.row_factor[row];
  const int lane = threadIdx.x % 32;
  float directions[2] = {0, 0}, sizes[2] = {0, 0};
  for (int64_t j = lane; j < columns; j += kRowLanes) {
    for (int half = 0; half < 2; ++half) {
      const int64_t at = j + 32 * half, i = row * columns + at;
      if (at >= columns) continue;
      const float direction = direction_of(gradient<G>(a, i), row_factor, scratch.column_factor[at]);
      directions[half] += direction * direction;
      if (!weights) continue;
      const float p = load_weights<form, 1>(a, i).at[0];
      sizes[half] += p * p;
    }
  }
  const float of_directions = row_sum(directions[0], directions[1]), of_weights = row_sum(sizes[0], sizes[1]);
  if (lane != 0) return;
  scratch.row_sum[row] = of_directions;
  if (weights) scratch.row_weights[row] = of_weights;
}

template <class R>
__global__ void make_step(RuleUpdate a, R rule, bool weights) {
  const FactoredScratch scratch = divide_scratch(a.factored);
  const double directions = sum_numbers(scratch.row_sum, a.factored.rows);
  const double sizes = weights ? sum_numbers(scratch.row_weights, a.factored.rows) : 0;
  if (threadIdx.x != 0) return;
  const FactoredStep step = R::step(rule, {.directions = static_cast<float>(directions),
                                           .weights = static_cast<float>(sizes),
                                           .elements = static_cast<float>(a.elements)});
  scratch.step[0] = step.factor;
  scratch.step[1] = step.decay;
}

template <class G, MasterForm form>
__global__ void apply(RuleUpdate a) {
  if (skipped(a)) return;
  const FactoredScratch scratch = divide_scratch(a.factored);
  const float factor = scratch.step[0], decay = scratch.step[1];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.elements; i += step) {
    const int64_t row = i / a.factored.columns, column = i - row * a.factored.columns;
    const float direction =
        direction_of(gradient<G>(a, i), scratch.row_factor[row], scratch.column_factor[column]);
    Pack<float, 1> p = load_weights<form, 1>(a, i);
    p.at[0] = stepped(p.at[0], direction, factor, decay);
    store_weights<form, 1>(a, i, p);
  }
}

template <class R, class G, MasterForm form>
void update_as(const RuleUpdate& a, const R& rule, StreamView stream) {
  using T = std::conditional_t<R::kStateTensors[0].type == DType::kBF16, Bf16, float>;
  const FactoredState& state = a.factored;
  const unsigned of_columns = blocks_of(state.columns, kThreads), of_rows = blocks_of(state.rows, kThreads);
  const unsigned warps = blocks_of(state.rows, kRowsAtOnce);
  const bool weights = R::counts_weights(rule);
  if (state.vector != nullptr) {
    launch(move_vector<R, G, T>, of_columns, kThreads, stream, a, rule);
  } else {
    const int64_t parts = factored_parts(state.rows);
    launch(sum_rows_of_squares<G>, warps, kThreads, stream, a, rule.square_eps);
    launch(sum_columns_of_squares<G>, dim3(of_columns, static_cast<unsigned>(parts)), kThreads, stream, a,
           rule.square_eps, factored_part(state.rows));
    launch(move_columns<R, T>, of_columns, kThreads, stream, a, rule, parts);
    launch(move_rows<R, T>, of_rows, kThreads, stream, a, rule);
    launch(mean_rows, 1u, kNormLanes, stream, a);
    launch(make_row_factors<R>, of_rows, kThreads, stream, a, rule);
  }
  launch(measure<G, form>, warps, kThreads, stream, a, weights);
  launch(make_step<R>, 1u, kNormLanes, stream, a, rule, weights);
  launch(apply<G, form>, stride_blocks(a.elements), kThreads, stream, a);
}

}  // namespace

void update_factored(const RuleUpdate& a, StreamView stream) {
  LM_CHECK(a.elements == a.factored.rows * a.factored.columns, "update: rows x columns");
  if (a.elements == 0) return;
  Rules::with(a.rule.id, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (kIsFactored<R>) {
      LM_CHECK(a.factored.dtype == R::kStateTensors[0].type, "update: type of statistics");
      with_gradient_dtype(a.gradient_dtype, [&](auto gradient) {
        with_form<R>(a.form, [&](auto form) {
          update_as<R, decltype(gradient), decltype(form)::value>(a, a.rule.as<R>(), stream);
        });
      });
    } else {
      LM_CHECK(false, "update: rows and columns for a rule that has none");
    }
  });
}

}  // namespace lm::gpu
