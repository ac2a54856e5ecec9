// How many experts a layer may have: tables of them are kept on a kernel's stack.
#pragma once

#include <cstdint>

namespace lm {

inline constexpr int64_t kMostExperts = 1024;

}  // namespace lm
