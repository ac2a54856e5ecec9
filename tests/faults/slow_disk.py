"""A disk that becomes slow under a run with its state on it: SLOW-29 says so once, with the rate that the disk has and the one that
the plan was made for; the run goes on, is not taken for one that hangs, and its numbers are the undisturbed run's.

  slow_disk.py

The disk is an ext4 on a loop device, which a control group (blkio, v1; root) lets the run read and write at RATE, from before it
measures it: a rate that other work on this machine does not change. After some steps it is a fifth of that. The rates in the message
must be the group's."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import full_disk_saves
from full_disk_saves import Run, must, sh
from rows import Row

GROUPS = Path("/sys/fs/cgroup/blkio")
RATE, SLOWER = 50e6, 5  # bytes a second, each way
STEPS, BEFORE = 30, 9  # the first step fills slots, and eight are looked at together
SAID = r"warning SLOW-29: disks move ([\d.]+) GB/s, and the plan was made for ([\d.]+)"


def prepare(work):
    """A model of 3 million weights, whose optimizer's state is 25 MB: a step of 0.5 s at RATE, of which little is arithmetic (in fp32
    on every machine)."""
    full_disk_saves.prepare(work)
    shape = json.loads((work / "shape" / "config.json").read_text())
    (work / "shape" / "config.json").write_text(json.dumps({**shape, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}))
    text = (work / "c.toml").read_text().replace("steps = 1000000", f"steps = {STEPS}").replace('every = "2s"', 'every = "1h"').replace('"bf16"', '"fp32"')
    (work / "c.toml").write_text(text + '[offload]\noptimizer = "nvme"\npaths = ["swap"]\n')


@contextlib.contextmanager
def loop_disk(work):
    image, at = work / "swap.img", work / "swap"
    at.mkdir()
    must("truncate", "-s", "1g", image)
    must("mkfs.ext4", "-q", image)
    must("mount", "-o", "loop", image, at)
    try:
        device = os.stat(at).st_dev
        yield f"{os.major(device)}:{os.minor(device)}"
    finally:
        for _ in range(200):
            if sh("umount", at).returncode == 0:
                break
            time.sleep(0.05)


@contextlib.contextmanager
def limited(disk):
    """What this process starts meanwhile reads and writes the disk no faster than what is yielded is told."""
    group = GROUPS / f"lmlaunch-slow-{os.getpid()}"
    group.mkdir()

    def limit(bytes_per_s):
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{disk} {int(bytes_per_s)}")

    try:
        limit(RATE)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield limit
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        for _ in range(200):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def rows(work, name):
    with contextlib.suppress(FileNotFoundError):
        lines = (work / "runs" / name / "metrics.jsonl").read_text().split("\n")
        return [row for row in map(json.loads, lines[:-1]) if "loss" in row]
    return []


def numbers(work, name):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(work, name)], \
        (work / "runs" / name / "model" / "model.safetensors").read_bytes()


def show(work, disk, row):
    with limited(disk) as limit:
        run = Run(work, "slow")
        try:
            while len(rows(work, "slow")) < BEFORE:
                assert run.process.poll() is None, run.text()
                time.sleep(0.01)
            assert not re.search(SAID, run.text()), f"a disk that nobody slows is called slow:\n{run.text()[-3000:]}"
            limit(RATE / SLOWER)
            run.wait_for(SAID, seconds=200)
            limit(1e12)
            text = run.ended(0)
        finally:
            run.kill()
    said = re.findall(SAID, text)
    assert len(said) == 1, text
    # Both ways together; of the eight steps the first may have begun before.
    moved, planned = (float(rate) * 1e9 / 2 / RATE for rate in said[0])
    row.row["figures"] = {"said, of the rate that the disk was slowed to": round(moved * SLOWER, 2), "planned, of its rate": round(planned, 2)}
    assert 0.7 < moved * SLOWER < 1.3 and 0.7 < planned < 1.3, (text[-3000:], said)
    Run(work, "undisturbed").ended(0)
    assert numbers(work, "slow") == numbers(work, "undisturbed")


def main():
    row = Row("slow_disk", "F29: a disk becomes slow", "a loop device throttled to a fifth by a control group, under a run with its state on it")
    if os.geteuid() != 0:
        row.skip("mounting a file system needs root")
    if not (GROUPS / "blkio.throttle.read_bps_device").exists():
        row.skip("no control group (v1) here that slows a disk")
    wrong = ""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        row.row["tries"] = 1
        with loop_disk(work) as disk:
            try:
                show(work, disk, row)
                row.count("said, the same bits")
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as what:
                row.count("wrong")
                wrong = str(what)
    row.write()
    print(wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
