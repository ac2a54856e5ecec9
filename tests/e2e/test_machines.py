"""Shards inside machines (zero.group = "machine"), on two imitated machines of two processes: the bits, the bytes, the checkpoints."""

import json
import os
import shutil

import pytest
from counts import some_of

import mpi
from test_ranks import ON_DISK, prepared, result, run as run_ranks, started
from test_run import filled, lmlaunch, rows

pytestmark = [pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (openmpi-bin)"),
              pytest.mark.skipif(os.getuid() != 0, reason="needs root, for machines with boot ids of their own")]

FEW = dict(train__steps=6, train__eval_every=0, checkpoint__every=3)
QLORA = {"model__quantize": "nf4", "model__dtype": "bf16"}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("machines"), layers=3)


def checkpoint(work, name):
    return max((work / "runs" / name / "checkpoints").glob("step_*"))


def saved_elements(work, name):
    """Of each array of the newest checkpoint, the elements of all of its parts."""
    out = {}
    for array in json.loads((checkpoint(work, name) / "MANIFEST.json").read_text())["arrays"]:
        out[array["name"]] = out.get(array["name"], 0) + array["elements"]
    return out


@pytest.mark.parametrize("stage, method, more", some_of(
    (3, "full", {}), (3, "lora", QLORA), (1, "full", {"offload__optimizer": "nvme", "offload__paths": ["."]}), (2, "lora", {}),
    (2, "full", {"train__recompute": "block", "train__gradients": "bf16", "model__dtype": "bf16"}),
    (3, "full", {"train__recompute": "block", **ON_DISK}), (3, "lora", {**QLORA, **ON_DISK}), short=3))
def test_the_bits_of_shards_among_all(work, stage, method, more):
    for group in ("all", "machine"):
        prepared(work, group, method, zero__stage=stage, zero__group=group, **{**FEW, **more})
        mpi.run(work, group, 4, machine_ranks=2)
    assert result(work, "machine", method) == result(work, "all", method)
    hashes = [json.loads(lmlaunch("verify", checkpoint(work, name), "--json", cwd=work).stdout)["weights_hash"] for name in ("all", "machine")]
    assert hashes[0] == hashes[1]
    assert saved_elements(work, "machine") == saved_elements(work, "all")  # each shard once


def test_a_frozen_base_is_once_on_each_machine(work):
    """With the bits of shards. Ranks that are not numbered machine by machine have a copy each, and say so."""
    for name, stage in ("once", 1), ("shards", 3):
        prepared(work, name, "lora", zero__stage=stage, **FEW)
        assert "its own copy of the frozen weights" not in mpi.run(work, name, 4, machine_ranks=2)
    assert "one copy for the 2 ranks of a machine" in (work / "runs" / "once" / "plan.txt").read_text()
    assert result(work, "once", "lora") == result(work, "shards", "lora")
    prepared(work, "dealt", "lora", zero__stage=1, **FEW)
    assert "each rank has its own copy of the frozen weights" in mpi.run(work, "dealt", 4, machine_ranks=2, dealt=True)
    assert "one copy" not in (work / "runs" / "dealt" / "plan.txt").read_text()


def between(work, name):
    """Bytes of a step to the other machine: planned, on average of all ranks; and those of the first, whose shards are longest."""
    told = json.loads((work / "runs" / name / "plan.json").read_text())["traffic"]
    planned = told["between_machines_share"] * sum(told[f"{kind}_bytes"] for kind in ("gradient", "weight", "vote"))
    return planned, [row for row in rows(work, name) if "loss" in row][-1]["between_machines_bytes"]


def test_gradients_cross_between_machines_as_planned(work):
    """Sums go there and back. (That a base in shards does not cross: ../train/traffic_test.cpp.)"""
    sent = {}
    for group in ("all", "machine"):
        prepared(work, group, "full", zero__stage=3, zero__group=group, **{**FEW, "checkpoint__every": 0})
        mpi.run(work, group, 4, machine_ranks=2)
        sent[group] = between(work, group)
    assert sent["machine"][0] < 1.1 * sent["all"][0] and sent["machine"][1] < 1.1 * sent["all"][1], sent
    assert sent["machine"][0] <= sent["machine"][1] < 1.25 * sent["machine"][0], sent


def stopped(job, metrics, step):
    mpi.until(lambda: metrics.exists() and f'"step":{step},' in metrics.read_text() or job.poll() is not None, 60, f"step {step}")
    (metrics.parent / "STOP").touch()
    messages = job.communicate(timeout=60)[1]
    assert job.returncode == 75, messages


def test_a_run_goes_on_with_other_shards(work):
    """With the same bits: with shards among all, on one machine; and inside two machines, though it began on one, whose sums it keeps."""
    steps = {**FEW, "train__steps": 100, "checkpoint__every": 0}
    prepared(work, "two", zero__stage=1, **steps)
    mpi.run(work, "two", 4, machine_ranks=2)
    prepared(work, "joined", zero__stage=3, zero__group="machine", **steps)
    stopped(mpi.start(work, "joined", 4, machine_ranks=2), work / "runs" / "joined" / "metrics.jsonl", 3)
    assert len(rows(work, "joined")) < 100
    run_ranks(work, "joined", 4, "zero.group=all", "zero.stage=2")
    assert result(work, "joined") == result(work, "two")
    prepared(work, "one", zero__stage=1, **steps)
    run_ranks(work, "one", 4)
    prepared(work, "spread", zero__stage=1, **steps)
    stopped(started(work, "spread", 4, 3)[0], work / "runs" / "spread" / "metrics.jsonl", 3)
    assert len(rows(work, "spread")) < 100
    mpi.run(work, "spread", 4, "zero.group=machine", "zero.stage=3", machine_ranks=2)
    assert result(work, "spread") == result(work, "one") != result(work, "two")


def test_ranks_that_are_dealt_out_in_turn_are_refused(work):
    prepared(work, "dealt", zero__group="machine", **FEW)
    messages = mpi.run(work, "dealt", 4, code=10, machine_ranks=2, dealt=True)
    assert "needs equally many ranks on every machine, numbered machine by machine" in messages and "--map-by slot" in messages
