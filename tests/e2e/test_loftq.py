"""Adapters that begin with what quantizing the model lost: held against numpy's singular values of what bitsandbytes makes of
the model, against themselves in other tiers, and against peft once trained."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from limits import memory_counts
from test_run import BIN, config, eval_losses, expect_resumed_bits, filled, lmlaunch, loss_by_transformers, losses
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
from quantized_base import four_bits  # noqa: E402

R, ALPHA = 4, 12
LOFTQ = dict(lora__r=R, lora__alpha=ALPHA, lora__start="loftq", train__method="qlora", optimizer__lr=3e-2)
HEADS, KV_HEADS, HEAD = 4, 2, 8


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Norms whose gains differ, some below 0, so that columns count differently."""
    work = filled(tmp_path_factory.mktemp("loftq"), layers=2)
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data = 1 + 0.8 * torch.randn(parameter.shape, generator=generator)
        elif "proj" in name:
            parameter.data *= 3
    model.save_pretrained(work / "model")
    (work / "swap").mkdir()
    return work


def settled(sizes):
    return sizes.clamp(min=0.05 * sizes.square().mean().sqrt().item())


def input_sizes(layer, module):
    """Of a norm's outputs the gain's; of values and of silu(gate) * up what the rows that make them have."""
    attention, mlp = layer.input_layernorm.weight.data.abs(), layer.post_attention_layernorm.weight.data.abs()

    def of_rows(weight, gain):
        return (weight.data * gain).square().sum(1).sqrt()

    if module in ("q_proj", "k_proj", "v_proj"):
        return settled(attention)
    if module in ("gate_proj", "up_proj"):
        return settled(mlp)
    if module == "o_proj":
        values = of_rows(layer.self_attn.v_proj.weight, attention).view(KV_HEADS, HEAD)
        return settled(values.repeat_interleave(HEADS // KV_HEADS, 0).reshape(-1))
    return settled(of_rows(layer.mlp.gate_proj.weight, mlp) * of_rows(layer.mlp.up_proj.weight, mlp))


@pytest.mark.parametrize("settings,kind,double", [({}, "nf4", True), (dict(model__quantize="fp4", model__double_quantize=False), "fp4", False)],
                         ids=["nf4", "fp4"])
def test_they_begin_with_the_nearest_to_what_was_lost(work, settings, kind, double):
    """A step of no length: the adapter as it began."""
    name = f"start-{kind}"
    lmlaunch(config(work, name, **{**LOFTQ, **settings, "optimizer__lr": 1e-30, "train__steps": 1}), cwd=work)
    adapter = load_file(work / "runs" / name / "model" / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    modules = 0
    for i, layer in enumerate(model.model.layers):
        for path, linear in layer.named_modules():
            if not isinstance(linear, torch.nn.Linear):
                continue
            modules += 1
            key = f"base_model.model.model.layers.{i}.{path}"
            a, b = adapter[key + ".lora_A.weight"].double(), adapter[key + ".lora_B.weight"].double()
            sizes = input_sizes(layer, path.split(".")[-1]).double()
            lost = (linear.weight.data.double() - four_bits(linear.weight.data, kind, double).double()) * sizes
            least = np.sqrt((np.linalg.svd(lost.numpy(), compute_uv=False)[R:] ** 2).sum())
            rest = (lost - ALPHA / R * (b @ a) * sizes).norm().item()
            assert rest <= 1.01 * least, (path, rest, least)
            assert least < 0.9 * lost.norm().item()
            # Each half has its share of every direction, A's for inputs of their size.
            torch.testing.assert_close((a * sizes).norm(dim=1), b.norm(dim=0), rtol=1e-3, atol=0)
    assert modules == 14


def quantized(work):
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "layers" in name:
            parameter.data = four_bits(parameter.data, "nf4", True)
    return model


@pytest.fixture(scope="module")
def trained(work):
    return lmlaunch(config(work, "loftq", **LOFTQ), cwd=work)


def test_training_begins_nearer_to_the_model_and_peft_agrees(work, trained):
    assert "the quantization error" in trained.stderr
    lmlaunch(config(work, "zero", **{**LOFTQ, "lora__start": "zero", "train__steps": 1}), cwd=work)
    base = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    ids = torch.arange(24)[None] % 97
    with torch.no_grad():
        wanted = base(ids).logits
        far = (quantized(work)(ids).logits - wanted).norm().item()
        begun = PeftModel.from_pretrained(quantized(work), work / "runs" / "start-nf4" / "model")
        near = (begun(ids).logits - wanted).norm().item()
    assert near < 0.8 * far
    before, after = eval_losses(work, "loftq")
    assert loss_by_transformers(begun, work) == pytest.approx(before, rel=1e-4)
    assert before != eval_losses(work, "zero")[0]
    assert after < before - 0.1
    adapted = PeftModel.from_pretrained(quantized(work), work / "runs" / "loftq" / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-3)
    assert json.loads(lmlaunch("eval", "runs/loftq", "--json", cwd=work).stdout)["eval_loss"] == after


@pytest.mark.parametrize("arguments,changes", [
    ([], dict(offload__weights="nvme", offload__paths=["swap"], train__recompute="block")),
    ([], dict(offload__weights="host", offload__optimizer="host", train__update="in_backward", optimizer__clip="block")),
], ids=["on_disk", "in_backward"])
def test_tiers_change_no_bit(work, arguments, changes):
    kept = {key: value for key, value in changes.items() if key.startswith("optimizer__")}
    lmlaunch(*arguments, config(work, "here", **LOFTQ, **kept, run__dir=f"runs/here{len(changes)}"), cwd=work)
    lmlaunch(*arguments, config(work, "there", **LOFTQ, **changes, run__dir=f"runs/there{len(changes)}"), cwd=work)
    assert losses(work, f"there{len(changes)}") == losses(work, f"here{len(changes)}")


def test_threads_and_ranks_begin_alike(work, trained):
    lmlaunch(config(work, "threads", **LOFTQ, run__threads=2), cwd=work)
    lmlaunch("--ranks", "2", config(work, "ranks", **LOFTQ, zero__stage=3), cwd=work)
    assert eval_losses(work, "threads")[0] == pytest.approx(eval_losses(work, "loftq")[0], rel=1e-6)
    assert eval_losses(work, "ranks")[0] == pytest.approx(eval_losses(work, "loftq")[0], rel=1e-6)


def test_a_stopped_run_goes_on_bit_for_bit(work, trained):
    """With lengths of rows, which begin as those of the quantized base and its adapter together."""
    expect_resumed_bits(work, **LOFTQ, lora__dora=True, lora__b_lr_ratio=2.0)
    begun, plain = (losses(work, name)[0][0] for name in ("long", "loftq"))
    assert begun == pytest.approx(plain, rel=1e-5)


def test_norms_that_are_trained_whole_count_as_the_bases(work, trained):
    """They are read for the sizes of inputs, under the base's names."""
    lmlaunch(config(work, "norms", **{**LOFTQ, "lora__also": ["norms"], "optimizer__lr": 1e-30, "train__steps": 1}), cwd=work)
    adapter, alone = (load_file(work / "runs" / name / "model" / "adapter_model.safetensors") for name in ("norms", "start-nf4"))
    assert all(torch.equal(adapter[key], alone[key]) for key in alone) and len(adapter) == len(alone) + 5


def test_random_weights_lose_as_well(work):
    """What was drawn is drawn once more, and quantized once more."""
    settings = {**LOFTQ, "model__init": "random", "lora__targets": ["k_proj", "o_proj", "down_proj"], "lora__r": 24}
    begun = {}
    for start in ("zero", "loftq"):
        lmlaunch(config(work, f"random-{start}", **{**settings, "lora__start": start, "optimizer__lr": 1e-30, "train__steps": 1}), cwd=work)
        begun[start] = load_file(work / "runs" / f"random-{start}" / "model" / "adapter_model.safetensors")
    plain = {**settings, "train__method": "lora", "lora__start": "zero", "optimizer__lr": 1e-30, "train__steps": 1}
    lmlaunch(config(work, "random", **plain), cwd=work)
    lmlaunch("export", "runs/random", "-o", "drawn", "--merge", cwd=work)
    drawn = load_file(work / "drawn" / "model.safetensors")
    for path, inputs in [("self_attn.o_proj", 32), ("mlp.down_proj", 64)]:
        weight = drawn[f"model.layers.1.{path}.weight"]
        key = f"base_model.model.model.layers.1.{path}"
        lost = weight - four_bits(weight, "nf4", True)
        a, b = begun["loftq"][key + ".lora_A.weight"], begun["loftq"][key + ".lora_B.weight"]
        assert a.shape == (24, inputs) and begun["zero"][key + ".lora_B.weight"].abs().max() < 1e-20
        assert (lost - ALPHA / 24 * b @ a).norm() < 0.5 * lost.norm()
    # 16 rows have no more than 16 directions: the other 8 begin as they do in any adapter, or they would never learn.
    a, b = (begun["loftq"][f"base_model.model.model.layers.1.self_attn.k_proj.lora_{half}.weight"] for half in "AB")
    fresh = begun["zero"]["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"]
    assert torch.equal(a[16:], fresh[16:]) and b[:, 16:].abs().max() < 1e-20 and not (a[:16] == fresh[:16]).any()
    assert (b[:, :16].abs() > 1e-20).all()


@memory_counts
def test_the_plan_knows_what_the_start_takes(work, tmp_path):
    """A matrix of 64 MiB in fp32. In fp32, for which the GEMM library makes no code that a plan has to have room for."""
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=512, intermediate_size=32768, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2, vocab_size=97,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "wide")
    (tmp_path / "wide" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    peak, planned = {}, {}
    for start in ("zero", "loftq"):
        toml = config(work, f"wide-{start}", **{**LOFTQ, "lora__start": start, "model__path": str(tmp_path / "wide"), "model__dtype": "fp32",
                                                "train__steps": 1, "train__global_batch": 1, "train__micro_batch": 1, "data__max_length": 16})
        planned[start] = json.loads(lmlaunch("plan", toml, "--json", cwd=work).stdout)["peak"]["host_bytes"]
        done = subprocess.run([BIN / "lmlaunch", toml], cwd=work, check=True, capture_output=True, text=True)
        peak[start] = int(done.stderr.split("peak resident memory ")[1].split(" MiB")[0]) << 20
    assert 40 << 20 < planned["loftq"] - planned["zero"] <= 64 << 20
    # It takes the memory that it is planned, and no more. (What a plan has room for beside that depends on the processor.)
    assert peak["zero"] * 1.03 < peak["loftq"] <= planned["loftq"] * 1.03, (peak, planned)
    assert peak["zero"] <= planned["zero"] * 1.03, (peak, planned)


def test_what_cannot_be_is_refused(work, trained, tmp_path):
    def refused(name, *words, **changes):
        done = lmlaunch(config(work, name, **{**LOFTQ, **changes}, run__dir="runs/refused"), cwd=work, check=False)
        assert done.returncode == 10 and all(word in done.stderr for word in words), done.stderr
        assert {path.name for path in (work / "runs" / "refused").glob("*")} <= {".lock", "status.json"}

    refused("plain", "lora.start", "qlora", train__method="lora")
    refused("full", "lora.start", "qlora", train__method="full")
    refused("continued", "lora.start", "weights of its own", lora__init="runs/loftq")
    refused("continued_model", "lora.start", "weights of its own", model__path="runs/loftq")
    refused("unknown", "lora.start", '"zero"', lora__start="olora")
    from transformers import BitsAndBytesConfig
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                  bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=["lm_head"])
    AutoModelForCausalLM.from_pretrained(work / "model", quantization_config=settings, dtype=torch.float32,
                                         device_map="cpu").save_pretrained(tmp_path / "quantized")
    refused("stored", "lora.start", "original weights", "only quantized ones", model__path=str(tmp_path / "quantized"))
    done = lmlaunch("export", "runs/loftq", "-o", "nothing", "--merge", "--base", "model", cwd=work, check=False)
    assert done.returncode == 2 and "lora.start" in done.stderr and not (work / "nothing").exists()


def test_what_was_trained_is_exported_and_gone_on_with(work, trained):
    done = json.loads(lmlaunch("export", "runs/loftq", "-o", "merged", "--merge", "--json", cwd=work).stdout)
    assert done["base"] == "dequantized weights (nf4, double)" and done["logits_differ_by"] < 1e-3
    merged = AutoModelForCausalLM.from_pretrained(work / "merged", dtype=torch.float32)
    assert loss_by_transformers(merged, work) == pytest.approx(eval_losses(work, "loftq")[-1], rel=1e-3)
    lmlaunch(config(work, "further", **{**LOFTQ, "lora__start": "zero", "train__steps": 1}, lora__init="runs/loftq"), cwd=work)
    assert eval_losses(work, "further")[0] == pytest.approx(eval_losses(work, "loftq")[-1], rel=1e-6)
    rows = json.loads(lmlaunch("plan", "--compare", config(work, "compared", **LOFTQ), "--json", cwd=work).stdout)
    text = json.dumps(rows)
    assert "model.quantize=none" in text and "lora.start=zero" in text
