"""Is the estimate of a step of many ranks what a simulation of all of them says?

Llama-3.1-8B on machines of 8 imagined H100, up to 4096 of them, ZeRO stages 1 and 3, optimizer state on the GPU, the host and disk:
the estimate, which knows one rank, against a walk of every rank's list with the links and disks that they share; and how much
longer a step is when a rank in a hundred computes for 1.2 times as long. Nothing is measured but the simulation's own time.

Usage: ranks_forecast.py BIN_DIR [--smoke] [--impossible]
"""

import json
import subprocess

from figures import Figure, Figures, common_options


def main():
    options = common_options(__doc__).parse_args()
    figures = Figures(options, [Figure("forecast", "% off", "the simulation", at_most=2),
                                Figure("forecast against its bound", "x", "what the busiest link or rank needs", at_least=0.999),
                                Figure("simulation of 4096 ranks", "s", "a few seconds", at_most=10)])
    done = subprocess.run([options.bin_dir / "bench_ranks_forecast", *(["--smoke"] if options.smoke else [])], capture_output=True,
                          text=True, check=True)
    worst, least, longest = 0.0, 1e9, 0.0
    for line in done.stdout.splitlines():
        row = json.loads(line)
        off = 100 * (row["forecast"] / row["simulated"] - 1)
        worst, least = max(worst, abs(off)), min(least, row["forecast"] / row["bound"])
        if row["ranks"] == 4096:
            longest = max(longest, row["took"])
        print(f"{row['ranks']:5} ranks on {row['nodes']:3} machines, stage {row['stage']}, state: {row['optimizer']:5} "
              f"forecast {row['forecast']:7.3f} s {off:+5.2f} %  bound {row['bound']:7.3f} s  "
              f"1 % slower by 1.2: {100 * (row['stragglers'] / row['simulated'] - 1):+5.1f} %  simulated in {row['took']:.2f} s", flush=True)
    figures.set("forecast", worst)
    figures.set("forecast against its bound", least)
    figures.set("simulation of 4096 ranks", longest)
    figures.finish()


if __name__ == "__main__":
    main()
