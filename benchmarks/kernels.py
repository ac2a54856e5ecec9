"""How near to the memory's speed do the model's kernels run? Each against memcpy of as many bytes as it reads and writes, one that
writes nothing against reading alone.

One thread, a training step's shapes, bf16. Some kernels compute more than they move, and small arrays stay in the cache, where
memcpy is several times as fast as from memory: so the targets are no ideal. They are about 0.85 of what these kernels reached
on an AMD EPYC with AVX-512-BF16, and guard against rot. Usage: kernels.py BIN_DIR [--short] [--rounds 50]
"""

from figures import Figure, Figures, common_options
from processes import json_rows

# Share of memcpy's speed, at least.
TARGETS = {"rms_norm forward + residual": 0.20, "rms_norm backward": 0.19, "rope": 0.25, "swiglu forward": 0.17,
           "swiglu backward": 0.33, "softmax statistics": 0.19, "softmax gradient": 0.38, "accumulate bf16 into fp32": 1.35,
           "granule norms fp32": 0.90, "dropout": 0.05}


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    figures = Figures(options, [Figure(name, "x", "memcpy", at_least=target) for name, target in TARGETS.items()])
    for row in json_rows([str(options.bin_dir / "bench_kernels"), "1", str(options.rounds)]):
        figures.set(row["kernel"], row["gbps"] / row["copy_gbps"], f"{'reading alone' if row['reads_only'] else 'memcpy'}, {row['copy_gbps']:.1f} GB/s")
    figures.finish()


if __name__ == "__main__":
    main()
