#include "plan/activation_arrays.h"

#include <algorithm>

#include "base/arena.h"

namespace lm {

std::vector<int64_t> activation_arrays(const PlanInput& in, const PlacedPlan& plan) {
  const NumericsPlan& n = plan.numerics;
  const int64_t input = n.rows(micro_tokens(in, n)) * in.spec.hidden * size_of(n.dtype);
  const int64_t group = plan.placement.group, head = in.spec.layer_count() + 1;
  const InputPlaces& places = plan.placement.inputs;
  std::vector<int64_t> bytes(static_cast<size_t>((places.place(head) + 1) * group), 0);
  // Their sum stays a number, however far it is from any memory.
  const int64_t most = Arena::kEndless / std::ssize(bytes);
  const std::vector<int64_t>* const kept =
      plan.recompute().whole() ? nullptr : &in.dry_runs->activations(in, plan);
  for (int64_t block = 1; block <= head; ++block) {
    const bool alone = kept == nullptr || block < in.first_trained();
    const int64_t each = alone ? input : (*kept)[static_cast<size_t>(block)];
    const auto first = bytes.begin() + places.place(block) * group;
    std::fill(first, first + group, std::min(each, most));
  }
  return bytes;
}

}  // namespace lm
