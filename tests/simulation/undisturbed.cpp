// The same steps as one plain loop.
#include "simulated_steps.h"
#include "step_values.h"

namespace lm::test {
namespace {

class Undisturbed {
 public:
  Undisturbed(const StepShape& shape, int ranks, uint64_t seed) : shape_(shape), ranks_(ranks), seed_(seed) {
    for (int64_t u = 0; u < unit_count(shape); ++u) {
      std::vector<float>& unit = weights_.emplace_back();
      for (int64_t i = 0; i < part_elements(u) * ranks; ++i) unit.push_back(first_weight(u, i));
    }
  }

  void step(int64_t number) {
    std::vector<Gradients> of_ranks;
    for (int rank = 0; rank < ranks_; ++rank) of_ranks.push_back(backward(number, rank));
    Gradients sums;
    for (size_t u = 0; u < weights_.size(); ++u) sums.push_back(sum(of_ranks, u));
    double all = 0;
    for (size_t u = 0; u < sums.size(); ++u) all += square(sums, u);
    for (size_t u = 0; u < sums.size(); ++u) {
      float scale = 1;
      if (shape_.clip == Clip::kGlobal) scale = scale_for(all);
      if (shape_.clip == Clip::kBlock) scale = scale_for(square(sums, u));
      for (size_t i = 0; i < sums[u].size(); ++i) weights_[u][i] = updated(weights_[u][i], sums[u][i], scale);
    }
  }

  std::vector<float> all() const {
    std::vector<float> out;
    for (const std::vector<float>& unit : weights_) out.insert(out.end(), unit.begin(), unit.end());
    return out;
  }

 private:
  using Gradients = std::vector<std::vector<float>>;
  uint64_t bits(size_t unit) const { return bits_of(std::span<const float>(weights_[unit])); }

  // All of them here.
  uint64_t by_experts(uint64_t input, size_t unit) const {
    RoutedRows routed = routed_rows(input, ranks_);
    for (int64_t e = 0; e < ranks_; ++e) {
      for (int32_t row = routed.start[static_cast<size_t>(e)]; row < routed.start[static_cast<size_t>(e) + 1];
           ++row)
        routed.rows[static_cast<size_t>(row)] =
            by_expert(routed.rows[static_cast<size_t>(row)], static_cast<int64_t>(unit), e);
    }
    return combined(routed.rows);
  }

  Gradients backward(int64_t step, int rank) const {
    Gradients out;
    for (const std::vector<float>& unit : weights_) out.emplace_back(unit.size());
    const size_t head = weights_.size() - 1;
    for (int64_t micro = 0; micro < shape_.micro_batches; ++micro) {
      std::vector<uint64_t> inputs = {tokens_of(seed_, step, rank, micro)};
      std::vector<uint64_t> of_units;  // what a unit's weights, and its experts, have to say
      for (size_t u = 0; u <= head; ++u) {
        of_units.push_back(shape_.experts && u > 0 && u < head ? behind(bits(u), by_experts(inputs.back(), u))
                                                               : bits(u));
        if (u < head) inputs.push_back(behind(inputs.back(), of_units.back()));
      }
      inputs.push_back(behind(inputs.back(), shape_.tied ? behind(bits(head), bits(0)) : bits(head)));
      uint64_t back = mixed(inputs.back());
      for (size_t u = head + 1; u-- > 0;) {
        for (size_t i = 0; i < out[u].size(); ++i) {
          const float weight = u == 0 ? 0 : weights_[u][i];
          const float one = gradient_of(inputs[u], back, weight, static_cast<int64_t>(i));
          out[u][i] = micro == 0 ? one : out[u][i] + one;
        }
        back = behind(back, of_units[u]);
      }
    }
    return out;
  }

  std::vector<float> sum(const std::vector<Gradients>& of_ranks, size_t unit) const {
    const int each = shape_.machine_ranks;
    std::vector<float> out(weights_[unit].size());
    for (size_t i = 0; i < out.size(); ++i) {
      float all = 0;
      for (int first = 0; first < ranks_; first += each) {
        float machine = of_ranks[static_cast<size_t>(first)][unit][i];
        for (int r = first + 1; r < first + each; ++r) machine += of_ranks[static_cast<size_t>(r)][unit][i];
        all = first == 0 ? machine : all + machine;
      }
      out[i] = all;
    }
    return out;
  }

  double square(const Gradients& sums, size_t unit) const {
    const auto part = static_cast<size_t>(part_elements(static_cast<int64_t>(unit)));
    double out = 0;
    for (size_t at = 0; at < sums[unit].size(); at += part)
      out += square_of(std::span(sums[unit]).subspan(at, part));
    return out;
  }

  const StepShape shape_;
  const int ranks_;
  const uint64_t seed_;
  Gradients weights_;
};

}  // namespace

std::vector<float> undisturbed_weights(const StepShape& shape, int ranks, uint64_t seed, int64_t steps) {
  Undisturbed run(shape, ranks, seed);
  for (int64_t step = 1; step <= steps; ++step) run.step(step);
  return run.all();
}

}  // namespace lm::test
