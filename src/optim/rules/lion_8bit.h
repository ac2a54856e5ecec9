// Lion with its momentum in 8-bit codes, as bitsandbytes' Lion8bit.
#pragma once

#include "optim/rules/codes.h"
#include "optim/rules/lion.h"

namespace lm {

struct Lion8bit : Lion {
  using Formula = Lion;
  static constexpr RuleText kText = {
      "lion_8bit", "lion with its momentum in 8 bits, blocks of 256, as bitsandbytes' Lion8bit"};
  static constexpr std::array kCodes = {CodeMap::kSigned8};
  static constexpr std::array kStateTensors = coded_state_tensors(Lion::kStateTensors, kCodes);
  static Lion8bit at(const Settings& settings, const RulePass& pass) { return {Lion::at(settings, pass)}; }
};

template <>
struct RuleAt<4> {
  using Rule = Lion8bit;
};

}  // namespace lm
