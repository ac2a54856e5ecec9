#include "plan/rehearse.h"

#include <algorithm>
#include <cmath>

#include "base/bytes.h"

namespace lm {
namespace {

// The micro-batches of a rehearsal, all alike: documents of one length.
struct RehearsedBatch {
  RehearsedBatch(const PassShape& of, int64_t tokens, int64_t with_target, int64_t documents)
      : shape{tokens, with_target, documents, of.weighted} {
    for (int64_t d = 0; d <= documents; ++d) start.push_back(static_cast<int32_t>(tokens * d / documents));
  }
  BatchShape shape;
  std::vector<int32_t> start;
};

// Every address is the same, and none is used.
class RehearsedMemory : public PassMemory {
 public:
  RehearsedMemory(const Context& context, const PassShape& shape, const RehearsedBatch& batch)
      : context_(context), units_(shape.layout.units(shape.cut_head)), batch_(batch) {}

  DeviceBatch place(int64_t) override { return batch(); }
  DeviceBatch batch() const {
    DeviceBatch out = allocate_batch(context_, batch_.shape);
    out.document_start = batch_.start.data();
    return out;
  }
  BlockMemory borrow(int64_t unit, bool gradient) override {
    const Unit& range = units_[static_cast<size_t>(unit)];
    return {nowhere(), nowhere(), gradient && range.elements > 0 ? nowhere() : nullptr, range.first,
            range.first_frozen_byte};
  }
  void begin_gradient(int64_t) override {}
  void add_embedding_gradient(int64_t, const View& dx) override {
    context_.kernels.sum_rows({.slots = batch_.shape.tokens, .width = dx.columns, .dtype = dx.dtype},
                              context_.stream);
  }
  std::byte* make_input(int64_t, int64_t, int64_t) override { return nowhere(); }
  std::byte* input(int64_t, int64_t) override { return nowhere(); }

 private:
  static std::byte* nowhere() { return reinterpret_cast<std::byte*>(Arena::kAlignment); }

  const Context& context_;
  std::vector<Unit> units_;
  const RehearsedBatch& batch_;
};

// A pass with all that it works on.
class Rehearsal {
 public:
  Rehearsal(const PassShape& shape, const RehearsedBatch& batch, std::set<GemmShape>* gemms = nullptr)
      : shape_(shape),
        units_(schedule_units(shape.spec.layer_count(),
                              shape.cut_head ? ceil_div(shape.spec.vocab, kVocabularySegment) : 0)),
        counts_{.cost = {}, .gemms = gemms},
        arena_(Arena::Rehearsed{}),
        context_{shape.spec,
                 shape.dtype,
                 shape.device,
                 counting_kernels(shape.device),
                 counting_stream(counts_, shape.device, shape.threads),
                 arena_,
                 rope_,
                 uploads_,
                 shape.documents_at_once,
                 shape.round_rows},
        memory_(context_, shape, batch),
        pass_(context_, shape.layout, shape.adapter, memory_, settings(shape, batch), nullptr) {}

  // Calls after(operation, the arena's high water during it) behind each compute operation of a step of so
  // many micro-batches.
  template <class After>
  void step(int64_t micro_batches, const After& after) {
    const ScheduleShape schedule{.units = units(),
                                 .micro_batches = micro_batches,
                                 .tied = shape_.spec.tied,
                                 .recompute = shape_.recompute,
                                 .group = shape_.group,
                                 .table_last = shape_.table_last};
    pass_.begin(0, micro_batches, 1);
    for (const Operation& operation : make_schedule(schedule).operations) {
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
    const StepSchedule list = make_evaluation_schedule({.units = units(), .tied = shape_.spec.tied});
    for (const Operation& operation : list.operations) {
      if (!computes(operation.kind)) continue;
      const UnitRole role = units()[static_cast<size_t>(operation.unit)].role;
      role == UnitRole::kEmbedding || role == UnitRole::kBody ? pass.carry_out(operation)
                                                              : pass.head(operation);
    }
    return arena_.high_water();
  }

  const Arena& arena() const { return arena_; }
  const Cost& cost() const { return counts_.cost; }
  const std::vector<ScheduleUnit>& units() const { return units_; }

 private:
  static PassSettings settings(const PassShape& shape, const RehearsedBatch& batch) {
    PassSettings out = pass_settings(shape);
    out.micro_rows = shape.round_rows ? rounded_rows(batch.shape.tokens) : batch.shape.tokens;
    return out;
  }

  const PassShape& shape_;
  std::vector<ScheduleUnit> units_;
  Counts counts_;
  Arena arena_;
  RopeTable rope_;
  Uploads uploads_;
  Context context_;
  RehearsedMemory memory_;
  Pass pass_;
};

// The last token of a document has no target: so many at most have one, and the head then gathers them.
RehearsedBatch fullest(const PassShape& shape, int64_t tokens, int64_t documents) {
  return {shape, tokens, std::max<int64_t>(tokens - 1, 1), documents};
}

// The arena of a group of micro-batches, in three phases: the blocks' forward, the head, the blocks'
// backward.
constexpr int kPhases = 3;
struct GroupArena {
  std::array<int64_t, kPhases> peak = {};
  std::array<int64_t, kPhases> kept = {};  // the most that lies there between two operations
  int64_t saved = 0;
  int64_t forward = 0;  // peak of an evaluation
};

GroupArena rehearse_group(const PassShape& shape, const RehearsedBatch& batch) {
  Rehearsal rehearsal(shape, batch);
  const int64_t rows = shape.round_rows ? rounded_rows(batch.shape.tokens) : batch.shape.tokens;
  const int64_t input = rows * shape.spec.hidden * static_cast<int64_t>(dtype_size(shape.dtype));
  GroupArena out;
  int64_t before = 0;
  size_t phase = 0;
  rehearsal.step(shape.group, [&](const Operation& operation, int64_t peak) {
    const UnitRole role = rehearsal.units()[static_cast<size_t>(operation.unit)].role;
    const bool body = role == UnitRole::kBody || role == UnitRole::kEmbedding;
    if (phase == 0 && !body) phase = 1;
    if (phase == 1 && body) phase = 2, out.kept[phase] = before;
    const int64_t now = rehearsal.arena().mark();
    out.peak[phase] = std::max(out.peak[phase], peak);
    if (phase < 2) out.kept[phase] = std::max(out.kept[phase], now);
    if (operation.kind == OperationKind::kForward && role == UnitRole::kEmbedding)
      out.saved += shape.inputs_off_device ? 0 : round_up(input, Arena::kAlignment);
    if (operation.kind == OperationKind::kForward && role == UnitRole::kBody) out.saved += now - before;
    before = now;
  });
  out.forward = rehearsal.forward();
  return out;
}

ArenaNeed need_of(const PassShape& shape, int64_t tokens, const GroupArena& arena) {
  ArenaNeed need;
  need.bytes = std::max(*std::max_element(arena.peak.begin(), arena.peak.end()), arena.forward);
  need.saved = arena.saved;
  const int64_t rows = shape.round_rows ? rounded_rows(tokens) : tokens;
  need.logits = std::min(rows, shape.row_chunk) *
                (shape.cut_head ? std::min(shape.spec.vocab, kVocabularySegment) : shape.spec.vocab) *
                static_cast<int64_t>(dtype_size(shape.dtype));
  return need;
}

}  // namespace

PassSettings pass_settings(const PassShape& shape) {
  return {.bind = {.dtype = shape.dtype,
                   .fp32_adapters = shape.fp32_adapters,
                   .gradient_dtype = shape.gradient_dtype},
          .recompute = shape.recompute,
          .row_chunk = shape.row_chunk,
          .group = shape.group,
          .cut_head = shape.cut_head,
          .inputs_off_device = shape.inputs_off_device,
          .table_last = shape.table_last};
}

ArenaNeed arena_need_whole(const PassShape& shape, int64_t tokens, int64_t documents) {
  return need_of(shape, tokens, rehearse_group(shape, fullest(shape, tokens, documents)));
}

// What lies in the arena grows with the group by what a micro-batch leaves there, and by that most where all
// of it is there at once. So a phase's high water, a maximum over operations, is convex in the group's size,
// and once it grows by the most that it can, it goes on so.
ArenaNeed arena_need(const PassShape& shape, int64_t tokens, int64_t documents) {
  constexpr int64_t kFew = 3;
  if (shape.group <= kFew) return arena_need_whole(shape, tokens, documents);
  PassShape few = shape;
  const RehearsedBatch batch = fullest(shape, tokens, documents);
  few.group = kFew - 1;
  const GroupArena before = rehearse_group(few, batch);
  few.group = kFew;
  const GroupArena last = rehearse_group(few, batch);
  GroupArena all = last;
  for (size_t phase = 0; phase < kPhases; ++phase) {
    const int64_t growth = last.kept[phase] - before.kept[phase];
    if (last.peak[phase] - before.peak[phase] != growth) return arena_need_whole(shape, tokens, documents);
    all.peak[phase] += (shape.group - kFew) * growth;
  }
  all.saved += (shape.group - kFew) * (last.saved - before.saved);
  return need_of(shape, tokens, all);
}

int64_t arena_need_forward(const PassShape& shape, int64_t tokens, int64_t documents) {
  const RehearsedBatch batch = fullest(shape, tokens, documents);
  Rehearsal rehearsal(shape, batch);
  return rehearsal.forward();
}

int64_t gemm_shapes(const PassShape& shape, int64_t tokens, int64_t micro_batches) {
  // Rows of logits for a whole chunk and for a last one.
  const int64_t targets = std::clamp<int64_t>(shape.row_chunk + 1, 1, std::max<int64_t>(tokens - 1, 1));
  const RehearsedBatch batch(shape, tokens, targets, 1);
  PassShape alone = shape;
  alone.group = 1;
  std::set<GemmShape> gemms;
  Rehearsal rehearsal(alone, batch, &gemms);
  micro_batches > 0 ? rehearsal.step(std::min<int64_t>(micro_batches, 2), [](const Operation&, int64_t) {})
                    : static_cast<void>(rehearsal.forward());
  return std::ssize(gemms);
}

PassCosts::PassCosts(const PassShape& shape, const StepWork& micro) {
  const auto tokens = std::max<int64_t>(std::llround(micro.tokens), 1);
  const auto targets = std::clamp<int64_t>(std::llround(micro.target_rows), 0, tokens);
  const double length = micro.tokens > 0 ? micro.squares / micro.tokens : 1;
  const auto documents = std::clamp<int64_t>(std::llround(micro.tokens / length), 1, tokens);
  const RehearsedBatch batch(shape, tokens, targets, documents);
  PassShape alone = shape;
  alone.group = 1;
  Rehearsal rehearsal(alone, batch);
  costs_.resize(rehearsal.units().size());
  const auto since = [](Cost now, const Cost& before) {
    now.gemm_flops -= before.gemm_flops;
    now.fp32_gemm_flops -= before.fp32_gemm_flops;
    now.attention_flops -= before.attention_flops;
    now.bytes -= before.bytes;
    now.pass_bytes -= before.pass_bytes;
    now.decoded_bytes -= before.decoded_bytes;
    now.calls -= before.calls;
    now.gemm_calls -= before.gemm_calls;
    return now;
  };
  Cost before;
  rehearsal.step(2, [&](const Operation& operation, int64_t) {
    costs_[static_cast<size_t>(operation.unit)][static_cast<size_t>(operation.kind)]
          [operation.micro == 0 ? 0 : 1] = since(rehearsal.cost(), before);
    before = rehearsal.cost();
  });
}

const Cost& PassCosts::of(const Operation& operation) const {
  static const Cost kNone;
  if (static_cast<size_t>(operation.kind) >= kOperationKinds) return kNone;
  return costs_[static_cast<size_t>(operation.unit)][static_cast<size_t>(operation.kind)]
               [operation.micro == 0 ? 0 : 1];
}

}  // namespace lm
