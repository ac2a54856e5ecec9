"""A disk that becomes slow under a run with its state on it: SLOW-29 says so once, with the rate that the disk has and the one that
the plan was made for; the run goes on, is not taken for one that hangs, and its numbers are the undisturbed run's.

  slow_disk.py

The disk is an ext4 on a loop device; after some steps a control group (blkio, v1; root) lets the run's process read and write it
at a tenth of what it did. The rate in the message must be the group's."""

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
STEPS, BEFORE = 30, 9  # the first step fills slots, and eight are looked at together
SAID = r"warning SLOW-29: disks move ([\d.]+) GB/s, and the plan was made for ([\d.]+)"


def prepare(work):
    """A model of 13 million weights, whose optimizer's state is 130 MB."""
    full_disk_saves.prepare(work)
    shape = json.loads((work / "shape" / "config.json").read_text())
    (work / "shape" / "config.json").write_text(json.dumps({**shape, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}))
    text = (work / "c.toml").read_text().replace("steps = 1000000", f"steps = {STEPS}").replace('every = "2s"', 'every = "1h"')
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
def slowed(pid, disk, bytes_per_s):
    group = GROUPS / f"lmlaunch-slow-{os.getpid()}"
    group.mkdir()
    try:
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{disk} {int(bytes_per_s)}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            (GROUPS / "cgroup.procs").write_text(str(pid))
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
    Run(work, "undisturbed").ended(0)
    run = Run(work, "slow")
    try:
        while len(rows(work, "slow")) < BEFORE:
            assert run.process.poll() is None, run.text()
            time.sleep(0.01)
        assert not re.search(SAID, run.text()), "a disk that nobody slows is called slow"
        last = rows(work, "slow")[-1]
        rate = (last["read_bytes"] + last["written_bytes"]) / (last["step_ms"] / 1e3) / 2 / 10
        with slowed(run.rank(), disk, rate):
            run.wait_for(SAID, seconds=200)
        text = run.ended(0)
    finally:
        run.kill()
    said = re.findall(SAID, text)
    assert len(said) == 1, text
    # Both ways together; of the eight steps the first may have begun before. The plan's is of the disk as it was.
    moved, planned = map(float, said[0])
    row.row["figures"] = {"slowed to, GB/s each way": round(rate / 1e9, 3), "said, GB/s": moved, "planned, GB/s": planned}
    assert 1.4 * rate < moved * 1e9 < 2.6 * rate and planned > 2 * moved, (rate, said)
    assert numbers(work, "slow") == numbers(work, "undisturbed")


def main():
    row = Row("slow_disk", "F29: a disk becomes slow", "a loop device throttled to a tenth by a control group, under a run with its state on it")
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
