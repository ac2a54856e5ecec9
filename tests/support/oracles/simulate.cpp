#include "tests/support/oracles/simulate.h"

#include <algorithm>

#include "plan/estimate.h"
#include "plan/traffic.h"
#include "schedule/rank_clock.h"
#include "tests/support/oracles/collective_bytes.h"

namespace lm {
namespace {

// A number in [0, 1) for a rank and a step (SplitMix64).
double draw(uint64_t seed, uint64_t step, uint64_t rank) {
  uint64_t x = seed + 0x9e3779b97f4a7c15ULL * (step * 0x100000001ULL + rank + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

// What has to pass each link in one direction; the busiest one decides.
class Network {
 public:
  Network(const World& world, const RankLinks& links) : world_(world), links_(links) {}

  // Seconds of a call, from the last one's coming on.
  double carry(const Collective& call) {
    const int each = world_.ranks_per_node(), outside = world_.ranks - each;
    if (call.reach == Collective::Reach::kMachine)  // of a reduce_scatter a call for each machine's shards
      return occupy(most_inside(call), 0) + (call.reduce_scatter ? world_.nodes : 1) * links_.call_seconds;
    if (call.reach == Collective::Reach::kGroup) return occupy(most_of_group(call), 0) + links_.call_seconds;
    if (call.reach == Collective::Reach::kMachines || call.reach == Collective::Reach::kCopies)
      return occupy(0, most_of_places(call)) + links_.call_seconds +
             (world_.nodes - 1) * links_.message_seconds;
    double inside = 0, between = 0;
    for (int node = 0; node < world_.nodes; ++node) {
      double here = 0;  // bytes of the node's shards
      for (int r = node * each; r < (node + 1) * each; ++r)
        here += static_cast<double>(shard_of(call, r, world_.ranks));
      const double rest = static_cast<double>(call.bytes) - here;
      // Out of the machine and into it: its shards to all others' ranks, and theirs to each of its ranks.
      between = std::max({between, here * (world_.ranks - each), rest * each});
      for (int r = node * each; r < (node + 1) * each; ++r) {
        const auto own = static_cast<double>(shard_of(call, r, world_.ranks));
        inside = std::max({inside, own * (each - 1), here - own});
      }
    }
    return occupy(inside, between) + links_.call_seconds + outside * links_.message_seconds;
  }

  double inside_busy = 0, between_busy = 0;

 private:
  // Bytes of the rank that has the most to send or to receive on its machine: the shards of other places, and
  // its own place's for or from each of the others.
  double most_inside(const Collective& call) const {
    int64_t most = 0;
    for (int place = 0; place < world_.ranks_per_node(); ++place) {
      const int64_t own = shards_of_place(call, place, world_.ranks);
      most = std::max({most, call.bytes - own, own * (world_.ranks_per_node() - 1)});
    }
    return static_cast<double>(most);
  }
  // Bytes of the rank that has the most to send or to receive in its group: its own shard, or the others'.
  static double most_of_group(const Collective& call) {
    int64_t most = 0;
    for (int place = 0; place < call.machine_ranks; ++place) {
      const int64_t own = shard_of(call, place, call.machine_ranks);
      most = std::max({most, call.bytes - own, own * (call.machine_ranks - 1)});
    }
    return static_cast<double>(most);
  }
  // Bytes of the machine that has the most to send or to receive: others' shards, once each; and its own from
  // or for each of the others.
  double most_of_places(const Collective& call) const {
    const int each = world_.ranks_per_node();
    int64_t most = 0;
    for (int node = 0; node < world_.nodes; ++node) {
      int64_t here = 0;
      for (int r = node * each; r < (node + 1) * each; ++r) here += shard_of(call, r, world_.ranks);
      most = std::max({most, call.bytes - here, here * (world_.nodes - 1)});
    }
    return static_cast<double>(most);
  }
  double occupy(double inside, double between) {
    inside /= links_.inside;
    between = world_.nodes > 1 ? between / links_.between : 0;
    inside_busy += inside;
    between_busy += between;
    return std::max(inside, between);
  }

  const World& world_;
  const RankLinks& links_;
};

// An operation as all ranks have it.
struct Timed {
  double compute = 0;
  std::vector<Collective> calls;
};

class Ranks {
 public:
  Ranks(const World& world, const StepConfig& config, const TimelineShape& shape, const LinkRates& rates)
      : world_(world), disks_(static_cast<size_t>(world.nodes)) {
    for (int r = 0; r < world.ranks; ++r)
      clocks_.emplace_back(config, shape, rates, disks_[static_cast<size_t>(r / world.ranks_per_node())]);
    order_.resize(clocks_.size());
    for (size_t r = 0; r < order_.size(); ++r) order_[r] = r;
  }

  void pass(const TimedList& list, size_t i, const Timed& timed, const std::vector<double>& slowness,
            Network& network) {
    const Operation& op = list.operations()[i];
    if (clocks_.front().beside(op)) return pass_beside(list, i, timed, slowness, network);
    const bool moves = is_transfer(op) && !clocks_.front().gathers(op);
    if (moves) take_turns();  // who comes to a disk first is served first
    if (timed.calls.empty()) {
      for (const size_t r : order_) clocks_[r].pass(list, i, timed.compute * slowness[r]);
      return;
    }
    double last = 0;
    for (size_t r = 0; r < clocks_.size(); ++r) {
      clocks_[r].arrive(list, i);
      last = std::max(last, clocks_[r].now);
    }
    for (const Collective& call : timed.calls) last += network.carry(call);
    for (size_t r = 0; r < clocks_.size(); ++r) clocks_[r].leave(op, last + timed.compute * slowness[r]);
  }

  // In the ranks' streams of calls, while their compute goes on.
  void pass_beside(const TimedList& list, size_t i, const Timed& timed, const std::vector<double>& slowness,
                   Network& network) {
    std::vector<double> start;
    for (RankClock& clock : clocks_) start.push_back(clock.ready_beside(list, i));
    if (!timed.calls.empty()) {
      double last = *std::ranges::max_element(start);
      for (const Collective& call : timed.calls) last += network.carry(call);
      std::ranges::fill(start, last);
    }
    for (size_t r = 0; r < clocks_.size(); ++r)
      clocks_[r].pass_beside(list.operations()[i], start[r], start[r] + timed.compute * slowness[r]);
  }

  bool beside(const Operation& op) const { return clocks_.front().beside(op); }

  // Between two steps.
  void call(double seconds) {
    const double end = this->end() + seconds;
    for (RankClock& clock : clocks_) clock.now = end;
  }
  double end() const {
    return std::max_element(clocks_.begin(), clocks_.end(),
                            [](const RankClock& a, const RankClock& b) { return a.now < b.now; })
        ->now;
  }
  const RankClock& first() const { return clocks_.front(); }

 private:
  void take_turns() {
    std::stable_sort(order_.begin(), order_.end(),
                     [&](size_t a, size_t b) { return clocks_[a].now < clocks_[b].now; });
  }

  const World& world_;
  std::vector<DiskClock> disks_;  // of each machine
  std::vector<RankClock> clocks_;
  std::vector<size_t> order_;
};

}  // namespace

Simulation simulate_step(const PlanInputs& inputs, const Machine& machine, const Plan& plan,
                         const Stragglers& stragglers) {
  const PlanInput in{inputs, machine, plan.world, PlanPurpose::kTrain};
  const StepCosts costs(step_shape(in, plan));
  const Traffic traffic(in.layout, plan.numerics, plan.placement, plan.world);
  const RankLinks links = rank_links(machine, in.device);
  const TimelineShape shape = plan.placement.timeline();
  LinkRates rates = link_rates(machine, in.device);  // of a rank; ranks of a machine have its disks together
  rates.disk_read *= plan.world.ranks_per_node(), rates.disk_write *= plan.world.ranks_per_node();
  const auto compute = compute_seconds(in, plan, costs);
  Ranks ranks(plan.world, plan.step, shape, rates);
  Simulation out;
  uint64_t number = 0;
  walk_until_steady(plan.step, [&](const TimedList& list) {
    std::vector<double> slowness;
    for (int r = 0; r < plan.world.ranks; ++r) {
      const bool slow = draw(stragglers.seed, number, static_cast<uint64_t>(r)) < stragglers.share;
      slowness.push_back(slow ? stragglers.slowdown : 1);
    }
    ++number;
    Network network(plan.world, links);
    const double start = ranks.end(), read = ranks.first().read, written = ranks.first().written;
    double computing = 0;
    for (size_t i = 0; i < list.operations().size(); ++i) {
      const Operation& op = list.operations()[i];
      const Timed timed{compute(op), traffic.of(op)};
      if (timed.compute == 0 && timed.calls.empty() && !is_transfer(op) && list.wanted(i).empty()) continue;
      if (!shape.host_update(plan.step, op).used && !ranks.beside(op)) computing += timed.compute;
      ranks.pass(list, i, timed, slowness, network);
    }
    for (const Collective& call : traffic.stop_vote()) {
      if (plan.world.ranks > 1) ranks.call(network.carry(call));
    }
    const double slowest = *std::max_element(slowness.begin(), slowness.end());
    const double per_node = plan.world.ranks_per_node();
    out = {.seconds = ranks.end() - start,
           .bound = std::max({computing * slowest, network.inside_busy, network.between_busy,
                              (ranks.first().read - read) * per_node / rates.disk_read,
                              (ranks.first().written - written) * per_node / rates.disk_write})};
    return WalkedStep{out.seconds, ranks.first().behind()};
  });
  return out;
}

}  // namespace lm
