// What a plan has for texts that are generated: how many there are, and the memory of their keys, values and
// logits. Pure.
#pragma once

#include "plan/class_table.h"

namespace lm {

int64_t cache_positions(const PlanInput& in);
int64_t cache_texts(const PlanInput& in, const NumericsPlan& numerics);
void add_generation(const PlanInput& in, const NumericsPlan& numerics, const PlanSizes& sizes,
                    ClassTable& table);

}  // namespace lm
