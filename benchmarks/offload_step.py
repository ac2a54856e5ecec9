"""What does it cost to keep all optimizer state on disk?

Processes take turns, one step each: everything in memory; all optimizer state on disk, with and without checksums; the
same with one slot, so that nothing overlaps; and, since a disk may be fast enough to need no overlap, both on a simulated
disk: of 1 GB/s; with --short of a speed that follows from memory's step, which other work on the machine makes long. There a
step without overlap must miss the target of the step with it, or this benchmark could not see missing overlap. SmolLM2-135M's shape, full fine-tuning, bf16, 2k tokens per step; medians of the rounds. The disk must be
a real one: tmpfs has no speed to hide. --throttle makes the real disk that slow each way, by a control group (v1, root),
for memory, disk and no overlap only.

Usage: offload_step.py BIN_DIR [--short] [--path DIR] [--rounds 9] [--sequences 4] [--clip global] [--throttle GB_PER_S]
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from figures import Figure, Figures, common_options, loosened
from processes import Side
from train_step import LENGTH, shape_of

OVERLAPPED = 1.15  # of memory's step, at most
# Of memory's step, what the short form's simulated disk takes to read and to write all state. A forward is a third of a step:
# half of this is hidden under it, and all of it, one after the other, is not.
SLOW = 0.6
WARM = 2


def wanted(short):
    """The figures; the last two are the simulated disk's."""
    slow = "slow disk" if short else "1 GB/s"
    # What the step with overlap may take at most, loosened or not, a step without takes at least.
    missed = loosened(OVERLAPPED, "x", False) if short else OVERLAPPED
    # A fifth of the layers computes less beside the same vocabulary's state.
    return [Figure("disk", "x", "memory's step", at_most=OVERLAPPED),
            Figure("checksums", "x", "a step without", at_most=1.06 if short else 1.03),
            Figure(slow, "x", "memory's step", at_most=OVERLAPPED),
            Figure(f"{slow}, no overlap", "x", "none: shows that missing overlap is seen", at_least=missed, loosened=False)]


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
    options.rounds = options.rounds or (5 if options.short else 9)
    with slow_disk(options.path, options.throttle) if options.throttle else contextlib.nullcontext() as enter:
        compare(options, enter)


def take_turns(sides, rounds):
    for _ in range(rounds):
        for side in sides.values():
            side.step()


def slow_speed(running):
    """In GB/s, of the short form's simulated disk: as many bytes are written as are read."""
    return 2 * running["disk"].rows[-1]["read_bytes"] / (SLOW * running["memory"].rows[-1]["ms"] * 1e6)


def compare(options, enter):
    clip = f"optimizer.clip={options.clip}"
    disk = [clip, f"offload.paths={options.path}", "offload.optimizer=nvme"]
    announced = wanted(options.short)
    slow, no_overlap = (figure.name for figure in announced[2:])
    sides = {"memory": [clip], "disk": disk, "disk, unverified": disk + ["offload.verify=false"], "disk, no overlap": disk + ["slots=1"]}
    if options.throttle:
        del sides["disk, unverified"]
        announced = announced[:1]
    elif options.short:
        del sides["disk, no overlap"]
    figures = Figures(options, announced)
    running = {name: start(options, settings, enter) for name, settings in sides.items()}
    take_turns(running, WARM)
    if not options.throttle:
        speed = slow_speed(running) if options.short else 1
        print(f"the simulated disk: {speed:.2f} GB/s each way")
        simulated = {name: start(options, disk + [f"disk_gb_per_s={speed}", *slots], enter)
                     for name, slots in ((slow, []), (no_overlap, ["slots=1"]))}
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
