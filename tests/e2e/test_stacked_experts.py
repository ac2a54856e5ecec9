"""Files of mixtures with one tensor for all experts, as transformers' classes hold them (save_original_format = false): the same model as in
the family's own files, bit for bit, and written as they were read."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_expert_adapters import MODELS as ALL_MODELS
from test_experts import drawn, read
from test_run import config, eval_losses, expect_resumed_bits, filled, lmlaunch, loss_by_transformers, losses

NAMES = "qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "granitemoe", "glm4_moe", "minimax_m2"
MODELS = {name: ALL_MODELS[name] for name in NAMES}
STACKS = "experts.gate_up_proj", "experts.down_proj"
LORA = dict(train__method="lora", lora__r=4, lora__alpha=8, optimizer__lr=3e-2)


def weights(path):
    return load_file(path / "model.safetensors")


def shapes(path):
    return {name: tensor.shape for name, tensor in weights(path).items()}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("stacked"), layers=1)
    torch.manual_seed(4)
    for name, make in MODELS.items():
        model = drawn(make)
        model.save_pretrained(work / name)
        model.save_pretrained(work / f"{name}_stacked", save_original_format=False)
    return work


def both(work, name, run, **changes):
    """Runs on the family's files and on the class's, which have the same bits; their names."""
    runs = f"{run}_{name}", f"{run}_{name}_stacked"
    for path, one in zip((name, f"{name}_stacked"), runs, strict=True):
        lmlaunch(config(work, one, model__path=path, **changes), cwd=work)
    assert losses(work, runs[0]) == losses(work, runs[1])
    return runs


@pytest.mark.parametrize("name", NAMES)
def test_they_are_the_same_model_and_are_written_as_they_were_read(work, name):
    own, stacked = both(work, name, "whole", optimizer__lr=1e-2)
    assert any(key.endswith(STACKS) for key in shapes(work / f"{name}_stacked"))
    assert shapes(work / "runs" / stacked / "model") == shapes(work / f"{name}_stacked")
    assert shapes(work / "runs" / own / "model") == shapes(work / name)
    models = [read(work / "runs" / run / "model").state_dict() for run in (own, stacked)]
    assert all(torch.equal(tensor, models[1][key]) for key, tensor in models[0].items())
    assert loss_by_transformers(read(work / "runs" / stacked / "model"), work) == pytest.approx(eval_losses(work, stacked)[-1], rel=1e-4)
    assert json.loads(lmlaunch("verify", f"runs/{stacked}/model", "--json", cwd=work).stdout)["ok"]


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "glm4_moe"])
def test_an_adapter_has_the_same_modules_and_merges_into_the_form_of_its_base(work, name):
    """GLM's dense layer has names that peft takes for the experts'."""
    for experts in False, True:
        own, stacked = both(work, name, f"lora_{experts}", lora__experts=experts, **LORA)
        saved = [json.loads((work / "runs" / run / "model/adapter_config.json").read_text()) for run in (own, stacked)]
        assert all(saved[0][key] == saved[1][key] for key in saved[0] if key != "base_model_name_or_path")
        files = [load_file(work / "runs" / run / "model/adapter_model.safetensors") for run in (own, stacked)]
        assert files[0].keys() == files[1].keys() and all(torch.equal(tensor, files[1][key]) for key, tensor in files[0].items())
    adapted = PeftModel.from_pretrained(read(work / f"{name}_stacked"), work / "runs" / stacked / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(eval_losses(work, stacked)[-1], rel=1e-4)
    lmlaunch("export", f"runs/{stacked}", "--merge", "-o", f"merged_{name}", cwd=work)
    base, merged = weights(work / f"{name}_stacked"), weights(work / f"merged_{name}")
    assert {key: value.shape for key, value in base.items()} == {key: value.shape for key, value in merged.items()}
    assert all(not torch.equal(base[key], value) for key, value in merged.items() if key.endswith(STACKS))
    assert loss_by_transformers(read(work / f"merged_{name}"), work) == pytest.approx(eval_losses(work, stacked)[-1], rel=1e-4)


def test_each_expert_is_quantized_by_itself_and_may_be_on_a_disk(work):
    """Gate and up are one matrix of these files, whose scales of scales are common to both."""
    (work / "swap").mkdir()
    qlora = dict(LORA, model__dtype="bf16", train__method="qlora")
    for run, changes in {"each": dict(model__path="qwen3_moe"), "here": {}, "on_disk": dict(offload__weights="nvme", offload__paths=["swap"])}.items():
        lmlaunch(config(work, run, **{"model__path": "qwen3_moe_stacked", **qlora, **changes}), cwd=work)
    assert losses(work, "here")[0][0] == pytest.approx(losses(work, "each")[0][0], rel=1e-3)
    assert losses(work, "on_disk") == losses(work, "here")


def test_ranks_that_shard_the_weights_have_the_same_bits(work):
    runs = []
    for path in "mixtral", "mixtral_stacked":
        runs.append(f"ranks_{path}")
        lmlaunch("--ranks", "2", config(work, runs[-1], model__path=path, zero__stage=3, train__micro_batch=2), cwd=work)
    assert losses(work, runs[0]) == losses(work, runs[1])


def test_a_stopped_run_resumes_bit_for_bit(work):
    expect_resumed_bits(work, model__path="mixtral_stacked", optimizer__lr=1e-3)


def test_a_plan_needs_the_index_alone(work):
    """The parts may be still under way."""
    path = work / "index_alone"
    path.mkdir()
    shutil.copy(work / "mixtral_stacked/config.json", path)
    index = {"metadata": {}, "weight_map": {name: "model-00001-of-00001.safetensors" for name in shapes(work / "mixtral_stacked")}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = lmlaunch("plan", config(work, "index", model__path="index_alone", train__only=["layers.1.mlp.experts.down_proj.3"]), cwd=work)
    assert "plan" in done.stdout.lower()


def test_what_is_missing_is_named_as_the_form_has_it(work):
    shutil.copytree(work / "mixtral_stacked", work / "mixed")
    tensors = weights(work / "mixed")
    del tensors["model.layers.2.mlp.experts.down_proj"]
    save_file(tensors, work / "mixed/model.safetensors", {"format": "pt"})
    done = lmlaunch(config(work, "mixed_run", model__path="mixed"), cwd=work, check=False)
    assert done.returncode == 11 and "model.layers.2.mlp.experts.down_proj" in done.stderr
