"""optimizer.name = "sgd" against torch.optim.SGD: momentum, weight decay added to the gradient, clipping; in fp32 and with a bf16
weight's split master."""

import pytest
import reference
import tiny_models
import tool
import torch
from reference import changes, relative, worst

STEPS, LR, WEIGHT_DECAY, MOMENTUM, MAX_NORM = 5, 0.05, 0.1, 0.8, 0.7
MODEL = "qwen3_tied_biases"
RIGHT = dict(optimizer="sgd", momentum=MOMENTUM, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM, steps=STEPS)
# Of what five steps make of a master, relative, per tensor. SGD is linear in the gradient: in bf16 as near as the gradients are.
CHANGE = {"fp32": 1e-4, "bf16": 0.1}


@pytest.fixture(scope="module", params=CHANGE)
def case(request, tmp_path_factory):
    """(dtype, model's directory, documents, what torch makes of it)"""
    directory = tmp_path_factory.mktemp("model")
    model = tiny_models.make(MODEL, directory, {"fp32": torch.float32, "bf16": torch.bfloat16}[request.param])
    documents = reference.random_documents(model.config.vocab_size)
    sgd = lambda groups: torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY, MAX_NORM, optimizer=sgd)
    return request.param, directory, documents, theirs


def error_of(case, work, **options):
    dtype, directory, documents, theirs = case
    ours = tool.run(directory, documents, work, dtype=dtype, **{**RIGHT, **options})
    before = theirs["first_weights"]
    return ours, worst(changes(ours["masters"], before), changes(theirs["weights"], before), relative)


@pytest.mark.parametrize("off_device", ["none", "disk", "host"])
def test_five_steps_are_torchs(case, tmp_path, off_device):
    ours, errors = error_of(case, tmp_path, off_device=off_device)
    assert errors[0][0] <= CHANGE[case[0]], errors[:5]
    assert ours["norms"].tolist() == pytest.approx(case[3]["norms"], rel={"fp32": 1e-5, "bf16": 2e-2}[case[0]])
    if off_device != "none":
        resident, _ = error_of(case, tmp_path / "resident")
        assert all((resident[what] == ours[what]).all() for what in ("losses", "norms"))
        assert all((resident["masters"][name] == ours["masters"][name]).all() for name in resident["masters"])


# Groups: as optimizer.groups has them, whether one has a tensor, its factor of the rate, its decay. The first that matches counts.
GROUPS = [
    ('match = "layers.0.self_attn.q_proj", lr_scale = 0.1', lambda name: ".layers.0.self_attn.q_proj." in name, 0.1, None),
    ('match = "regex:[kv]_proj[.]weight$", weight_decay = 0.5', lambda name: name.endswith(("k_proj.weight", "v_proj.weight")), 1, 0.5),
    ('match = "self_attn", lr_scale = 3', lambda name: ".self_attn." in name, 3, None),
    ('match = "norm", lr_scale = 0.5, weight_decay = 0.2', lambda name: ".norm." in name, 0.5, 0.2),
    ('match = "embed_tokens", lr_scale = 0.0', lambda name: ".embed_tokens." in name, 0, None),
]


def in_groups(names):
    """torch.optim.SGD of each tensor alone, with its own settings."""
    def optimizer(groups):
        order = [name for decayed in (True, False) for name in names if reference.is_decayed(name) == decayed]
        alone = []
        for name, parameter in zip(order, [p for group in groups for p in group["params"]], strict=True):
            _, _, scale, decay = next((group for group in GROUPS if group[1](name)), (None, None, 1, None))
            alone.append({"params": [parameter], "lr": LR * scale,
                          "weight_decay": WEIGHT_DECAY * reference.is_decayed(name) if decay is None else decay})
        return torch.optim.SGD(alone, lr=LR, momentum=MOMENTUM)
    return optimizer


def test_five_steps_of_groups_are_torchs(tmp_path):
    model = tiny_models.make(MODEL, tmp_path / "model", torch.float32)
    documents = reference.random_documents(model.config.vocab_size)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY, MAX_NORM, optimizer=in_groups(names))
    toml = "[" + ", ".join("{" + group[0] + "}" for group in GROUPS) + "]"
    for off_device in ("none", "disk"):
        ours = tool.run(tmp_path / "model", documents, tmp_path / off_device, dtype="fp32", off_device=off_device, groups=toml, **RIGHT)
        assert (errors := worst(ours["masters"], theirs["weights"], relative))[0][0] <= 1e-6, errors[:5]
        assert (ours["masters"]["model.embed_tokens.weight"] == theirs["first_weights"]["model.embed_tokens.weight"]).all()
    wrong = tool.run(tmp_path / "model", documents, tmp_path / "wrong", dtype="fp32", groups=toml.replace("0.1", "0.105"), **RIGHT)
    assert worst(wrong["masters"], theirs["weights"], relative)[0][0] > 1e-5


def test_what_is_five_percent_off_is_seen(case, tmp_path):
    wrong = [dict(weight_decay=0.0)]
    if case[0] == "fp32":  # bf16's gradients differ by as much
        wrong += [dict(momentum=0.84), dict(lr=1.05 * LR), dict(max_grad_norm=0.735)]
    for number, options in enumerate(wrong):
        _, errors = error_of(case, tmp_path / str(number), **options)
        assert errors[0][0] > CHANGE[case[0]], (options, errors[:5])
