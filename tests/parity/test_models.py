"""The same model as everyone's: logits, loss, the gradient of every parameter and 5 AdamW steps against transformers."""

import json

import pytest
import reference
import tiny_models
import tool
import torch
from counts import alternating
from bounds import LOSS, LOSSES, LR, STEPS, WEIGHT_DECAY, check, check_all, check_changes, determined

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compared(name, dtype, directory, model=None, **options):
    """(dtype, ours, theirs) of one model, trained once for all the tests below. `model`: with an adapter, its base in
    directory/base."""
    base = directory / "base"
    model = model or tiny_models.make(name, base, DTYPES[dtype])
    documents = tiny_models.documents(name, model)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    ours = tool.run(base, documents, directory / "run", dtype=dtype, steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY,
                    **tiny_models.options(name), **options)
    return dtype, comparable(name, ours), comparable(name, theirs)


def comparable(name, result):
    """By the names that the text model has alone, and that peft has in files."""
    out = dict(result)
    for what in {"gradients", "weights", "masters", "first_weights"}.intersection(result):
        tensors = {tiny_models.canonical(key).replace(".default.", "."): tensor
                   for key, tensor in tiny_models.as_in_files(name, result[what]).items()}
        out[what] = determined(tensors, tiny_models.idle(name))
    return out


@pytest.fixture(scope="module", params=alternating(tiny_models.MODELS, DTYPES), ids="-".join)
def pair(request, tmp_path_factory):
    return compared(*request.param, tmp_path_factory.mktemp("model"))


def test_logits_agree(pair):
    dtype, ours, theirs = pair
    check(dtype, ours["logits"], theirs["logits"])


def test_the_loss_agrees(pair):
    dtype, ours, theirs = pair
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=LOSS[dtype])
    if dtype == "fp32":
        assert ours["token_accuracy"].item() == pytest.approx(theirs["token_accuracy"].item(), abs=1e-6)


def test_the_gradient_of_every_parameter_agrees(pair):
    dtype, ours, theirs = pair
    check_all(dtype, ours["gradients"], theirs["gradients"])


def test_five_adamw_steps_agree(pair):
    dtype, ours, theirs = pair
    check_all(dtype, ours["weights"], theirs["weights"])
    check_changes(dtype, ours["masters"], theirs)
    assert ours["losses"].tolist() == pytest.approx(theirs["losses"].tolist(), rel=LOSSES[dtype])
    assert theirs["losses"][-1] < theirs["losses"][0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama_every_head_its_own_keys_odd_sizes", "qwen3_tied_biases"])
def test_a_wrong_rate_decay_or_a_tensor_left_out_is_seen(tmp_path, name, dtype):
    model = tiny_models.make(name, tmp_path, DTYPES[dtype])
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    right = dict(dtype=dtype, steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY)
    masters = lambda **wrong: tool.run(tmp_path, documents, tmp_path / "run", **{**right, **wrong})["masters"]
    check_changes(dtype, masters(), theirs)
    for wrong in (dict(lr=1.05 * LR), dict(lr=0.95 * LR), dict(weight_decay=0.0)):
        with pytest.raises(AssertionError):
            check_changes(dtype, masters(**wrong), theirs)
    for left_out in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        with pytest.raises(AssertionError):
            check_changes(dtype, {**masters(), left_out: theirs["first_weights"][left_out]}, theirs)


# train.only, of a model, and which of its tensors these are.
ONLY = {
    "layers": ("qwen3_untied", ["model.layers"], lambda name: "layers." in name),
    "head": ("qwen3_untied", ["lm_head"], lambda name: name.startswith("lm_head.")),
    "head_and_norm": ("qwen3_untied", ["lm_head", "model.norm"], lambda name: name.startswith(("lm_head.", "model.norm."))),
    "norms": ("qwen3_untied", ["norm", "q_norm", "k_norm", "post_attention_layernorm"],
              lambda name: any(part in name for part in (".norm.", ".q_norm.", ".k_norm.", ".post_attention_layernorm."))),
    "layers_of_a_tied_one": ("qwen3_tied_biases", ["model.layers"], lambda name: "layers." in name),
    "embedding_of_a_tied_one": ("qwen3_tied_biases", ["embed_tokens"], lambda name: "embed_tokens." in name),
    "a_middle_layer": ("qwen3_tied_biases", ["regex:layers[.]1[.]"], lambda name: ".layers.1." in name),
    "an_mlp": ("qwen3_tied_biases", ["layers.1.mlp", "layers.2.self_attn"], lambda name: ".layers.1.mlp." in name or ".layers.2.self_attn." in name),
}


@pytest.mark.parametrize("case", ONLY)
def test_five_steps_of_some_tensors_are_torchs(tmp_path, case):
    name, only, chosen = ONLY[case]
    model = tiny_models.make(name, tmp_path / "model", torch.float32)
    for tensor, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(tensor))
    documents = tiny_models.documents(name, model)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY, max_norm=0.5)
    right = dict(steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY, max_grad_norm=0.5, only=json.dumps(only))
    run = lambda **more: tool.run(tmp_path / "model", documents, tmp_path / "run", **right, **more)
    ours = run(micro_batches=2)
    check_all("fp32", ours["gradients"], theirs["gradients"])
    check_all("fp32", ours["weights"], theirs["weights"])
    check_changes("fp32", ours["masters"], theirs)
    assert ours["losses"].tolist() == pytest.approx(theirs["losses"].tolist(), rel=LOSSES["fp32"])
    assert ours["norms"].tolist() == pytest.approx(theirs["norms"], rel=1e-4)
    others = [dict(recompute="block"), dict(recompute="attention")]
    if "tied_" in name and "untied" not in name:
        others += [dict(off_device="disk"), dict(off_device="disk", recompute="block")]
    for more in others:
        again = run(micro_batches=2, **more)
        assert all((again[what] == ours[what]).all() for what in ("losses", "norms")), more
        assert all((again["masters"][tensor] == ours["masters"][tensor]).all() for tensor in ours["masters"]), more
