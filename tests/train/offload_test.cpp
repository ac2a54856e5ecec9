// Where state lives never changes a bit: losses, norms, weights and moments of runs that stream every class
// through few slots against the run that keeps everything resident. Built twice: for the CPU, which stands in
// for a GPU where a run is `slots_on_device`, and for a GPU, where it skips without one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "base/error.h"
#include "memory_store.h"
#include "offloaded_run.h"
#include "tests/support/counts.h"
#include "tests/support/device_test.h"

namespace lm {
namespace {

using namespace offloaded_run;

class Offload : public DeviceTest {};

TEST_F(Offload, GradientsAreClippedInTheseRuns) {
  for (const bool lora : {false, true}) {
    Variant run;
    run.lora = lora;
    const std::vector<double>& norms = reference(run).norms;
    EXPECT_GT(std::count_if(norms.begin(), norms.end(), [](double norm) { return norm > kMaxGradNorm; }), 3)
        << "lora " << lora << " " << testing::PrintToString(norms);
  }
}

TEST_F(Offload, EachClassByItselfGivesTheSameBits) {
  for (int which = 0; which < 4; ++which) {
    Variant run;
    run.optimizer = which == 0, run.gradients = which == 1, run.weights = which == 2,
    run.activations = which == 3;
    run.recompute = run.activations;
    run.micro_batches = 2;
    const Outcome got = Training(run).run();
    EXPECT_GT(got.moved_bytes, 0) << run.text();
    expect_same(run, got);
  }
}

// What blocks keep leaves the device with their inputs, at each level of recomputation, and comes back in
// another slot. With groups an input is on its way before its block's forward has more to keep. And without
// transfers, with outputs of norms.
TEST_F(Offload, KeptActivationsOfEachLevelGiveTheSameBits) {
  constexpr Recompute kBlock = Recompute::kBlock;
  for (const RecomputeChoice level :
       {RecomputeChoice(Recompute::kNone), {Recompute::kAttention}, {kBlock, 2}}) {
    for (const int variant : {0, 1, 2, 3, 4, 5}) {
      Variant run;
      run.recompute = true, run.level = level;
      run.activations = variant < 4, run.keep_norms = !run.activations;
      run.layers = 4, run.micro_batches = 3;
      run.lora = variant == 1 || variant == 5;
      run.group = variant == 2 ? 3 : 1;
      run.slots_on_device = variant == 2 || variant == 3;
      run.host = variant == 3 ? 1 : 0;
      const Outcome got = Training(run).run();
      EXPECT_EQ(got.moved_bytes > 0, run.activations && run.host == 0) << run.text();
      expect_same(run, got);
    }
  }
}

// A second forward makes them again.
TEST_F(Offload, KeptActivationsAreMadeAgainForASecondBackward) {
  Variant run;
  run.activations = run.in_backward = true;
  run.micro_batches = 2;
  expect_same(run, Training(run).run());
}

// What says io_uring runs on it, or is skipped where a ring is refused.
void everything_on_disk(Engine engine, const std::string& name) {
  Variant run;
  run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
  run.micro_batches = 4;
  run.group = 2;
  run.engine = engine;
  Training training(run);
  EXPECT_TRUE(training.rank().off_device().description().starts_with(name))
      << training.rank().off_device().description();
  const Outcome got = training.run();
  EXPECT_GT(got.moved_bytes, 0);
  expect_same(run, got);
}

TEST_F(Offload, EverythingOnDiskGivesTheSameBitsUnderIoUring) {
  if (!ring_allowed()) GTEST_SKIP() << "io_uring is refused here";
  everything_on_disk(Engine::kUring, "io_uring, depth ");
}

TEST_F(Offload, EverythingOnDiskGivesTheSameBitsUnderThreadsAndTheSimulator) {
  everything_on_disk(Engine::kThreads, "pread/pwrite");
  everything_on_disk(Engine::kSim, "simulated disk");
}

// Everything off the device, in each way that there is.
std::vector<Variant> everywhere(Variant run) {
  run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
  run.granules = 2;
  std::vector<Variant> out(6, run);
  for (size_t i = 1; i < out.size(); ++i) out[i].slots_on_device = true;  // the first: slots in host memory
  out[2].host = 1, out[3].host = 2, out[3].mixed = true;
  out[4].on_host = out[5].on_host = true, out[5].host = 1;
  return out;
}

TEST_F(Offload, GradientsInBf16GiveTheSameBits) {
  for (const bool lora : {false, true}) {
    for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
      if (!test::full_counts() && lora != (clip == Clip::kBlock)) continue;
      Variant resident;
      resident.lora = lora, resident.clip = clip, resident.micro_batches = 4, resident.group = 3;
      resident.gradient_dtype = DType::kBF16, resident.steps = 6;
      for (const Variant& run : everywhere(resident)) {
        SCOPED_TRACE(run.text());
        expect_same(run, Training(run).run());
      }
      // They are gradients of their own: fp32 ones end elsewhere.
      Variant wide = resident;
      wide.gradient_dtype = DType::kF32;
      EXPECT_TRUE(reference(wide).state != reference(resident).state);
    }
  }
}

// With a step that overflows, whose updates were left to the next one.
TEST_F(Offload, AModelInFp16GivesTheSameBitsAndSkipsOverflowsEverywhere) {
  for (const bool lora : {false, true}) {
    Variant resident;
    resident.dtype = DType::kF16, resident.master = lora ? Master::kNone : Master::kF32;
    resident.lora = lora, resident.micro_batches = 2, resident.group = 2, resident.steps = 5;
    if (lora) resident.base = EncodingKind::kNf4Double;
    std::vector<Variant> runs = everywhere(resident);
    if (!test::full_counts()) runs.resize(3);
    if (!lora) {
      runs.push_back(resident);
      runs.back().in_backward = true;
    }
    for (const Variant& run : runs) {
      SCOPED_TRACE(run.text());
      const Outcome got = Training(run).run();
      EXPECT_EQ(got.skipped, (std::vector<bool>{false, false, true, false, false}));
      for (const double loss : got.losses) EXPECT_TRUE(std::isfinite(loss));
      expect_same(run, got);
    }
  }
}

TEST_F(Offload, AnOverflowChangesNothing) {
  Variant run;
  run.dtype = DType::kF16, run.master = Master::kF32;
  Training training(run);
  training.step(1), training.step(2);
  const State before = training.state();
  const StepResult result = training.step(run.overflows_at);
  EXPECT_TRUE(result.skipped && std::isfinite(result.loss));
  EXPECT_TRUE(result.fault.starts_with("the gradient of tensor ")) << result.fault;
  EXPECT_TRUE(training.state() == before);
  training.step(4);
  EXPECT_FALSE(training.state() == before);
}

TEST_F(Offload, AdaptersInFp32OverACoarserModelGiveTheSameBits) {
  for (const EncodingKind base : {EncodingKind::kPlain, EncodingKind::kNf4Double}) {
    Variant resident;
    resident.lora = resident.fp32_adapters = true, resident.base = base;
    resident.micro_batches = 2, resident.group = 2, resident.steps = 5;
    std::vector<Variant> runs = everywhere(resident);
    runs.push_back(runs.front());
    runs.back().in_backward = true;
    for (const Variant& run : runs) {
      SCOPED_TRACE(run.text());
      expect_same(run, Training(run).run());
    }
    // Adapters of the model's own type are others, and a master beside fp32 ones is none.
    Variant same = resident, none = resident;
    same.fp32_adapters = false, none.master = Master::kNone;
    EXPECT_NE(reference(same).losses, reference(resident).losses);
    EXPECT_TRUE(reference(none).state == reference(resident).state);
    EXPECT_FALSE(reference(resident).state.contains("block1.master"));
  }
}

TEST_F(Offload, BiasesNormsOfHeadsAndWindowsGiveTheSameBits) {
  for (const Family family : {Family::kQwen2, Family::kQwen3, Family::kMistral}) {
    for (const bool lora : {false, true}) {
      if (!test::full_counts() && lora != (family == Family::kQwen3)) continue;
      Variant resident;
      resident.family = family, resident.lora = lora, resident.micro_batches = 2, resident.group = 2,
      resident.steps = 6;
      for (const Variant& run : everywhere(resident)) {
        SCOPED_TRACE(run.text());
        expect_same(run, Training(run).run());
      }
    }
  }
}

// All weights, with gradients in either type, and adapters beside quantized experts.
TEST_F(Offload, MixturesOfExpertsGiveTheSameBits) {
  for (const int kind : {0, 1, 2}) {
    Variant resident;
    resident.family = Family::kExperts, resident.lora = kind == 2, resident.micro_batches = 2;
    resident.group = 2, resident.steps = 4;
    if (kind == 1) resident.gradient_dtype = DType::kBF16;
    if (kind == 2) resident.base = EncodingKind::kNf4;
    const std::vector<Variant> runs = everywhere(resident);
    for (size_t i = 0; i < runs.size(); ++i) {
      if (!test::full_counts() && i % 3 != static_cast<size_t>(kind)) continue;
      SCOPED_TRACE(runs[i].text());
      expect_same(runs[i], Training(runs[i]).run());
    }
  }
}

// Learned positions, norms with biases, a layer's scalar, which is frozen in a full run too, mixers beside
// each other, and what a layer gives to later ones.
TEST_F(Offload, ShapesOfOtherFamiliesGiveTheSameBits) {
  for (const Family family : {Family::kGpt2, Family::kGemma, Family::kCohere, Family::kGranite,
                              Family::kGemma4, Family::kExpertsBeside}) {
    for (const bool lora : {false, true}) {
      if (!test::full_counts() && lora && family != Family::kGemma4) continue;
      Variant resident;
      resident.family = family, resident.lora = lora, resident.micro_batches = 2, resident.group = 2,
      resident.steps = 4;
      const std::vector<Variant> runs = everywhere(resident);
      for (size_t i = 0; i < runs.size(); ++i) {
        // In the short tier each way of having everything off the device is that of some family.
        if (!test::full_counts() && i % 3 != static_cast<size_t>(family) % 3) continue;
        SCOPED_TRACE(runs[i].text());
        expect_same(runs[i], Training(runs[i]).run());
      }
    }
  }
}

// A weight that is infinite for one step makes its loss or its gradients so.
TEST_F(Offload, ASkippedStepChangesNoByteAndTheNextOneIsTheResidentRunsOwn) {
  struct Told {
    std::vector<double> losses, norms;
    std::map<std::string, std::vector<std::byte>> state;
  };
  const auto run_one = [](const Variant& run) {
    Training training(run);
    Told told;
    for (int64_t step = 1; step <= 5; ++step) {
      const bool poisoned = step == 3;
      std::map<std::string, std::vector<std::byte>> before;
      float kept = 0;
      if (poisoned) {
        kept = training.replace_norm_weight(INFINITY);
        before = training.state();
      }
      const StepResult result = training.step(step);
      EXPECT_EQ(result.skipped, poisoned) << "step " << step;
      if (poisoned) {
        EXPECT_TRUE(training.state() == before) << "a skipped step has changed something";
        EXPECT_TRUE(std::isinf(training.replace_norm_weight(kept)));
        continue;
      }
      told.losses.push_back(result.loss), told.norms.push_back(result.grad_norm);
    }
    told.state = training.state();
    return told;
  };
  for (const bool lora : {false, true}) {
    Variant resident;
    resident.lora = lora, resident.micro_batches = 2, resident.group = 2;
    const Told want = run_one(resident);
    for (const Variant& run : everywhere(resident)) {
      SCOPED_TRACE(run.text());
      const Told got = run_one(run);
      EXPECT_EQ(got.losses, want.losses);
      EXPECT_EQ(got.norms, want.norms);
      EXPECT_TRUE(got.state == want.state);
    }
  }
}

// As above, with updates still left to the step that is skipped: a rate of 1e38 makes the next ones so.
TEST_F(Offload, SkippedStepsCompleteWhatWasLeftToThemAndNothingElse) {
  const auto run_one = [](const Variant& run) {
    Training training(run);
    std::vector<bool> skipped;
    for (int64_t step = 1; step <= 5; ++step)
      skipped.push_back(training.step(step, step == 2 ? 1e38 : 3e-3).skipped);
    EXPECT_EQ(skipped, (std::vector<bool>{false, false, true, true, true}));
    return training.state();
  };
  Variant resident;
  resident.micro_batches = 2;
  const auto want = run_one(resident);
  for (const Variant& run : everywhere(resident)) {
    SCOPED_TRACE(run.text());
    EXPECT_TRUE(run_one(run) == want);
  }
}

// The CPU beside a device: state in host memory, on disk, or half and half; under every clip mode and master.
TEST_F(Offload, UpdatesBesideTheDeviceGiveTheSameBits) {
  for (int i = 0; i < (cuda_built() ? test::counts(8, 30) : test::counts(15, 30)); ++i) {
    Variant run;
    run.slots_on_device = run.optimizer = run.on_host = true;
    run.host = i % 3;
    run.clip = static_cast<Clip>(i / 3 % 3);
    run.master = static_cast<Master>(i / 9 % 3);
    run.gradients = i % 2 == 1, run.weights = i % 4 == 2, run.mixed = i % 5 == 4;
    run.lora = i % 7 == 6, run.granules = 1 + i % 4;
    run.rule = static_cast<RuleId>(static_cast<size_t>(i) / 3 % Rules::kSize);
    SCOPED_TRACE(run.text());
    const Outcome got = Training(run).run();
    EXPECT_TRUE(run.host != 1 || got.moved_bytes == 0);  // only what is on disk is read and written
    expect_same(run, got);
  }
}

// The CPU updates every other tile where it lies, the device the others in its slots, in one block and step.
TEST_F(Offload, UpdatesBesideTheDeviceAreSharedWithTheSameBits) {
  for (int i = 0; i < test::counts(6, 24); ++i) {
    Variant run;
    run.slots_on_device = run.optimizer = run.on_host = run.shared = true, run.host = 1 + i % 2;
    run.clip = static_cast<Clip>(i / 2 % 3), run.master = static_cast<Master>(i % 3);
    run.gradients = i % 4 == 3, run.weights = i % 6 == 4, run.mixed = i % 5 == 4, run.lora = i % 6 == 5;
    SCOPED_TRACE(run.text());
    expect_same(run, Training(run).run());
  }
}

// Nothing has been written yet; an fp32 master off the device, which its first update makes of the weight, is
// read as such all the same, and is still made of it afterwards.
TEST_F(Offload, StateIsReadBeforeTheFirstStepAndReadingChangesNothing) {
  for (const Master master : {Master::kF32, Master::kSplit}) {
    Variant resident;
    resident.master = master;
    const auto want = Training(resident).state();
    for (const bool on_host : {false, true}) {
      Variant run = resident;
      run.optimizer = run.weights = true, run.tied = true;
      run.slots_on_device = run.on_host = on_host;
      SCOPED_TRACE(run.text());
      Training training(run);
      EXPECT_TRUE(training.state() == want);
      expect_same(run, training.run());
    }
  }
}

// Before the first step, when nothing was written yet, and between all others, whoever updates and wherever:
// the run is the one in which nobody has looked.
TEST_F(Offload, ReadingTheStateBetweenStepsChangesNoLaterBit) {
  for (int i = 0; i < test::counts(6, 12); ++i) {
    Variant run;
    run.optimizer = i > 1;
    run.weights = i % 2 == 1, run.gradients = i % 3 == 1, run.mixed = i % 5 == 4;
    run.tied = i % 4 != 3, run.vocab = run.tied ? 300 : 17000, run.granules = run.tied ? 1 + i % 3 : 40;
    run.master = static_cast<Master>(i % 3), run.clip = static_cast<Clip>(i / 4);
    run.rule = static_cast<RuleId>(static_cast<size_t>(i) % Rules::kSize);
    run.lora = i == 5;
    run.slots_on_device = i % 3 != 0;
    run.on_host = i % 3 == 2 && run.optimizer, run.host = run.slots_on_device ? i / 3 % 3 : 0;
    SCOPED_TRACE(run.text());
    expect_same(run, Training(run).run(true));
  }
}

// Of fp32 weights nothing at all is left to offload.
TEST_F(Offload, SgdWithoutMomentumHasNoState) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Variant run;
    run.rule = Rules::id<Sgd>(), run.stateless = true;
    run.dtype = dtype, run.steps = 4;
    run.weights = run.optimizer = true;
    run.groups = dtype == DType::kBF16;
    SCOPED_TRACE(run.text());
    Training training(run);
    const bool bare = dtype == DType::kF32;
    EXPECT_EQ(training.plan().placement.pool(Pool::kOptimizer).slots == 0, bare);
    const Outcome got = training.run();
    expect_same(run, got);
    for (const auto& [name, bytes] : got.state) EXPECT_FALSE(name.ends_with(".m")) << name;
    run.in_backward = true;
    expect_same(run, Training(run).run());
  }
}

// Two segments and a bit, of whatever classes, on disk, in host memory and half and half.
TEST_F(Offload, AChunkedHeadGivesTheSameBits) {
  const auto run_one = [](const std::string& text, bool lora, int host, int slots) {
    const auto has = [&](const char* what) { return text.find(what) != std::string::npos; };
    Variant run;
    run.lora = lora, run.tied = false, run.vocab = 17000;
    run.weights = has("weights"), run.gradients = has("gradients"), run.optimizer = has("optimizer");
    run.activations = run.recompute = has("activations");
    run.slots_on_device = has("device slots"), run.on_host = has("on host"), run.mixed = has("mixed"),
    run.host = host;
    run.micro_batches = 4, run.group = slots == 1 ? 4 : 3;
    run.granules = 40, run.slots = slots;
    SCOPED_TRACE(run.text());
    Training training(run);
    EXPECT_EQ(training.head_segments(), 3);
    expect_same(run, training.run());
  };
  run_one("weights", false, 0, 1);
  run_one("weights gradients optimizer mixed", false, 0, 3);
  run_one("weights gradients optimizer activations device slots", false, 0, 2);
  run_one("weights optimizer device slots on host", false, 2, 2);
  run_one("weights optimizer activations device slots", true, 2, 2);
  if (!test::full_counts()) return;
  run_one("gradients", false, 0, 1);
  run_one("weights gradients", false, 0, 2);
  run_one("weights gradients optimizer", false, 0, 2);
  run_one("weights gradients optimizer device slots", false, 1, 2);
  run_one("gradients optimizer device slots on host", false, 0, 2);
  run_one("weights", true, 0, 1);
  run_one("weights mixed", true, 0, 3);
}

// Stores are an interface: one that knows neither disks nor pinned memory trains as well.
TEST_F(Offload, AStoreInMemoryAloneGivesTheSameBits) {
  for (int i = 0; i < 9; ++i) {
    Variant run;
    run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
    run.micro_batches = 4, run.group = 2, run.lora = i == 3, run.tied = i % 2 == 0;
    run.vocab = run.tied ? 300 : 17000, run.granules = run.tied ? 1 + i % 3 : 40;
    run.clip = static_cast<Clip>(i / 3), run.master = static_cast<Master>(i % 3), run.mixed = i % 4 == 3;
    SCOPED_TRACE(run.text());
    MemoryStore::Calls calls;
    Training training(run, {}, [&](Pool, const LocalStoreSetup& setup) {
      return std::make_unique<MemoryStore>(setup, calls);
    });
    const Outcome got = training.run(i == 8);
    EXPECT_EQ(got.moved_bytes, 0) << "something went to a disk";
    EXPECT_GT(calls.fetches, 100);
    EXPECT_GT(calls.claims, 100);
    EXPECT_GT(calls.writes, 100);
    EXPECT_GT(calls.polls, 100);
    EXPECT_GE(calls.flushes, 2);
    expect_same(run, got);
  }
}

TEST_F(Offload, AQuantizedBaseGivesTheSameBits) {
  for (int kind = 1; kind <= static_cast<int>(EncodingKind::kInt8); ++kind) {
    Variant run;
    run.lora = true, run.base = static_cast<EncodingKind>(kind), run.steps = 6;
    run.dtype = kind % 2 == 0 ? DType::kF32 : DType::kBF16;
    if (run.dtype == DType::kF32) run.master = Master::kF32;
    Variant plain = run;
    plain.base = EncodingKind::kPlain;
    EXPECT_NE(reference(plain).losses, reference(run).losses);
    run.weights = run.recompute = true;
    for (const int host : {-1, 0, 1, 2}) {  // slots of the device's own memory, or its tiers themselves
      run.slots_on_device = host >= 0, run.host = std::max(host, 0), run.mixed = host == 2;
      SCOPED_TRACE(run.text());
      expect_same(run, Training(run).run());
    }
  }
}

// Those from `first` to `last` of a fixed sequence.
void drawn_runs(int first, int last) {
  const bool ring = ring_allowed();
  int without_ring = 0;
  std::mt19937 random(11);
  for (int i = 0; i < last; ++i) {
    Variant run = drawn_variant(random, i);
    if (i < first) continue;
    if (run.engine == Engine::kUring && !ring) {
      run.engine = Engine::kThreads;
      ++without_ring;
    }
    SCOPED_TRACE(run.text());
    try {
      expect_same(run, Training(run).run());
    } catch (const Error& error) {
      FAIL() << error.report() << run.text();
    }
    if (testing::Test::HasFailure()) return;
  }
  if (without_ring > 0)
    GTEST_SKIP() << "io_uring is refused here: " << without_ring << " runs drawn for it ran on threads";
}

TEST_F(Offload, DrawnRunsGiveTheSameBits) {
  drawn_runs(0, 40);
}

// `./dev test --full`.
TEST_F(Offload, MoreDrawnRunsGiveTheSameBits) {
  drawn_runs(40, 80);
}

}  // namespace
}  // namespace lm
