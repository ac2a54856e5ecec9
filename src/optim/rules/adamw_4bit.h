// AdamW with its moments in 4-bit codes, as torchao's AdamW4bit: blocks of 128 elements.
#pragma once

#include "optim/rules/adamw.h"
#include "optim/rules/codes.h"

namespace lm {

struct AdamW4bit : AdamW {
  using Formula = AdamW;
  static constexpr RuleText kText = {
      "adamw_4bit", "adamw with its moments in 4 bits, blocks of 128, as torchao's AdamW4bit"};
  static constexpr std::array kCodes = {CodeMap::kSigned4, CodeMap::kUnsigned4};
  static constexpr std::array kStateTensors = coded_state_tensors(AdamW::kStateTensors, kCodes);
  static AdamW4bit at(const Settings& settings, const RulePass& pass) { return {AdamW::at(settings, pass)}; }
};

template <>
struct RuleAt<7> {
  using Rule = AdamW4bit;
};

}  // namespace lm
