"""What does it cost to keep all optimizer state on disk?

Three processes take turns, one step each: everything in memory; all optimizer state on disk; the same with one slot,
so that nothing overlaps. SmolLM2-135M's shape, full fine-tuning, bf16, 2k tokens per step; medians of the rounds.
Prints a table and one JSON line. The disk must be a real one: tmpfs has no speed to hide.

Usage: offload_step.py BIN_DIR [--path DIR] [--rounds 9] [--sequences 4] [--clip global]
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from train_step import LENGTH, SHAPE, Side


def start(binary, threads, sequences, settings):
    return Side([str(binary), json.dumps(SHAPE), "full", "fp32", str(threads), str(sequences), str(LENGTH), *settings])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--clip", default="global")
    options = parser.parse_args()
    binary = options.bin_dir / "train_step_bench"
    clip = f"optimizer.clip={options.clip}"
    disk = [clip, f"offload.paths={options.path}", "offload.optimizer=nvme"]
    sides = {"memory": [clip], "disk": disk, "disk, unverified": disk + ["offload.verify=false"],
             "disk, no overlap": disk + ["slots=1"]}
    running = {name: start(binary, options.threads, options.sequences, settings) for name, settings in sides.items()}
    warm = 2
    for _ in range(options.rounds + warm):
        for side in running.values():
            side.step()
    base = running["memory"].median_ms(warm)
    row = {"benchmark": "offload_step", "tokens": options.sequences * LENGTH, "clip": options.clip}
    for name, side in running.items():
        ms, last = side.median_ms(warm), side.rows[-1]
        wait = statistics.median(r["wait_ms"] for r in side.rows[warm:])
        row[name] = {"ms": ms, "ratio": ms / base, "wait_ms": wait, "peak_rss": side.peak()}
        print(f"{name:17} {ms:8.0f} ms  {ms / base:5.2f}x of memory's step  waits {wait:6.0f} ms  "
              f"peak RSS {side.peak() / 2**30:.2f} GiB (planned {last['planned']['rss'] / 2**30:.2f})  "
              f"reads {last['read_bytes'] / 1e9:.2f} GB a step")
        if abs(side.rows[-1]["loss"] - running["memory"].rows[-1]["loss"]) > 0:
            sys.exit(f"{name}: the loss differs from memory's")
        side.finish()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
