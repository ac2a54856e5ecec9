"""A text model that another model holds, and GPT-2, whose files hold matrices the other way round, as their users train them: the whole
model comes back, adapters load into the class of the base, and merged they are the same model."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_run import config, eval_losses, filled, lmlaunch, loss_by_transformers, losses

sys.path.append(str(Path(__file__).resolve().parents[1] / "parity"))
import tiny_models  # noqa: E402

NAMES = [name for name in ("mistral_in_mistral3", "gemma3_text_in_gemma3", "gpt2") if name in getattr(tiny_models, "FAMILIES", {})]
if not NAMES:
    pytest.skip("tiny_models has no such models", allow_module_level=True)
STEPS = dict(train__steps=4, optimizer__lr=1e-3)
ADAPTER = dict(**STEPS, train__method="lora", lora__r=4, lora__alpha=8)


@pytest.fixture(scope="module", params=NAMES)
def base(request, tmp_path_factory):
    work = filled(tmp_path_factory.mktemp(request.param), layers=1)
    tiny_models.make(request.param, work / "base")
    (work / "base" / "processor_config.json").write_text('{"processor_class": "None"}')
    return work


def load(directory):
    return tiny_models.load(directory, torch.float32)


def is_tower(name):
    return "vision_tower" in name or "multi_modal_projector" in name


def run(work, name, **settings):
    return lmlaunch(config(work, name, **{"model__path": "base", **settings}), cwd=work)


def tensors_of(directory):
    tensors = load_file(directory / "model.safetensors")
    with safe_open(directory / "model.safetensors", "pt") as file:
        return tensors, set(file.keys())


def other_layout(name):
    """The other of two forms: the text model's prefix first or last, and GPT-2's first files without one."""
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.")
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith(("vision_tower.", "multi_modal_projector.")):
        return "model." + name
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.")
    if name == "lm_head.weight":
        return "language_model." + name
    return name.removeprefix("transformer.").removeprefix("model.")


def test_a_full_run_writes_the_whole_model(base):
    run(base, "full", **STEPS)
    out, before = base / "runs" / "full" / "model", tensors_of(base / "base")
    after = tensors_of(out)
    assert after[1] == before[1] and (out / "config.json").read_text() == (base / "base" / "config.json").read_text()
    assert (out / "processor_config.json").read_text() == '{"processor_class": "None"}'
    for name, tensor in before[0].items():
        assert torch.equal(tensor, after[0][name]) == is_tower(name), name
    start, end = eval_losses(base, "full")
    assert loss_by_transformers(load(base / "base"), base) == pytest.approx(start, rel=1e-4)
    assert loss_by_transformers(load(out), base) == pytest.approx(end, rel=1e-4) and end < start
    assert json.loads(lmlaunch("verify", "runs/full/model", "--json", cwd=base).stdout)["ok"]
    assert json.loads(lmlaunch("eval", "runs/full", "--json", cwd=base).stdout)["eval_loss"] == end


def test_an_adapter_loads_into_the_bases_class_and_merges(base):
    run(base, "lora", **ADAPTER)
    out, end = base / "runs" / "lora" / "model", eval_losses(base, "lora")[-1]
    assert json.loads(lmlaunch("verify", "runs/lora/model", "--json", cwd=base).stdout)["ok"]
    adapted = PeftModel.from_pretrained(load(base / "base"), out)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if "lora_" in name}
    assert not any(map(is_tower, trained)) and all(parameter.any() for parameter in trained.values())
    assert loss_by_transformers(adapted, base) == pytest.approx(end, rel=1e-4)
    lmlaunch("export", "runs/lora", "--merge", "-o", "merged", cwd=base)
    merged, expected = load(base / "merged"), adapted.merge_and_unload().state_dict()
    for name, ours in merged.state_dict().items():
        torch.testing.assert_close(ours, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    # What PEFT has written, whatever names it takes, is trained further.
    PeftModel.from_pretrained(load(base / "base"), out).save_pretrained(base / "by_peft")
    run(base, "further", **ADAPTER, lora__init="by_peft")
    assert eval_losses(base, "further")[0] == pytest.approx(end, rel=1e-5)


def test_the_other_layout_is_the_same_model_and_stays_the_other(base):
    tensors, _ = tensors_of(base / "base")
    (base / "other").mkdir()
    for file in (base / "base").iterdir():
        if file.suffix == ".json":
            (base / "other" / file.name).write_text(file.read_text())
    renamed = {other_layout(name): tensor.clone() for name, tensor in tensors.items()}
    assert set(renamed) != set(tensors)
    if "wte.weight" in renamed:
        renamed["h.0.attn.bias"] = torch.ones(1, 1, 4, 4).tril()
    save_file(renamed, base / "other" / "model.safetensors", metadata={"format": "pt"})
    for name in ("base", "other"):
        run(base, f"of_{name}", **STEPS, model__path=name)
    assert losses(base, "of_base") == losses(base, "of_other")
    after, names = tensors_of(base / "runs" / "of_other" / "model")
    assert names == set(renamed)  # a mask that nobody reads, too
    ours, _ = tensors_of(base / "runs" / "of_base" / "model")
    for name, tensor in ours.items():
        assert torch.equal(tensor, after[other_layout(name)]), name


@pytest.mark.parametrize("method", ["full", "lora"])
def test_diff_names_tensors_as_the_exported_files_do(base, method):
    settings = dict(ADAPTER if method == "lora" else STEPS, train__steps=1, checkpoint__every=1)
    for name, rate in ((f"{method}_slow", 1e-3), (f"{method}_fast", 2e-3)):
        run(base, name, **{**settings, "optimizer__lr": rate})
    found = json.loads(lmlaunch("diff", f"runs/{method}_slow", f"runs/{method}_fast", "--json", cwd=base, check=False).stdout)
    first = found["checkpoints"][0]["weights"]["first"]["name"]
    file = "adapter_model.safetensors" if method == "lora" else "model.safetensors"
    assert first in load_file(base / "runs" / f"{method}_slow" / "model" / file)


@pytest.mark.parametrize("start", ["zero", "loftq", "pissa"])
def test_an_adapter_over_the_quantized_model(base, start):
    run(base, start, **{**ADAPTER, "train__method": "qlora"}, lora__start=start)
    before, after = eval_losses(base, start)
    assert after < before
    told = json.loads(lmlaunch("export", f"runs/{start}", "--merge", "-o", f"merged_{start}", "--json", cwd=base).stdout)
    assert 0 <= told["logits_differ_by"] < 1e-2
    assert loss_by_transformers(load(base / f"merged_{start}"), base) == pytest.approx(after, rel=1e-3)
    if start == "zero":
        told = json.loads(lmlaunch("export", "runs/zero", "--merge", "--base", "base", "-o", "original", "--json", cwd=base).stdout)
        assert told["base"] == "base"
