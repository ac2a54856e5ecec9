"""How near to what the machine can do do the model's kernels run? One thread, a training step's shapes, bf16.

Each against its ceiling: memcpy of as many bytes as it reads and writes; reading alone where it writes nothing. Those with an
exponential in each element compute for longer than they move: their ceiling is the lower one of memcpy and of what ATen's
vectorised operations reach that compute the same, on arrays that stay in the cache. Above 1 a kernel gains by making one pass of
what ATen makes in several. SwiGLU's backward pass makes h again, so both count ATen's silu.

Other kernels compute more than they move, too, and small arrays stay in the cache, where memcpy is several times as fast as from
memory: against memcpy alone the targets are no ideal. They are about 0.85 to 0.92 of what these kernels reached on an AMD EPYC with
AVX-512-BF16, as are those above 1, and guard against rot. Usage: kernels.py BIN_DIR [--smoke] [--rounds 50]
"""

import os
import time

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
import torch  # noqa: E402

from figures import Figure, Figures, common_options  # noqa: E402
from processes import json_rows  # noqa: E402

# Share of the ceiling, at least.
TARGETS = {"rms_norm forward + residual": 0.20, "rms_norm backward": 0.19, "rope": 0.25, "swiglu forward": 1.15,
           "swiglu backward": 2.00, "softmax statistics": 2.15, "softmax gradient": 1.35, "accumulate bf16 into fp32": 1.35,
           "granule norms fp32": 0.90, "dropout": 0.05}

# The least of a step's three products. Where there are instructions for bf16 they reach 2 and more; where there are none a model in
# bf16 must not train slower than one in fp32.
BF16_OF_FP32 = 0.9

COLUMNS, ROWS = 8192, 4  # 64 KiB an array: several fit a second-level cache


def arithmetic(rows=ROWS, columns=COLUMNS):
    """Of each kernel with exponentials: the bytes that it moves for an element, ATen's operations and what they are called."""
    torch.manual_seed(5)
    x, y, out = (torch.randn(rows, columns).bfloat16() for _ in range(3))
    aten = torch.ops.aten
    silu, product = (lambda: aten.silu.out(x, out=out)), (lambda: torch.mul(x, y, out=out))
    return {"swiglu forward": (6, [silu, product], "silu and product"),
            "swiglu backward": (12, [silu, lambda: aten.silu_backward(x, y), product, product, product],
                                "silu, its gradient and three products"),
            "softmax statistics": (2, [lambda: aten._log_softmax(x, 1, False)], "log_softmax"),
            "softmax gradient": (4, [lambda: torch.exp(x, out=out)], "exp")}


def quickest(operation, rounds):
    """Seconds. Rounds so short that other work of the machine leaves some of them alone."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        operation()
        best = min(best, time.perf_counter() - start)
    return best


def aten_gbps(rounds):
    """Kernel: (GB/s that it would reach at ATen's pace, what ATen does). A call on one element is what Python and ATen's choice of a
    kernel take, and is taken off."""
    torch.set_num_threads(1)
    calls = arithmetic(1, 1)

    def seconds(kernel, operations):
        return sum(quickest(one, rounds) - quickest(call, rounds) for one, call in zip(operations, calls[kernel][1], strict=True))

    return {kernel: (bytes_each * ROWS * COLUMNS / seconds(kernel, operations) / 1e9, what)
            for kernel, (bytes_each, operations, what) in arithmetic().items()}


def ceiling(row, aten):
    """GB/s, and its name."""
    memory = f"{'reading alone' if row['reads_only'] else 'memcpy'}, {row['copy_gbps']:.1f} GB/s"
    gbps, what = aten.get(row["kernel"], (float("inf"), ""))
    if row["copy_gbps"] <= gbps:
        return row["copy_gbps"], memory
    return gbps, f"ATen's {what} in the cache, {gbps:.1f} GB/s ({memory})"


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.smoke else 50)
    figures = Figures(options, [*(Figure(name, "x", "memcpy" if name not in arithmetic() else "memcpy or ATen in the cache", at_least=target)
                                  for name, target in TARGETS.items()),
                                Figure("bf16 products", "x", "fp32 products", at_least=BF16_OF_FP32)])
    rows, aten = json_rows([str(options.bin_dir / "bench_kernels"), "1", str(options.rounds)]), aten_gbps(40 * options.rounds)
    for row in rows:
        gbps, name = ceiling(row, aten)
        figures.set(row["kernel"], row["gbps"] / gbps, name)
    products = json_rows([str(options.bin_dir / "bench_products"), "1", str(options.rounds)])
    slowest = min(products, key=lambda row: row["bf16_gflops"] / row["fp32_gflops"])
    figures.set("bf16 products", slowest["bf16_gflops"] / slowest["fp32_gflops"],
                f"fp32 products, {slowest['fp32_gflops']:.0f} GFLOP/s ({slowest['product']}, {slowest['instructions']})")
    figures.finish()


if __name__ == "__main__":
    main()
