// Our side of throttled_link.py: is what ranks say to one another hidden behind compute as far as the step's
// list of operations allows? Ranks with GPUs, as processes on the emulator (tests/emulator), run whole steps
// of a small model: the real plan, executor, stores, streams and sums. Products and updates sleep for as long
// as a chosen GPU would take, calls for as long as a link of a chosen rate, and disks are simulated. The
// bound is the same list in schedule/timeline.h's arithmetic with the same rates.
//
//   bench_throttled_link [ROUNDS = 7] [smoke]
//
// A line of text and a JSON line {case, ranks, beside, link, step_ms, bound_ms, ratio, ...} for each. `link`:
// what the link has to do, in the step's compute. smoke: link / compute = 1 alone.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/clock.h"
#include "comm/shared_group.h"
#include "config/config_toml.h"
#include "kernels/library.h"
#include "plan/estimate.h"
#include "plan/traffic.h"
#include "synthetic_run.h"
#include "tests/support/sim_disk.h"
#include "throttled_group.h"

namespace {

using namespace lm;

// Seconds of a step's compute and updates, per rank: what the emulation itself computes, which no GPU would,
// is a small part of it however many ranks share this machine's cores.
constexpr double kCompute = 0.15, kUpdates = 0.015;
constexpr int64_t kLength = 16, kMicroBatches = 2;  // of each rank
constexpr double kDisk = 16e6;                      // bytes/s each way: half of two ranks' compute
constexpr double kFast = 1e18;                      // bytes/s: a link that takes no time

constexpr const char* kModel =
    R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":64,"intermediate_size":128,
"num_hidden_layers":10,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"vocab_size":320,
"max_position_embeddings":4096,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":false})";

struct Setting {
  const char* name;
  int ranks;
  bool lora;
  std::vector<std::string> keys;
  bool disk = false;
};

std::vector<Setting> settings() {
  const std::string block = "train.recompute=\"block\"";
  return {
      {"stage 0", 2, false, {"zero.stage=0"}},
      {"stage 1", 2, false, {"zero.stage=1"}},
      {"stage 2", 2, false, {"zero.stage=2"}},
      {"stage 3", 2, false, {"zero.stage=3", block}},
      {"stage 3, 4 ranks", 4, false, {"zero.stage=3", block}},
      {"stage 1, 4 ranks", 4, false, {"zero.stage=1"}},
      {"LoRA, base in shards", 2, true, {"zero.stage=3"}},
      {"LoRA, base in shards, 4 ranks", 4, true, {"zero.stage=3"}},
      {"stage 1, state on disk", 2, false, {"zero.stage=1", "offload.optimizer=\"nvme\""}, true},
  };
}

std::string swap_path() {
  return std::filesystem::temp_directory_path().string();
}

SyntheticSetup setup_of(const Setting& setting) {
  std::vector<std::string> keys = setting.keys;
  keys.push_back("run.threads=1");
  keys.push_back("data.max_length=" + std::to_string(kLength));
  keys.push_back("train.micro_batch=1");
  keys.push_back("train.global_batch=" + std::to_string(kMicroBatches * setting.ranks));
  if (setting.disk) keys.push_back("offload.paths=[\"" + swap_path() + "\"]");
  if (setting.lora) keys.push_back("train.method=\"lora\"");
  return {.spec = parse_model_spec(kModel, "benchmark"),
          .lora = setting.lora,
          .config = parse_config("[model]\npath = \"none\"\n[data]\ntrain = [\"none\"]\n", "benchmark", keys),
          .update_on_host = false};
}

Machine imagined() {
  Machine machine;
  machine.cores = 1;
  machine.host_memory = 64 * kGiB;
  machine.gpus.push_back(built_in_gpu("H100"));
  machine.disks = {{swap_path(), 64 * kGiB, kDisk, kDisk}};
  return machine;
}

// What each operation of a rank's list takes, by the rates of the streams.
class Bound {
 public:
  Bound(const SyntheticRun& run, const SyntheticSetup& setup, int ranks)
      : plan_(run.plan()),
        inputs_{setup.config, setup.spec, run.adapter(), run.layout(), DeviceType::kCuda, {}, false},
        in_{inputs_, machine_, {.ranks = ranks}, PlanPurpose::kTrain},
        costs_(step_shape(in_, plan_)),
        traffic_(run.layout(), plan_.numerics, plan_.placement, in_.world),
        units_(run.layout().units(plan_.placement.head_segments() > 0)),
        list_(steady_steps(plan_.step).back()) {}

  TimedRates rates() const {
    double flops = 0, elements = 0;
    for (const Operation& op : list_.operations) flops += this->flops(op), elements += this->elements(op);
    return {flops / (kCompute * in_.world.ranks), elements / (kUpdates * in_.world.ranks)};
  }
  // Seconds of the link, at a byte per second.
  double link_bytes() const {
    return sum([&](const Operation& op) { return link(op, 1); });
  }
  double compute(const TimedRates& rates) const {
    return sum([&](const Operation& op) { return compute(op, rates); });
  }
  Timeline walk(const TimedRates& rates, double link_rate) const {
    return walk_timeline(plan_.step, plan_.placement.timeline(),
                         {.disk_read = kDisk, .disk_write = kDisk, .link = kFast},
                         [&](const Operation& op) { return compute(op, rates) + link(op, link_rate); });
  }

 private:
  double sum(const std::function<double(const Operation&)>& of) const {
    double out = 0;
    for (const Operation& op : list_.operations) out += of(op);
    return out;
  }
  double flops(const Operation& op) const {
    return is_transfer(op) || op.kind == OperationKind::kUpdate ? 0 : costs_.of(op).gemm_flops;
  }
  double elements(const Operation& op) const {
    if (op.kind != OperationKind::kUpdate) return 0;
    const Unit& unit = units_[static_cast<size_t>(op.unit)];
    const int ranks = plan_.placement.sharded ? in_.world.ranks : 1;
    return static_cast<double>(shard_of(unit, 0, ranks).elements) /
           static_cast<double>(plan_.step.unit(op.unit).tiles());
  }
  double compute(const Operation& op, const TimedRates& rates) const {
    return flops(op) / rates.gemm_flops + elements(op) / rates.updated_elements;
  }
  double link(const Operation& op, double rate) const {
    double seconds = 0;
    for (const Collective& call : traffic_.of(op)) {
      if (op.kind == OperationKind::kCheck) continue;  // over host memory
      seconds += collective_time(call, in_.world, {.inside = rate}).seconds();
    }
    return seconds;
  }

  const Plan& plan_;
  const Machine machine_ = imagined();
  const PlanInputs inputs_;
  const PlanInput in_;
  const StepCosts costs_;
  const Traffic traffic_;
  const std::vector<Unit> units_;
  const StepSchedule list_;
};

struct Case {
  bool beside = true;
  double link = 1;  // in the step's compute
};

std::vector<Case> cases(bool smoke) {
  if (smoke) return {{true, 1.0}, {false, 1.0}};
  return {{true, 0.25}, {true, 0.5}, {true, 1.0}, {true, 2.0}, {false, 1.0}};
}

// Of the quicker rounds: what else the machine does makes a step longer, never a link quicker.
double quicker(std::vector<double> seconds) {
  const auto quarter = seconds.begin() + std::ssize(seconds) / 4;
  std::nth_element(seconds.begin(), quarter, seconds.end());
  return *quarter;
}

void measure(const Setting& setting, const Case& one, int rounds, SyntheticRun& run, const Bound& bound,
             const TimedRates& rates, TimedStreams& streams, ThrottledGroup& group) {
  const double compute = bound.compute(rates), bytes = bound.link_bytes();
  group.rate = bytes / (one.link * compute);
  group.beside = one.beside;
  const Timeline timeline = bound.walk(rates, group.rate);
  for (int round = 0; round < 2; ++round) run.begin_step();
  const double held = streams.held();
  const int64_t sent = run.rank().sent_bytes();
  std::vector<double> seconds;
  double before = monotonic_seconds();
  for (int round = 0; round < rounds; ++round) {
    run.begin_step();
    const double now = monotonic_seconds();
    seconds.push_back(now - before);
    before = now;
  }
  const double step = quicker(seconds), steps = rounds;
  const double disk = std::max(timeline.disk_read_bytes, timeline.disk_written_bytes) / kDisk;
  const double longest = std::max({compute, one.link * compute, disk});
  const std::vector<double> all_sent =
      run.rank().group().gather("sent", static_cast<double>(run.rank().sent_bytes() - sent) / steps);
  if (run.rank().group().rank() != 0) return;
  double mean_sent = 1;  // the vote of whether to stop, between steps
  for (const double of_rank : all_sent) mean_sent += of_rank / setting.ranks;
  const nlohmann::json row = {{"case", setting.name},
                              {"ranks", setting.ranks},
                              {"beside", one.beside},
                              {"link", one.link},
                              {"step_ms", step * 1e3},
                              {"bound_ms", timeline.seconds * 1e3},
                              {"longest_ms", longest * 1e3},
                              {"held", (streams.held() - held) / steps / (compute + one.link * compute)},
                              {"sent", mean_sent / run.plan().traffic.bytes()},
                              {"ratio", step / timeline.seconds}};
  std::printf("%-30s link %.2f x compute%s: step %6.1f ms, bound %6.1f ms (%.3fx), longest %6.1f ms\n%s\n",
              setting.name, one.link, one.beside ? "" : ", not beside it", step * 1e3, timeline.seconds * 1e3,
              step / timeline.seconds, longest * 1e3, row.dump().c_str());
  std::fflush(stdout);
}

void run_rank(const Setting& setting, SharedRegion& region, int rank, int rounds, bool smoke) {
  setenv("NCCL_HOSTID", ("host" + std::to_string(rank)).c_str(),
         1);  // all ranks have the emulator's one card
  SharedGroup peers(region, rank);
  cuda_select(0);
  const StreamView stream = start_torch(DeviceType::kCuda, 1, true);
  NcclGroup nccl(
      {.api = load_nccl(), .peers = peers, .lost = peers.watch(), .host = "here", .staging = 4 * kMiB});
  TimedStreams streams;
  TimedRates rates{kFast, kFast};
  ThrottledGroup group(nccl, streams);
  SyntheticSetup setup = setup_of(setting);
  std::unique_ptr<SimDisk> disk;
  setup.engine = [&disk](const EngineSetup& engine) {
    disk = std::make_unique<SimDisk>(
        engine.files,
        SimSetup{.faults = {}, .depth = 32, .read_bytes_per_s = kDisk, .write_bytes_per_s = kDisk});
    return disk->make_engine();
  };
  setup.group = &peers;
  setup.device_group = &group;
  setup.kernels = &timed_kernels(library_kernels(DeviceType::kCuda), streams, rates);
  {
    SyntheticRun run(setup, imagined(), stream);
    const Bound bound(run, setup, setting.ranks);
    rates = bound.rates();
    for (const Case& one : cases(smoke)) measure(setting, one, rounds, run, bound, rates, streams, group);
    run.rank().step().flush();
  }
  nccl.leave();
}

// Whether all ranks have come to their end.
bool run_ranks(const Setting& setting, int rounds, bool smoke) {
  SharedRegion region = SharedRegion::create(setting.ranks);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < setting.ranks; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      ranks.push_back(child);
      continue;
    }
    int code = 0;
    try {
      run_rank(setting, region, rank, rounds, smoke);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s, rank %d: %s\n", setting.name, rank, error.what());
      region.end();
      code = 1;
    }
    std::fflush(nullptr);
    _exit(code);
  }
  bool good = true;
  for (const pid_t rank : ranks) {
    int status = 0;
    waitpid(rank, &status, 0);
    good = good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  const bool smoke = argc > 2 && std::string(argv[2]) == "smoke";
  for (const Setting& setting : settings()) {
    if (!run_ranks(setting, rounds, smoke)) return 1;
  }
  return 0;
}
