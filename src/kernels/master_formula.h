// The forms of fp32 masters of bf16 and fp16 weights (MasterForm). U: unsigned integers of 32 bits, or lanes
// of them. Both launchers and the tests' scalar reference use these lines.
#pragma once

#include <type_traits>

#include "base/host_device.h"
#include "optim/rules/rule.h"

namespace lm {

// As values, which code for GPUs may ask.
template <MasterForm form>
inline constexpr bool kHasFp32Master = has_fp32_master(form);

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
    case MasterForm::kF32OfFp16:
      return call(std::integral_constant<MasterForm, MasterForm::kF32OfFp16>());
    case MasterForm::kStochasticFp16:
      return call(std::integral_constant<MasterForm, MasterForm::kStochasticFp16>());
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
// To fp16 with the low 13 bits: the number that an fp16 weight then holds exactly. Below 2^-14 the distance
// of fp16 numbers stays that of 2^-14, to which the number is added for the rounding.
template <class F, class U>
LM_HOST_DEVICE F stochastic_fp16(F master, U random) {
  const U bits = bits_of(master), sign = bits & U(0x80000000u);
  const F size = float_of(bits & U(0x7FFFFFFFu)), least(0x1p-14F);
  const F added = select_less(size, least, least, F(0.F));
  const U rounded = (bits_of(size + added) + (random & U(0x1FFFu))) & U(0xFFFFE000u);
  return float_of(bits_of(float_of(rounded) - added) | sign);
}

}  // namespace lm
