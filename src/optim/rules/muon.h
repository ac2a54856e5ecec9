// Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks"), as torch.optim.Muon: a
// matrix of a transformer block steps by its momentum, orthogonalised by Newton–Schulz
// (kernels/newton_schulz.h):
//   m = lerp(m, g, 1 - momentum);  d = lerp(g, m, momentum) with nesterov, else m
//   p = p * (1 - lr * weight_decay) - lr * ratio * orthogonal(d)
// with ratio = 0.2 * sqrt(max(rows, columns)) where match_adamw, else sqrt(max(1, rows / columns)). Vectors,
// the embedding, the head and virtual tokens are AdamW's: their rows are vectors side by side, which no
// product mixes. The matrices are those of the files, even if they are fused here.
#pragma once

#include <algorithm>
#include <cmath>

#include "optim/rules/adamw.h"

namespace lm {

struct Muon {
  // The formula for other tensors; its scalars come first.
  using Formula = AdamW;
  static constexpr RuleText kText = {
      "muon", "Newton-Schulz momentum for the blocks' matrices, AdamW for the rest; as torch.optim.Muon",
      true};
  static constexpr bool kMuonSteps = true;
  static constexpr std::array kStateTensors = {
      StateTensor{"m", "momentum"}, StateTensor{"v", "second moment", DType::kF32, StateTensorOf::kOutside}};

  struct Settings : AdamW::Settings {
    double momentum = 0.95;
    bool nesterov = true;
    bool match_adamw = true;
  };
  template <class S, class Key>
  static void keys(S& settings, const Key& key) {
    AdamW::keys(settings, key);
    key("momentum", settings.momentum, "decay of the momentum", kFraction);
    key("nesterov", settings.nesterov, "a matrix steps by its momentum one step ahead", Range{});
    key("match_adamw", settings.match_adamw,
        "a matrix's step is as large as AdamW's, so that one lr serves both; false: sqrt(max(1, "
        "rows/columns))",
        Range{});
  }

  // torch's lerp: from the nearer end, for precision.
  struct Lerp {
    float share = 0;  // fraction of `end - start`, from the end if negative
    explicit Lerp(float weight = 1) : share(weight < 0.5F ? weight : weight - 1) {}
    template <class V>
    LM_HOST_DEVICE V of(const Lerp& lerp, V start, V end) {
      return fused(V(lerp.share), end - start, lerp.share > 0.F ? start : end);
    }
  };

  AdamW adamw;
  Lerp momentum, ahead;  // ahead: all the way to the momentum without nesterov
  float decay = 1;       // 1 - lr * weight_decay
  double lr = 0;
  int64_t match_adamw = 1;  // not bool: the GPU's arguments must have no padding

  static Muon at(const Settings& settings, const RulePass& pass) {
    return {.adamw = AdamW::at(settings, pass),
            .momentum = Lerp(static_cast<float>(1 - settings.momentum)),
            .ahead = Lerp(settings.nesterov ? static_cast<float>(settings.momentum) : 1),
            .decay = static_cast<float>(1 - pass.lr * pass.weight_decay),
            .lr = pass.lr,
            .match_adamw = settings.match_adamw ? 1 : 0};
  }
  // The factor of a matrix's orthogonalised momentum.
  float step_size(int64_t rows, int64_t columns) const {
    const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
    return static_cast<float>(
        lr * (match_adamw != 0 ? 0.2 * std::sqrt(std::max(r, c)) : std::sqrt(std::max(1.0, r / c))));
  }

  template <class V>
  LM_HOST_DEVICE V direction(const Muon& c, V g, V& m) {
    m = Lerp::of(c.momentum, m, g);
    return Lerp::of(c.ahead, g, m);
  }
  template <class V>
  LM_HOST_DEVICE V step(const Muon& c, V direction, float size, V p) {
    return fused(V(-size), direction, p * V(c.decay));
  }
};

template <>
struct RuleAt<9> {
  using Rule = Muon;
};

}  // namespace lm
