// Attention on the CPU: the choice of instructions, the list of tiles and the threads that take from it. The
// mathematics is in attention_forward.h and attention_backward.h.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <type_traits>

#include "base/bytes.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/processor.h"
#include "kernels/attention_path.h"

namespace lm::attention {
namespace {

// Hands out 64-byte aligned pieces of the caller's scratch; with a null base it only counts.
class Pieces {
 public:
  explicit Pieces(std::byte* base) : base_(base) {}
  template <class T>
  void take(T*& piece, int64_t count, int64_t element = sizeof(T)) {
    piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * element, 64);
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

int64_t lay_out(ForwardScratch& s, std::byte* base, int64_t head_dim) {
  const int64_t width = padded(head_dim);
  Pieces pieces(base);
  pieces.take(s.q, kForwardRows * head_dim, 4);
  pieces.take(s.key_t, head_dim * kKeys, 4);
  pieces.take(s.value, kKeys * width, 4);
  pieces.take(s.p, kMostRows * kKeys, 4);
  pieces.take(s.score, kMostRows * kKeys);
  pieces.take(s.out, kForwardRows * width);
  pieces.take(s.sum, kForwardRows * 16);
  pieces.take(s.top, kForwardRows);
  pieces.take(s.limit, kForwardRows);
  pieces.take(s.position, kForwardRows);
  pieces.take(s.row, kForwardRows);
  return pieces.used();
}

int64_t lay_out(BackwardScratch& s, std::byte* base, int64_t head_dim) {
  const int64_t width = padded(head_dim);
  Pieces pieces(base);
  for (std::byte** rows : {&s.q, &s.dout}) pieces.take(*rows, kBackwardRows * head_dim, 4);
  for (std::byte** rows : {&s.q_pairs, &s.dout_pairs}) pieces.take(*rows, kBackwardRows * width, 4);
  for (std::byte** keys : {&s.key_t, &s.value_t}) pieces.take(*keys, head_dim * kKeys, 4);
  pieces.take(s.key, kKeys * width, 4);
  pieces.take(s.ds, kMostRows * kKeys, 4);
  for (std::byte** pairs : {&s.p_pairs, &s.ds_pairs}) pieces.take(*pairs, kBackwardRows * kKeys, 4);
  for (float** rows : {&s.score, &s.dp}) pieces.take(*rows, kMostRows * kKeys);
  pieces.take(s.dq, kBackwardRows * width);
  pieces.take(s.lse, kBackwardRows);
  pieces.take(s.delta, kBackwardRows);
  pieces.take(s.position, kBackwardRows);
  pieces.take(s.row, kBackwardRows);
  return pieces.used();
}

int64_t lay_out(BackwardShared& s, std::byte* base, int64_t tokens, int64_t kv_heads, int64_t head_dim) {
  Pieces pieces(base);
  pieces.take(s.dk, kv_heads * tokens * padded(head_dim));
  pieces.take(s.dv, kv_heads * tokens * padded(head_dim));
  pieces.take(s.turn, kv_heads * tokens);
  return pieces.used();
}

// The tiles in document order, then row order (last first where `descending`: the long ones, so that threads
// end together), then key heads. A thread takes ever higher numbers, so finding one is a walk that never
// turns back.
class TileList {
 public:
  TileList(const Documents& documents, int64_t group, int64_t kv_heads, int64_t tile_rows, bool descending)
      : start_(documents.start),
        documents_(documents.count),
        past_(documents.past),
        group_(group),
        kv_heads_(kv_heads),
        tile_rows_(tile_rows),
        descending_(descending) {}

  // False past the end.
  bool find(int64_t number, Tile& tile) {
    while (document_ < documents_ && number >= first_ + in_document()) {
      first_ += in_document();
      ++document_;
    }
    if (document_ == documents_) return false;
    const int64_t first = past_ * group_, rows = length() * group_;
    int64_t index = (number - first_) / kv_heads_;
    if (descending_) index = ceil_div(rows, tile_rows_) - 1 - index;
    tile = {.document_begin = start_[document_],
            .document_length = past_ + length(),
            .kv_head = (number - first_) % kv_heads_,
            .row_begin = first + index * tile_rows_,
            .row_end = first + std::min(rows, (index + 1) * tile_rows_)};
    return true;
  }

 private:
  int64_t length() const { return start_[document_ + 1] - start_[document_]; }
  int64_t in_document() const { return ceil_div(length() * group_, tile_rows_) * kv_heads_; }

  const int32_t* start_;
  int64_t documents_, past_, group_, kv_heads_, tile_rows_;
  bool descending_;
  int64_t document_ = 0, first_ = 0;  // number of the first tile of document_
};

// Work is taken tile by tile, in order: with dK and dV a tile waits only for tiles taken before it, so some
// thread can always go on, however many threads really run.
template <class Work>
void run_tiles(const TileList& tiles, int threads, const Work& work) {
  std::atomic<int64_t> next = 0;
#pragma omp parallel num_threads(threads) firstprivate(tiles)
  {
    TileList list = tiles;
    Tile tile;
    while (list.find(next.fetch_add(1, std::memory_order_relaxed), tile)) work(omp_get_thread_num(), tile);
  }
}

// A process asks the kernel for tile registers once; all its threads have them then.
bool tiles_allowed() {
  constexpr int kRequestFeature = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed =
      has_instructions(Instructions::kAmx) && syscall(SYS_arch_prctl, kRequestFeature, kTileData) == 0;
  return allowed;
}

// Asked here, in code that every machine can run.
bool usable(const Path& path) {
  if (&path == &kAmxBf16) return tiles_allowed();
  if (&path == &kAvx512Bf16) return has_instructions(Instructions::kAvx512Bf16);
  if (&path == &kAvx512) return has_instructions(Instructions::kAvx512Core);
  return &path == &kBaseline || has_instructions(Instructions::kAvx2);
}

// Null: not of this type.
auto forward_of(const Path& path, DType dtype) {
  if (dtype == DType::kF32) return path.forward_f32;
  return dtype == DType::kBF16 ? path.forward_bf16 : path.forward_f16;
}

template <class Args>
void check_arguments(const Args& a, StreamView stream) {
  LM_CHECK(stream.device == DeviceType::kCpu && stream.threads >= 1, "attention on a CPU stream");
  LM_CHECK(a.dtype == DType::kF32 || a.dtype == DType::kBF16 || a.dtype == DType::kF16, dtype_name(a.dtype));
  LM_CHECK(a.head_dim >= 2 && a.head_dim <= kMaxHeadDim && a.head_dim % 2 == 0, std::to_string(a.head_dim));
  LM_CHECK(a.kv_heads >= 1 && a.heads % a.kv_heads == 0,
           std::to_string(a.heads) + " query heads, " + std::to_string(a.kv_heads) + " key heads");
  LM_CHECK(a.scale > 0 && a.window >= 0, std::to_string(a.scale) + ", " + std::to_string(a.window));
  LM_CHECK(a.softcap >= 0, std::to_string(a.softcap));
  LM_CHECK(reinterpret_cast<uintptr_t>(a.scratch) % 64 == 0, "scratch is not aligned");
  LM_CHECK(
      a.documents.count >= 1 && a.documents.start[0] == 0 && a.documents.start[a.documents.count] == a.tokens,
      "documents do not cover the tokens");
  LM_CHECK(a.documents.past == 0 || a.documents.count == 1, "one document goes on");
}

// With an address of q, out and lse where the document's first token would have it: rows of tiles are counted
// from there.
AttentionForward from_the_first_token(AttentionForward a) {
  const int64_t past = a.documents.past;
  const auto earlier = [&](auto*& pointer, int64_t bytes) {
    using Pointer = std::remove_reference_t<decltype(pointer)>;
    pointer = reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(pointer) - static_cast<uintptr_t>(bytes));
  };
  const auto size = static_cast<int64_t>(dtype_size(a.dtype));
  earlier(a.q, past * a.q_stride * size);
  earlier(a.out, past * a.heads * a.head_dim * size);
  earlier(a.lse, past * static_cast<int64_t>(sizeof(float)));
  return a;
}

}  // namespace

void wait_turn(const int32_t* turn, int32_t value) {
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != value; ++spins) {
    if (spins < 1000)
      __builtin_ia32_pause();
    else
      sched_yield();  // fewer cores than threads: let the one that is awaited run
  }
}

const Path* find_path(const char* name, DType dtype) {
  for (const Path* path : {&kAmxBf16, &kAvx512Bf16, &kAvx512, &kAvx2, &kBaseline}) {
    if (name != nullptr && std::strcmp(name, path->name) != 0) continue;
    if (forward_of(*path, dtype) != nullptr && usable(*path)) return path;
  }
  return nullptr;
}

const Path& best_path(DType dtype) {
  return *find_path(nullptr, dtype);
}

void forward(const Path& path, const AttentionForward& args, StreamView stream) {
  check_arguments(args, stream);
  ForwardScratch layout;
  const int64_t bytes = lay_out(layout, nullptr, args.head_dim);
  const auto tile = forward_of(path, args.dtype);
  const AttentionForward whole = from_the_first_token(args);
  run_tiles(TileList(args.documents, args.heads / args.kv_heads, args.kv_heads, kForwardRows,
                     /*descending=*/true),
            stream.threads, [&](int thread, const Tile& item) {
              ForwardScratch scratch;
              lay_out(scratch, static_cast<std::byte*>(args.scratch) + thread * bytes, args.head_dim);
              tile(whole, item, scratch);
            });
}

void backward(const Path& path, const AttentionBackward& args, StreamView stream) {
  check_arguments(args, stream);
  auto* base = static_cast<std::byte*>(args.scratch);
  BackwardShared shared;
  const int64_t shared_bytes = lay_out(shared, base, args.tokens, args.kv_heads, args.head_dim);
  BackwardScratch layout;
  const int64_t bytes = lay_out(layout, nullptr, args.head_dim);
  std::memset(shared.turn, 0, sizeof(int32_t) * args.kv_heads * args.tokens);
  const auto tile = args.dtype == DType::kF32    ? path.backward_f32
                    : args.dtype == DType::kBF16 ? path.backward_bf16
                                                 : path.backward_f16;
  run_tiles(TileList(args.documents, args.heads / args.kv_heads, args.kv_heads, kBackwardRows,
                     /*descending=*/false),
            stream.threads, [&](int thread, const Tile& item) {
              BackwardScratch scratch;
              lay_out(scratch, base + shared_bytes + thread * bytes, args.head_dim);
              tile(args, item, scratch, shared);
            });
}

}  // namespace lm::attention

namespace lm {

void attention_forward_cpu(const AttentionForward& args, StreamView stream) {
  attention::forward(attention::best_path(args.dtype), args, stream);
}

void attention_backward_cpu(const AttentionBackward& args, StreamView stream) {
  attention::backward(attention::best_path(args.dtype), args, stream);
}

// The same on every machine and for all element types: a plan made elsewhere holds here.
int64_t attention_forward_scratch_cpu(const AttentionForward& args, StreamView stream) {
  attention::ForwardScratch layout;
  return stream.threads * attention::lay_out(layout, nullptr, args.head_dim);
}

int64_t attention_backward_scratch_cpu(const AttentionBackward& args, StreamView stream) {
  attention::BackwardShared shared;
  attention::BackwardScratch layout;
  return attention::lay_out(shared, nullptr, args.tokens, args.kv_heads, args.head_dim) +
         stream.threads * attention::lay_out(layout, nullptr, args.head_dim);
}

}  // namespace lm
