"""Compiles flash-attn-4's attention for Hopper ahead of time, on a machine without a GPU: what lmlaunch would link to have it.
The objects hold machine code of sm_90a and a host function each, which fills tensor maps and launches; the headers beside them say
how it is called from C. docs/performance.md ("Attention for Hopper") has the result, and what is left to do. lmlaunch's build does
not run this.

Run in a Python environment with torch, flash-attn-4 and nvidia-cutlass-dsl[cu13] (a minute and a half for each size of the heads):
  python benchmarks/hopper_attention.py DIRECTORY [HEAD_DIM...]

The packages' interface compiles with fake tensors, but for three things that are put right here: semaphores of the deterministic
backward pass are read through DLPack, which asks for a driver; the kernels' unused argument AuxData has no form in C; and with TVM's
calling convention the objects would need libtvm_ffi.
"""

import os
import subprocess
import sys
from pathlib import Path

# What the kernels are chosen for, what they are compiled for, and the multiprocessors of the card.
os.environ.update(FLASH_ATTENTION_ARCH="sm_90", CUTE_DSL_ARCH="sm_90a", FLASH_ATTENTION_NUM_SMS="132")

import cuda.bindings.driver as cuda  # noqa: E402
import torch  # noqa: E402
from cutlass import Float32, Int32, cute  # noqa: E402
from flash_attn.cute import interface, utils  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

HEADS, KEY_HEADS, TOKENS, DOCUMENTS = 32, 8, 16384, 8  # sizes are arguments at run time; that heads share keys is not
Tensor = cute.Tensor


def semaphore(x, leading_dim, alignment=16, static_modes=None, stride_order=None):
    shape = tuple(int(size) if mode == leading_dim else cute.sym_int() for mode, size in enumerate(x.shape))
    return cute.runtime.make_fake_compact_tensor(Int32, shape, stride_order=tuple(reversed(range(x.ndim))), assumed_align=alignment)


def forward_of(kernel):
    @cute.jit
    def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: Float32, starts: Tensor, key_starts: Tensor,
                stream: cuda.CUstream):
        kernel(q, k, v, out, lse, scale, starts, key_starts, *[None] * 7, utils.AuxData(), None, None, stream)

    return forward


def backward_of(kernel):
    @cute.jit
    def backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, dpsum: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
                 scale: Float32, starts: Tensor, key_starts: Tensor, dq_turn: Tensor, dk_turn: Tensor, dv_turn: Tensor,
                 stream: cuda.CUstream):
        kernel(q, k, v, dout, lse, dpsum, dq, dk, dv, scale, starts, key_starts, *[None] * 4, dq_turn, dk_turn, dv_turn,
               utils.AuxData(), None, None, stream)

    return backward


class Compiler:
    """In the place of cute.compile: without the argument that has no form in C, and without TVM. Keeps what it has compiled."""

    def __init__(self, real):
        self.real, self.made = real, []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __call__(self, kernel, *arguments, options=""):
        name = type(kernel).__name__
        if any(isinstance(x, utils.AuxData) for x in arguments):
            arguments = [x for x in arguments if x is not None and not isinstance(x, utils.AuxData)]
            kernel = backward_of(kernel) if "Backward" in name else forward_of(kernel)
        compiled = self.real(kernel, *arguments)
        self.made.append((name, compiled))
        return compiled


def compile_all(compiler, head_dim):
    """Packed documents, causal, bf16; q, k, v and their gradients are slices of one array, as a fused projection has them."""
    compiler.made = []
    sizes = [heads * head_dim for heads in (HEADS, KEY_HEADS, KEY_HEADS)]

    def slices():
        whole = torch.empty(TOKENS, sum(sizes), dtype=torch.bfloat16, device="cuda")
        return [part.view(TOKENS, -1, head_dim) for part in whole.split(sizes, dim=1)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = slices()
        dq, dk, dv = slices()
        out = torch.empty(TOKENS, HEADS, head_dim, dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(HEADS, TOKENS, dtype=torch.float32, device="cuda")
        starts = torch.empty(DOCUMENTS + 1, dtype=torch.int32, device="cuda")
        common = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": TOKENS // DOCUMENTS,
                  "max_seqlen_k": TOKENS // DOCUMENTS, "softmax_scale": head_dim**-0.5, "causal": True}
        interface._flash_attn_fwd(q, k, v, out=out, lse=lse, return_lse=True, **common)
        interface._flash_attn_bwd(q, k, v, out, torch.empty_like(out), lse, deterministic=True, dq=dq, dk=dk, dv=dv, **common)
    return compiler.made


def main():
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    fake_stream = cute.runtime.make_fake_stream
    cute.runtime.make_fake_stream = lambda **_: fake_stream()
    utils.convert_from_dlpack_leading_static = semaphore
    compiler = cute.compile = Compiler(cute.compile)
    for head_dim in [int(word) for word in sys.argv[2:]] or [64, 128]:
        for number, (name, compiled) in enumerate(compile_all(compiler, head_dim)):
            file = f"attention_d{head_dim}_{number}_{name}"
            compiled.export_to_c(str(directory), file, f"lm_{file}")
            made = directory / f"{file}.o"
            wanted = subprocess.run(["nm", "-u", made], capture_output=True, text=True, check=True).stdout.split()
            assert b"sm_90a" in made.read_bytes()
            print(f"{made.name}: {made.stat().st_size:,} bytes, wants {' '.join(s for s in wanted if s.startswith('_cu'))}", flush=True)


if __name__ == "__main__":
    main()
