// AdamW with its moments in floats of 8 bits (e4m3), as torchao's AdamWFp8: blocks of 256 elements.
#pragma once

#include "optim/rules/adamw.h"
#include "optim/rules/codes.h"

namespace lm {

struct AdamWFp8 : AdamW {
  using Formula = AdamW;
  static constexpr RuleText kText = {
      "adamw_fp8", "adamw with its moments in 8-bit floats (e4m3), blocks of 256, as torchao's AdamWFp8"};
  static constexpr std::array kCodes = {CodeMap::kFloat8, CodeMap::kFloat8};
  static constexpr std::array kStateTensors = coded_state_tensors(AdamW::kStateTensors, kCodes);
  static AdamWFp8 at(const Settings& settings, const RulePass& pass) { return {AdamW::at(settings, pass)}; }
};

template <>
struct RuleAt<8> {
  using Rule = AdamWFp8;
};

}  // namespace lm
