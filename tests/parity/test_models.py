"""The same model as everyone's: logits, loss, the gradient of every parameter and 5 AdamW steps against transformers."""

import pytest
import reference
import tiny_models
import tool
import torch
from bounds import LOSS, LOSSES, LR, STEPS, WEIGHT_DECAY, check, check_all

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", params=[(n, d) for n in tiny_models.MODELS for d in DTYPES], ids="-".join)
def pair(request, tmp_path_factory):
    """(dtype, ours, theirs) of one model; each is trained once for all the tests below."""
    name, dtype = request.param
    directory = tmp_path_factory.mktemp("model")
    model = tiny_models.make(name, directory, DTYPES[dtype])
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    ours = tool.run(directory, documents, directory / "run", dtype=dtype, steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY)
    return dtype, ours, theirs


def test_logits_agree(pair):
    dtype, ours, theirs = pair
    check(dtype, ours["logits"], theirs["logits"])


def test_the_loss_agrees(pair):
    dtype, ours, theirs = pair
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=LOSS[dtype])


def test_the_gradient_of_every_parameter_agrees(pair):
    dtype, ours, theirs = pair
    check_all(dtype, ours["gradients"], theirs["gradients"])


def test_five_adamw_steps_agree(pair):
    dtype, ours, theirs = pair
    check_all(dtype, ours["weights"], theirs["weights"])
    assert ours["losses"].tolist() == pytest.approx(theirs["losses"].tolist(), rel=LOSSES[dtype])
    assert theirs["losses"][-1] < theirs["losses"][0]
