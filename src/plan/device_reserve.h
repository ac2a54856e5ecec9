// Memory of a GPU that nobody of ours allocates: what attention takes from LibTorch's allocator while it
// runs, GEMM workspaces, the CUDA context.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "spec/model_spec.h"

namespace lm {

// Documents that attention is given at once on a GPU, for micro-batches of at most `tokens`: flash
// attention's backward pass takes memory for 128 more rows per document, so that these at most double what it
// takes; in micro-batches of many short documents it is called more than once. Numerics: it decides how the
// pass splits its sums.
int64_t documents_at_once(int64_t tokens);

// Numbers that say where documents begin, for all calls of a micro-batch: one more than the documents of each
// call.
int64_t document_starts(int64_t tokens, int64_t documents);

struct AttentionShape {
  int64_t tokens = 0;      // of a micro-batch, at most
  int64_t processors = 0;  // of the GPU; 0: not known
  bool deterministic = true;
  DType dtype = DType::kBF16;
  bool flash = true;  // the card has flash attention
};

// The most that attention's tensors take at once, forward or backward.
int64_t attention_workspace(const ModelSpec& spec, const AttentionShape& shape);

// All that LibTorch may take from the GPU: attention and GEMM workspaces, with what its allocator rounds up.
int64_t library_device_bytes(const ModelSpec& spec, const AttentionShape& shape);

// Context, modules, and streams of a CUDA process. An estimate: runs on an H200 stayed below it.
inline constexpr int64_t kContextBytes = 640 << 20;

// What NCCL takes of a GPU that has others. An estimate: no run of several GPUs has been measured.
inline constexpr int64_t kNcclBytes = 512 << 20;

}  // namespace lm
