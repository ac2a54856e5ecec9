// A rank's steps in a simulation: the real lists (schedule/step_lists.h), walked in their order as
// train/step.h does, by the real collectives, stores of shards (comm/shard_store.h) and sums in two levels. A
// unit's weights are a few numbers. What is computed depends on every bit of the weights that an operation
// has borrowed, and sums depend on their order: whatever is done too early, too late, twice or with other
// ranks' bytes changes all that follows. Owns its memory; borrows the group. The rank's thread calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/collective_names.h"
#include "comm/group.h"
#include "comm/shard_store.h"
#include "comm/two_levels.h"
#include "schedule/step_lists.h"
#include "train/rank_experts.h"

namespace lm::test {

// What a plan decides of a step.
struct StepShape {
  int64_t layers = 1, micro_batches = 1, group = 1;  // as StepConfig has them
  int stage = 0;                                     // ZeRO's
  int copies = 1;                                    // of each shard; as many as ranks: nothing is sharded
  int machine_ranks = 1;                             // whose gradients are added up first
  Clip clip = Clip::kGlobal;
  RecomputeChoice recompute = Recompute::kNone;
  bool in_backward = false, tied = false;
  int64_t tiles = 0;     // of each block's state, off the device; 0: it is on it
  int64_t slots = 3;     // of weights in shards, and of gradients
  bool experts = false;  // layers are mixtures, of which each rank keeps an expert
};

// Of so many ranks on machines of `each`.
StepShape random_shape(uint64_t seed, int ranks, int each);
StepConfig step_config(const StepShape& shape, int ranks);
int64_t unit_count(const StepShape& shape);
int64_t part_elements(int64_t unit);  // of a unit's array, that each rank adds up and saves

// All weights, unit by unit, after so many steps without ranks, lists, stores or faults: what each rank's
// passes give, added in the order that the shape names.
std::vector<float> undisturbed_weights(const StepShape& shape, int ranks, uint64_t seed, int64_t steps);

class SimulatedSteps {
 public:
  struct Setup {
    StepShape shape;
    Group& group;
    uint64_t seed = 0;  // of the data
    // Before an operation in which the ranks meet: how many times this rank carries it out. Once, unless its
    // list is another one than the others'.
    std::function<int(const Operation&)> enter;
    // What it has left in this rank's memory. All ranks are told the same, in the same order; 0: of a rank's
    // own bytes.
    std::function<void(const Operation&, uint64_t bits)> met;
  };
  explicit SimulatedSteps(Setup setup);
  SimulatedSteps(const SimulatedSteps&) = delete;
  SimulatedSteps& operator=(const SimulatedSteps&) = delete;

  void run(int64_t step);
  // Completes what is deferred and empties the slots, as before a save.
  void flush();
  // Forward of the same batch on all ranks, who have to agree on what it gives; in `step`.
  void evaluate(int64_t step);

  // Between a flush and a step.
  std::vector<float> own_part(int64_t unit);
  void set(int64_t unit, std::span<const float> whole);
  std::vector<float> all_weights();  // a collective
  int64_t first_of_part(int64_t unit) const { return part_ * part_elements(unit); }
  int64_t elements(int64_t unit) const { return part_elements(unit) * config_.ranks; }

 private:
  // Numbers of a micro-batch on its way through the units.
  struct Micro {
    std::vector<uint64_t> inputs;    // of each unit, and behind the last
    std::vector<uint64_t> borrowed;  // bits of the weights that each unit's forward has had
    uint64_t back = 0;
  };
  void walk(const StepSchedule& list);
  void carry_out(const Operation& op);
  bool collective(const Operation& op) const;
  void transfer(const Operation& op);
  void compute(const Operation& op);
  bool has_experts(const Operation& op) const;
  uint64_t by_owners(int64_t unit, uint64_t input);
  void reduce(int64_t unit);
  void norm(int64_t unit);
  void check();
  void gather(int64_t unit);
  void update(const Operation& op);
  uint64_t left_by(const Operation& op);

  std::span<const float> borrowed(int64_t unit) const;
  void add_gradient(const Operation& op, std::span<const float> weights);
  std::span<float> weights(int64_t unit);
  std::span<float> gradient(int64_t unit);
  std::span<double> squares(int64_t unit);
  Micro& at(int64_t micro) { return micros_[static_cast<size_t>(micro)]; }
  std::vector<ByteRange> parts(int64_t unit, int64_t bytes) const;   // by rank
  std::vector<ByteRange> shards(int64_t unit, int64_t bytes) const;  // by place in a group
  ShardStore* store(Pool pool) { return (pool == Pool::kWeights ? weight_shards_ : gradient_shards_).get(); }

  const Setup setup_;
  Group& group_;
  StepLists lists_;
  const StepConfig& config_;
  const Sharding sharding_;
  const int part_;
  int64_t step_ = 0;
  bool evaluates_ = false;
  double loss_ = 0;
  float scale_ = 1;  // of the gradients, since the last check
  std::vector<Micro> micros_;
  std::vector<const float*> loans_;  // per unit; null: none
  std::vector<std::vector<float>> weights_, gradients_;
  std::vector<std::vector<double>> squares_;  // per unit, of each part
  std::vector<float> rows_;                   // of the embedding's gradient
  std::unique_ptr<ShardStore> weight_shards_, gradient_shards_;
  std::unique_ptr<TwoLevels> levels_;
  CollectiveNames reduce_scatters_, shares_, norms_, gathers_;  // of units
  std::unique_ptr<RankExperts> experts_;
};

}  // namespace lm::test
