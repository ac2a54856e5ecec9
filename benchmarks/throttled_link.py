"""Is what ranks say to one another hidden behind compute as far as the step's list of operations allows?

Whole steps of several ranks with GPUs, as processes on the emulator: the real plan, executor, stores and sums, where products and
updates sleep for as long as a chosen GPU would take and calls of all ranks for as long as a link of a chosen rate. Held against
the same list in the arithmetic of schedule/timeline.h: nothing that executes this list can be faster. A figure is the worst of
link / compute = 0.25 .. 2. One more says what the same steps take when compute waits for every call, which must miss the others'
target, or missing overlap could not be seen here; and one that the bytes that leave a rank are the plan's.
Usage: throttled_link.py BIN_DIR [--smoke] [--impossible] [--rounds 9]
"""

import os

from figures import Figure, Figures, common_options
from processes import json_rows

CASES = ("stage 0", "stage 1", "stage 2", "stage 3", "stage 3, 4 ranks", "stage 1, 4 ranks", "LoRA, base in shards",
         "LoRA, base in shards, 4 ranks", "stage 1, state on disk")
AT_MOST = 1.10
# What compute waits for in any case: all ranks' gradients and their sums, or the disk's tiles. Without overlap these take 1.18x.
HIDES_LITTLE = ("stage 0", "stage 1, state on disk")


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    bound = "the step's list of operations"
    figures = Figures(options, [*(Figure(case, "x", bound, at_most=AT_MOST) for case in CASES),
                                Figure("calls not beside compute", "x", bound, at_least=1 + 2 * (AT_MOST - 1)),
                                Figure("bytes between ranks", "% off", "the plan", at_most=1)])
    rounds = options.rounds or (1 if options.smoke else 9)
    program = options.bin_dir.parent / "emulator" / "bin" / "bench_throttled_link"
    command = [str(program), str(rounds), *(["smoke"] if options.smoke else [])]
    worst, least, off = {}, None, 0.0
    for row in json_rows(command, env=os.environ | {"EMULATOR_QUIET": "1"}):
        off = max(off, abs(100 * (row["sent"] - 1)))
        if not row["beside"]:
            if row["case"] in HIDES_LITTLE:
                continue
            least = min(least or row, row, key=lambda one: one["ratio"])
        elif row["ratio"] > worst.get(row["case"], {"ratio": 0})["ratio"]:
            worst[row["case"]] = row
    for case, row in worst.items():
        figures.set(case, row["ratio"], f"{bound}, {row['bound_ms']:.0f} ms (link {row['link']} x compute)")
    if least:
        figures.set("calls not beside compute", least["ratio"], f"{bound}, {least['bound_ms']:.0f} ms ({least['case']})")
        figures.set("bytes between ranks", off)
    figures.finish()


if __name__ == "__main__":
    main()
