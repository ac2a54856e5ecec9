#include "plan/device_reserve.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "base/bytes.h"
#include "kernels/attention_chunks.h"
#include "kernels/library.h"

namespace lm {
namespace {

constexpr int64_t kRowsPerDocument = 128;  // of flash attention's blocks
constexpr int64_t kFewDocuments = 8;       // of which the rows are nothing much
constexpr int64_t kMostProcessors = 192;   // more than any GPU has today
// CUBLAS_WORKSPACE_CONFIG=:4096:8, which the CLI process sets (launcher/environment.cpp): of the products
// that LibTorch itself makes, for attention in chunks.
constexpr int64_t kChunkWorkspace = 32 * kMiB;
// LibTorch's allocator takes memory in pieces of 2 MiB for small tensors, of 20 MiB up to 10 MiB, and of
// multiples of 2 MiB.
constexpr int64_t kPieces = 64 * kMiB;

int64_t processors(const AttentionShape& shape) {
  return shape.processors > 0 ? shape.processors : kMostProcessors;
}

// Flash attention (bf16, fp16). `documents` in one call.
int64_t flash_backward(const AttentionSpec& spec, const AttentionShape& shape, int64_t documents) {
  const int64_t width = round_up(spec.head_dim, spec.head_dim <= 128 ? 32 : 64);
  const int64_t rows = shape.tokens + kRowsPerDocument * documents;
  const int64_t splits = shape.deterministic ? ceil_div(processors(shape), documents * spec.heads) : 1;
  const int64_t q = shape.tokens * spec.q_rows() * 2, kv = shape.tokens * spec.kv_rows() * 2;
  const int64_t expanded = spec.heads == spec.kv_heads ? 0 : 2 * q;  // dK and dV per query head
  const int64_t sums = spec.heads * rows * 4, dq_sum = splits * rows * spec.heads * width * 4;
  return q + 2 * kv + sums + dq_sum + expanded;
}

// Memory-efficient attention (fp32, and at most as much for fp16), whose forward pass runs again in the
// backward pass.
int64_t efficient_backward(const AttentionSpec& spec, const AttentionShape& shape) {
  const int64_t wide = shape.tokens * spec.q_rows() * 4, kv = shape.tokens * spec.kv_rows() * 4;
  const int64_t logsumexp = documents_at_once(shape.tokens) * spec.heads * round_up(shape.tokens, 32) * 4;
  // k and v per query head, out, dq, dk, dv, and the product of which delta is the sum.
  return 7 * wide + 2 * kv + logsumexp + spec.heads * shape.tokens * 4;
}

// Attention in chunks (attention_chunks.h), which allocates once per call.
int64_t chunks_backward(const AttentionSpec& spec, const AttentionShape& shape) {
  return chunk_memory({.tokens = shape.tokens,
                       .keys = shape.tokens,
                       .heads = spec.heads,
                       .kv_heads = spec.kv_heads,
                       .head_dim = spec.head_dim,
                       .window = spec.window,
                       .capped = spec.softcap > 0,
                       .backward = true,
                       .dtype = shape.dtype})
      .bytes;
}

int64_t attention_workspace(const AttentionSpec& spec, const AttentionShape& shape) {
  const bool flash = shape.dtype != DType::kF32 && shape.flash;
  if (!library_attends(spec.head_dim, spec.softcap) || (spec.sinks && !flash))
    return chunks_backward(spec, shape);
  if (!flash) return efficient_backward(spec, shape);
  // More documents mean more rows, and fewer splits: one, once each processor has a document.
  const int64_t all = documents_at_once(shape.tokens);
  int64_t most = flash_backward(spec, shape, all);
  for (int64_t documents = 1; documents <= std::min(all, processors(shape)); ++documents)
    most = std::max(most, flash_backward(spec, shape, documents));
  // The plan is for any card.
  return wants_shared_memory(spec.head_dim) ? std::max(most, chunks_backward(spec, shape)) : most;
}

// On some card.
bool some_in_chunks(const ModelSpec& spec) {
  return std::ranges::any_of(spec.layers, [](const LayerSpec& layer) {
    const AttentionSpec* const a = layer.find<AttentionSpec>();
    return a != nullptr && (!library_attends(a->head_dim, a->softcap) || wants_shared_memory(a->head_dim));
  });
}

}  // namespace

int64_t documents_at_once(int64_t tokens) {
  return std::max(kFewDocuments, tokens / kRowsPerDocument);
}

int64_t document_starts(int64_t tokens, int64_t documents) {
  return documents + ceil_div(documents, documents_at_once(tokens));
}

int64_t attention_workspace(const ModelSpec& spec, const AttentionShape& shape) {
  // Most layers have heads of the same sizes: each size is looked at once.
  std::set<std::tuple<int64_t, int64_t, int64_t, int64_t, double, bool>> sizes;
  int64_t most = 0;
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec* const a = layer.find<AttentionSpec>();
    if (a != nullptr &&
        sizes.emplace(a->heads, a->kv_heads, a->head_dim, a->window, a->softcap, a->sinks).second)
      most = std::max(most, attention_workspace(*a, shape));
  }
  return most;
}

int64_t library_device_bytes(const ModelSpec& spec, const AttentionShape& shape) {
  const int64_t workspaces = kGemmWorkspace + (some_in_chunks(spec) ? kChunkWorkspace : 0);
  return attention_workspace(spec, shape) + workspaces + kPieces;
}

}  // namespace lm
