"""QLoRA against peft: a random adapter on a frozen model whose linear layers are what bitsandbytes makes of them,
quantized and dequantized."""

import bitsandbytes.functional as bnb
import pytest
import reference
import tiny_models
import tool
import torch
from bounds import check_changes
from quantized_base import four_bits
from test_lora import ADAPTERS, DORA, adapted, file_names
from test_models import LR, STEPS, WEIGHT_DECAY, check, check_all

# name -> (--quantize, --double-quantize)
ENCODINGS = {"nf4": ("nf4", "no"), "nf4_double": ("nf4", "yes"), "fp4": ("fp4", "no"), "int8": ("int8", "no")}


def quantize_weights(model, encoding):
    """Every linear layer of the blocks, in place; adapters and the head stay as they are."""
    kind, double = ENCODINGS[encoding]
    changed = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or parameter.ndim != 2 or "layers" not in name:
            continue
        weight = parameter.data
        if kind == "int8":
            parameter.data = bnb.int8_vectorwise_dequant(*bnb.int8_vectorwise_quant(weight)[:2]).to(weight.dtype)
        else:
            parameter.data = four_bits(weight, kind, double == "yes")
        changed += 1
    assert changed == 7 * tiny_models.LAYERS


@pytest.fixture(scope="module", params=[(n, e) for i, n in enumerate(ADAPTERS) for e in
                                        (["nf4", "nf4_double"] if i else ENCODINGS)] + [("all_linear_dora", "nf4_double"),
                                                                                        ("biased_dora_rslora", "int8")], ids="-".join)
def pair(request, tmp_path_factory):
    name, encoding = request.param
    base, arguments = (ADAPTERS | DORA)[name]
    directory = tmp_path_factory.mktemp("model")
    model = adapted(base, directory, arguments)
    quantize_weights(model, encoding)
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = file_names(theirs[what])
    quantize, double = ENCODINGS[encoding]
    ours = tool.run(directory / "base", documents, directory / "run", adapter=directory / "adapter", steps=STEPS, lr=LR,
                    weight_decay=WEIGHT_DECAY, quantize=quantize, double_quantize=double)
    return ours, theirs


def test_logits_over_the_quantized_base_agree(pair):
    ours, theirs = pair
    check("fp32", ours["logits"], theirs["logits"])
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-5)


def test_gradients_of_a_and_b_agree_and_nothing_else_has_one(pair):
    ours, theirs = pair
    check_all("fp32", ours["gradients"], theirs["gradients"])


def test_five_adamw_steps_of_the_adapter_agree(pair):
    ours, theirs = pair
    check_all("fp32", ours["weights"], theirs["weights"])
    check_changes("fp32", ours["masters"], theirs)
    assert theirs["losses"][-1] < theirs["losses"][0]


@pytest.mark.parametrize("encoding", ["nf4_double", "int8"])
def test_fp32_adapters_over_a_quantized_bf16_model_are_as_pefts(tmp_path, encoding):
    base, arguments = ADAPTERS["all_linear"]
    model = adapted(base, tmp_path, arguments, torch.bfloat16, fp32_adapters=True)
    quantize_weights(model, encoding)
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = file_names(theirs[what])
    quantize, double = ENCODINGS[encoding]
    ours = tool.run(tmp_path / "base", documents, tmp_path / "run", adapter=tmp_path / "adapter", dtype="bf16", adapter_dtype="fp32",
                    steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY, quantize=quantize, double_quantize=double)
    check("bf16", ours["logits"], theirs["logits"])
    check_all("bf16", ours["gradients"], theirs["gradients"])
    check_all("bf16", ours["weights"], theirs["weights"])
    check_changes("bf16", ours["masters"], theirs)


def test_quantizing_changes_the_result():
    """Else the comparisons above show nothing."""
    weight = torch.randn(96, 40, generator=torch.Generator().manual_seed(3)) * 0.1
    once, twice = (four_bits(weight, "nf4", double) for double in (False, True))
    assert (once - weight).norm() > 0.02 * weight.norm()
    assert not torch.equal(once, twice)
