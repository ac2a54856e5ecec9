// The comparison of ways to train: every row is what a run with its settings would plan, in the promised
// order.
#include "plan/alternatives.h"

#include <gtest/gtest.h>

#include <span>

#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "config/config_toml.h"
#include "plan/adapter.h"
#include "shapes.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

constexpr const char* kText = R"([model]
path = "somewhere"
[data]
train = ["train.jsonl"]
max_length = 1024
[train]
epochs = 1
global_batch = 8
[lora]
r = 16
alpha = 32
)";

// Settings of a row replace those of the same key.
std::vector<std::string> replaced(std::vector<std::string> overrides, const std::vector<std::string>& by) {
  for (const std::string& setting : by) {
    const std::string key = setting.substr(0, setting.find('=') + 1);
    std::erase_if(overrides, [&](const std::string& other) { return other.starts_with(key); });
    overrides.push_back(setting);
  }
  return overrides;
}

struct Compared {
  explicit Compared(int64_t gpu_gib, const std::vector<std::string>& overrides = {},
                    const std::string& text = kText)
      : c{.config = parse_config(text, "test", overrides),
          .spec = llama_1b(),
          .machine = gpu_machine("H100"),
          .device = DeviceType::kCuda} {
    c.machine.gpus.front().memory_bytes = gpu_gib << 30;
    c.machine.host_memory = int64_t{8} << 30;
    const bool adapts = trains_adapter(c.config);
    const AdapterSpec fresh = adapts ? configured_adapter(c.spec, c.config) : AdapterSpec{};
    const AdapterSpec* adapter = adapts ? &fresh : nullptr;
    const ModelLayout layout = c.layout(adapter);
    rows = alternatives({c.config, c.spec, adapter, layout, c.device}, c.machine, {});
  }
  Case c;
  std::vector<Alternative> rows;
};

TEST(Alternatives, AreWhatARunWithTheirSettingsPlans) {
  // Each method, each type and another rule once; then the types together.
  const std::vector<std::vector<std::string>> all = {
      {},
      {"train.method=qlora"},
      {"train.method=lora", "lora.dtype=fp32"},
      {"model.dtype=fp32", "optimizer.name=sgd"},
      {"train.method=lora"},
      {"lora.dtype=fp32"},
      {"model.dtype=fp32"},
      {"model.dtype=fp32", "lora.dtype=fp32"},
      {"model.dtype=fp32", "lora.dtype=fp32", "train.method=lora"},
      {"optimizer.name=sgd"},
      {"optimizer.name=adamw_bf16"}};
  for (const std::vector<std::string>& overrides :
       std::span(all).first(test::counts<size_t>(4, all.size()))) {
    const Compared compared(12, overrides);
    std::set<std::vector<std::string>> seen;
    int as_it_is = 0;
    for (const Alternative& row : compared.rows) {
      EXPECT_TRUE(seen.insert(row.settings).second) << row.setting_text() << " twice";
      as_it_is += row.settings.empty() ? 1 : 0;
      Case one = compared.c;
      one.config = parse_config(kText, "test", replaced(overrides, row.settings));
      const Plan plan = one.draft();
      EXPECT_EQ(plan.fits, row.plan.fits) << row.setting_text();
      EXPECT_EQ(plan.peak.device, row.plan.peak.device) << row.setting_text();
      EXPECT_EQ(plan.peak.host, row.plan.peak.host) << row.setting_text();
      EXPECT_EQ(plan.peak.disk, row.plan.peak.disk) << row.setting_text();
      EXPECT_EQ(plan.step_seconds, row.plan.step_seconds) << row.setting_text();
    }
    EXPECT_EQ(as_it_is, 1);
    std::set<std::string> methods;
    for (const Alternative& row : compared.rows) methods.insert(row.method);
    EXPECT_EQ(methods, (std::set<std::string>{"full", "lora", "qlora"}));
  }
}

// Their keys are refused beside another method.
TEST(Alternatives, OfVirtualTokensAreConfigurationsThatARunTakes) {
  const std::string text(kText, std::string(kText).find("[lora]"));  // which is not theirs
  const std::pair<const char*, const char*> own[] = {{"prefix", "prompt.start=zero"},
                                                     {"prompt", "prompt.start=vocabulary"},
                                                     {"ptuning", "prompt.hidden=48"}};
  for (const auto& [method, key] : own) {
    const std::vector<std::string> overrides = {std::string("train.method=") + method, "prompt.length=7",
                                                key};
    const Compared compared(12, overrides, text);
    std::set<std::string> methods;
    for (const Alternative& row : compared.rows) {
      methods.insert(row.method);
      Config config;
      EXPECT_NO_THROW(config = parse_config(text, "test", replaced(overrides, row.settings)))
          << row.setting_text();
      EXPECT_EQ(config.prompt.length, row.method == method ? 7 : PromptConfig().length) << row.setting_text();
    }
    EXPECT_EQ(methods, (std::set<std::string>{"full", method}));
  }
}

// A run refuses adapters that leave the rows of new tokens as they begin.
TEST(Alternatives, OfNewTokensAreAdaptersOnlyWhereTheseTrainTheirRows) {
  for (const bool trained : {false, true}) {
    std::vector<std::string> overrides = {"train.method=full", "model.add_tokens=[\"<think>\"]"};
    if (trained) overrides.emplace_back("lora.tokens=[\"<think>\"]");
    const Compared compared(12, overrides);
    std::set<std::string> methods;
    for (const Alternative& row : compared.rows) methods.insert(row.method);
    EXPECT_EQ(methods,
              trained ? (std::set<std::string>{"full", "lora", "qlora"}) : std::set<std::string>{"full"});
  }
}

TEST(Alternatives, ComeInTheOrderOfTheirSpeedThoseThatFitFirst) {
  const Compared compared(6);
  bool fitted = true;
  double last = std::numeric_limits<double>::infinity();
  int without = 0;
  for (const Alternative& row : compared.rows) {
    EXPECT_TRUE(fitted || !row.plan.fits) << row.setting_text();
    if (fitted && row.plan.fits) {
      EXPECT_LE(row.tokens_per_second(), last) << row.setting_text();
      last = row.tokens_per_second();
    }
    fitted = row.plan.fits;
    without += row.plan.fits ? 0 : 1;
  }
  EXPECT_TRUE(compared.rows.front().plan.fits);
  EXPECT_GT(without, 0) << "a GPU that is small enough for full fine-tuning not to fit";
}

TEST(Alternatives, ADiskIsThereOnlyWhereNothingFitsWithoutOne) {
  const Compared compared(6);
  int disks = 0;
  for (const Alternative& row : compared.rows) {
    std::vector<std::string> near = row.settings;
    if (std::erase_if(near, [](const std::string& s) { return s.starts_with("offload.paths"); }) == 0)
      continue;
    ++disks;
    const auto other = std::ranges::find(compared.rows, near, &Alternative::settings);
    ASSERT_NE(other, compared.rows.end()) << row.setting_text();
    EXPECT_FALSE(other->plan.fits) << row.setting_text();
  }
  EXPECT_GT(disks, 0);
}

TEST(Alternatives, TheBestAreThoseThatNoOtherBeats) {
  const Compared compared(12);
  const std::vector<Alternative> best = best_alternatives(compared.rows);
  ASSERT_FALSE(best.empty());
  EXPECT_LT(best.size(), compared.rows.size());
  std::map<std::string, int> of_method;
  for (const Alternative& row : best) ++of_method[row.method];
  EXPECT_GE(of_method["full"], 3);
  for (const char* adapters : {"lora", "qlora"}) {
    EXPECT_GE(of_method[adapters], 1);
    EXPECT_LE(of_method[adapters], 3) << "what is configured would drown in them";
  }
  for (const Alternative& row : compared.rows) {
    if (!row.plan.fits) continue;
    const bool matched = std::ranges::any_of(best, [&](const Alternative& b) {
      const double alike = row.method == "full" ? 1 : 0.99;  // adapters' rules differ by less than is known
      return b.method == row.method && b.plan.fits &&
             b.tokens_per_second() >= alike * row.tokens_per_second() && b.state_bits >= row.state_bits &&
             b.weight_bits >= row.weight_bits;
    });
    EXPECT_TRUE(matched) << row.setting_text();
  }
}

TEST(Alternatives, SayTheBitsOfWeightsAndState) {
  const Compared compared(12);
  for (const Alternative& row : compared.rows) {
    // 4.125 bits in the blocks; the vocabulary's matrix, a fifth of the model, stays at 16.
    EXPECT_NEAR(row.weight_bits, row.method == "qlora" ? 6.6 : 16, 0.1) << row.setting_text();
    const bool none = row.setting_text().find("master=none") != std::string::npos;
    const int rule = row.rule == "adamw" ? 64 : row.rule == "sgd" ? 32 : 0;
    if (rule > 0) {
      EXPECT_EQ(row.state_bits, none ? rule : rule + 16) << row.setting_text();
    }
  }
}

TEST(Alternatives, AdaptersComeWithEveryOptimizerAndMaster) {
  for (const bool wide : {false, true}) {
    const Compared compared(12, wide ? std::vector<std::string>{"train.method=lora", "lora.dtype=fp32"}
                                     : std::vector<std::string>{"train.method=lora"});
    for (const char* const method : {"lora", "qlora"}) {
      std::set<std::string> rules, masterless;
      for (const Alternative& row : compared.rows) {
        if (row.method != method) continue;
        const bool none = row.setting_text().find("optimizer.master=none") != std::string::npos;
        (none ? masterless : rules).insert(row.rule);
      }
      // Adapters in fp32 are their own masters; rules that have none by themselves train bf16 weights.
      const auto bare = static_cast<size_t>(std::ranges::count(Rules::kNoMaster, true));
      EXPECT_EQ(rules.size(), Rules::kSize - (wide ? bare : 0)) << method;
      EXPECT_EQ(masterless.size(), wide ? 0 : Rules::kSize - bare) << method;
    }
  }
}

TEST(Alternatives, ArePrintedAndGivenToPrograms) {
  const Compared compared(12);
  const std::string table = print_alternatives(compared.rows, 3);
  EXPECT_EQ(std::ranges::count(table, '\n'), 5) << table;
  EXPECT_NE(table.find(compared.rows.front().setting_text()), std::string::npos);
  const auto json = nlohmann::json::parse(alternatives_json(compared.rows));
  ASSERT_EQ(json.size(), compared.rows.size());
  EXPECT_EQ(json[0]["settings"], compared.rows.front().settings);
  EXPECT_EQ(json[0]["peak"]["device_bytes"], compared.rows.front().plan.peak.device);
}

// Their rates, too, are those of the comparison, to which the refusal sends.
TEST(Alternatives, ThatFitAreNamedByARefusal) {
  const Compared compared(6);
  const AdapterSpec* const none = nullptr;
  const ModelLayout layout = compared.c.layout(none);
  const std::vector<Alternative> advised = advised_alternatives(
      {compared.c.config, compared.c.spec, none, layout, compared.c.device}, compared.c.machine, {});
  std::map<std::string, int> methods;
  for (const Alternative& row : advised) {
    ++methods[row.method];
    const auto same = std::ranges::find(compared.rows, row.settings, &Alternative::settings);
    ASSERT_NE(same, compared.rows.end()) << row.setting_text();
    EXPECT_TRUE(row.plan.fits) << row.setting_text();
    EXPECT_EQ(row.tokens_per_second(), same->tokens_per_second()) << row.setting_text();
    EXPECT_EQ(row.plan.recompute(), same->plan.recompute()) << row.setting_text();
  }
  EXPECT_GE(methods["lora"], 1);
  for (const auto& [method, count] : methods) EXPECT_LE(count, 2) << method;
  try {
    compared.c.plan();
    FAIL() << "it fits";
  } catch (const Error& error) {
    EXPECT_NE(error.text().next.find(": " + name_alternatives(advised)), std::string::npos)
        << error.text().next;
  }
}

}  // namespace
}  // namespace lm
