// The step as a value: a list of operations that the executor walks, the predictor times and tests inspect.
// The order is known beforehand because the model's code is ours. Blocks: 0 embedding, 1 .. L transformer
// blocks, L + 1 final norm and head.
//
// A head that is cut comes in vocabulary segments, each of them a step of its own for all micro-batches of a
// group: forward of what is left of the block (rows are picked and normed), forward of each segment (its part
// of the softmax), backward of each segment, backward of what is left. So its matrix crosses a link twice,
// and never has to be there as a whole.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"

namespace lm {

enum class OperationKind : uint8_t {
  kAcquire,  // the block's weights are borrowed
  kForward,  // of a micro-batch through a block (a whole head's forward is part of kHead)
  kRelease,
  kHead,       // loss in chunks of rows; in a step also its backward
  kRecompute,  // the block's saved activations once more from its input
  kBackward,
  kReduce,  // the block's gradient is final
  kCheck,   // loss, norm and finiteness are known: the step's one wait
  kUpdate,  // of a tile of the block's state
  // Between an array's home and a slot; inserted by transfers.h, absent while everything is at home.
  kFetch,      // the array's bytes start on their way into the slot
  kClaim,      // the slot becomes the array's, whose bytes are about to be made
  kWriteBack,  // the array's bytes, changed, start on their way home
};
const char* operation_name(OperationKind kind);

// What moves as one array: a block's weights, a block's gradient, a tile of optimizer state, a micro-batch's
// input of a block.
enum class Pool : uint8_t { kWeights, kGradients, kOptimizer, kActivations };
inline constexpr int kPools = 4;
const char* pool_name(Pool pool);

struct Operation {
  OperationKind kind;
  int64_t block = 0;
  int64_t micro = 0;     // kUpdate: the tile of the block
  int64_t segment = -1;  // of a cut head; -1: the block, of a cut head what is left of it
  // Number of the block or segment (spec/block_layout.h); such numbers also count the arrays of weights and
  // of gradients.
  int64_t unit(int64_t layers) const { return segment < 0 ? block : layers + 2 + segment; }
  // Of transfers alone.
  Pool pool = Pool::kWeights;
  int64_t array = 0;
  int64_t slot = 0;
  bool operator==(const Operation&) const = default;
};

bool is_transfer(const Operation& operation);  // one of the last three kinds

struct StepSchedule {
  std::vector<Operation> operations;
};

struct ScheduleShape {
  int64_t layers = 0;
  int64_t micro_batches = 1;
  bool tied = false;
  bool recompute = false;
  Clip clip = Clip::kGlobal;
  // Micro-batches that run through a block before the next block (G). 1 while weights are resident; with
  // streamed weights each byte crosses its link once per pass and group.
  int64_t group = 1;
  // Per block: into how many tiles the state that is off the device is cut; 0 (or no entry): all of it is on
  // the device. Under global clipping the update of such a block is deferred: it runs under the next forward,
  // before the block's own.
  std::vector<int64_t> tiles = {};
  bool pending = false;  // the step before has left its deferred updates to this one
  // Into how many vocabulary segments the head is cut; 0: it is whole.
  int64_t segments = 0;
  // Of a cut head: the first tile of each segment, of what is left of the block, and the end. Nothing but
  // whole tiles lies in a segment.
  std::vector<int64_t> segment_tiles = {};

  int64_t tiles_of(int64_t block) const {
    return static_cast<size_t>(block) < tiles.size() ? tiles[static_cast<size_t>(block)] : 0;
  }
  // Tiles [first, end) of the updates of a block or a segment. A block whose state is on the device has one
  // update, but a cut head, which is updated by tiles wherever they are.
  struct Tiles {
    int64_t first = 0, end = 0;
  };
  Tiles updates(int64_t block, int64_t segment = -1) const;
  bool cut(int64_t block) const { return segments > 0 && block == layers + 1; }
  bool deferred(int64_t block) const { return clip == Clip::kGlobal && tiles_of(block) > 0; }
  bool defers() const;  // any block
};

// Under global clipping every update waits for the check; otherwise a block is updated as soon as its
// gradient is final.
StepSchedule make_schedule(const ScheduleShape& shape);

// The deferred updates alone: before evaluation, saving and the end.
StepSchedule make_flush_schedule(const ScheduleShape& shape);

// Forward and loss alone, `micro_batches` of them.
StepSchedule make_evaluation_schedule(const ScheduleShape& shape);

// Empty, or the first rule that `schedule` breaks: a micro-batch passes the blocks in order and returns
// through them in reverse, micro-batches ascend in every block (so every accumulator adds in order), loans
// are balanced and held by every use, segments follow each other in order (so that softmax and dX add up as
// in a whole head), recomputation stands right before its backward, each block is reduced once after its last
// backward, updates follow their reduce (and the check, under global clipping) with no loan open, tile by
// tile, nothing uses an updated block, and a deferred update comes before its block's next use. Transfers are
// transfer_fault's matter.
std::string schedule_fault(const StepSchedule& schedule, const ScheduleShape& shape);
// The same for an evaluation's list.
std::string evaluation_fault(const StepSchedule& schedule, const ScheduleShape& shape);

}  // namespace lm
