"""QLoRA as its users start it: an adapter over a quantized model, on the CPU. What comes out is held against peft over what
bitsandbytes makes of the model, and against itself: in every tier, resumed, merged."""

import json
import sys
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from peft import PeftModel
from test_run import config, eval_losses, expect_resumed_bits, filled, lmlaunch, loss_by_transformers, losses
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
from quantized_base import four_bits  # noqa: E402

ADAPTER = dict(lora__r=4, lora__alpha=8, optimizer__lr=3e-2, train__method="qlora")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("qlora"), layers=3)
    (work / "swap").mkdir()
    return work


@pytest.fixture(scope="module")
def qlora(work):
    lmlaunch(config(work, "qlora", **ADAPTER), cwd=work)


def learnt(work):
    """What a LoRA run of as many steps takes off the held-out loss."""
    if not (work / "runs" / "plain").exists():
        lmlaunch(config(work, "plain", **{**ADAPTER, "train__method": "lora"}), cwd=work)
    before, after = eval_losses(work, "plain")
    assert after < before
    return before - after


def quantized(work, kind="nf4", double=True):
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "layers" in name:
            parameter.data = four_bits(parameter.data, kind, double)
    return model


def test_it_learns_and_peft_agrees_over_the_dequantized_model(work, qlora):
    before, after = eval_losses(work, "qlora")
    assert after < before - 0.5 * learnt(work)
    assert loss_by_transformers(quantized(work), work) == pytest.approx(before, rel=1e-3)
    adapted = PeftModel.from_pretrained(quantized(work), work / "runs" / "qlora" / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-3)


def test_the_run_says_what_it_is(work, qlora):
    text = (work / "runs" / "qlora" / "config.toml").read_text()
    assert 'method = "lora"' in text and 'quantize = "nf4"' in text and "double_quantize = true" in text
    assert "nf4, double" in (work / "runs" / "qlora" / "plan.txt").read_text()


@pytest.mark.parametrize("changes", [
    dict(offload__weights="nvme", offload__paths=["swap"], train__recompute="block"),
    dict(train__method="lora", model__quantize="nf4", train__recompute="block", run__threads=1),
], ids=["on_disk", "lora_of_nf4"])
def test_where_the_base_lives_changes_no_bit(work, qlora, changes):
    lmlaunch(config(work, "other", **{**ADAPTER, **changes}, run__dir=f"runs/{len(changes)}"), cwd=work)
    assert [(r["loss"], r["grad_norm"]) for r in map(json.loads, open(work / "runs" / str(len(changes)) / "metrics.jsonl"))
            if "loss" in r] == [loss[:2] for loss in losses(work, "qlora")]


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_agree_whatever_they_shard(work, stage):
    name = f"ranks{stage}"
    lmlaunch("--ranks", "2", config(work, name, **ADAPTER, zero__stage=stage, train__micro_batch=2), cwd=work)
    if stage == 3:
        assert losses(work, "ranks3") == losses(work, "ranks1")


@pytest.mark.parametrize("settings", [dict(model__quantize="fp4", model__double_quantize=False), dict(model__quantize="int8"),
                                      dict(model__dtype="bf16")], ids=["fp4", "int8", "bf16"])
def test_other_types_learn(work, settings):
    name = "-".join(str(v) for v in settings.values())
    lmlaunch(config(work, name, **{**ADAPTER, **settings}), cwd=work)
    before, after = eval_losses(work, name)
    assert after < before - 0.5 * learnt(work)


def test_a_stopped_run_resumes_bit_for_bit(work):
    expect_resumed_bits(work, **ADAPTER)


def test_the_merged_export_is_what_was_trained_or_goes_into_the_original(work, qlora):
    done = lmlaunch("export", "runs/qlora", "-o", "merged", "--merge", "--json", cwd=work)
    assert json.loads(done.stdout)["base"] == "dequantized weights (nf4, double)"
    merged = AutoModelForCausalLM.from_pretrained(work / "merged", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(quantized(work), work / "runs" / "qlora" / "model").merge_and_unload()
    for (name, ours), theirs in zip(merged.named_parameters(), adapted.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    done = lmlaunch("export", "runs/qlora", "-o", "original", "--merge", "--base", "model", "--json", cwd=work)
    assert 0 < json.loads(done.stdout)["logits_differ_by"] < 0.2
    assert json.loads(done.stdout)["base"] == "model"
    original = AutoModelForCausalLM.from_pretrained(work / "original", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, work / "runs" / "qlora" / "model").merge_and_unload()
    for (name, ours), theirs in zip(original.named_parameters(), adapted.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    refused = lmlaunch("export", "runs/qlora", "-o", "nothing", "--base", "model", cwd=work, check=False)
    assert refused.returncode == 2 and "--merge" in refused.stderr


@pytest.mark.parametrize("kind,double", [("nf4", True), ("nf4", False), ("fp4", True)])
def test_a_directory_that_bitsandbytes_quantized_is_trained_as_it_is(work, kind, double, tmp_path):
    """The same numbers as quantizing it here, but for the last bits of the scales' mean."""
    from transformers import BitsAndBytesConfig
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double,
                                  bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(work / "model", quantization_config=settings, dtype=torch.float32, device_map="cpu")
    assert any(isinstance(m, bnb.nn.Linear4bit) for m in model.modules())
    model.save_pretrained(tmp_path / "quantized")
    # Steps as large as ADAPTER's make 1e-9 of the first losses 1e-3 of the twelfth.
    settings = {**ADAPTER, "optimizer__lr": 3e-3, "train__method": "lora"}
    name = f"stored-{kind}-{double}"
    lmlaunch(config(work, name, **settings, model__path=str(tmp_path / "quantized")), cwd=work)
    lmlaunch(config(work, name + "-here", **settings, model__quantize=kind, model__double_quantize=double), cwd=work)
    ours, theirs = losses(work, name + "-here"), losses(work, name)
    if double:
        assert [x[0] for x in ours] == pytest.approx([x[0] for x in theirs], rel=1e-6)
    else:
        assert ours == theirs
    refused = lmlaunch(config(work, "wrong", **{**ADAPTER, "model__quantize": "int8", "model__path": str(tmp_path / "quantized")}),
                       cwd=work, check=False)
    assert refused.returncode == 10 and kind in refused.stderr and "int8" in refused.stderr
    refused = lmlaunch(config(work, "full", model__path=str(tmp_path / "quantized")), cwd=work, check=False)
    assert refused.returncode == 10 and "qlora" in refused.stderr


def test_a_directory_that_bitsandbytes_quantized_to_int8_is_trained_as_it_is(work, tmp_path):
    """Before and after it is the model that its codes stand for, in transformers and with the adapter in peft."""
    from transformers import BitsAndBytesConfig
    settings = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(work / "model", quantization_config=settings, dtype=torch.float32, device_map="cpu")
    codes = {name + ".weight": (m.weight.data.clone(), m.weight.SCB.clone()) for name, m in model.named_modules()
             if isinstance(m, bnb.nn.Linear8bitLt)}
    assert len(codes) == 7 * 3
    model.save_pretrained(tmp_path / "quantized")

    def dequantized():
        out = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        for name, parameter in out.named_parameters():
            if name in codes:
                parameter.data = codes[name][0].float() * codes[name][1][:, None] * (1 / 127)
        return out

    lmlaunch(config(work, "stored-int8", **{**ADAPTER, "train__method": "lora", "model__path": str(tmp_path / "quantized")}), cwd=work)
    before, after = eval_losses(work, "stored-int8")
    assert after < before - 0.5 * learnt(work)
    assert loss_by_transformers(dequantized(), work) == pytest.approx(before, rel=1e-4)
    adapted = PeftModel.from_pretrained(dequantized(), work / "runs" / "stored-int8" / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-4)


def test_the_plan_counts_the_bytes_of_codes(work, qlora):
    plans = {}
    for method in ("lora", "qlora"):
        toml = config(work, f"plan-{method}", **{**ADAPTER, "train__method": method})
        plans[method] = json.loads(lmlaunch("plan", toml, "--json", cwd=work).stdout)
    assert plans["qlora"]["peak"]["host_bytes"] < plans["lora"]["peak"]["host_bytes"]
