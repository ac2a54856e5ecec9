"""How fast is our CPU attention, against the machine's GEMM of the same type and ATen's flash kernels?

One thread. Targets are shares of the rate of a large product, about 0.85 of what was reached on an AMD EPYC with
AVX-512-BF16: they guard against rot. ATen's attention is beaten wherever it can do the same; a window and the longest sequence
are not compared with it. Usage: attention.py BIN_DIR [--smoke] [--rounds 9]
"""

from figures import Figure, Figures, common_options
from processes import json_rows

# Share of the GEMM rate, at least, forward and backward.
LONG = {"bf16 1x8192, 3/1 heads of 64": (0.61, 0.62), "bf16 1x8192, 3/1 heads of 64, window 1024": (0.63, 0.70)}
TARGETS = {"bf16 2x512, 9/3 heads of 64": (0.55, 0.60), "bf16 1x2048, 9/3 heads of 64": (0.53, 0.62),
           "bf16 2x512, 12/12 heads of 64": (0.45, 0.49), "bf16 2x512, 8/2 heads of 128": (0.65, 0.70),
           "bf16 16x64, 9/3 heads of 64": (0.18, 0.32), "fp32 2x512, 9/3 heads of 64": (0.54, 0.62)}


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    figures = Figures(options, [
        *[Figure(f"{case}, {way}", "x", "a product", at_least=target)
          for case, both in (TARGETS | LONG).items() for way, target in zip(("forward", "backward"), both)],
        *[Figure(f"{case}, {way}, against ATen", "x", "ATen's flash attention", at_least=1.0)
          for case in TARGETS for way in ("forward", "backward")]])
    rounds = options.rounds or (1 if options.smoke else 9)
    for row in json_rows([str(options.bin_dir / "bench_attention"), "1", str(rounds)]):
        name = f"{row['case']}, {row['pass']}"
        figures.set(name, row["of_gemm"], f"a {name.split()[0]} product, {row['gemm_gflops']:.0f} GFLOP/s")
        if row["of_aten"] is not None:
            figures.set(f"{name}, against ATen", row["of_aten"])
    figures.finish()


if __name__ == "__main__":
    main()
