"""What does it cost to keep all optimizer state on disk?

Processes take turns, one step each: everything in memory; all optimizer state on disk, with and without checksums; the
same with one slot, so that nothing overlaps; and, since a disk may be fast enough to need no overlap, both on a simulated
disk of 1 GB/s. SmolLM2-135M's shape, full fine-tuning, bf16, 2k tokens per step; medians of the rounds. Prints a table
and one JSON line. The disk must be a real one: tmpfs has no speed to hide. --throttle makes the real disk that slow each
way, by a control group (v1, root), for memory, disk and no overlap only.

Usage: offload_step.py BIN_DIR [--path DIR] [--rounds 9] [--sequences 4] [--clip global] [--throttle GB_PER_S]
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from train_step import LENGTH, SHAPE, Side


def start(binary, threads, sequences, settings, enter):
    return Side([str(binary), json.dumps(SHAPE), "full", "fp32", str(threads), str(sequences), str(LENGTH), *settings], preexec_fn=enter)


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
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--clip", default="global")
    parser.add_argument("--throttle", type=float)
    options = parser.parse_args()
    with slow_disk(options.path, options.throttle) if options.throttle else contextlib.nullcontext() as enter:
        compare(options, enter)


def compare(options, enter):
    binary = options.bin_dir / "train_step_bench"
    clip = f"optimizer.clip={options.clip}"
    disk = [clip, f"offload.paths={options.path}", "offload.optimizer=nvme"]
    sides = {"memory": [clip], "disk": disk, "disk, unverified": disk + ["offload.verify=false"],
             "disk, no overlap": disk + ["slots=1"], "1 GB/s": disk + ["disk_gb_per_s=1"],
             "1 GB/s, no overlap": disk + ["disk_gb_per_s=1", "slots=1"]}
    if options.throttle:
        sides = {name: sides[name] for name in ("memory", "disk", "disk, no overlap")}
    running = {name: start(binary, options.threads, options.sequences, settings, enter) for name, settings in sides.items()}
    warm = 2
    for _ in range(options.rounds + warm):
        for side in running.values():
            side.step()
    base = running["memory"].median_ms(warm)
    row = {"benchmark": "offload_step", "tokens": options.sequences * LENGTH, "clip": options.clip, "throttle_gb_per_s": options.throttle}
    for name, side in running.items():
        ms, last = side.median_ms(warm), side.rows[-1]
        wait = statistics.median(r["wait_ms"] for r in side.rows[warm:])
        row[name] = {"ms": ms, "ratio": ms / base, "wait_ms": wait, "peak_rss": side.peak()}
        print(f"{name:18} {ms:8.0f} ms  {ms / base:5.2f}x of memory's step  waits {wait:6.0f} ms  "
              f"peak RSS {side.peak() / 2**30:.2f} GiB (planned {last['planned']['rss'] / 2**30:.2f})  "
              f"reads {last['read_bytes'] / 1e9:.2f} GB a step")
        if abs(side.rows[-1]["loss"] - running["memory"].rows[-1]["loss"]) > 0:
            sys.exit(f"{name}: the loss differs from memory's")
        side.finish()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
