// What a rule's updates take beside state, gradient and weights: tensors as a whole, scratch, products. Pure.
#pragma once

#include <cstdint>
#include <set>

#include "kernels/counting.h"
#include "optim/rules/rules.h"
#include "spec/block_layout.h"

namespace lm {

// Bytes of all blocks' state.
int64_t state_bytes(const ModelLayout& layout, const StateTensors& streams);
// Whether the tensor's matrices step by their orthogonal momentum.
bool steps_by_muon(RuleId rule, const BlockLayout& block, const TensorPlace& tensor);
// Which tensors of the files an update takes whole; of the block's whether it does.
WholeTensors whole_tensors(RuleId rule);
bool updates_whole(RuleId rule, const BlockLayout& block);
// Bytes that an update works in, of the tensor that wants most.
int64_t update_scratch_bytes(const ModelLayout& layout, RuleId rule);
// What the products of an update of the block's elements [first, first + elements) cost. They are added to
// `gemms`, which may be null.
Cost update_products(const BlockLayout& block, int64_t first, int64_t elements, RuleId rule,
                     DeviceType device, std::set<GemmShape>* gemms);

}  // namespace lm
