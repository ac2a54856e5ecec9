// What both launchers of the router share (expert_arguments.h has the rules).
#pragma once

#include "base/host_device.h"

namespace lm {

// What a group of n experts is chosen by: its two largest. value(e) is what expert e of it is chosen by.
template <class Value>
LM_HOST_DEVICE float two_largest(int n, const Value& value) {
  float most = float_of(0xFF800000), next = most;  // -inf
  for (int e = 0; e < n; ++e) {
    const float of = value(e);
    if (of > most)
      next = most, most = of;
    else if (of > next)
      next = of;
  }
  return most + next;
}

}  // namespace lm
