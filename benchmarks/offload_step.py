"""What does it cost to keep all optimizer state on disk?

Processes take turns, one step each: everything in memory; all optimizer state on disk, with and without checksums; the
same with one slot, so that nothing overlaps; and, since a disk may be fast enough to need no overlap, both on a simulated
disk of 1 GB/s. There a step without overlap must miss the target of the step with it, or this benchmark could not see missing
overlap. SmolLM2-135M's shape, full fine-tuning, bf16, 2k tokens per step; medians of the rounds. The disk must be a real one: tmpfs
has no speed to hide. --throttle makes the real disk that slow each way, by a control group (v1, root),
for memory, disk and no overlap only.

Usage: offload_step.py BIN_DIR [--smoke] [--path DIR] [--rounds 9] [--sequences 4] [--clip global] [--throttle GB_PER_S]
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from figures import Figure, Figures, common_options
from processes import Side
from train_step import LENGTH, shape_of

OVERLAPPED = 1.15  # of memory's step, at most
WARM = 2
SIMULATED = "1 GB/s"  # of the simulated disk, each way
FIGURES = [Figure("disk", "x", "memory's step", at_most=OVERLAPPED),
           Figure("checksums", "x", "a step without", at_most=1.03),
           Figure(SIMULATED, "x", "memory's step", at_most=OVERLAPPED),
           # What the step with overlap may take at most a step without takes at least.
           Figure(f"{SIMULATED}, no overlap", "x", "none: shows that missing overlap is seen", at_least=OVERLAPPED)]


def start(options, settings, enter):
    return Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape_of(options)), "full", "fp32", str(options.threads),
                 str(options.sequences), str(LENGTH), *settings], preexec_fn=enter)


@contextlib.contextmanager
def slow_disk(path, gb_per_s):
    """Gives a function for a child whose direct I/O on the disk of `path` then runs at that speed at most, each way. One
    group for all: they take turns. It can be removed when they have ended."""
    device = os.stat(path).st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (node / "partition").exists():
        node = node.parent
    disk = (node / "dev").read_text().strip()
    group = Path(f"/sys/fs/cgroup/blkio/lmlaunch-bench-{os.getpid()}")
    group.mkdir()
    try:
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{disk} {int(gb_per_s * 1e9)}")
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


def main():
    parser = common_options(__doc__)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--clip", default="global")
    parser.add_argument("--throttle", type=float)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.smoke else 9)
    with slow_disk(options.path, options.throttle) if options.throttle else contextlib.nullcontext() as enter:
        compare(options, enter)


def take_turns(sides, rounds):
    for _ in range(rounds):
        for side in sides.values():
            side.step()


def compare(options, enter):
    clip = f"optimizer.clip={options.clip}"
    disk = [clip, f"offload.paths={options.path}", "offload.optimizer=nvme"]
    announced = FIGURES
    sides = {"memory": [clip], "disk": disk, "disk, unverified": disk + ["offload.verify=false"], "disk, no overlap": disk + ["slots=1"]}
    if options.throttle:
        del sides["disk, unverified"]
        announced = announced[:1]
    figures = Figures(options, announced)
    running = {name: start(options, settings, enter) for name, settings in sides.items()}
    take_turns(running, WARM)
    if not options.throttle:
        simulated = {name: start(options, disk + ["disk_gb_per_s=1", *slots], enter)
                     for name, slots in ((SIMULATED, []), (f"{SIMULATED}, no overlap", ["slots=1"]))}
        take_turns(simulated, WARM)
        running |= simulated
    take_turns(running, options.rounds)
    ms = {name: side.median("ms", WARM) for name, side in running.items()}
    for name, side in running.items():
        last = side.rows[-1]
        print(f"{name:21} {ms[name]:8.0f} ms  {ms[name] / ms['memory']:5.2f}x of memory's step  "
              f"waits {side.median('wait_ms', WARM):6.0f} ms  "
              f"peak RSS {side.peak() / 2**30:.2f} GiB (planned {last['planned']['rss'] / 2**30:.2f})  "
              f"reads {last['read_bytes'] / 1e9:.2f} GB a step")
        if last["loss"] != running["memory"].rows[-1]["loss"]:
            sys.exit(f"{name}: the loss differs from memory's")
        side.finish()
    for figure in announced:
        base = "disk, unverified" if figure.name == "checksums" else "memory"
        of = "disk" if figure.name == "checksums" else figure.name
        figures.set(figure.name, ms[of] / ms[base], f"{figure.ceiling}, {ms[base]:.0f} ms" if figure.at_most else None)
    figures.finish()


if __name__ == "__main__":
    main()
