// AdamW with its moments in 8-bit codes, as bitsandbytes' AdamW8bit: moments are quantized between updates,
// each update computes in fp32.
#pragma once

#include "optim/rules/adamw.h"
#include "optim/rules/codes.h"

namespace lm {

struct AdamW8bit : AdamW {
  using Formula = AdamW;
  static constexpr RuleText kText = {
      "adamw_8bit", "adamw with its moments in 8 bits, blocks of 256, as bitsandbytes' AdamW8bit"};
  static constexpr std::array kCodes = {CodeMap::kSigned8, CodeMap::kUnsigned8};
  static constexpr std::array kStateTensors = coded_state_tensors(AdamW::kStateTensors, kCodes);
  static AdamW8bit at(const Settings& settings, const RulePass& pass) { return {AdamW::at(settings, pass)}; }
};

template <>
struct RuleAt<3> {
  using Rule = AdamW8bit;
};

}  // namespace lm
