// What every layer needs beside its own arguments: the device's kernels and stream, the arena, the
// micro-batch in device memory. Owned by the rank; used by its compute thread alone. In a dry run
// (dry_run.h) kernels count instead of working, and the arena has no memory.
//
// Legend of shapes in this folder: T rows of a micro-batch (DeviceBatch::rows), H hidden, V vocabulary, R
// rows with a target.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/arena.h"
#include "base/batch.h"
#include "base/cuda.h"
#include "base/host_device.h"
#include "base/view.h"
#include "kernels/kernels.h"
#include "model/key_value_cache.h"
#include "model/uploads.h"
#include "spec/model_spec.h"

namespace lm {

// The value that a number of this type keeps of x.
inline float as_stored(DType dtype, float x) {
  if (dtype == DType::kBF16) return to_float(to_bf16(x));
  return dtype == DType::kF16 ? to_float(to_fp16(x)) : x;
}

// cos and sin of every position a run can meet, of each of the model's RoPE tables: fp32 [positions, dim/2],
// rounded to the activation type as the reference implementation does.
class RopeTable {
 public:
  RopeTable(const ModelSpec& spec, int64_t positions, DType dtype, DeviceType device, StreamView stream);
  RopeTable() = default;  // of a dry run: no tables
  // Of table `rope` (AttentionSpec::rope); null in a dry run.
  const float* cos(int rope) const { return elements_.empty() ? nullptr : cosines(rope); }
  const float* sin(int rope) const {
    return elements_.empty() ? nullptr : cosines(rope) + elements_[static_cast<size_t>(rope)];
  }
  int64_t positions() const { return positions_; }
  static int64_t bytes(const ModelSpec& spec, int64_t positions);

 private:
  const float* cosines(int rope) const;
  int64_t positions_ = 0;
  std::vector<int64_t> elements_;  // of each table's cosines, and as many sines behind them
  Memory memory_;
};

// The rows of a batch that have a target, and these targets with their weights, in device memory.
struct TargetRows {
  int64_t count = 0;
  const int32_t* row = nullptr;     // [R]
  const int32_t* target = nullptr;  // [R]
  const float* weight = nullptr;    // [R], of each one's nll in the loss; null: 1
};

struct Carried;  // model/carried.h
class Routers;   // model/routers.h

// A micro-batch as the layers see it. Pointers are device memory but where they say otherwise.
struct DeviceBatch {
  int64_t tokens = 0;
  int64_t rows = 0;                // of the micro-batch's tensors: its tokens, or more (Context::round_rows)
  const int32_t* token = nullptr;  // [T]
  const int32_t* position = nullptr;  // [T]
  const int32_t* sample = nullptr;    // [T]
  TargetRows targets;
  const int32_t* document_start = nullptr;  // HOST memory, [document_count + 1]
  int64_t document_count = 0;
  std::vector<DocumentRun> runs;  // of the documents, on a GPU: as attention takes them
  // Of generation: document d continues the text whose tokens caches[d] holds, and its own keys and values
  // join them. Empty: no document continues a text.
  std::vector<const KeyValueCache*> caches;
  // What its blocks give to later ones; null where the model has nothing of the kind.
  const Carried* carried = nullptr;
  // Of a step: what counts what its routers do, and balances them; null: nobody asks.
  Routers* routers = nullptr;
  bool continues() const { return !caches.empty(); }
  // A token that continues a text: its products are with one row.
  bool one_row() const { return continues() && rows == 1; }
  Documents documents() const {
    return {document_start, document_count, runs.data(), static_cast<int64_t>(runs.size())};
  }
};

struct Counts;  // kernels/counting.h

struct Context {
  const ModelSpec& spec;
  DType dtype;  // of weights and activations
  DeviceType device;
  const Kernels& kernels;
  StreamView stream;  // also ATen's current stream
  Arena& arena;
  const RopeTable& rope;
  Uploads& uploads;
  int64_t documents_at_once = 0;  // that attention takes on a GPU; 0: all
  // Tensors over a micro-batch's tokens have rounded_rows (base/batch.h) of them. Surplus rows are finite,
  // and zero wherever gradients are summed: they add exact zeros to every sum.
  bool round_rows = false;
  Counts* counts = nullptr;  // of a dry run, where of equal parts of a pass one is enough

  int64_t rounded(int64_t rows) const { return round_rows ? rounded_rows(rows) : rows; }
  // Uninitialised memory from the arena, valid until the frame that holds it ends.
  View tensor(int64_t rows, int64_t columns) const { return tensor(rows, columns, dtype); }
  View tensor(int64_t rows, int64_t columns, DType type) const {
    return view_of(arena.allocate(rows * columns * static_cast<int64_t>(dtype_size(type))), type, rows,
                   columns);
  }
  // Of the shape and type of x.
  View like(const View& x) const { return tensor(x.rows, x.columns, x.dtype); }
  // The same with memory from another arena.
  Context with(Arena& other) const {
    return {spec,       dtype, device, kernels, stream, other, rope, uploads, documents_at_once,
            round_rows, counts};
  }
};

// to += from (overwrite: to = from), element by element in fp32, rounded once to the type of `to`.
void accumulate(const Context& context, const View& to, const View& from, bool overwrite = false);

// The rows of x behind the first `used` become zero.
void zero_surplus(const Context& context, const View& x, int64_t used);

// The batch's arrays where the device can read them: on the CPU the batch itself (the rows with targets in
// the arena), on a GPU all of them in one block of the arena, by one copy.
// With caches, one for each document: the documents continue their texts.
DeviceBatch place_batch(const Context& context, const Batch& batch,
                        std::span<const KeyValueCache* const> caches = {});
// Memory for such arrays alone: of so many tokens, rows with a target and documents. The batch's pointers are
// those that place_batch's would have.
struct BatchShape {
  int64_t tokens = 0, targets = 0, documents = 0;
  bool weighted = false;   // its targets have weights
  bool continued = false;  // its documents continue texts
};
DeviceBatch allocate_batch(const Context& context, const BatchShape& shape);

}  // namespace lm
