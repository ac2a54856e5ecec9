// Refusals: exit 12, the table, and advice that is true.
#include <gtest/gtest.h>

#include <span>

#include <map>

#include "base/bytes.h"
#include "shapes.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

using Change = void (*)(Config&);

// Every setting that advice may name and what it means.
const std::map<std::string, Change>& settings() {
  static const std::map<std::string, Change> kSettings = {
      {"train.recompute = \"block\"", [](Config& c) { c.train.recompute = Recompute::kBlock; }},
      {"offload.paths = [\"a directory on a fast disk\"]", [](Config& c) { c.offload.paths = {"."}; }},
      {"train.update = \"auto\"", [](Config& c) { c.train.update = UpdateTime::kAuto; }},
      {"train.micro_batch = 1", [](Config& c) { c.train.micro_batch = 1; }},
      {"train.gradients = \"bf16\"", [](Config& c) { c.train.gradients = GradientDType::kBF16; }},
      {"optimizer.master = \"split\"", [](Config& c) { c.optimizer.master = Master::kSplit; }},
      {"optimizer.master = \"none\"", [](Config& c) { c.optimizer.master = Master::kNone; }},
      {"data.max_length = 1024", [](Config& c) { c.data.max_length = 1024; }},
      {"lora.dtype = \"bf16\" with optimizer.master = \"split\"",
       [](Config& c) { c.lora.dtype = LoraDType::kBF16, c.optimizer.master = Master::kSplit; }},
      {"model.dtype = \"bf16\"", [](Config& c) { c.model.dtype = ModelDType::kBF16; }},
      {"train.method = \"lora\"", [](Config& c) { c.train.method = Method::kLora; }},
      {"train.method = \"qlora\"",
       [](Config& c) { c.train.method = Method::kLora, c.model.quantize = Quantize::kNf4; }},
      {"model.quantize = \"nf4\"", [](Config& c) { c.model.quantize = Quantize::kNf4; }},
  };
  return kSettings;
}

struct Refusal {
  ErrorText text;
  std::vector<std::string> named;  // settings, in the advice's order
};

Refusal refuse(const Case& c) {
  try {
    c.plan();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kDoesNotFit);
    Refusal out{error.text(), {}};
    std::string rest = out.text.next;
    while (!rest.empty()) {
      size_t first = std::string::npos;
      std::string name;
      for (const auto& [setting, change] : settings()) {
        const size_t at = rest.find(setting + " (saves");
        if (at < first) first = at, name = setting;
      }
      if (first == std::string::npos) break;
      out.named.push_back(name);
      rest = rest.substr(first + name.size());
    }
    return out;
  }
  ADD_FAILURE() << "planned";
  return {};
}

Case full_1b() {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  c.config.lora.r = 16;
  c.config.train.micro_batch = 8;
  c.config.train.recompute = Recompute::kNone;
  return c;
}

TEST(Refusal, HasATableOfNeedAndHave) {
  Case c = full_1b();
  c.machine = cpu_machine(8);
  const Refusal refusal = refuse(c);
  const Plan plan = c.draft();
  EXPECT_EQ(refusal.text.area, "MEM-16");
  EXPECT_NE(refusal.text.what.find(format_bytes(plan.peak.host)), std::string::npos);
  EXPECT_NE(refusal.text.what.find(format_bytes(plan.tiers[0].usable)), std::string::npos);
  for (const ClassBytes& row : plan.classes) {
    if (row.bytes > 0) {
      EXPECT_NE(refusal.text.what.find("\n    " + row.name + ": " + format_bytes(row.bytes)),
                std::string::npos);
    }
  }
}

TEST(Refusal, NamesSettingsThatMakeItFit) {
  Case c = full_1b();
  int alone = 0, together = 0, hopeless = 0;
  for (int64_t gib = 1; gib <= 64; gib += test::counts(3, 1)) {
    c.machine = cpu_machine(gib);
    const Plan plan = c.draft();
    if (plan.fits) continue;
    const Refusal refusal = refuse(c);
    EXPECT_LE(refusal.named.size(), 3U);
    const std::string& next = refusal.text.next;
    const bool joint = next.starts_with("set together"), hope = next.starts_with("set ");
    // "set together A, B, or set C": what follows "or set" is enough alone.
    const size_t split = joint ? std::min(next.find(", or set "), next.size()) : 0;
    Case all = c;
    for (const std::string& setting : refusal.named) {
      Case one = c;
      settings().at(setting)(one.config);
      const bool enough = hope && next.find(setting) >= split;
      if (!enough) settings().at(setting)(all.config);
      const Plan changed = one.draft();
      const std::string saving =
          setting + " (saves " + format_bytes(plan.peak.host - changed.peak.host) + ")";
      EXPECT_NE(next.find(saving), std::string::npos) << next;
      if (enough) {
        EXPECT_TRUE(changed.fits) << setting << " at " << gib << " GiB";
        ++alone;
      }
    }
    if (joint) {
      EXPECT_TRUE(all.draft().fits) << next;
      ++together;
    }
    if (!hope) {
      EXPECT_FALSE(all.draft().fits);
      EXPECT_NE(next.find(format_bytes(all.draft().peak.host)), std::string::npos) << next;
      ++hopeless;
    }
  }
  EXPECT_GT(alone, 0);
  EXPECT_GT(together, 0);
  EXPECT_GT(hopeless, 0);
}

TEST(Refusal, OfWhatCanNeverFitIsQuickAndSaysSo) {
  // The embedding alone, which never leaves, is larger.
  Case c{.spec = llama_8b(), .machine = cpu_machine(1)};
  const Refusal refusal = refuse(c);
  EXPECT_TRUE(refusal.text.next.starts_with("use a machine with more memory")) << refusal.text.next;
}

TEST(Refusal, OfAGpuNamesItsMemory) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  stay_near(c.config);
  const Refusal refusal = refuse(c);
  EXPECT_EQ(refusal.text.area, "MEM-15");
  EXPECT_NE(refusal.text.what.find("of GPU memory"), std::string::npos);
  EXPECT_NE(refusal.text.next.find("train.method = \"lora\""), std::string::npos) << refusal.text.next;
}

TEST(Refusal, AdvisesAdaptersBesideNewTokensOnlyIfTheseTrainTheirRows) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  stay_near(c.config);
  c.config.model.add_tokens = {"<think>"};
  const std::string untrained = refuse(c).text.next;
  EXPECT_EQ(untrained.find("lora"), std::string::npos) << untrained;
  c.config.lora.also = {"embed_tokens", "lm_head"};
  const std::string trained = refuse(c).text.next;
  EXPECT_NE(trained.find("lora"), std::string::npos) << trained;
}

TEST(Refusal, CountsWhatOthersUseNow) {
  Case c;
  c.machine.host_available = 1LL << 30;
  const Refusal refusal = refuse(c);
  EXPECT_NE(refusal.text.what.find("1.00 GiB"), std::string::npos) << refusal.text.what;
}

TEST(Refusal, OfADiskLimitNamesItAndWhatTheRestNeeds) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(12)};
  c.config.offload.paths = {"/scratch"};
  c.machine.disks = {{.path = "/scratch", .free_bytes = 1LL << 40}};
  c.config.offload.disk_limit = Budget{1LL << 30, 0};
  const Refusal refusal = refuse(c);
  EXPECT_EQ(refusal.text.area, "DISK-33");
  EXPECT_NE(refusal.text.what.find("1.00 GiB may be used in /scratch (offload.disk_limit; 1.00 TiB free)"),
            std::string::npos)
      << refusal.text.what;
  EXPECT_TRUE(refusal.text.next.starts_with("raise offload.disk_limit")) << refusal.text.next;
  // The limit that it names is one that works.
  c.config.offload.disk_limit = Budget{c.draft().peak.disk, 0};
  EXPECT_TRUE(c.draft().fits);
}

TEST(Refusal, NeverComesWhereTheMachineIsUnknown) {
  Case c{.spec = llama_8b(), .machine = Machine{}};
  EXPECT_TRUE(c.plan().fits);
}

}  // namespace
}  // namespace lm
