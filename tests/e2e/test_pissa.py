"""Adapters that begin with the principal parts of the matrices (lora.start = "pissa"): held against numpy's singular values, against peft's
gradients on a base from which they are subtracted, against themselves in other tiers, and as plain adapters of the original model."""

import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from test_loftq import quantized
from test_run import config, eval_losses, expect_resumed_bits, filled, lmlaunch, loss_by_transformers, losses
from transformers import AutoModelForCausalLM

R, ALPHA = 4, 12
PISSA = dict(lora__r=R, lora__alpha=ALPHA, lora__start="pissa", train__method="lora", optimizer__lr=3e-3)
AT_ONCE = dict(optimizer__lr=1e-30, train__steps=1)  # a step of no length: the adapter as it began
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Matrices whose singular values fall, so that the first of them are well defined."""
    work = filled(tmp_path_factory.mktemp("pissa"), layers=2)
    model = base_of(work)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            left, values, right = torch.linalg.svd(8 * parameter.data, full_matrices=False)
            parameter.data = left @ torch.diag(values * 0.8 ** torch.arange(len(values))) @ right
    model.save_pretrained(work / "model")
    (work / "swap").mkdir()
    return work


def base_of(work):
    return AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)


def adapter_of(work, run):
    directory = work / "runs" / run / "model"
    return load_file(directory / "adapter_model.safetensors"), json.loads((directory / "adapter_config.json").read_text())


def pairs(tensors):
    """{module: (A, B, A0, B0)}"""
    out = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b, r = tensors[name.replace("lora_A", "lora_B")], len(a) // 2
        out[name[len(PREFIX):-len(".lora_A.weight")]] = a[:r], b[:, :r], a[r:], -b[:, r:]
    return out


def all_examples_loss(model, work):
    total, targets = 0.0, 0
    for line in open(work / "train.jsonl"):
        row = json.loads(line)
        labels = torch.tensor(row["labels"])[1:]
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        targets += int((labels != -100).sum())
    return total / targets


@pytest.fixture(scope="module")
def begun(work):
    lmlaunch(config(work, "begun", **{**PISSA, **AT_ONCE}), cwd=work)
    lmlaunch(config(work, "zero", **{**PISSA, **AT_ONCE, "lora__start": "zero"}), cwd=work)
    return adapter_of(work, "begun")


@pytest.fixture(scope="module")
def trained(work):
    return lmlaunch(config(work, "pissa", **PISSA, lora__dropout=0.1, checkpoint__every=6), cwd=work)


def test_they_begin_with_the_nearest_and_change_nothing(work, begun):
    tensors, written = begun
    assert (written["r"], written["lora_alpha"], written["init_lora_weights"]) == (2 * R, 2 * ALPHA, True)
    found = pairs(tensors)
    assert len(found) == 14
    for path, (a, b, start_a, start_b) in found.items():
        assert torch.equal(a, start_a) and torch.equal(b, start_b), path
        weight = base_of(work).get_submodule(path).weight.data.double()
        least = np.sqrt((np.linalg.svd(weight.numpy(), compute_uv=False)[R:] ** 2).sum())
        assert (weight - ALPHA / R * (b.double() @ a.double())).norm().item() <= 1.01 * least, path
        torch.testing.assert_close(a.norm(dim=1), b.norm(dim=0), rtol=1e-3, atol=0)
    ids = torch.arange(24)[None] % 97
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base_of(work), work / "runs" / "begun" / "model")(ids).logits
        torch.testing.assert_close(adapted, base_of(work)(ids).logits, rtol=1e-4, atol=1e-4)
    assert eval_losses(work, "begun")[0] == pytest.approx(eval_losses(work, "zero")[0], rel=1e-5)


def test_dropout_drops_the_inputs_of_both_pairs(work, begun):
    """Else the first loss would not be the base's."""
    lmlaunch(config(work, "dropped", **{**PISSA, **AT_ONCE, "lora__dropout": 0.5}), cwd=work)
    assert losses(work, "dropped")[0][0] == pytest.approx(losses(work, "zero")[0][0], rel=1e-5)


def test_ranks_by_pattern_and_rslora_are_doubled_exactly(work):
    settings = {**PISSA, **AT_ONCE, "lora__ranks": {}, "lora__rslora": True}
    toml = config(work, "patterns", **{key: value for key, value in settings.items() if key != "lora__ranks"})
    lmlaunch(toml, "lora.ranks={down_proj=6}", "lora.alphas={q_proj=5}", cwd=work)
    tensors, written = adapter_of(work, "patterns")
    assert written["rank_pattern"] == {"down_proj": 12} and written["alpha_pattern"] == {"q_proj": pytest.approx(5 * 2 ** 0.5)}
    assert written["lora_alpha"] == pytest.approx(ALPHA * 2 ** 0.5) and written["use_rslora"] is True
    lmlaunch("export", "runs/patterns", "-o", "plain_patterns", cwd=work)
    ids = torch.arange(24)[None] % 97
    for directory in ("runs/patterns/model", "plain_patterns"):
        with torch.no_grad():
            adapted = PeftModel.from_pretrained(base_of(work), work / directory)(ids).logits
        torch.testing.assert_close(adapted, base_of(work)(ids).logits, rtol=1e-4, atol=1e-4)
    for path, (a, b, *_) in pairs(tensors).items():
        weight, r = base_of(work).get_submodule(path).weight.data, 6 if "down" in path else R
        scale = (5 if "q_proj" in path else ALPHA) / r ** 0.5
        least = np.sqrt((np.linalg.svd(weight.double().numpy(), compute_uv=False)[r:] ** 2).sum())
        assert len(a) == r and (weight - scale * b @ a).norm().item() <= 1.01 * least, path


def test_a_step_is_the_one_that_peft_makes_on_the_changed_base(work, begun):
    """All examples at once by plain gradient descent: A and B move along peft's gradients, A0 and B0 stay."""
    rate = 0.1
    lmlaunch(config(work, "step", **{**PISSA, "train__steps": 1, "train__global_batch": 64, "optimizer__clip": "none", "optimizer__lr": rate,
                                     "optimizer__name": "sgd", "optimizer__momentum": 0.0, "optimizer__weight_decay": 0.0}), cwd=work)
    model, start = base_of(work), pairs(begun[0])
    for path, (a, b, *_) in start.items():
        model.get_submodule(path).weight.data -= ALPHA / R * b @ a
    peft = get_peft_model(model, LoraConfig(r=R, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"))
    for path, (a, b, *_) in start.items():
        layer = peft.base_model.model.get_submodule(path)
        layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = a.clone(), b.clone()
    all_examples_loss(peft, work).backward()
    for path, (a, b, start_a, start_b) in pairs(adapter_of(work, "step")[0]).items():
        layer = peft.base_model.model.get_submodule(path)
        for ours, begin, theirs in ((a, start[path][0], layer.lora_A), (b, start[path][1], layer.lora_B)):
            gradient = theirs["default"].weight.grad
            assert gradient.abs().max() > 0
            assert ((begin - ours) / rate - gradient).norm() < 2e-3 * gradient.norm() + 1e-5, path
        assert torch.equal(start_a, start[path][2]) and torch.equal(start_b, start[path][3])


def test_what_was_trained_is_a_plain_adapter_of_the_original_model(work, trained):
    assert 'lora.start = "pissa"' in trained.stderr
    before, *_, after = eval_losses(work, "pissa")
    assert after < before - 0.02
    adapted = PeftModel.from_pretrained(base_of(work), work / "runs" / "pissa" / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-4)
    for place in ("runs/pissa", "runs/pissa/model"):
        assert json.loads(lmlaunch("eval", place, "--json", cwd=work).stdout)["eval_loss"] == pytest.approx(after, rel=1e-5)
    last = sorted((work / "runs" / "pissa" / "checkpoints").glob("step_*"))[-1].relative_to(work)
    assert json.loads(lmlaunch("eval", last, "--json", cwd=work).stdout)["eval_loss"] == pytest.approx(after, rel=1e-6)
    own, _ = adapter_of(work, "pissa")
    lmlaunch("export", last, "-o", "of_checkpoint", cwd=work)
    exported = load_file(work / "of_checkpoint" / "adapter_model.safetensors")
    assert exported.keys() == own.keys() and all(torch.equal(exported[name], own[name]) for name in own)
    for place, out in ((last, "merged_checkpoint"), ("runs/pissa", "merged")):
        done = json.loads(lmlaunch("export", place, "-o", out, "--merge", "--json", cwd=work).stdout)
        assert done["logits_differ_by"] < 1e-3
        merged = AutoModelForCausalLM.from_pretrained(work / out, dtype=torch.float32)
        assert loss_by_transformers(merged, work) == pytest.approx(after, rel=1e-4)
    lmlaunch(config(work, "further", **{**PISSA, "lora__start": "zero", "lora__r": 2 * R, "lora__alpha": 2 * ALPHA, "train__steps": 1},
                    lora__init="runs/pissa"), cwd=work)
    assert eval_losses(work, "further")[0] == pytest.approx(after, rel=1e-5)


def test_a_stopped_run_goes_on_bit_for_bit(work):
    expect_resumed_bits(work, **PISSA, lora__dropout=0.1)


PLACEMENTS = {
    "on_disk": ([], dict(offload__weights="nvme", offload__optimizer="nvme", offload__paths=["swap"], train__recompute="block")),
    "in_backward": ([], dict(offload__weights="host", train__update="in_backward", optimizer__clip="block")),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tiers_change_no_bit(work, placement):
    arguments, changes = PLACEMENTS[placement]
    kept = {key: value for key, value in changes.items() if key.startswith("optimizer__")}
    settings = {**PISSA, "lora__dropout": 0.1, "model__dtype": "bf16"}
    lmlaunch(config(work, f"here_{placement}", **settings, **kept), cwd=work)
    lmlaunch(*arguments, config(work, f"there_{placement}", **settings, **changes), cwd=work)
    assert losses(work, f"there_{placement}") == losses(work, f"here_{placement}")
    (there, _), (here, _) = adapter_of(work, f"there_{placement}"), adapter_of(work, f"here_{placement}")  # with the pairs that each has kept
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in here)


def test_threads_and_ranks_begin_with_the_same_bits(work, begun):
    """What they train differs in the order of sums."""
    lmlaunch(config(work, "threads", **{**PISSA, **AT_ONCE}, run__threads=2), cwd=work)
    lmlaunch("--ranks", "2", config(work, "ranks", **{**PISSA, **AT_ONCE}, zero__stage=3), cwd=work)
    for run in ("threads", "ranks"):
        tensors, _ = adapter_of(work, run)
        assert all(torch.equal(tensors[name], begun[0][name]) for name in tensors), run
        assert eval_losses(work, run)[0] == pytest.approx(eval_losses(work, "begun")[0], rel=1e-6)


def test_a_quantized_base_keeps_its_codes(work):
    """The pairs are those of the dequantized weights: such a run begins, and ends, beside these."""
    settings = {**PISSA, "train__method": "qlora"}
    lmlaunch(config(work, "q_zero", **{**settings, **AT_ONCE, "lora__start": "zero"}), cwd=work)
    lmlaunch(config(work, "q_pissa", **settings), cwd=work)
    before, after = eval_losses(work, "q_pissa")
    assert before == pytest.approx(eval_losses(work, "q_zero")[0], rel=1e-5) and after < before - 0.02
    adapted = PeftModel.from_pretrained(quantized(work), work / "runs" / "q_pissa" / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-3)
    done = json.loads(lmlaunch("export", "runs/q_pissa", "-o", "q_merged", "--merge", "--json", cwd=work).stdout)
    assert done["base"] == "dequantized weights (nf4, double)" and done["logits_differ_by"] < 1e-3


@pytest.mark.parametrize("adapters", ["bf16", "fp32"])
def test_a_bf16_model_begins_as_itself(work, adapters):
    settings = {**PISSA, "model__dtype": "bf16", "lora__dtype": adapters}
    for start in ("zero", "pissa"):
        lmlaunch(config(work, f"{adapters}_{start}", **{**settings, "lora__start": start}), cwd=work)
    begun, plain = eval_losses(work, f"{adapters}_pissa"), eval_losses(work, f"{adapters}_zero")
    assert begun[0] == pytest.approx(plain[0], rel=2e-3) and begun[1] < begun[0] - 0.02
    adapted = PeftModel.from_pretrained(base_of(work), work / "runs" / f"{adapters}_pissa" / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(begun[1], rel=2e-2)


def test_the_frozen_pairs_have_no_gradients_and_no_state(work):
    sizes = {}
    for start in ("zero", "pissa"):
        done = lmlaunch("plan", config(work, f"planned_{start}", **{**PISSA, "lora__start": start, "model__dtype": "bf16"}), "--json", cwd=work)
        sizes[start] = {row["name"]: row["bytes"] for tier in json.loads(done.stdout)["tiers"] for row in tier["classes"]}
    for name in ("weights", "gradients", "first moment", "second moment", "master"):
        assert sizes["zero"][name] == sizes["pissa"][name] > 0, name
    matrices = [module.weight for path, module in base_of(work).named_modules() if path.endswith("_proj")]
    pairs_bytes = sum(R * sum(weight.shape) for weight in matrices) * 2
    more = sizes["pissa"]["frozen weights"] - sizes["zero"]["frozen weights"]
    assert len(matrices) == 14 and pairs_bytes <= more <= pairs_bytes + 2 * len(matrices) * 512
    assert sizes["pissa"]["principal parts"] > 0


def test_what_cannot_be_is_refused(work, trained, tmp_path):
    def refused(name, *words, code=10, **changes):
        done = lmlaunch(config(work, name, **{**PISSA, **changes}, run__dir="runs/refused"), cwd=work, check=False)
        assert done.returncode == code and all(word in done.stderr for word in words), done.stderr

    refused("full", "lora.start", "pissa", "train.method", train__method="full")
    refused("factors", "lora.start", "ia3", train__method="ia3", lora__r=8, lora__alpha=16)
    refused("lengths", "lora.start", "lora.dora", lora__dora=True)
    refused("continued", "lora.start", "weights of its own", lora__init="runs/pissa")
    last = sorted((work / "runs" / "pissa" / "checkpoints").glob("step_*"))[-1].relative_to(work)
    done = lmlaunch("export", last, "-o", "nothing", "--merge", "--base", "model", cwd=work, check=False)
    assert done.returncode == 2 and "lora.start" in done.stderr and not (work / "nothing").exists()
    rows = lmlaunch("plan", "--compare", config(work, "compared", **PISSA), "--json", cwd=work).stdout
    assert "train.method=full" in rows and "lora.start=zero" in rows
