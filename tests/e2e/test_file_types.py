"""Models whose files have tensors in several types: norms and a router in fp32 and a head in fp16, among bf16. Each comes back in its
own type, what was not trained with its bits, and transformers, gguf and `verify` read the result. What files have beside the tensors of
the model comes back, too."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_family_files import forms, make_work
from test_gguf import make_model
from test_run import config, eval_losses, filled, lmlaunch, loss_by_transformers
from transformers import AutoModelForCausalLM

FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"
SETTINGS = dict(model__path="base", model__dtype="bf16", train__steps=3, optimizer__lr=1e-3, checkpoint__every=3)
ROUNDED = "more bits in the files than bf16 holds"


def mix(directory, more=()):
    """Norms and routers keep fp32, with bits that bf16 does not hold."""
    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        wide = name.endswith(("norm.weight", ".gate.weight"))
        tensors[name] = tensor.float() if wide else tensor.half() if name == "lm_head.weight" else tensor.bfloat16()
        assert not wide or not torch.equal(tensor, tensor.bfloat16().float()), name
    save_file({**tensors, **dict(more)}, path, {"format": "pt"})
    config_path = directory / "config.json"
    given = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**{key: value for key, value in given.items() if key != "torch_dtype"}, "dtype": "bfloat16"}))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("types"), layers=1)
    make_model(work / "base", "llama3")
    mix(work / "base", {FREQUENCIES: torch.rand(8)})
    return work


def tensors(directory):
    return load_file(directory / "model.safetensors")


def types(directory):
    return {name: tensor.dtype for name, tensor in tensors(directory).items()}


def hash_of(work, what):
    return json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["weights_hash"]


def unequal(one, other):
    """Names of the tensors with other bits."""
    assert one.keys() == other.keys()
    return {name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])}


@pytest.fixture(scope="module")
def full(work):
    return lmlaunch(config(work, "full", **SETTINGS), cwd=work).stderr


def test_each_tensor_comes_back_in_its_type(work, full):
    out = work / "runs" / "full" / "model"
    assert set(types(out).values()) == {torch.float32, torch.float16, torch.bfloat16}
    assert types(out) == types(work / "base")
    before, after = tensors(work / "base"), tensors(out)
    assert torch.equal(before[FREQUENCIES], after[FREQUENCIES])
    assert {name for name in before if name.endswith("proj.weight") or name in ("lm_head.weight", "model.embed_tokens.weight")} \
        <= unequal(before, after)
    # The run has trained bf16 values, and says so once.
    assert all(torch.equal(after[name], after[name].bfloat16().float()) for name in after if name.endswith("norm.weight"))
    assert full.count(ROUNDED) == 1 and "6 of the model's tensors, lm_head.weight the first" in full


def test_transformers_reads_what_was_trained(work, full):
    out = work / "runs" / "full" / "model"
    model, found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not found["missing_keys"] and not found["mismatched_keys"], found
    ours, state = tensors(out), model.state_dict()
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in ours.items() if name != FREQUENCIES)
    start, end = eval_losses(work, "full")
    assert loss_by_transformers(model, work) == pytest.approx(end, rel=1e-2) and end < start


def test_a_run_its_checkpoint_and_an_export_have_one_hash(work, full):
    lmlaunch("export", "runs/full", "-o", "exported", cwd=work)
    (checkpoint,) = (work / "runs" / "full" / "checkpoints").iterdir()
    lmlaunch("export", checkpoint, "-o", "of_checkpoint", cwd=work)
    assert len({hash_of(work, what) for what in ("runs/full", "runs/full/model", "exported", checkpoint, "of_checkpoint")}) == 1
    assert not unequal(tensors(work / "exported"), tensors(work / "of_checkpoint"))


def test_a_run_of_a_rank_for_each_shard_has_the_types(work):
    changes = dict(zero__stage=3, train__micro_batch=2)
    lmlaunch("--ranks", "2", config(work, "shards", **{**SETTINGS, **changes}), cwd=work)
    assert types(work / "runs" / "shards" / "model") == types(work / "base")
    (checkpoint,) = (work / "runs" / "shards" / "checkpoints").iterdir()
    assert hash_of(work, "runs/shards/model") == hash_of(work, checkpoint)


@pytest.fixture(scope="module")
def frozen(work):
    lmlaunch(config(work, "frozen", **SETTINGS, train__only=["mlp"]), cwd=work)


def test_what_is_frozen_has_the_bits_of_the_files(work, frozen):
    before, after = tensors(work / "base"), tensors(work / "runs" / "frozen" / "model")
    assert unequal(before, after) == {name for name in before if ".mlp." in name}
    (checkpoint,) = (work / "runs" / "frozen" / "checkpoints").iterdir()
    assert hash_of(work, "runs/frozen/model") == hash_of(work, checkpoint)


def test_gguf_has_the_values_of_the_files(work, frozen):
    (checkpoint,) = (work / "runs" / "frozen" / "checkpoints").iterdir()
    for what, out in ("runs/frozen", "run.gguf"), (checkpoint, "checkpoint.gguf"):
        lmlaunch("export", what, "--gguf", "bf16", "-o", out, cwd=work)
    assert (work / "run.gguf").read_bytes() == (work / "checkpoint.gguf").read_bytes()
    ours, base = {tensor.name: tensor for tensor in gguf.GGUFReader(work / "run.gguf").tensors}, tensors(work / "base")
    for name, theirs in ("blk.1.attn_norm", "model.layers.1.input_layernorm"), ("output_norm", "model.norm"):
        assert np.array_equal(ours[f"{name}.weight"].data, base[f"{theirs}.weight"].numpy())
    head = gguf.quants.quantize(base["lm_head.weight"].float().numpy(), gguf.GGMLQuantizationType.BF16)
    assert np.array_equal(ours["output.weight"].data, head)


def test_a_merged_adapter_leaves_the_other_tensors_alone(work):
    lmlaunch(config(work, "lora", **SETTINGS, train__method="lora", lora__r=4, lora__alpha=8), cwd=work)
    lmlaunch("export", "runs/lora", "--merge", "-o", "merged", cwd=work)
    before, after = tensors(work / "base"), tensors(work / "merged")
    assert types(work / "merged") == types(work / "base")
    assert unequal(before, after) == {name for name in before if name.endswith("_proj.weight")}
    # A head of another type is adapted, and written in that type.
    lmlaunch(config(work, "head", **SETTINGS, train__method="lora", lora__r=4, lora__targets=["q_proj", "lm_head"]), cwd=work)
    lmlaunch("export", "runs/head", "--merge", "-o", "merged_head", cwd=work)
    after = tensors(work / "merged_head")
    assert types(work / "merged_head") == types(work / "base")
    assert unequal(before, after) == {name for name in before if "q_proj" in name or name == "lm_head.weight"}


def test_an_fp32_run_loses_nothing_and_narrows_nothing(work):
    done = lmlaunch(config(work, "wide", **{**SETTINGS, "model__dtype": "fp32"}), cwd=work)
    assert "more bits in the files" not in done.stderr
    assert set(types(work / "runs" / "wide" / "model").values()) == {torch.float32}
    (checkpoint,) = (work / "runs" / "wide" / "checkpoints").iterdir()
    assert hash_of(work, "runs/wide/model") == hash_of(work, checkpoint)


def test_a_damaged_base_keeps_no_model_from_being_written(work):
    lmlaunch(config(work, "lost", **SETTINGS), cwd=work)
    (checkpoint,) = (work / "runs" / "lost" / "checkpoints").iterdir()
    weights = work / "base" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:5])
    try:
        told = lmlaunch("export", checkpoint, "-o", "of_lost", cwd=work).stderr
    finally:
        weights.write_bytes(whole)
    assert "the base model's weights cannot be read: each tensor is written in bf16" in told
    assert set(types(work / "of_lost").values()) == {torch.bfloat16}


# model -> how its files are changed, the tensors that nobody trains, their number
BESIDE = {
    "gpt2": (forms.as_published, (".attn.bias", ".attn.masked_bias"), 4),
    "gemma4_text_inputs_and_borrowed_keys": (forms.keys_that_nobody_reads, tuple(
        f"layers.{layer}.self_attn.{name}.weight" for layer in (2, 3) for name in ("k_proj", "v_proj", "k_norm")), 6),
    "mixtral": (mix, (), 0),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_nobody_trains_comes_back(name, tmp_path):
    form, ends, count = BESIDE[name]
    make_work(tmp_path, name, form)
    lmlaunch(config(tmp_path, "full", model__dtype="bf16" if form is mix else "fp32", train__steps=2, checkpoint__every=2), cwd=tmp_path)
    out = tmp_path / "runs" / "full" / "model"
    before, after = tensors(tmp_path / "model"), tensors(out)
    assert types(out) == types(tmp_path / "model")
    kept = {key for key in before if key.endswith(ends)} if ends else set()
    assert len(kept) == count and not kept & unequal(before, after)
    (checkpoint,) = (tmp_path / "runs" / "full" / "checkpoints").iterdir()
    assert hash_of(tmp_path, out) == hash_of(tmp_path, checkpoint)
