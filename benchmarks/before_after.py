"""Is a change that should cost nothing free? Two builds of the project take turns, one step or one start each.

Steps of train_step.py's model, full and LoRA, are timed as there. A start is lmlaunch from its command line to the row of its first
step, with a tiny model. Medians of the ratios of neighbouring turns: a change of the machine's speed hits both. It is no part of
`./dev bench`, since it needs a second build (of the commit before the change): ./dev build executables train_step_bench in another
work tree.

Usage: before_after.py BIN_DIR BASE_BIN_DIR [--rounds 9] [--smoke]
"""

import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from figures import Figure, Figures, common_options
from processes import Side
from train_step import LENGTH, SEQUENCES, shape_of
from varying_lengths import prepare

CASES = {"full, bf16 gradients": ("full", "bf16"), "full, fp32 gradients": ("full", "fp32"), "LoRA": ("lora", "bf16")}
START = "start to the first step"
MOST = 1.02
CONFIG = """
[run]
device = "cpu"
[model]
path = "small"
init = "random"
[data]
train = ["equal.jsonl"]
max_length = 512
cache_dir = "{cache}"
[train]
steps = 1
global_batch = 1
micro_batch = 1
"""


def step_ratios(options, method, gradients, rounds):
    sides = [Side([str(bin_dir / "train_step_bench"), json.dumps(shape_of(options)), method, gradients, "2", str(SEQUENCES), str(LENGTH)])
             for bin_dir in (options.bin_dir, options.base_bin_dir)]
    for turn in range(rounds + 2):
        for side in sides[::1 if turn % 2 else -1]:
            side.step()
    for side in sides:
        side.finish()
    return [after["ms"] / before["ms"] for after, before in zip(*(side.rows[2:] for side in sides))]


def start_seconds(side, bin_dir, work, count):
    """Of a fresh run, whose tokens, rates and disks earlier ones have put into this side's cache."""
    name = f"{side}{count}"
    (work / f"{name}.toml").write_text(CONFIG.format(cache=f"cache_{side}"))
    rows = work / "runs" / name / "metrics.jsonl"
    begin = time.perf_counter()
    process = subprocess.Popen([bin_dir.resolve() / "lmlaunch", f"{name}.toml"], cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (rows.exists() and rows.stat().st_size > 0) and process.poll() is None:
        time.sleep(0.002)
    seconds = time.perf_counter() - begin
    if process.wait() != 0:
        raise SystemExit(f"{bin_dir}/lmlaunch ended with {process.returncode}")
    return seconds


def start_ratios(options, rounds):
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        ratios = [start_seconds("after", options.bin_dir, work, i) / start_seconds("before", options.base_bin_dir, work, i)
                  for i in range(rounds + 2)]
    return ratios[2:]


def main():
    parser = common_options(__doc__)
    parser.add_argument("base_bin_dir", type=Path)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.smoke else 9)
    figures = Figures(options, [Figure(name, "x", "the other build", at_most=MOST) for name in (*(f"{case}: time of a step" for case in CASES), START)])
    for case, how in CASES.items():
        figures.set(f"{case}: time of a step", statistics.median(step_ratios(options, *how, rounds)))
    figures.set(START, statistics.median(start_ratios(options, 3 * rounds)))
    figures.finish()


if __name__ == "__main__":
    main()
