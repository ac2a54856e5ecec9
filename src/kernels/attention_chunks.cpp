#include "kernels/attention_chunks.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include <limits>
#include <span>

#include "base/error.h"
#include "kernels/aten.h"

namespace lm {
namespace {

using at::Tensor;

struct Slice {
  int64_t first = 0, count = 0;
};
Tensor of(const Tensor& x, int64_t dimension, const Slice& range) {
  return x.narrow(dimension, range.first, range.count);
}

struct Document {
  const DocumentRun* run;  // that it belongs to
  int64_t first, tokens;   // of the call's
};

// What goes through at once: tokens of one document, key heads with their query heads, and the keys that some
// of these tokens see.
struct Part {
  Slice tokens, heads, keys;  // of the call's
  Slice in_run;               // the tokens, in the run's lse
  // The columns of later keys begin behind the first token's own: the token at row r does not see those from
  // the r-th on.
  int64_t later = 0;
  // From this row on a window leaves keys behind: the r-th row behind it does not see the first r.
  int64_t leaving = 0;
};

template <class Args>
Part part_of(const Args& a, const Document& document, const Slice& heads, const Slice& rows) {
  const int64_t position = a.documents.past + rows.first;  // in the document, of the first token
  const int64_t key = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
  const int64_t token = document.first + rows.first;
  return {.tokens = {token, rows.count},
          .heads = heads,
          .keys = {document.first + key, position + rows.count - key},
          .in_run = {token - document.run->first, rows.count},
          .later = position + 1 - key,
          .leaving = a.window > 0 ? a.window - 1 - (position - key) : rows.count};
}

// [side, side] in this memory: -inf where a row does not see a key, 0 elsewhere.
Tensor hidden(const Tensor& memory, bool later) {
  memory.fill_(-std::numeric_limits<float>::infinity());
  return later ? memory.triu_(0) : memory.tril_(-1);
}

// The tensors of a call: views of its arguments, and its own memory.
template <class Args>
class Call {
 public:
  Call(const Args& args, StreamView stream, int64_t scores)
      : a(args),
        device_(stream.device),
        group_(args.heads / args.kv_heads),
        at_(chunk_memory(chunk_shape(args), scores)),
        memory_(at::empty(
            {at_.bytes},
            at::TensorOptions(device_ == DeviceType::kCpu ? at::kCPU : at::kCUDA).dtype(at::kByte))),
        side_(std::min(args.tokens, kMostChunkTokens)) {
    LM_CHECK(args.heads % args.kv_heads == 0, std::to_string(args.kv_heads) + " key heads");
    LM_CHECK(args.documents.past == 0 || args.documents.count == 1, "one document goes on");
    if (side_ < 2) return;  // one token, which sees all that it is given
    later_ = hidden(memory_of(at_.later, {side_, side_}), true);
    if (args.window > 0) earlier_ = hidden(memory_of(at_.earlier, {side_, side_}), false);
  }

  const Args& a;
  const ChunkMemory& at() const { return at_; }

  // Of an array [tokens, heads, head_dim]: [kv_heads, group, tokens, head_dim] of a part.
  Tensor rows(const void* x, int64_t stride, const Part& part) const {
    const int64_t d = a.head_dim;
    const Tensor all = tensor_of(const_cast<void*>(x), {a.tokens, a.kv_heads, group_, d},
                                 {stride, group_ * d, d, 1}, a.dtype, device_);
    return of(of(all, 0, part.tokens), 1, part.heads).permute({1, 2, 0, 3});
  }
  // Of an array [past + tokens, kv_heads, head_dim]: [kv_heads, keys, head_dim].
  Tensor keys(const void* x, int64_t stride, const Slice& keys, const Slice& heads) const {
    const Tensor all = tensor_of(const_cast<void*>(x), {a.documents.past + a.tokens, a.kv_heads, a.head_dim},
                                 {stride, a.head_dim, 1}, a.dtype, device_);
    return of(of(all, 0, keys), 1, heads).permute({1, 0, 2});
  }
  // [kv_heads, group, tokens]; lse lies as [heads, tokens] of each run, one after the other.
  Tensor lse(const DocumentRun& run, const Part& part) const {
    const Tensor all =
        tensor_of(const_cast<float*>(a.lse) + a.heads * run.first, {a.kv_heads, group_, run.tokens},
                  {group_ * run.tokens, run.tokens, 1}, DType::kF32, device_);
    return of(of(all, 0, part.heads), 2, part.in_run);
  }

  // In the call's memory: [kv_heads, rows, keys], [kv_heads, rows, head_dim], [kv_heads, rows, 1].
  Tensor by_keys(const ChunkMemory::Area& at, const Part& p, DType type = DType::kF32) const {
    return memory_of(at, {p.heads.count, group_ * p.tokens.count, p.keys.count}, type);
  }
  Tensor by_dim(const ChunkMemory::Area& at, const Part& p, DType type = DType::kF32) const {
    return memory_of(at, {p.heads.count, group_ * p.tokens.count, a.head_dim}, type);
  }
  Tensor by_row(const ChunkMemory::Area& at, const Part& p) const {
    return memory_of(at, {p.heads.count, group_ * p.tokens.count, 1});
  }
  // With head and token apart.
  Tensor apart(const Tensor& x, const Part& p) const {
    return x.view({p.heads.count, group_, p.tokens.count, x.size(2)});
  }
  // A document's [kv_heads, keys, head_dim].
  Tensor sums(const ChunkMemory::Area& at, const Slice& heads, int64_t keys) const {
    return memory_of(at, {heads.count, keys, a.head_dim});
  }

  // A part of q or of the like, side by side.
  Tensor packed(const ChunkMemory::Area& at, const Tensor& rows, const Part& p) const {
    const Tensor to = by_dim(at, p, a.dtype);
    apart(to, p).copy_(rows);
    return to;
  }
  // P or dS as factors of a product.
  Tensor rounded(const Tensor& x, const Part& p) const {
    if (a.dtype == DType::kF32) return x;
    const Tensor to = by_keys(at_.rounded, p, a.dtype);
    to.copy_(x);
    return to;
  }

  // Hidden scores become -inf.
  void hide(const Tensor& scores, const Part& p) const {
    const Tensor x = apart(scores, p);
    const int64_t rows = p.tokens.count, after = rows - p.leaving;
    if (rows > 1) x.narrow(3, p.later, rows - 1).add_(later_.narrow(0, 0, rows).narrow(1, 0, rows - 1));
    if (after > 1)
      x.narrow(2, p.leaving, after)
          .narrow(3, 0, after - 1)
          .add_(earlier_.narrow(0, 0, after).narrow(1, 0, after - 1));
  }

 private:
  Tensor memory_of(const ChunkMemory::Area& area, at::IntArrayRef sizes, DType type = DType::kF32) const {
    auto bytes = static_cast<int64_t>(dtype_size(type));
    for (const int64_t size : sizes) bytes *= size;
    LM_CHECK(bytes <= area.bytes, "a chunk is larger than its area of the memory: " + std::to_string(bytes) +
                                      " of " + std::to_string(area.bytes) + " bytes");
    return memory_.narrow(0, area.offset, bytes).view(torch_type(type)).view(sizes);
  }

  DeviceType device_;
  int64_t group_;
  ChunkMemory at_;
  Tensor memory_;
  int64_t side_;
  Tensor later_, earlier_;
};

// out = factor * a b, summed in fp32; `add`: added to what is there.
void multiply(Tensor out, const Tensor& a, const Tensor& b, double factor, bool add) {
  const double old = add ? 1 : 0;
  if (a.scalar_type() == out.scalar_type())
    at::baddbmm_out(out, out, a, b, old, factor);
  else if (out.is_cuda())
    at::baddbmm_out(out, out, a, b, out.scalar_type(), old, factor);
  else  // LibTorch has it for GPUs alone
    at::baddbmm_out(out, out, a.to(at::kFloat), b.to(at::kFloat), old, factor);
}

// What the softmax is of, but for hidden keys: scale * q·k, capped.
template <class Args>
void attention_scores(const Args& a, const Tensor& q, const Tensor& k, const Tensor& scores) {
  const bool capped = a.softcap > 0;
  multiply(scores, q, k.transpose(1, 2), capped ? a.scale / a.softcap : a.scale, false);
  if (capped) scores.tanh_().mul_(a.softcap);
}

// Calls body(document) for each, in order.
template <class Args, class Body>
void each_document(const Args& a, const Body& body) {
  const DocumentRun all{.first = 0, .tokens = a.tokens, .count = a.documents.count};
  const std::span<const DocumentRun> runs =
      a.documents.run_count > 0 ? std::span(a.documents.runs, static_cast<size_t>(a.documents.run_count))
                                : std::span(&all, 1);
  const int32_t* start = a.documents.start;
  for (const DocumentRun& run : runs) {
    LM_CHECK(*start == run.first, "runs of documents follow each other");
    for (int64_t d = 0; d < run.count; ++d, ++start) body(Document{&run, start[0], start[1] - start[0]});
  }
}

// Calls body(range) for pieces of [0, count).
template <class Body>
void each_piece(int64_t count, int64_t piece, const Body& body) {
  for (int64_t first = 0; first < count; first += piece) body(Slice{first, std::min(piece, count - first)});
}

void forward(const Call<AttentionForward>& call, const Document& document, const Part& p) {
  const AttentionForward& a = call.a;
  const ChunkMemory& at = call.at();
  const Tensor q = call.packed(at.q, call.rows(a.q, a.q_stride, p), p);
  const Tensor scores = call.by_keys(at.scores, p), product = call.by_dim(at.product, p);
  Tensor top = call.by_row(at.top, p), sum = call.by_row(at.sum, p);
  attention_scores(a, q, call.keys(a.k, a.kv_stride, p.keys, p.heads), scores);
  call.hide(scores, p);
  at::amax_out(top, scores, {2}, true);
  scores.sub_(top).exp_();
  at::sum_out(sum, scores, {2}, true);
  multiply(product, call.rounded(scores, p), call.keys(a.v, a.kv_stride, p.keys, p.heads), 1, false);
  product.div_(sum);
  call.rows(a.out, a.heads * a.head_dim, p).copy_(call.apart(product, p));
  sum.log_().add_(top);
  call.lse(*document.run, p).copy_(call.apart(sum, p).squeeze(3));
}

// dS / scale, from P and the scores that gave it (without a soft cap: P itself).
Tensor score_gradient(const Call<AttentionBackward>& call, const Part& p, const Tensor& dout,
                      const Tensor& scores, const Tensor& probabilities) {
  const AttentionBackward& a = call.a;
  const ChunkMemory& at = call.at();
  const Tensor out = call.rows(a.out, a.heads * a.head_dim, p), gradient = call.by_keys(at.gradient, p);
  Tensor product = call.by_dim(at.product, p), delta = call.by_row(at.sum, p);
  product.copy_(dout);
  call.apart(product, p).mul_(out);
  at::sum_out(delta, product, {2}, true);
  multiply(gradient, dout, call.keys(a.v, a.kv_stride, p.keys, p.heads).transpose(1, 2), 1, false);
  gradient.sub_(delta).mul_(probabilities);
  if (a.softcap > 0) {  // the cap's derivative: 1 - (score / cap)^2
    scores.mul_(scores);
    gradient.addcmul_(gradient, scores, -1 / (static_cast<double>(a.softcap) * a.softcap));
  }
  return gradient;
}

// Adds the part's share to dk and dv [kv_heads, keys of the document, head_dim].
void backward(const Call<AttentionBackward>& call, const Document& document, const Part& p, const Tensor& dk,
              const Tensor& dv) {
  const AttentionBackward& a = call.a;
  const ChunkMemory& at = call.at();
  const Tensor k = call.keys(a.k, a.kv_stride, p.keys, p.heads);
  const Tensor q = call.packed(at.q, call.rows(a.q, a.q_stride, p), p);
  const Tensor dout = call.packed(at.dout, call.rows(a.dout, a.heads * a.head_dim, p), p);
  const Tensor scores = call.by_keys(at.scores, p);
  const Slice keys{p.keys.first - document.first, p.keys.count};
  attention_scores(a, q, k, scores);
  Tensor probabilities = scores;
  if (a.softcap > 0) {
    probabilities = call.by_keys(at.probabilities, p);
    probabilities.copy_(scores);
  }
  call.apart(probabilities, p).sub_(call.lse(*document.run, p).unsqueeze(3));
  call.hide(probabilities, p);
  probabilities.exp_();
  multiply(of(dv, 1, keys), call.rounded(probabilities, p).transpose(1, 2), dout, 1, true);
  const Tensor gradient = call.rounded(score_gradient(call, p, dout, scores, probabilities), p);
  const Tensor product = call.by_dim(at.product, p);
  multiply(product, gradient, k, a.scale, false);
  call.rows(a.dq, a.dq_stride, p).copy_(call.apart(product, p));
  multiply(of(dk, 1, keys), gradient.transpose(1, 2), q, a.scale, true);
}

}  // namespace

void attention_forward_chunks(const AttentionForward& args, StreamView stream, int64_t scores) {
  const Call<AttentionForward> call(args, stream, scores);
  each_document(args, [&](const Document& document) {
    const Chunk chunk = chunk_of(chunk_shape(args), args.documents.past + document.tokens, scores);
    each_piece(args.kv_heads, chunk.kv_heads, [&](const Slice& heads) {
      each_piece(document.tokens, chunk.tokens,
                 [&](const Slice& rows) { forward(call, document, part_of(args, document, heads, rows)); });
    });
  });
}

void attention_backward_chunks(const AttentionBackward& args, StreamView stream, int64_t scores) {
  LM_CHECK(args.documents.past == 0, "the backward pass is of whole documents");
  const Call<AttentionBackward> call(args, stream, scores);
  each_document(args, [&](const Document& document) {
    const Slice keys{document.first, document.tokens};
    const Chunk chunk = chunk_of(chunk_shape(args), document.tokens, scores);
    each_piece(args.kv_heads, chunk.kv_heads, [&](const Slice& heads) {
      const Tensor dk = call.sums(call.at().dk, heads, document.tokens),
                   dv = call.sums(call.at().dv, heads, document.tokens);
      dk.zero_(), dv.zero_();
      each_piece(document.tokens, chunk.tokens, [&](const Slice& rows) {
        backward(call, document, part_of(args, document, heads, rows), dk, dv);
      });
      call.keys(args.dk, args.dkv_stride, keys, heads).copy_(dk);
      call.keys(args.dv, args.dkv_stride, keys, heads).copy_(dv);
    });
  });
}

}  // namespace lm
