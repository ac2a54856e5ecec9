#include "plan/dry_run.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "plan/alike_layers.h"

namespace lm {
namespace {

StepConfig of_group_size(const StepConfig& step, int64_t group) {
  StepConfig out = step;
  out.group = group;
  return out;
}

// Nothing moves.
class DryRunExchange : public ExpertExchange {
 public:
  explicit DryRunExchange(const ExpertShare& share) : share_(share) {}
  ExpertShare share() const override { return share_; }
  void gather_starts(int64_t, std::span<const int32_t>, int32_t*) override {}
  std::span<const int32_t> on_host(std::span<const int32_t>) override { return {}; }
  void move_rows(int64_t, const RowsOnTheWay&) override {}

 private:
  ExpertShare share_;
};

// All pointers are one dummy address that is never dereferenced.
class DryRunMemory : public PassMemory {
 public:
  DryRunMemory(const Context& context, const ModelLayout& layout, bool chunked_head, const BatchShape& batch)
      : context_(context), units_(layout.units(chunked_head)), batch_(batch), exchange_(layout.experts) {}

  DeviceBatch place(int64_t) override { return batch(); }
  DeviceBatch batch() const { return allocate_batch(context_, batch_); }
  BlockMemory borrow(int64_t unit, bool gradient) override {
    const Unit& range = units_[static_cast<size_t>(unit)];
    return {.trainable = nowhere(),
            .frozen = nowhere(),
            .gradients = gradient && range.elements > 0 ? nowhere() : nullptr,
            .first = range.first,
            .first_frozen_byte = range.first_frozen_byte,
            .exchange = exchange_.share().parallel() ? &exchange_ : nullptr};
  }
  void begin_gradient(int64_t) override {}
  void add_embedding_gradient(int64_t, const RowGradients& of) override {
    const auto sum = [&](const View& rows) {
      context_.kernels.sum_rows({.slots = batch_.tokens, .width = rows.columns, .dtype = rows.dtype},
                                context_.stream);
    };
    sum(of.dx);
    if (context_.spec.embedding.positions > 0) sum(of.dx);
    if (of.inputs.defined()) sum(of.inputs);
    if (of.pairs.defined()) sum(of.pairs);
  }
  void weigh(int64_t, const View&) override {}
  std::byte* make_input(int64_t block, int64_t, int64_t bytes) override {
    int64_t& most = activations_[block];
    most = std::max(most, bytes);
    return nowhere();
  }
  std::byte* input(int64_t, int64_t) override { return nowhere(); }
  int64_t activations(int64_t block) const { return activations_.at(block); }  // bytes off the device

 private:
  static std::byte* nowhere() { return reinterpret_cast<std::byte*>(Arena::kAlignment); }

  const Context& context_;
  std::vector<Unit> units_;
  const BatchShape& batch_;
  DryRunExchange exchange_;
  std::map<int64_t, int64_t> activations_;  // of each block
};

// A pass of the layers that stand for all, with all that it works on. Micro-batches are alike: documents of
// one length.
class DryRun {
 public:
  DryRun(const ModelParts& whole, const StepConfig& step, const BatchShape& batch, const Counts& counts = {})
      : layers_(whole.spec, whole.layout, step.recompute),
        first_trained_(step.first_trained),
        model_{layers_.spec(), layers_.layout(), whole.adapter},
        step_(of_model(step, layers_, batch)),
        batch_(batch),
        counts_(counts),
        arena_(Arena::Counting{}),
        context_{model_.spec,
                 step_.arithmetic.dtype,
                 step_.device,
                 counting_kernels(step_.device),
                 counting_stream(counts_, step_.device, step_.arithmetic.threads),
                 arena_,
                 rope_,
                 uploads_,
                 step_.arithmetic.documents_at_once,
                 step_.arithmetic.round_rows,
                 &counts_},
        memory_(context_, model_.layout, step_.chunked_head(), batch_),
        pass_(context_, model_, memory_, step_, &sums_) {}

  // The operations of a step of all layers.
  std::vector<Operation> operations(int64_t micro_batches) const {
    StepConfig whole = of_micro_batches(micro_batches);
    whole.units = schedule_units(layers_.all(), whole.segments());
    whole.first_trained = first_trained_;
    return make_schedule(whole).operations;
  }
  int64_t stands_for(int64_t unit) const { return layers_.stands_for(unit); }

  // Calls after(operation, the arena's high water during it) behind each compute operation of a step of so
  // many micro-batches.
  template <class After>
  void step(int64_t micro_batches, const After& after) {
    pass_.begin(0, micro_batches, 1);
    for (const Operation& operation : make_schedule(of_micro_batches(micro_batches)).operations) {
      if (computes(operation.kind)) {
        arena_.restart_high_water();
        pass_.carry_out(operation);
        after(operation, arena_.high_water());
      }
    }
    pass_.end();
  }

  // The arena's high water in an evaluation.
  int64_t forward() {
    arena_.restart_high_water();
    const ArenaFrame frame(arena_);
    ForwardPass pass(pass_, memory_.batch());
    for (const Operation& operation : make_evaluation_schedule(step_).operations) {
      if (!computes(operation.kind)) continue;
      const UnitRole role = step_.unit(operation.unit).role;
      role == UnitRole::kEmbedding || role == UnitRole::kBody ? pass.carry_out(operation)
                                                              : pass.head(operation);
    }
    return arena_.high_water();
  }

  // Of a micro-batch, what its blocks give to later ones.
  int64_t carried() {
    const int64_t before = arena_.mark();
    const ArenaFrame frame(arena_);
    allocate_carried(context_, step_.micro_rows, step_.first_trained <= layers(),
                     model_.layout.blocks.front().flat_elements > 0);
    return arena_.mark() - before;
  }

  bool ends_group(const Operation& op, int64_t group) const {
    const bool backward = op.kind == OperationKind::kBackward || op.kind == OperationKind::kHead;
    return backward && op.micro + 1 == group && step_.unit(op.unit).block == step_.first_trained;
  }

  const Arena& arena() const { return arena_; }
  int64_t activations(int64_t block) const { return memory_.activations(block); }
  const Cost& cost() const { return counts_.cost; }
  const std::vector<ScheduleUnit>& units() const { return step_.units; }
  int64_t layers() const { return model_.spec.layer_count(); }

 private:
  static StepConfig of_model(const StepConfig& step, const AlikeLayers& layers, const BatchShape& batch) {
    const ModelSpec& spec = layers.spec();
    StepConfig out = dry_run_step(step);
    out.units = schedule_units(spec.layer_count(), step.segments());
    out.first_trained = layers.stands_for(step.first_trained);
    out.tied = spec.tied;
    out.micro_rows = step.arithmetic.rows(batch.tokens);
    return out;
  }
  StepConfig of_micro_batches(int64_t micro_batches) const {
    StepConfig out = step_;
    out.micro_batches = micro_batches;
    return out;
  }

  AlikeLayers layers_;
  int64_t first_trained_;  // of the whole model
  ModelParts model_;
  StepConfig step_;
  BatchShape batch_;
  Counts counts_;
  Arena arena_;
  RopeTable rope_;
  Uploads uploads_;
  Context context_;
  DryRunMemory memory_;
  LossSums sums_;  // nobody adds to them
  Pass pass_;
};

// The last token of a document has no target: so many at most have one, and the head then gathers them.
// A head of scores has a row of each document.
BatchShape fullest(const ModelSpec& spec, const StepConfig& step, int64_t tokens, int64_t documents) {
  const int64_t targets = spec.scores() ? std::min(documents, tokens) : std::max<int64_t>(tokens - 1, 1);
  return {tokens, targets, documents, step.weighted};
}

// The arena of a group of micro-batches, in phases: the blocks' forward, the head, the blocks' backward, and
// the gradient of a table that is made last.
constexpr int kPhases = 4;
struct GroupArena {
  std::array<int64_t, kPhases> peak = {};
  std::array<int64_t, kPhases> kept = {};  // the most that lies there between two operations
  int64_t saved = 0;
  int64_t forward = 0;  // peak of an evaluation
};

// Sums of a dry run that are beyond all memory end there.
int64_t within_reach(int64_t bytes) {
  return std::clamp<int64_t>(bytes, 0, Arena::kEndless);
}
int64_t grown(int64_t bytes, int64_t times, int64_t growth) {
  const int64_t more = checked_multiply(times, growth).value_or(Arena::kEndless);
  return within_reach(bytes + std::min(more, Arena::kEndless));
}

// Of an operation: its high water over what lay there before, and what it adds to that. The last backward of
// the first trained block ends a group, and gives back all there is.
struct Carried {
  int64_t peak = 0, adds = 0;
  std::optional<int64_t> leaves;
};

using OperationKey = std::tuple<OperationKind, int64_t, int64_t>;

std::map<OperationKey, Carried> carry_out_group(DryRun& dry_run, int64_t group) {
  std::map<OperationKey, Carried> out;
  int64_t before = dry_run.arena().mark();
  dry_run.step(group, [&](const Operation& op, int64_t peak) {
    const int64_t now = dry_run.arena().mark();
    Carried& carried = out[{op.kind, op.unit, op.micro}] = {peak - before, now - before, {}};
    if (dry_run.ends_group(op, group) && now != before) carried.leaves = now;
    before = now;
  });
  return out;
}

GroupArena dry_run_group(const ModelParts& model, const StepConfig& step, const BatchShape& batch) {
  DryRun dry_run(model, step, batch);
  const int64_t input = step.arithmetic.rows(batch.tokens) * model.spec.hidden *
                        static_cast<int64_t>(dtype_size(step.arithmetic.dtype));
  int64_t now = dry_run.arena().mark();
  const std::map<OperationKey, Carried> carried = carry_out_group(dry_run, step.group);
  GroupArena out;
  size_t phase = 0;
  const int64_t head = model.spec.layer_count() + 1;  // unit; segments come behind it
  for (const Operation& op : dry_run.operations(step.group)) {
    if (!computes(op.kind)) continue;
    const Carried& found = carried.at({op.kind, dry_run.stands_for(op.unit), op.micro});
    const bool body = op.unit < head;
    const int64_t before = now;
    if (phase == 0 && !body) phase = 1;
    if (phase == 1 && body) phase = 2, out.kept[phase] = before;
    if (op.kind == OperationKind::kTableGradient && phase == 2) phase = 3, out.kept[phase] = before;
    now = within_reach(found.leaves.value_or(before + found.adds));
    out.peak[phase] = std::max(out.peak[phase], within_reach(before + found.peak));
    if (phase < 2) out.kept[phase] = std::max(out.kept[phase], now);
    if (op.kind != OperationKind::kForward || !body) continue;
    if (op.unit > 0) out.saved = within_reach(out.saved + now - before);
    if (op.unit == 0) out.saved += dry_run.carried();
    if (op.unit == 0 && !step.inputs_off_device()) out.saved += round_up(input, Arena::kAlignment);
  }
  out.forward = dry_run.forward();
  return out;
}

ArenaNeed need_of(const ModelSpec& spec, const StepConfig& step, int64_t tokens, const GroupArena& arena) {
  ArenaNeed need;
  need.bytes = std::max(*std::max_element(arena.peak.begin(), arena.peak.end()), arena.forward);
  need.saved = arena.saved;
  need.logits = std::min(step.arithmetic.rows(tokens), step.arithmetic.row_chunk) *
                (step.chunked_head() ? std::min(spec.vocab, kVocabularySegment) : spec.head_rows()) *
                static_cast<int64_t>(dtype_size(step.arithmetic.dtype));
  return need;
}

}  // namespace

StepConfig dry_run_step(const StepConfig& step) {
  StepConfig out = step;
  // The layers are the model's.
  const int64_t segments = step.segments();
  out.units = segments > 0 ? schedule_units(0, segments) : std::vector<ScheduleUnit>();
  out.micro_batches = out.ranks = out.machine_ranks = 1;
  out.clip = Clip::kGlobal;
  out.pending = out.sharded = out.in_backward = false;
  out.whole_tensors = WholeTensors::kNone;
  out.pools = {};
  if (step.inputs_off_device()) out.pool(Pool::kActivations).slots = 1;
  out.first_tile.clear();
  out.micro_rows = out.seed = 0;
  out.max_grad_norm = 1;
  return out;
}

ArenaNeed arena_need_whole(const ModelParts& model, const StepConfig& step, int64_t tokens,
                           int64_t documents) {
  return need_of(model.spec, step, tokens,
                 dry_run_group(model, step, fullest(model.spec, step, tokens, documents)));
}

// What lies in the arena grows with the group by what a micro-batch leaves there, and by that most where all
// of it is there at once. So a phase's high water, a maximum over operations, is convex in the group's size,
// and once it grows by the most that it can, it goes on so. Where it has not begun to after kMost, what it
// would be if it did is the upper bound.
ArenaNeed arena_need(const ModelParts& model, const StepConfig& step, int64_t tokens, int64_t documents) {
  constexpr int64_t kFew = 3, kMost = 24;
  const BatchShape batch = fullest(model.spec, step, tokens, documents);
  const auto of_group = [&](int64_t group) {
    return dry_run_group(model, of_group_size(step, group), batch);
  };
  for (int64_t few = kFew; few < step.group; few *= 2) {
    const GroupArena before = of_group(few - 1), last = of_group(few);
    GroupArena all = last;
    bool steady = true;
    for (size_t phase = 0; phase < kPhases; ++phase) {
      const int64_t growth = last.kept[phase] - before.kept[phase];
      steady = steady && last.peak[phase] - before.peak[phase] == growth;
      all.peak[phase] = grown(all.peak[phase], step.group - few, growth);
    }
    all.saved = grown(all.saved, step.group - few, last.saved - before.saved);
    if (steady || few >= kMost) return need_of(model.spec, step, tokens, all);
  }
  return arena_need_whole(model, step, tokens, documents);
}

std::vector<int64_t> offloaded_activations(const ModelParts& model, const StepConfig& step, int64_t tokens,
                                           int64_t documents) {
  StepConfig off_device = of_group_size(step, 1);
  off_device.pool(Pool::kActivations).slots = 1;
  DryRun dry_run(model, off_device, fullest(model.spec, step, tokens, documents));
  dry_run.step(1, [](const Operation&, int64_t) {});
  std::vector<int64_t> out(1, 0);
  for (int64_t block = 1; block <= model.spec.layer_count() + 1; ++block)
    out.push_back(dry_run.activations(dry_run.stands_for(block)));
  return out;
}

int64_t arena_need_forward(const ModelParts& model, const StepConfig& step, int64_t tokens,
                           int64_t documents) {
  DryRun dry_run(model, step, fullest(model.spec, step, tokens, documents));
  return dry_run.forward();
}

int64_t gemm_shapes(const ModelParts& model, const StepConfig& step, int64_t tokens, int64_t micro_batches) {
  // Rows of logits for a whole chunk and for a last one.
  const int64_t targets =
      std::clamp<int64_t>(step.arithmetic.row_chunk + 1, 1, std::max<int64_t>(tokens - 1, 1));
  std::set<GemmShape> gemms;
  DryRun dry_run(model, of_group_size(step, 1), {tokens, targets, 1, step.weighted},
                 {.cost = {}, .gemms = &gemms});
  micro_batches > 0 ? dry_run.step(std::min<int64_t>(micro_batches, 2), [](const Operation&, int64_t) {})
                    : static_cast<void>(dry_run.forward());
  return std::ssize(gemms);
}

PassCosts pass_costs(const ModelParts& model, const StepConfig& step, const StepWork& micro,
                     const std::function<double(const FlashCall&)>& attention_rate) {
  const auto tokens = std::max<int64_t>(std::llround(micro.tokens), 1);
  const auto targets = std::clamp<int64_t>(std::llround(micro.target_rows), 0, tokens);
  const double length = micro.tokens > 0 ? micro.squares / micro.tokens : 1;
  const auto documents = std::clamp<int64_t>(std::llround(micro.tokens / length), 1, tokens);
  DryRun dry_run(model, of_group_size(step, 1), {tokens, targets, documents, step.weighted},
                 {.cost = {}, .attention_rate = attention_rate ? &attention_rate : nullptr});
  PassCosts costs(dry_run.units().size());
  Cost before;
  dry_run.step(2, [&](const Operation& operation, int64_t) {
    Cost& cost = costs[static_cast<size_t>(operation.unit)][static_cast<size_t>(operation.kind)]
                      [operation.micro == 0 ? 0 : 1];
    cost = dry_run.cost();
    cost -= before;
    before = dry_run.cost();
  });
  const int64_t units = std::ssize(costs) + model.spec.layer_count() - dry_run.layers();
  PassCosts out;
  for (int64_t unit = 0; unit < units; ++unit)
    out.push_back(costs[static_cast<size_t>(dry_run.stands_for(unit))]);
  return out;
}

}  // namespace lm
