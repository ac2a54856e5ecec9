"""Does the plan take the fastest level of recomputation that fits? Every level is measured, then the plan has to choose under limits.

SmolLM2-135M's shape, random weights, bf16 with fp32 gradients. Of each setting the levels of train.recompute take turns. Then the plan
chooses, with train.recompute = "auto", under memory limits between the levels' planned peaks; the time of what it chooses is compared
with that of the fastest level under that limit. Usage: recompute.py BIN_DIR [--smoke] [--rounds 9] [--threads 2]
"""

import json

from figures import Figure, Figures, common_options
from processes import Side
from train_step import shape_of

LEVELS = ["none", "attention", "4", "3", "2", "block"]
SMOKE_LEVELS = ["none", "block"]
FIGURE = "the plan's level: step time"
# method, sequences, length: short and long, with gradients and state of all weights or of few
SETTINGS = [("full", 2, 512), ("full", 8, 128), ("full", 1, 1024), ("lora", 2, 512), ("lora", 8, 128), ("lora", 1, 1024)]


def side(options, method, sequences, length, *more):
    if options.smoke:
        more += ("gemm_tflops=0.1",)  # told, since measuring it takes seconds
    return Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape_of(options)), method, "fp32", str(options.threads),
                 str(sequences), str(length), "train.update=after", *more])


def measure(options, setting, rounds):
    """{level: (milliseconds of a step, planned peak)}; two processes at a time, since each keeps its model."""
    out = {}
    names = SMOKE_LEVELS if options.smoke else LEVELS
    for first in range(0, len(names), 2):
        sides = {level: side(options, *setting, f"train.recompute={level}") for level in names[first:first + 2]}
        for _ in range(rounds + 2):
            for one in sides.values():
                one.step()
        for level, one in sides.items():
            one.finish()
            out[level] = one.median("ms", 2), one.rows[-1]["planned"]["peak"]
    return out


def chosen(options, setting, limit):
    one = side(options, *setting, "train.recompute=auto", f"offload.host_memory={limit >> 20}MiB")
    one.step()
    one.finish()
    return one.rows[-1]["planned"]["recompute"]


def limits_of(levels):
    """Room for all levels, and between neighbouring peaks that a MiB can part."""
    peaks = sorted({peak for _, peak in levels.values()}, reverse=True)
    between = [(high + low) // 2 for high, low in zip(peaks, peaks[1:]) if high - low > 4 << 20]
    return [peaks[0] + (256 << 20), *between]


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.smoke else 9)
    figures = Figures(options, [Figure(FIGURE, "x", "the fastest level that fits", at_most=1.03)])
    worst, where, count = 0, "", 0
    for setting in SETTINGS[:1] if options.smoke else SETTINGS:
        levels = measure(options, setting, rounds)
        for level, (ms, peak) in levels.items():
            print(f"{setting[0]} {setting[1]} x {setting[2]}, {level}: {ms:.0f} ms, planned {peak / 2**20:.0f} MiB", flush=True)
        for limit in limits_of(levels)[:1 if options.smoke else None]:
            fastest = min(ms for ms, peak in levels.values() if peak <= limit)
            level = chosen(options, setting, limit)
            ratio = levels[level][0] / fastest
            count += 1
            print(f"  at most {limit >> 20} MiB: the plan takes {level}, {ratio:.3f} x the fastest", flush=True)
            if ratio > worst:
                worst, where = ratio, f"{setting[0]} {setting[1]} x {setting[2]}, {level}"
    figures.set(FIGURE, worst, f"the fastest level that fits, worst of {count}: {where}")
    figures.finish()


if __name__ == "__main__":
    main()
