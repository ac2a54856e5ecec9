"""Each of four ranks takes the memory that was planned, whatever the stage, and what is in shards falls as one by their number: on
the CPU, and of GPUs on the emulator."""

import contextlib
import json
import os
import random
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from test_gpus import cards
from test_emulator import EMULATOR
from test_emulator import lmlaunch as on_emulator

BIN = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin"))
RANKS, MIB = 4, 1 << 20


def filled(work, rows, length, **shape):
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1,
                                         eos_token_id=2, **shape))
    model.to(torch.bfloat16).save_pretrained(work / "model")
    drawn = random.Random(5)
    with open(work / "rows.jsonl", "w") as file:
        for _ in range(rows):
            ids = [drawn.randrange(shape["vocab_size"]) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    (work / "c.toml").write_text(f"""
[run]
device = "cpu"
[model]
path = "model"
[data]
train = ["rows.jsonl"]
max_length = {length}
cache_dir = "cache"
[train]
steps = 4
global_batch = 8
micro_batch = 2
recompute = "block"
[checkpoint]
every = 2
""")
    return work


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """45 million weights: 0.8 GB of state."""
    return filled(tmp_path_factory.mktemp("ranks_memory"), 64, 256, hidden_size=512, intermediate_size=1408, num_attention_heads=8,
                  num_key_value_heads=4, vocab_size=8192)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """9 million weights, as the emulator's kernels take their time: 150 MB of state."""
    return filled(tmp_path_factory.mktemp("gpus_memory"), 16, 32, hidden_size=256, intermediate_size=704, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=512)


def peaks_of(process):
    """Of the ranks' resident memory, as the kernel counts it until each ends: all of it, and what of it several processes have mapped."""
    peaks = {}
    while process.poll() is None:
        for pid in subprocess.run(["pgrep", "-P", str(process.pid), "lmlaunch"], capture_output=True, text=True).stdout.split():
            with contextlib.suppress(OSError, TypeError):  # it has just ended
                status = Path(f"/proc/{pid}/status").read_text()
                peaks[pid] = tuple(int(re.search(rf"{what}:\s*(\d+) kB", status)[1]) * 1024 for what in ("VmHWM", "RssShmem"))
        time.sleep(0.05)
    return list(peaks.values())


def plan(work, *words):
    return json.loads(subprocess.run([BIN / "lmlaunch", "plan", "c.toml", *words, "--json"], cwd=work, check=True, capture_output=True,
                                     text=True).stdout)


def run(work, stage, *places, name="stage"):
    """The plan, and what each rank took."""
    words = ["--ranks", str(RANKS), f"zero.stage={stage}", *places]
    planned = plan(work, *words)
    err = work / f"{name}{stage}.err"
    with open(err, "w") as file, subprocess.Popen([BIN / "lmlaunch", "c.toml", *words, f"run.dir=runs/{name}{stage}"], cwd=work,
                                                  stderr=file) as process:
        peaks = peaks_of(process)
    assert process.returncode == 0, err.read_text()[-2000:]
    assert len(peaks) == RANKS
    return planned, peaks


LAYER = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408 + 2 * 512  # weights


def untouched(planned):
    """Each slot of arrays that are gathered is planned for the longest one, a piece of the head. That passes through one slot, and the ends
    of the others are memory that the kernel never gives."""
    pools = planned["placement"]["pools"]
    return sum((pools[name]["slots"] - 1) * (pools[name]["slot_bytes"] - LAYER * size)
               for name, size in (("weights", 2), ("gradients", 4)) if pools.get(name, {}).get("shards", 1) > 1)


def expect_as_planned(planned, peaks, case, bound=0.03, alike=True):
    """Of a rank's own memory, and of what it has mapped of the others' messages: the plan is for the rank that reads most of these.
    `alike`: each rank has as much as was planned; else the plan is for the rank that has most. Returns how much that is."""
    rows = {row["name"]: row["bytes"] for row in planned["tiers"][0]["classes"]}
    common = rows["shared memory"]
    ours = planned["peak"]["host_bytes"] - common - untouched(planned)
    own = [peak - shared for peak, shared in peaks]
    told = (case, [p / MIB for p in own], ours / MIB, [shared / MIB for _, shared in peaks], common / MIB)
    assert (1 - bound) * ours < (min(own) if alike else max(own)), told
    assert max(own) < (1 + bound) * ours, told
    assert max(shared for _, shared in peaks) < 1.03 * common, told
    return max(own)


ON_DISK = ["offload.weights=nvme", "offload.gradients=nvme", 'offload.paths=["."]']


def test_shards_take_the_planned_bytes_of_disk(work):
    alone = plan(work, "--ranks", "1", "zero.stage=3", *ON_DISK)["peak"]["disk_bytes"]
    for ranks in (2, 4):
        assert plan(work, "--ranks", str(ranks), "zero.stage=3", *ON_DISK)["peak"]["disk_bytes"] * ranks == pytest.approx(alone, rel=0.03)
    for stage in (2, 3):
        planned, peaks = run(work, stage, *ON_DISK, name="disk")
        expect_as_planned(planned, peaks, stage)
        there = work / "runs" / f"disk{stage}"
        told = json.loads((there / "plan.json").read_text())
        # What is on its way at the end of a step counts in the next one.
        moved = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()]
        third = next(row for row in moved if row["step"] == 3 and "loss" in row)
        assert third["read_bytes"] == pytest.approx(told["disk_read_bytes"], rel=0.1)
        assert third["written_bytes"] == pytest.approx(told["disk_written_bytes"], rel=0.1)


def falls_with_their_number(work, taken):
    weights = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(work / "model").parameters())
    rest = 1 - 1 / RANKS
    # fp32 moments and the low halves of masters; then gradients beside three slots of a block; then weights.
    assert taken[0] - taken[1] == pytest.approx(rest * weights * 10, rel=0.05)
    assert 0.6 * rest * weights * 4 < taken[1] - taken[2] < rest * weights * 4
    assert 0.4 * rest * weights * 2 < taken[2] - taken[3] < rest * weights * 2


@pytest.mark.skipif(not (EMULATOR / "bin" / "lmlaunch-cuda").exists(), reason="no emulator here")
def test_each_rank_takes_of_its_gpu_what_was_planned(small):
    """The emulator counts; it has no context and no NCCL of CUDA's size. LibTorch takes less than it may, and as much at any stage."""
    taken, of_torch = {}, None
    for stage in (0, 1, 2, 3):
        peaks = small / f"peaks{stage}"
        peaks.mkdir()
        on_emulator("--gpus", RANKS, "c.toml", "run.device=auto", "train.steps=2", "checkpoint.every=0", f"zero.stage={stage}",
                f"run.dir=runs/gpus{stage}", cwd=small, EMULATOR_GPUS=cards(RANKS), EMULATOR_PEAK=str(peaks))
        device = json.loads((small / "runs" / f"gpus{stage}" / "plan.json").read_text())["tiers"][0]
        part = {row["name"]: row["bytes"] for row in device["classes"]}
        ours = device["bytes"] - part["context"] - part["NCCL"] - part["LibTorch"]
        measured = [int(path.read_text()) for path in peaks.iterdir()]
        assert len(measured) == RANKS
        of_torch = of_torch or max(measured) - ours
        assert 0 < of_torch < part["LibTorch"]
        for peak in measured:
            assert peak - of_torch == pytest.approx(ours, rel=0.05), (stage, peak / MIB, of_torch / MIB, ours / MIB)
        taken[stage] = max(measured)
    falls_with_their_number(small, taken)
