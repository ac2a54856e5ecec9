// What a plan has for texts that are generated: how many there are, and the memory of their keys, values and
// logits. Pure.
#pragma once

#include "plan/class_table.h"

namespace lm {

// Sets plan.cache_positions and plan.cache_texts; after the numerics and plan.micro_tokens.
void size_generation(const PlanInput& in, Plan& plan);
void add_generation(const PlanInput& in, const Plan& plan, ClassTable& table);

}  // namespace lm
