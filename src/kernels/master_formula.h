// The forms of fp32 masters of bf16 weights (MasterForm). U: unsigned integers of 32 bits, or lanes of them.
// Both launchers and the tests' scalar reference use these lines.
#pragma once

#include <type_traits>

#include "base/host_device.h"
#include "optim/rules/rule.h"

namespace lm {

// Calls body(form) with the form of the weights as a constant, if rule R takes it (takes_form; the launchers
// refuse others).
template <class R, class Body>
LM_INLINE void with_form(MasterForm form, const Body& body) {
  const auto call = [&](auto constant) {
    if constexpr (takes_form<R>(decltype(constant)::value)) body(constant);
  };
  switch (form) {
    case MasterForm::kWeight:
      return call(std::integral_constant<MasterForm, MasterForm::kWeight>());
    case MasterForm::kSplit:
      return call(std::integral_constant<MasterForm, MasterForm::kSplit>());
    case MasterForm::kF32:
      return call(std::integral_constant<MasterForm, MasterForm::kF32>());
    case MasterForm::kStochastic:
      return call(std::integral_constant<MasterForm, MasterForm::kStochastic>());
    case MasterForm::kNearest:
      return call(std::integral_constant<MasterForm, MasterForm::kNearest>());
  }
}

// Split master: bits M, working weight (M + 0x8000) >> 16, and M & 0xFFFF stored separately.
// split_rounded()'s high half is the weight.
template <class U>
LM_HOST_DEVICE U split_rounded(U master) {
  return master + U(0x8000);
}
template <class U>
LM_HOST_DEVICE U split_weight(U master) {
  return split_rounded(master) >> 16;
}
template <class U>
LM_HOST_DEVICE U split_low(U master) {
  return master & U(0xFFFF);
}
template <class U>
LM_HOST_DEVICE U split_join(U weight, U low) {
  return ((weight - (low >> 15)) << 16) | low;
}

// Stochastic rounding to bf16 with the low 16 bits of a random number. NaN must already be 0x7FC00000; it and
// infinity have no low bits, so that no carry changes them.
template <class U>
LM_HOST_DEVICE U stochastic_weight(U master, U random) {
  return (master + (random & U(0xFFFF))) >> 16;
}

}  // namespace lm
