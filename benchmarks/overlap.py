"""Is I/O hidden behind compute as far as the step's list of operations allows?

The real schedule, transfers, stores and I/O thread with a simulated disk and busy waiting for compute, against the same list in
the arithmetic of schedule/timeline.h: nothing that executes this list can be faster. Optimizer state, gradients, weights and
activations alone and all together. A figure is the worst of all clip modes and of io / compute = 0.25 .. 2. Needs two idle cores.
Usage: overlap.py BIN_DIR [--smoke] [--rounds 7]
"""

from figures import Figure, Figures, common_options
from processes import json_rows

POOLS = ("optimizer", "gradients", "weights", "activations", "all")


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    figures = Figures(options, [Figure(pools, "x", "the step's list of operations", at_most=1.05) for pools in POOLS])
    rounds = options.rounds or (1 if options.smoke else 7)
    command = [str(options.bin_dir / "bench_overlap"), str(rounds)]
    worst = {}
    for row in json_rows(command + (["smoke"] if options.smoke else [])):
        if row["ratio"] > worst.get(row["pools"], {"ratio": 0})["ratio"]:
            worst[row["pools"]] = row
    for pools, row in worst.items():
        figures.set(pools, row["ratio"], f"the step's list of operations, {row['bound_ms']:.0f} ms (clip {row['clip']}, io {row['io']})")
    figures.finish()


if __name__ == "__main__":
    main()
