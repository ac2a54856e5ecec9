"""Biases that are trained beside adapters (lora.bias): names, gradients and results held against peft, on models that have biases in their
linear layers (Qwen2), and in norms and transposed matrices, too (GPT-2)."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_pissa import all_examples_loss
from test_run import VOCAB, config, eval_losses, filled, lmlaunch, loss_by_transformers, losses
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

R, ALPHA = 4, 8
LORA = dict(lora__r=R, lora__alpha=ALPHA, train__method="lora", optimizer__lr=1e-2)
MODELS = {
    "qwen2": Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
                         max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64, bos_token_id=1, eos_token_id=2,
                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}
TARGETS = {"qwen2": ["q_proj", "down_proj"], "gpt2": ["c_attn"]}
CASES = [(family, bias) for family in MODELS for bias in ("all", "lora_only")]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("biases"), layers=1)
    for family, made in MODELS.items():
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(made)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(work / family)
        (work / family / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (work / "swap").mkdir()
    return work


def base_of(work, family):
    return AutoModelForCausalLM.from_pretrained(work / family, dtype=torch.float32)


def settings(family, bias, **changes):
    return {**LORA, "model__path": family, "lora__targets": TARGETS[family], "lora__bias": bias, **changes}


def adapter_of(work, run):
    return load_file(work / "runs" / run / "model" / "adapter_model.safetensors")


def pefts(work, family, bias, **more):
    return get_peft_model(base_of(work, family), LoraConfig(r=R, lora_alpha=ALPHA, target_modules=TARGETS[family], bias=bias, task_type="CAUSAL_LM", **more))


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def trained(work, request):
    family, bias = request.param
    name = f"{family}_{bias}"
    lmlaunch(config(work, name, **settings(family, bias)), cwd=work)
    return family, bias, name


def test_names_and_results_are_pefts(work, trained, tmp_path):
    family, bias, name = trained
    tensors = adapter_of(work, name)
    pefts(work, family, bias).save_pretrained(tmp_path / "theirs")
    assert tensors.keys() == load_file(tmp_path / "theirs" / "adapter_model.safetensors").keys()
    assert json.loads((work / "runs" / name / "model" / "adapter_config.json").read_text())["bias"] == bias
    own = dict(base_of(work, family).named_parameters())
    moved = 0
    for key, value in tensors.items():
        if "lora_" in key:
            continue
        before = own[key.removeprefix("base_model.model.").replace(".base_layer", "")].data
        assert value.shape == before.shape and 0 < (value - before).abs().max() < 12.5 * 1e-2, key
        moved += 1
    assert moved == {"qwen2_all": 6, "qwen2_lora_only": 2, "gpt2_all": 13, "gpt2_lora_only": 2}[name]
    before, after = eval_losses(work, name)
    assert before == pytest.approx(loss_by_transformers(base_of(work, family), work), rel=1e-4) and after < before
    adapted = PeftModel.from_pretrained(base_of(work, family), work / "runs" / name / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-4)
    assert json.loads(lmlaunch("eval", f"runs/{name}", "--json", cwd=work).stdout)["eval_loss"] == pytest.approx(after, rel=1e-6)


def test_they_are_merged_resumed_and_continued(work, trained):
    family, bias, name = trained
    after = eval_losses(work, name)[-1]
    done = json.loads(lmlaunch("export", f"runs/{name}", "-o", f"merged_{name}", "--merge", "--json", cwd=work).stdout)
    assert done["logits_differ_by"] < 1e-3
    merged = AutoModelForCausalLM.from_pretrained(work / f"merged_{name}", dtype=torch.float32)
    assert loss_by_transformers(merged, work) == pytest.approx(after, rel=1e-4)
    lmlaunch(config(work, f"half_{name}", **settings(family, bias), train__steps=6), cwd=work)
    lmlaunch(f"half_{name}.toml", "train.steps=12", cwd=work)
    resumed, whole = adapter_of(work, f"half_{name}"), adapter_of(work, name)
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    changes = {"train__method": "lora", "model__path": family, "train__steps": 1, "lora__init": f"runs/{name}"}
    lmlaunch(config(work, f"more_{name}", **changes), cwd=work)
    assert eval_losses(work, f"more_{name}")[0] == pytest.approx(after, rel=1e-6)
    other = lmlaunch(config(work, f"other_{name}", **changes, lora__bias="none"), cwd=work, check=False)
    assert other.returncode == 10 and 'lora.bias = "none" is written' in other.stderr, other.stderr


@pytest.mark.parametrize("family, more", [("qwen2", {}), ("qwen2", {"use_dora": True}), ("gpt2", {})], ids=["qwen2", "dora", "gpt2"])
def test_a_step_is_pefts(work, family, more):
    """All examples at once by plain gradient descent."""
    rate, name = 0.1, f"step_{family}_{len(more)}"
    lmlaunch(config(work, name, **settings(family, "all", train__steps=1, train__global_batch=64, optimizer__clip="none", optimizer__lr=rate,
                                           optimizer__name="sgd", optimizer__momentum=0.0, optimizer__weight_decay=0.0,
                                           **({"lora__dora": True} if more else {}))), cwd=work)
    model = pefts(work, family, "all", **more)
    all_examples_loss(model, work).backward()
    theirs = {key: parameter for key, parameter in model.named_parameters() if parameter.grad is not None and key.endswith("bias")}
    ours = adapter_of(work, name)
    assert theirs.keys() == {key for key in ours if key.endswith("bias")}
    for key, parameter in theirs.items():
        moved = (parameter.data - ours[key]) / rate
        assert parameter.grad.abs().max() > 0 and (moved - parameter.grad).norm() < 2e-3 * parameter.grad.norm() + 1e-5, key


@pytest.mark.parametrize("changes", [dict(model__dtype="bf16"), dict(model__dtype="bf16", lora__dtype="fp32"), dict(train__method="qlora"),
                                     dict(lora__start="pissa"), dict(lora__dropout=0.2, lora__dora=True)],
                         ids=["bf16", "fp32_over_bf16", "qlora", "pissa", "dora"])
def test_off_the_device_they_have_the_same_bits(work, changes):
    name = "_".join(str(value) for value in changes.values())
    lmlaunch(config(work, f"here_{name}", **settings("qwen2", "all", **changes)), cwd=work)
    lmlaunch(config(work, f"there_{name}", **settings("qwen2", "all", **changes), offload__weights="nvme", offload__optimizer="nvme",
                    offload__paths=["swap"], train__recompute="block"), cwd=work)
    assert losses(work, f"here_{name}") == losses(work, f"there_{name}")
    first, last = eval_losses(work, f"here_{name}")
    assert last < first


def test_the_final_norm_alone_is_trained(work):
    """Nothing below it is, so that nothing else asks for its gradient."""
    for family, target in (("qwen2", "model.norm"), ("gpt2", "ln_f")):
        lmlaunch(config(work, f"norm_{family}", train__method="norms", model__path=family, lora__targets=[target], optimizer__lr=1e-2), cwd=work)
        first, last = eval_losses(work, f"norm_{family}")
        assert last < first
        adapted = PeftModel.from_pretrained(base_of(work, family), work / "runs" / f"norm_{family}" / "model")
        assert loss_by_transformers(adapted, work) == pytest.approx(last, rel=1e-4)


def test_what_cannot_be_is_refused(work, trained):
    none = lmlaunch(config(work, "of_none", **LORA, lora__bias="all", run__dir="runs/refused"), cwd=work, check=False)
    assert none.returncode == 10 and "lora.bias" in none.stderr and "the model has no bias" in none.stderr, none.stderr
    some = settings("qwen2", "lora_only", lora__targets=["down_proj"], run__dir="runs/refused")
    none = lmlaunch(config(work, "of_few", **some), cwd=work, check=False)
    assert none.returncode == 10 and "layers that get adapters have no bias" in none.stderr, none.stderr
    other = lmlaunch(config(work, "factors", train__method="ia3", model__path="qwen2", lora__bias="all", run__dir="runs/refused"), cwd=work, check=False)
    assert other.returncode == 10 and "lora.bias is LoRA's" in other.stderr, other.stderr
    name = trained[2]
    both = lmlaunch("merge", f"runs/{name}", f"runs/{name}", "-o", "both", cwd=work, check=False)
    assert both.returncode != 0 and "trained biases" in both.stderr, both.stderr
