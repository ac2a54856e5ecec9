"""Adapters in fp32 over a bf16 model (`lora.dtype`), as their users start them: what comes out is held against peft, and against
itself in every tier, resumed, on ranks and merged."""

import json
import shutil
import signal

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_resume import checkpoints, done, interrupt, kill
from test_run import config, eval_losses, filled, lmlaunch, loss_by_transformers, losses
from transformers import AutoModelForCausalLM

STEPS = 8
WIDE = dict(lora__r=4, lora__alpha=8, lora__dtype="fp32", optimizer__lr=3e-2, train__method="lora", model__dtype="bf16", train__steps=STEPS)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("wide"), layers=3)
    (work / "swap").mkdir()
    lmlaunch(config(work, "wide", **WIDE), cwd=work)
    return work


def adapter(work, name):
    return load_file(work / "runs" / name / "model" / "adapter_model.safetensors")


def test_it_learns_and_peft_agrees(work):
    before, after = eval_losses(work, "wide")
    assert after < before
    base = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, work / "runs" / "wide" / "model")
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    assert loss_by_transformers(model, work) == pytest.approx(after, rel=5e-3)


def test_the_file_has_every_bit_of_fp32_adapters(work):
    lmlaunch(config(work, "narrow", **{**WIDE, "lora__dtype": "auto", "optimizer__master": "none"}), cwd=work)
    for name, tensor in adapter(work, "wide").items():
        assert tensor.dtype == torch.float32 and not torch.equal(tensor, tensor.bfloat16().float()), name
    assert all(torch.equal(t.float(), t.bfloat16().float()) for t in adapter(work, "narrow").values())
    # A model in fp32 takes the adapter and what the run's configuration says of it along.
    lmlaunch("eval", "runs/narrow", "model.dtype=fp32", cwd=work)


def test_the_run_and_its_plan_say_which_type(work):
    run = work / "runs" / "wide"
    numerics = json.loads((run / "numerics.json").read_text())
    assert (numerics["dtype"], numerics["trained"], numerics["master"]) == ("bf16", "fp32", "weight")
    assert 'dtype = "fp32"' in (run / "config.toml").read_text()
    assert "fp32, 4 B per parameter" in (run / "plan.txt").read_text()


@pytest.mark.parametrize("changes", [
    dict(offload__weights="nvme", offload__optimizer="nvme", offload__paths=["swap"], train__recompute="block"),
    dict(train__update="in_backward", train__recompute="block"),
], ids=["on_disk", "in_backward"])
def test_where_things_live_and_when_they_are_updated_changes_no_bit(work, changes):
    name = next(iter(changes))
    lmlaunch(config(work, "other", **{**WIDE, **changes}, run__dir=f"runs/{name}"), cwd=work)
    want, got = adapter(work, "wide"), adapter(work, name)
    assert set(want) == set(got) and all(torch.equal(want[k], got[k]) for k in want)


def test_ranks_agree_whatever_they_shard(work):
    for stage in (1, 3):
        lmlaunch("--ranks", "2", config(work, f"ranks{stage}", **WIDE, zero__stage=stage, train__micro_batch=2), cwd=work)
    assert losses(work, "ranks3") == losses(work, "ranks1")
    one, three = adapter(work, "ranks1"), adapter(work, "ranks3")
    assert all(torch.equal(one[k], three[k]) for k in one)


def test_a_killed_run_goes_on_bit_for_bit_and_its_checkpoint_is_exported(work):
    config(work, "killed", **WIDE, checkpoint__every=3)
    code, _ = interrupt(work, "killed", 4, kill)
    assert code in (-signal.SIGKILL, 0)
    if not done(work, "killed"):
        lmlaunch("killed.toml", cwd=work)
    want, got = adapter(work, "wide"), adapter(work, "killed")
    assert all(torch.equal(want[k], got[k]) for k in want)
    last = "step_00000006"
    assert last in checkpoints(work, "killed")
    lmlaunch(config(work, "six", **{**WIDE, "train__steps": 6}), cwd=work)
    lmlaunch("export", f"runs/killed/checkpoints/{last}", "-o", "from_checkpoint", cwd=work)
    want, exported = adapter(work, "six"), load_file(work / "from_checkpoint" / "adapter_model.safetensors")
    assert all(torch.equal(want[k], exported[k]) for k in want)
    # Merged it is compared with the adapter by export itself.
    lmlaunch("export", f"runs/killed/checkpoints/{last}", "-o", "merged_checkpoint", "--merge", cwd=work)


def test_it_is_merged_and_continued(work):
    exported = lmlaunch("export", "runs/wide", "-o", "merged", "--merge", "--json", cwd=work)
    assert json.loads(exported.stdout)["merged"]
    merged = AutoModelForCausalLM.from_pretrained(work / "merged", dtype=torch.bfloat16)
    assert loss_by_transformers(merged, work) == pytest.approx(eval_losses(work, "wide")[1], rel=5e-3)
    shutil.rmtree(work / "runs" / "more", ignore_errors=True)
    lmlaunch(config(work, "more", **{**WIDE, "lora__init": "runs/wide", "train__steps": 2}), cwd=work)
    assert losses(work, "more")[0][0] < losses(work, "wide")[0][0]


@pytest.mark.parametrize("settings,words", [
    (dict(lora__dtype="fp16"), ["lora.dtype", "fp16"]),
    (dict(model__dtype="fp32", lora__dtype="bf16"), ["lora.dtype", "model.dtype"]),
    (dict(optimizer__master="none"), ["optimizer.master", "lora.dtype"]),
    (dict(train__gradients="bf16"), ["train.gradients", "lora.dtype"]),
], ids=str)
def test_what_does_not_go_together_is_refused(work, settings, words):
    refused = lmlaunch(config(work, "bad", **{**WIDE, **settings}), cwd=work, check=False)
    assert refused.returncode == 10 and all(word in refused.stderr for word in words), refused.stderr


def test_a_run_does_not_go_on_with_another_type(work):
    """ "auto" is the model's type, whatever the masters are. """
    for master in ({}, {"optimizer__master": "fp32"}):
        refused = lmlaunch(config(work, "wide", **{**WIDE, "lora__dtype": "auto", **master}), cwd=work, check=False)
        assert refused.returncode == 14 and 'lora.dtype' in refused.stderr and '"fp32"' in refused.stderr, refused.stderr
    config(work, "wide", **WIDE)
