"""The loss that balances the load of experts, and the figures of routers in metrics.jsonl: against transformers' loss of all of a step's
texts, however many micro-batches and ranks they are divided into."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_experts import all_in_files, balance, read, settings, trained, work  # noqa: F401
from test_run import config, lmlaunch, losses, rows

COEFFICIENT = 0.5  # so large that it is seen in every gradient


def steps(work, name):
    return [row for row in rows(work, name) if "loss" in row]


def column(work, name, key):
    return [row[key] for row in steps(work, name)]


@pytest.fixture(scope="module")
def whole(work):
    """All of a step's texts are one micro-batch."""
    lmlaunch(config(work, "whole", **{**settings("qwen3_moe"), "train__micro_batch": 4, "train__router_aux_loss": COEFFICIENT}), cwd=work)
    return "whole"


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "granitemoe", "mixtral"])
@pytest.mark.parametrize("micro", [4, 1])
def test_loss_and_gradients_are_transformers(work, name, micro):
    balances = []
    theirs, norm, reference = trained(work, name, COEFFICIENT, balances)
    plain_norm = trained(work, name)[1]
    run = f"{name}_{micro}"
    lmlaunch(config(work, run, **{**settings(name), "train__micro_batch": micro, "train__router_aux_loss": COEFFICIENT}), cwd=work)
    assert column(work, run, "grad_norm")[0] == pytest.approx(norm, rel=1e-5)
    assert abs(norm / plain_norm - 1) > 1e-3
    assert column(work, run, "loss") == pytest.approx(theirs, rel=1e-4)
    assert column(work, run, "router_aux_loss") == pytest.approx(balances, rel=1e-4)
    expected = all_in_files(name.replace("_", ""), dict(reference.named_parameters()))
    for key, value in load_file(work / "runs" / run / "model" / "model.safetensors").items():
        assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), key


def test_a_padded_batch_has_the_same_loss(work):
    """Padding, which transformers leaves out by the mask, is not there at all in this program's batches."""
    model = read(work / "qwen3_moe")
    texts = [json.loads(line)["input_ids"] for line in open(work / "few.jsonl")]
    longest = max(map(len, texts))
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts])
    model.train()
    together = model(padded, attention_mask=mask, output_router_logits=True).aux_loss
    alone = balance(model, [model(torch.tensor([ids]), output_router_logits=True).router_logits for ids in texts])
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)


@pytest.mark.parametrize("arguments, changes", [
    ((), dict(train__micro_batch=1)),
    ((), dict(train__micro_batch=2, train__recompute="block")),
    ((), dict(train__micro_batch=2, train__update="in_backward")),
    ((), dict(train__micro_batch=1, offload__weights="nvme", offload__optimizer="nvme", offload__paths=["swap"])),
    (("--ranks", "2"), dict(train__micro_batch=1, zero__stage=3)),
    (("--ranks", "2"), dict(train__micro_batch=2, zero__stage=1)),
    (("--ranks", "3"), dict(train__micro_batch=1, zero__stage=3)),  # two ranks have a text fewer than the third
    (("--ranks", "3"), dict(train__micro_batch=1, train__update="in_backward"))],
    ids=["micro_batches", "recompute", "in_backward", "offload", "ranks", "one_each", "filled", "filled_in_backward"])
def test_micro_batches_and_ranks_do_not_change_it(work, whole, arguments, changes, request):
    name = request.node.callspec.id
    lmlaunch(*arguments, config(work, name, **{**settings("qwen3_moe"), "train__router_aux_loss": COEFFICIENT, **changes}), cwd=work)
    first, expected = steps(work, name)[0], steps(work, whole)[0]
    assert first["router_aux_loss"] == pytest.approx(expected["router_aux_loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for key in ("expert_load_max", "expert_load_min"):
        assert first[key] == expected[key]
    assert column(work, name, "loss") == pytest.approx(column(work, whole, "loss"), rel=1e-4)
    assert column(work, name, "router_aux_loss") == pytest.approx(column(work, whole, "router_aux_loss"), rel=1e-4)


def test_an_adapters_dropout_is_the_same_in_the_pass_that_counts(work):
    adapter = dict(train__method="lora", lora__r=4, lora__alpha=8, lora__dropout=0.3, optimizer__lr=3e-2)
    for name, micro in [("dropped_whole", 4), ("dropped", 1)]:
        lmlaunch(config(work, name, **{**settings("qwen3_moe"), **adapter, "train__router_aux_loss": COEFFICIENT, "train__micro_batch": micro}), cwd=work)
    assert column(work, "dropped", "router_aux_loss") == pytest.approx(column(work, "dropped_whole", "router_aux_loss"), rel=1e-5)
    assert column(work, "dropped", "grad_norm") == pytest.approx(column(work, "dropped_whole", "grad_norm"), rel=1e-4)


def test_the_models_file_switches_it_on_as_with_transformers(work, whole):
    shutil.copytree(work / "qwen3_moe", work / "balanced")
    path = work / "balanced" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}))
    lmlaunch(config(work, "by_file", **{**settings("balanced"), "train__micro_batch": 4}), cwd=work)
    assert losses(work, "by_file") == losses(work, whole)
    lmlaunch(config(work, "off", **{**settings("balanced"), "train__micro_batch": 4, "train__router_aux_loss": 0.0}), cwd=work)
    lmlaunch(config(work, "never", **{**settings("qwen3_moe"), "train__micro_batch": 4}), cwd=work)
    assert losses(work, "off") == losses(work, "never") != losses(work, whole)


def test_figures_are_those_of_the_routers(work, whole):
    model = read(work / "qwen3_moe")
    texts = [json.loads(line)["input_ids"] for line in open(work / "few.jsonl")]
    by_layer = zip(*[model(torch.tensor([ids]), output_router_logits=True).router_logits for ids in texts])
    most, least, entropies = [], [], []
    for parts in by_layer:
        p = torch.cat(parts).softmax(-1)
        loads = torch.bincount(p.topk(2, -1).indices.flatten(), minlength=8).float()
        most.append((loads.max() / loads.mean()).item())
        least.append((loads.min() / loads.mean()).item())
        entropies.append(-(p * p.log()).sum(-1).mean().item())
    first = steps(work, whole)[0]
    assert first["expert_load_max"] == pytest.approx(max(most), rel=1e-6)
    assert first["expert_load_min"] == pytest.approx(min(least), rel=1e-6)
    assert first["router_entropy"] == pytest.approx(sum(entropies) / len(entropies) / torch.tensor(8.0).log().item(), rel=1e-4)


def test_it_balances(work):
    """What it is for: with it the loads come nearer to each other."""
    for name, coefficient in [("unbalanced", 0.0), ("balancing", 1.0)]:
        lmlaunch(config(work, name, **{**settings("qwen3_moe"), "train__micro_batch": 4, "train__steps": 40, "train__router_aux_loss": coefficient}), cwd=work)
    assert column(work, "balancing", "router_aux_loss")[-1] < column(work, "unbalanced", "router_aux_loss")[-1]


def test_what_it_cannot_balance_is_refused_by_name(work):
    for arguments, text in [
            ((config(work, "dense", train__router_aux_loss=0.1),), "balances experts, and a model of type llama has none"),
            ((config(work, "less", **{**settings("qwen3_moe"), "train__router_aux_loss": -1}),), "train.router_aux_loss")]:
        done = lmlaunch(*arguments, cwd=work, check=False)
        assert done.returncode == 10, (arguments, done.stderr)
        assert text in done.stderr, (arguments, done.stderr)


def test_the_plan_says_what_it_costs(work):
    for micro, text in [(4, "is known before the backward pass"), (1, "a forward pass more")]:
        toml = config(work, "planned", **{**settings("qwen3_moe"), "train__micro_batch": micro, "train__router_aux_loss": 0.1})
        assert text in lmlaunch("plan", toml, "--gpus", "0", cwd=work).stdout.replace("\n", " ")
