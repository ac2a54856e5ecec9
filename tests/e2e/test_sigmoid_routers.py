"""GLM-4.5 and MiniMax-M2 as their users start them, on the CPU: a router's correction bias, which is fp32 in a bf16 file and never trained,
and layers of multi-token prediction, which nobody loads, come back with their bits, wherever the state is kept."""

import json
import sys
from pathlib import Path
from unittest import mock

import peft
import pytest
import torch
from peft.utils import transformers_weight_conversion
from safetensors.torch import load_file, save_file
from test_family_files import SETTINGS, make_work
from test_run import config, lmlaunch, losses

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
import tiny_models  # noqa: E402

GLM, MINIMAX = "glm4_moe_odd_groups_without_renormalisation", "minimax_m2"
CORRECTION = "e_score_correction_bias"


def with_predictor(directory):
    """In bf16, with corrections whose bits bf16 does not hold, and behind the last layer one that predicts a further token."""
    tensors = {name: tensor if name.endswith(CORRECTION) else tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    layer = f"model.layers.{json.loads((directory / 'config.json').read_text())['num_hidden_layers']}"
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    for name, tensor in {"enorm.weight": draw(40), "eh_proj.weight": draw(40, 80), "mlp.experts.0.gate_proj.weight": draw(20, 40),
                         "shared_head.norm.weight": draw(40)}.items():
        tensors[f"{layer}.{name}"] = tensor.bfloat16()
    tensors[f"{layer}.mlp.gate.{CORRECTION}"] = draw(12)
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for name, tensor in tensors.items() if name.endswith(CORRECTION))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("glm")
    make_work(work, GLM, with_predictor)
    (work / "swap").mkdir()
    return work


def untrained(name):
    return name.endswith(CORRECTION) or name.startswith("model.layers.3.")


def expect_kept(before, after, changed):
    """`changed`: whether a tensor's own values have to."""
    assert {key: (t.shape, t.dtype) for key, t in after.items()} == {key: (t.shape, t.dtype) for key, t in before.items()}
    assert sum(map(untrained, before)) == 2 + 5
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != (changed(name) and not untrained(name)), name


def test_what_nobody_trains_comes_back_with_its_bits(work):
    lmlaunch(config(work, "full", **SETTINGS, model__dtype="bf16"), cwd=work)
    before, after = (load_file(work / path / "model.safetensors") for path in ("model", "runs/full/model"))
    # An expert that no token has chosen in these steps has no gradient.
    idle = {name for name in before if ".experts." in name and torch.equal(before[name], after[name])}
    assert len(idle) < sum(".experts." in name for name in before) / 2
    expect_kept(before, after, lambda name: name not in idle)
    lmlaunch("export", "runs/full", "-o", "exported", cwd=work)
    before, after = (load_file(work / path / "model.safetensors") for path in ("runs/full/model", "exported"))
    assert before.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_where_state_lives_changes_no_bit(work):
    settings = {**SETTINGS, "model__dtype": "bf16", "train__steps": 4, "checkpoint__every": 2}
    lmlaunch(config(work, "near", **settings), cwd=work)
    lmlaunch(config(work, "far", **settings, offload__paths=["swap"], offload__weights="nvme", offload__optimizer="nvme"), cwd=work)
    lmlaunch(config(work, "quantized", **settings, train__method="qlora", lora__r=4, lora__alpha=8), cwd=work)
    assert losses(work, "near") == losses(work, "far")
    near, far = (load_file(work / "runs" / run / "model/model.safetensors") for run in ("near", "far"))
    assert all(torch.equal(tensor, far[name]) for name, tensor in near.items())


def test_an_adapter_is_pefts_and_a_merged_one_keeps_the_rest(work):
    settings = {**SETTINGS, "model__dtype": "bf16", "optimizer__lr": 3e-2, "train__method": "lora", "lora__r": 4, "lora__alpha": 8}
    lmlaunch(config(work, "lora", **settings, lora__targets=["q_proj", "mlp.shared_experts.down_proj"]), cwd=work)
    adapter = load_file(work / "runs/lora/model/adapter_model.safetensors")
    assert {key.split(".lora_")[0].rsplit(".", 1)[1] for key in adapter} == {"q_proj", "down_proj"}
    # peft 0.21 takes these names for those of all experts, unless it is kept from that.
    with mock.patch.dict(transformers_weight_conversion._MODEL_TO_CONVERSION_PATTERN):
        transformers_weight_conversion._MODEL_TO_CONVERSION_PATTERN.pop("glm4_moe")
        model = peft.PeftModel.from_pretrained(tiny_models.load(work / "model", torch.float32), work / "runs/lora/model")
    assert adapter.keys() <= peft.get_peft_model_state_dict(model).keys()
    lmlaunch("export", "runs/lora", "--merge", "-o", "merged", cwd=work)
    adapted = {key.removeprefix("base_model.model.").split(".lora_")[0] + ".weight" for key in adapter}
    expect_kept(load_file(work / "model/model.safetensors"), load_file(work / "merged/model.safetensors"), lambda name: name in adapted)


def test_what_is_not_there_yet_is_refused_by_name(work):
    (work / "other").mkdir()
    make_work(work / "other", MINIMAX)
    done = lmlaunch("plan", config(work / "other", "refused", **SETTINGS), "train.router_aux_loss=0.01", cwd=work / "other", check=False)
    assert done.returncode == 10, done.stderr
    assert "which its correction bias balances" in done.stderr, done.stderr


def test_a_gpu_is_planned_for(work):
    done = lmlaunch("plan", config(work, "gpu", **{**SETTINGS, "run__device": "auto"}), "--gpus", "1", "--gpu-memory", "24GiB", cwd=work)
    assert "for each token" in done.stdout
