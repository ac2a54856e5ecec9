// The ATen operations that LibTorch would do with kernels of its own: elementwise ones and copies by their
// CPU kernels on the same memory. Registered over LibTorch's, whose library is loaded first.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "aten.h"

namespace {

using emulator::add_access;
using emulator::current;
using emulator::seen;

// Any operation by its CPU kernel, in the current stream.
void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t n = schema.arguments().size();
  std::vector<c10::IValue> given(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end()), here = given,
                                                                                               meta = given;
  torch::jit::drop(*stack, n);
  std::vector<emulator::Access> accesses;
  std::vector<c10::IValue> returned;
  for (size_t i = 0; i < n; ++i) {
    if (!given[i].isTensor()) continue;
    const at::Tensor t = given[i].toTensor();
    const auto* info = schema.arguments()[i].alias_info();
    const bool written = info != nullptr && info->isWrite();
    add_access(accesses, t, false);
    if (written) add_access(accesses, t, true), returned.push_back(given[i]);
    here[i] = seen(t);
    if (t.is_cuda()) meta[i] = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
  }
  const std::string name = schema.name() + "." + schema.overload_name();
  if (!returned.empty()) {
    emulator::enqueue(
        current(), emulator::Kind::kAten, name,
        [op, here] {
          const c10::InferenceMode guard;
          torch::jit::Stack s = here;
          op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
        },
        std::move(accesses));
    for (auto& value : returned) torch::jit::push(*stack, value);
    return;
  }
  torch::jit::Stack shapes = meta;
  op.callBoxed(&shapes);
  TORCH_CHECK(shapes.size() == 1 && shapes[0].isTensor(), "emulator: ", name, " returns no one tensor");
  const at::Tensor like = shapes[0].toTensor();
  const at::Tensor out = at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCUDA));
  add_access(accesses, out, true);
  emulator::enqueue(
      current(), emulator::Kind::kAten, name,
      [op, here, to = seen(out)] {
        const c10::InferenceMode guard;
        torch::jit::Stack s = here;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
        to.copy_(s[0].toTensor());
      },
      std::move(accesses));
  torch::jit::push(*stack, out);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  std::vector<emulator::Access> accesses;
  add_access(accesses, from, false);
  add_access(accesses, to, true);
  const bool staged = !from.is_cuda() && !from.is_pinned();
  emulator::enqueue(
      current(), emulator::Kind::kAten, "copy_",
      [to = seen(to), from = staged ? from.clone() : seen(from)] {
        const c10::InferenceMode guard;
        to.copy_(from);
      },
      std::move(accesses));
  if (!to.is_cuda() || (!from.is_cuda() && !non_blocking)) cudaStreamSynchronize(current());
  return to;
}

// LibTorch warns, once, that its own operation is replaced: that is what this file is for.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
} silence;
const bool silent = (c10::WarningUtils::set_warning_handler(&silence), true);

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name :
       {"mul.Tensor", "mul_.Tensor", "mul.out", "add.Tensor", "add_.Tensor", "add.out", "sub_.Tensor",
        "div_.Tensor", "addcmul_", "exp_", "log_", "tanh_", "triu_", "tril_", "amax.out", "sum.dim_IntList",
        "sum.IntList_out", "fill_.Scalar", "zero_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
  }
  m.impl("copy_", copy_);
}

const bool heard = (c10::WarningUtils::set_warning_handler(nullptr), true);

}  // namespace
