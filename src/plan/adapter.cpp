#include "plan/adapter.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "config/config_text.h"

namespace lm {
namespace {

bool written(const LoraConfig& lora, const char* key) {
  return std::find(lora.written.begin(), lora.written.end(), key) != lora.written.end();
}

}  // namespace

AdapterSpec configured_adapter(const NameMap& names, const LoraConfig& lora) {
  return {.r = lora.r,
          .alpha = lora.alpha,
          .rslora = lora.rslora,
          .dora = lora.dora,
          .dropout = lora.dropout,
          .targets = resolve_targets(names, lora.targets, "lora.targets")};
}

AdapterSpec continued_adapter(const NameMap& names, const LoraConfig& lora, const AdapterSpec& given,
                              const std::string& directory) {
  std::string what;
  const auto differs = [&](const std::string& asked, const std::string& there) {
    what += (what.empty() ? "" : "; ") + asked + " is written, and the adapter has " + there;
  };
  AdapterSpec out = given;
  out.dropout = lora.dropout;
  if (written(lora, "r") && lora.r != given.r)
    differs("lora.r = " + value_text(lora.r), "r = " + value_text(given.r));
  // An adapter may be stored with another alpha and without rslora, as its equal.
  if (written(lora, "rslora")) out.rslora = lora.rslora;
  const double divisor = out.rslora ? std::sqrt(static_cast<double>(given.r)) : static_cast<double>(given.r);
  out.alpha = given.rslora == out.rslora ? given.alpha : given.scale() * divisor;
  if (written(lora, "alpha")) {
    const double there = std::abs(out.alpha);
    if (std::abs(lora.alpha - out.alpha) > 1e-6 * there)
      differs("lora.alpha = " + value_text(lora.alpha),
              "alpha = " + value_text(out.alpha) + (out.rslora ? " with rslora" : ""));
    else
      out.alpha = lora.alpha;
  }
  if (written(lora, "targets")) {
    const std::vector<std::string> asked = resolve_targets(names, lora.targets, "lora.targets");
    if (asked != given.targets)
      differs("lora.targets = " + value_text(asked), "targets " + value_text(given.targets));
  }
  if (written(lora, "dora") && lora.dora != given.dora)
    differs("lora.dora = " + value_text(lora.dora), given.dora ? "magnitudes" : "no magnitudes");
  if (lora.start != LoraStart::kZero) differs("lora.start = " + value_text(lora.start), "weights of its own");
  if (what.empty()) return out;
  throw Error(Exit::kConfig, {.area = "CONF-20",
                              .what = "the adapter of lora.init is continued as it is: " + what,
                              .place = directory,
                              .next = "leave these keys out, or leave out lora.init to train a fresh adapter",
                              .kept = "nothing was started or written"});
}

LoraConfig resolved_lora(const LoraConfig& lora, const AdapterSpec& adapter) {
  LoraConfig out = lora;
  out.r = adapter.r;
  out.alpha = adapter.alpha;
  out.rslora = adapter.rslora;
  out.dora = adapter.dora;
  out.targets = adapter.targets;
  return out;
}

}  // namespace lm
