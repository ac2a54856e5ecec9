// What every layer needs beside its own arguments: the device's kernels and stream, the arena, the
// micro-batch in device memory. Owned by the rank; used by its compute thread alone.
#pragma once

#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "base/batch.h"
#include "base/cuda.h"
#include "kernels/kernels.h"
#include "model/tensor.h"
#include "model/uploads.h"
#include "spec/model_spec.h"

namespace lm {

// cos and sin of every position a run can meet, fp32 [positions, d/2], rounded to the activation type as the
// reference implementation does.
class RopeTable {
 public:
  RopeTable(const ModelSpec& spec, int64_t positions, DType dtype, DeviceType device, StreamView stream);
  const float* cos() const { return reinterpret_cast<const float*>(memory_.data()); }
  const float* sin() const { return cos() + elements_; }
  int64_t positions() const { return positions_; }

 private:
  int64_t positions_, elements_;
  Memory memory_;  // cos, then sin
};

// The rows of a batch that have a target, and these targets, in device memory.
struct TargetRows {
  int64_t count = 0;
  const int32_t* row = nullptr;     // [R]
  const int32_t* target = nullptr;  // [R]
};

// Neighbouring documents of a micro-batch that attention takes at once.
struct DocumentRun {
  int64_t first = 0, tokens = 0;   // their tokens
  int64_t count = 0, longest = 0;  // documents, and tokens of the longest
  const int32_t* start = nullptr;  // [count + 1], from `first`; device memory
};

// A micro-batch as the layers see it. Pointers are device memory but `host`.
struct DeviceBatch {
  const Batch* host = nullptr;
  const int32_t* token = nullptr;      // [T]
  const int32_t* position = nullptr;   // [T]
  const int32_t* sample = nullptr;     // [T]
  std::vector<DocumentRun> documents;  // on a GPU: as attention takes them
  TargetRows targets;
  int64_t rows = 0;  // of the micro-batch's tensors: its tokens, or more (Context::round_rows)
  int64_t tokens() const { return host->tokens(); }
};

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

  int64_t rounded(int64_t rows) const { return round_rows ? rounded_rows(rows) : rows; }
  at::Tensor tensor(at::IntArrayRef shape) const { return arena_tensor(arena, shape, dtype, device); }
  at::Tensor tensor(at::IntArrayRef shape, DType type) const {
    return arena_tensor(arena, shape, type, device);
  }
};

// The rows of x behind the first `used` become zero.
void zero_surplus(const at::Tensor& x, int64_t used);

// The batch's arrays where the device can read them: on the CPU the batch itself (the rows with targets in
// the arena), on a GPU all of them in one block of the arena, by one copy.
DeviceBatch place_batch(const Context& context, const Batch& batch);

}  // namespace lm
