#include "plan/alternatives.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <tuple>
#include <utility>

#include "base/bytes.h"
#include "plan/estimate.h"
#include "plan/what_if.h"

namespace lm {
namespace {

using Settings = std::vector<Setting>;

Setting set(bool needed, const char* text, void (*apply)(Config&)) {
  return needed ? Setting{{text}, apply} : Setting();
}

// A run without virtual tokens has none of their keys.
Setting no_virtual_tokens(const PromptConfig& now) {
  const PromptConfig fresh;
  Setting out{.text = {}, .apply = [](Config& c) { c.prompt = {}; }};
  if (now.length != fresh.length) out.text.push_back(fmt::format("prompt.length={}", fresh.length));
  if (now.start != fresh.start) out.text.emplace_back("prompt.start=normal");
  if (now.hidden != fresh.hidden) out.text.emplace_back("prompt.hidden=auto");
  return out;
}

// A base that its files have quantized stays as it is.
std::vector<Settings> methods(const PlanInput& in) {
  if (in.spec.stored != EncodingKind::kPlain) return {{}};
  const Config& now = in.config;
  const bool full = in.adapter == nullptr, quantized = now.model.quantize != Quantize::kNone;
  // Adapters in fp32 are their own masters, which the model's weights in bf16 are not.
  const bool fp32_adapters = now.lora.dtype == LoraDType::kF32;
  const bool wide = !full && fp32_adapters && now.model.dtype == ModelDType::kBF16;
  const Setting plain =
      set(quantized, "model.quantize=none", [](Config& c) { c.model.quantize = Quantize::kNone; });
  const Setting zero = set(quantized && now.lora.start == LoraStart::kLoftq, "lora.start=zero",
                           [](Config& c) { c.lora.start = LoraStart::kZero; });
  const Setting master =
      set(wide, "optimizer.master=split", [](Config& c) { c.optimizer.master = Master::kSplit; });
  const Setting no_start = set(!full && now.lora.start == LoraStart::kPissa, "lora.start=zero",
                               [](Config& c) { c.lora.start = LoraStart::kZero; });
  if (full && !may_train_adapters(now)) return {{}};
  const Setting all = set(!full, "train.method=full", [](Config& c) { c.train.method = Method::kFull; });
  const Setting lora = set(full || (quantized && now.train.method == Method::kLora), "train.method=lora",
                           [](Config& c) { c.train.method = Method::kLora; });
  const Setting qlora = set(!quantized, full ? "train.method=qlora" : "model.quantize=nf4", [](Config& c) {
    if (c.train.method == Method::kFull) c.train.method = Method::kLora;
    c.model.quantize = Quantize::kNf4;
  });
  // Of fresh ones; another type than fp32 does not count without adapters, and is not told.
  Setting type;
  if (full) type.apply = [](Config& c) { c.lora.dtype = LoraDType::kAuto; };
  if (full && fp32_adapters) type.text = {"lora.dtype=auto"};
  const Setting none = set(!now.train.only.empty(), "train.only=[]", [](Config& c) { c.train.only.clear(); });
  return {{all, plain, zero, no_start, master, no_virtual_tokens(now.prompt)},
          {lora, plain, zero, type, none},
          {qlora, type, none}};
}

Settings masters(const Config& config) {
  Settings out = {{}};
  if (config.model.dtype == ModelDType::kF32) {
    // A master beside fp32 weights is nothing to choose.
    if (has_fp32_adapters(config)) {
      out.push_back({{"model.dtype=bf16"}, [](Config& c) { c.model.dtype = ModelDType::kBF16; }});
    } else {
      out.push_back({{"model.dtype=bf16", "optimizer.master=split"}, [](Config& c) {
                       c.model.dtype = ModelDType::kBF16, c.optimizer.master = Master::kSplit;
                     }});
    }
  } else if (!trains_fp32(config) && !scales_loss(config) && config.optimizer.master == Master::kF32) {
    out.push_back({{"optimizer.master=split"}, [](Config& c) { c.optimizer.master = Master::kSplit; }});
  }
  if (!trains_fp32(config) && config.optimizer.master != Master::kNone)
    out.push_back({{"optimizer.master=none"}, [](Config& c) { c.optimizer.master = Master::kNone; }});
  return out;
}

Setting rule_setting(const Config& config, size_t number) {
  const RuleId rule{static_cast<uint8_t>(number)};
  if (rule == config.optimizer.name) return {};
  Setting out{{std::string("optimizer.name=") + rule_text(rule).name},
              [rule](Config& c) { c.optimizer.name = rule; }};
  if (!has_no_master(config.optimizer.name) || trains_fp32(config)) return out;
  out.text.emplace_back("optimizer.master=split");
  out.apply = [rule](Config& c) { c.optimizer.name = rule, c.optimizer.master = Master::kSplit; };
  return out;
}

// A rule without master weights trains bf16 weights, and is listed once: with the master that is written.
bool takes_rule(const Config& written, const Config& chosen, size_t number) {
  if (!has_no_master(RuleId{static_cast<uint8_t>(number)})) return true;
  const bool bf16 = !trains_fp32(chosen) && !scales_loss(chosen);
  return !trains_fp32(written) && bf16 && chosen.optimizer.master == written.optimizer.master;
}

// The other time of updates; gradients that are told to live off the device are of updates after.
std::optional<Setting> other_update(const Config& config) {
  if (names_tier(config.offload.gradients)) return std::nullopt;
  if (config.train.update == UpdateTime::kInBackward)
    return Setting{{"train.update=after"}, [](Config& c) { c.train.update = UpdateTime::kAfter; }};
  return Setting{{"train.update=in_backward"}, [](Config& c) { c.train.update = UpdateTime::kInBackward; }};
}

// The rule with the least state.
size_t least_rule() {
  constexpr int64_t kSide = 4096;  // of a matrix
  const auto state = [](size_t rule) {
    const StateTensors streams(RuleId{static_cast<uint8_t>(rule)}, MasterForm::kWeight);
    return streams.bytes({.all = kSide * kSide, .rows = kSide, .columns = kSide});
  };
  return *std::ranges::min_element(std::views::iota(size_t{0}, size_t{Rules::kSize}), {}, state);
}

class Comparison {
 public:
  Comparison(const PlanInput& in, Estimated estimated) : in_(in), estimated_(estimated) {}

  std::vector<Alternative> all() {
    for (const Settings& method : methods(in_)) {
      for (const Setting& master : masters(with_settings(in_.config, method))) {
        model_.reset();
        Settings chosen = method;
        chosen.push_back(master);
        each_rule(chosen);
      }
    }
    return std::move(out_);
  }

 private:
  void each_rule(const Settings& chosen) {
    // Where the rule with the least state does not fit, no other does.
    if (estimated_ == Estimated::kWhatFits) {
      std::vector<Alternative> rows = std::exchange(out_, {});
      add_rule(chosen, least_rule());
      const bool fits = std::ranges::any_of(out_, [](const Alternative& row) { return row.plan.fits; });
      out_ = std::move(rows);
      if (!fits) return;
    }
    for (size_t rule = 0; rule < Rules::kSize; ++rule) add_rule(chosen, rule);
  }

  void add_rule(Settings chosen, size_t rule) {
    if (!takes_rule(in_.config, with_settings(in_.config, chosen), rule)) return;
    chosen.push_back(rule_setting(in_.config, rule));
    const bool in_backward = add(chosen);
    const Config config = with_settings(in_.config, chosen);
    if (trains_adapter(config)) return;
    const std::optional<Setting> other = other_update(config);
    // What "auto" has chosen is there already.
    if (!other || (in_backward && config.train.update == UpdateTime::kAuto)) return;
    chosen.push_back(*other);
    add(chosen);
  }

  // Whether updates are inside backward.
  bool add(Settings chosen) {
    if (!add_planned(chosen) && may_use_disk(in_.config.offload)) {
      chosen.push_back({{"offload.paths=[\"DIRECTORY\"]"}, [](Config& c) { c.offload.paths = {"."}; }});
      add_planned(chosen);
    }
    return !out_.empty() && out_.back().plan.placement.in_backward();
  }

  // Whether it fits.
  bool add_planned(const Settings& chosen) {
    std::optional<Alternative> row = plan_with(in_, chosen, estimated_, &model_);
    if (row) out_.push_back(std::move(*row));
    return row && out_.back().plan.fits;
  }

  const PlanInput& in_;
  Estimated estimated_;
  std::optional<OtherModel> model_;  // of the method and master at hand, which may set model.dtype
  std::vector<Alternative> out_;
};

// The first memory that is too small counts.
int64_t lacks(const Plan& plan) {
  for (const Tier& tier : plan.tiers) {
    if (tier.bytes > tier.usable) return tier.bytes - tier.usable;
  }
  return 0;
}

// An adapter's update is so little of a step that rules and masters differ by less than an estimate knows.
bool as_fast(const Alternative& a, const Alternative& b) {
  constexpr double kAlike = 0.01;
  return a.tokens_per_second() >= b.tokens_per_second() * (a.method == "full" ? 1 : 1 - kAlike);
}

bool beats(const Alternative& a, const Alternative& b) {
  if (a.method != b.method || a.plan.fits < b.plan.fits) return false;
  if (a.plan.fits > b.plan.fits) return a.state_bits >= b.state_bits && a.weight_bits >= b.weight_bits;
  if (!a.plan.fits) return lacks(a.plan) < lacks(b.plan);
  return as_fast(a, b) && a.state_bits >= b.state_bits && a.weight_bits >= b.weight_bits;
}

std::vector<Alternative> in_order(std::vector<Alternative> rows) {
  std::ranges::stable_sort(rows, {}, [](const Alternative& row) {
    return std::tuple(!row.plan.fits, lacks(row.plan), -row.tokens_per_second(), -row.state_bits);
  });
  return rows;
}

std::string number(double value) {
  return fmt::format("{:.{}f}", value, value < 10 ? 1 : 0);
}

std::string bytes_or_none(int64_t bytes) {
  return bytes > 0 ? format_bytes(bytes) : "-";
}

}  // namespace

double Alternative::tokens_per_second() const {
  return lm::tokens_per_second(plan);
}

std::string Alternative::setting_text() const {
  std::string out;
  for (const std::string& setting : settings) out += (out.empty() ? "" : " ") + setting;
  return out.empty() ? "as it is" : out;
}

std::vector<Alternative> alternatives(const PlanInputs& inputs, const Machine& machine, const World& world) {
  const PlanInput in{inputs, machine, world, PlanPurpose::kTrain};
  return in_order(Comparison(in, Estimated::kAll).all());
}

std::vector<Alternative> best_alternatives(std::vector<Alternative> all) {
  std::vector<Alternative> out;
  for (size_t i = 0; i < all.size(); ++i) {
    // Of two that are equal the first one stays.
    const bool beaten = std::ranges::any_of(all, [&](const Alternative& other) {
      return &other != &all[i] && beats(other, all[i]) && (!beats(all[i], other) || &other < &all[i]);
    });
    if (!beaten) out.push_back(all[i]);
  }
  return out;
}

std::vector<Alternative> advised_alternatives(const PlanInputs& inputs, const Machine& machine,
                                              const World& world) {
  constexpr int kOfEach = 2;
  const PlanInput in{inputs, machine, world, PlanPurpose::kTrain};
  std::map<std::string, int> named;
  std::vector<Alternative> out;
  for (const Alternative& row : best_alternatives(in_order(Comparison(in, Estimated::kWhatFits).all()))) {
    if (!row.plan.fits || row.settings.empty() || ++named[row.method] > kOfEach) continue;
    const Setting chosen{row.settings, [&row](Config& c) { c = row.config; }};
    if (auto whole = plan_with(in, {chosen}, Estimated::kAll)) out.push_back(std::move(*whole));
  }
  return in_order(std::move(out));
}

std::string name_alternatives(const std::vector<Alternative>& rows) {
  std::string out;
  for (const Alternative& row : rows)
    out += (out.empty() ? "" : ", or ") + row.setting_text() + " (" + number(row.tokens_per_second()) +
           " tokens/s)";
  return out;
}

std::string print_alternatives(const std::vector<Alternative>& rows, size_t most) {
  char line[160];
  const auto columns = [&](const std::string& fits, const std::string& tokens, const std::string& step,
                           const Alternative* row, const std::string& settings) {
    const auto memory = [&](int64_t PeakBytes::*tier, const char* title) {
      return row == nullptr ? std::string(title) : bytes_or_none(row->plan.peak.*tier);
    };
    std::snprintf(line, sizeof line, "%-5s %9s %9s %10s %10s %10s %8s %6s  ", fits.c_str(), tokens.c_str(),
                  step.c_str(), memory(&PeakBytes::device, "GPU").c_str(),
                  memory(&PeakBytes::host, "host").c_str(), memory(&PeakBytes::disk, "disk").c_str(),
                  row == nullptr ? "weights" : number(row->weight_bits).c_str(),
                  row == nullptr ? "state" : number(row->state_bits).c_str());
    return line + settings + "\n";
  };
  std::string out = columns("fits", "tokens/s", "s/step", nullptr, "settings");
  for (size_t i = 0; i < std::min(most, rows.size()); ++i) {
    const Alternative& row = rows[i];
    out += columns(row.plan.fits ? "yes" : "no", number(row.tokens_per_second()),
                   number(row.plan.step_seconds), &row, row.setting_text());
  }
  return out + "weights, state: bits of a weight, and of its optimizer state with the master\n";
}

std::string alternatives_json(const std::vector<Alternative>& rows) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const Alternative& row : rows) {
    const PeakBytes& peak = row.plan.peak;
    out.push_back(
        {{"fits", row.plan.fits},
         {"settings", row.settings},
         {"method", row.method},
         {"rule", row.rule},
         {"peak", {{"device_bytes", peak.device}, {"host_bytes", peak.host}, {"disk_bytes", peak.disk}}},
         {"step_seconds", row.plan.step_seconds},
         {"tokens_per_s", row.tokens_per_second()},
         {"binding", row.plan.binding},
         {"weight_bits", row.weight_bits},
         {"state_bits", row.state_bits}});
  }
  return out.dump(2);
}

}  // namespace lm
