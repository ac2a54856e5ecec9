"""Is the plan right? Fifteen configurations: planned against measured.

Peak resident memory, bytes on disk (what the process's nameless files occupy), bytes read and written per step, and the
step's time (the cores' rate measured in the same process before every step, since others use the machine, too).
SmolLM2-135M's shape, random weights. Prints a table, one JSON line per configuration, and at the end the worst deviation of
each.

Usage: plan_honest.py BIN_DIR [--path DIR] [--steps 7]
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from train_step import SHAPE, Side

NVME = {name: f"offload.{name}=nvme" for name in ("optimizer", "gradients", "weights", "activations")}
BLOCK = "train.recompute=block"
UNTIED = "untied"  # a head of its own, which is streamed by vocabulary segments
# method, gradients, sequences, length, micro_batch, settings
CASES = [
    ("full", "fp32", 2, 512, 2, []),
    ("full", "bf16", 2, 512, 2, [BLOCK]),
    ("full", "fp32", 4, 256, 2, []),
    ("full", "fp32", 2, 512, 2, [NVME["optimizer"]]),
    ("full", "bf16", 4, 512, 4, [NVME["optimizer"], BLOCK]),
    ("full", "fp32", 2, 512, 1, [NVME["optimizer"], NVME["gradients"], BLOCK]),
    ("full", "fp32", 4, 256, 1, [NVME["optimizer"], NVME["weights"], BLOCK]),
    ("full", "fp32", 4, 512, 2, [*NVME.values(), BLOCK]),
    ("full", "fp32", 2, 512, 2, [NVME["activations"], BLOCK]),
    ("full", "fp32", 2, 512, 2, [NVME["optimizer"], "offload.host_memory=1800MiB", "optimizer.clip=block"]),
    ("full", "fp32", 2, 512, 2, ["offload.host_memory=1400MiB", BLOCK]),
    ("lora", "fp32", 2, 512, 2, []),
    ("lora", "fp32", 4, 512, 2, [NVME["weights"], BLOCK]),
    ("lora", "fp32", 4, 256, 4, [NVME["weights"], NVME["activations"], BLOCK]),
    ("full", "fp32", 4, 256, 1, [UNTIED, *NVME.values(), BLOCK]),
]


def swap_bytes(pid):
    """What the nameless files of a process occupy on disk."""
    total = 0
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{descriptor}"
        if os.path.exists(link) and os.readlink(link).endswith("(deleted)") and not os.readlink(link).startswith("/mem"):
            total += os.stat(link).st_blocks * 512
    return total


def measure(binary, case, path, steps):
    method, gradients, sequences, length, micro, settings = case
    shape = {**SHAPE, "tie_word_embeddings": UNTIED not in settings}
    name = f"{method} {gradients} {sequences}x{length}/{micro} " + " ".join(settings)
    settings = ["rates=each", f"offload.paths={path}", f"train.micro_batch={micro}", *[s for s in settings if s != UNTIED]]
    side = Side([str(binary), json.dumps(shape), method, gradients, "2", str(sequences), str(length), *settings])
    for _ in range(steps):
        side.step()
    disk = swap_bytes(side.process.pid)
    last, planned = side.rows[-1], side.rows[-1]["planned"]
    side.finish()
    ms = statistics.median(row["ms"] for row in side.rows[2:])
    planned_ms = statistics.median(row["planned"]["ms"] for row in side.rows[2:])  # with the rates just before each
    # The median: slots fill during the first steps, and what is on its way at a step's end counts for the next.
    moved = {way: statistics.median(row[way] for row in side.rows[2:]) for way in ("read_bytes", "written_bytes")}
    return {"case": name,
            "rss": (planned["rss"], last["peak_rss"]), "disk": (planned["disk"], disk),
            "read": (planned["read_bytes"], moved["read_bytes"]),
            "written": (planned["written_bytes"], moved["written_bytes"]), "ms": (planned_ms, ms)}


def deviation(pair):
    planned, measured = pair
    return 100 * (planned - measured) / measured if measured else (0.0 if planned == 0 else 100.0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", type=int, help="the n-th configuration alone")
    options = parser.parse_args()
    worst = dict.fromkeys(("rss", "disk", "read", "written", "ms"), 0.0)
    for case in CASES if options.only is None else [CASES[options.only]]:
        row = measure(options.bin_dir / "train_step_bench", case, options.path, options.steps)
        deviations = {key: deviation(row[key]) for key in worst}
        for key, value in deviations.items():
            worst[key] = max(worst[key], abs(value))
        print(f"{row['case'].replace('offload.', ''):92} "
              f"RSS {row['rss'][1] / 2**20:6.0f} MiB {deviations['rss']:+5.1f} %  "
              f"disk {row['disk'][1] / 2**20:6.0f} MiB {deviations['disk']:+5.1f} %  "
              f"read {deviations['read']:+4.1f} %  written {deviations['written']:+4.1f} %  "
              f"step {row['ms'][1]:6.0f} ms {deviations['ms']:+5.1f} %")
        print(json.dumps({"benchmark": "plan_honest", **row}), flush=True)
    print("worst: " + ", ".join(f"{key} {value:.1f} %" for key, value in worst.items()))


if __name__ == "__main__":
    main()
