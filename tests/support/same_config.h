// Whether two configurations are the same, key by key.
#pragma once

#include <algorithm>

#include "config/config_print.h"

namespace lm {

inline bool same_config(const Config& a, const Config& b) {
  return std::ranges::equal(list_keys(a), list_keys(b), {}, &KeyText::value, &KeyText::value);
}

}  // namespace lm
