"""LoRA against peft: a random adapter (B not zero) continued on a frozen model."""

import peft
import pytest
import reference
import tiny_models
import tool
import torch
from test_models import DTYPES, LR, STEPS, WEIGHT_DECAY, check, check_all
from tiny_models import MATRIX_STD

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

# name -> (model, LoraConfig's arguments)
ADAPTERS = {
    "all_linear": ("llama_three_heads_per_key_tied_with_pad_token", dict(r=8, lora_alpha=16, target_modules=ATTENTION + MLP)),
    "query_and_value_rslora":
        ("llama_every_head_its_own_keys_odd_sizes", dict(r=5, lora_alpha=7, target_modules=["q_proj", "v_proj"], use_rslora=True)),
    "beside_biases": ("llama_biases_everywhere", dict(r=4, lora_alpha=4, target_modules=["k_proj", "o_proj", "down_proj"])),
    "mlp_of_qwen3": ("qwen3_untied", dict(r=3, lora_alpha=12, target_modules=MLP)),
    "all_linear_of_qwen2": ("qwen2_untied", dict(r=8, lora_alpha=32, target_modules=ATTENTION + MLP, use_rslora=True)),
    "up_of_mistral": ("mistral_window_shorter_than_documents", dict(r=2, lora_alpha=2, target_modules=["up_proj", "k_proj"])),
}


def file_name(parameter):
    """The name that peft gives a parameter of the adapter "default" in its files."""
    return parameter.replace(".default.", ".")


def randomise(model, config):
    """A and B such that scale * B A is a third of a weight in size: larger ones make the model's gradients so steep that
    two bf16 runs of peft itself no longer agree."""
    generator, r = torch.Generator().manual_seed(11), config["r"]
    scale = config["lora_alpha"] / (r ** 0.5 if config.get("use_rslora") else r)
    std = {"lora_A": MATRIX_STD, "lora_B": 1 / 3 / (scale * r ** 0.5)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(std[name.split(".")[-3]] * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module", params=[(n, d) for n in ADAPTERS for d in DTYPES], ids="-".join)
def pair(request, tmp_path_factory):
    name, dtype = request.param
    base, arguments = ADAPTERS[name]
    directory = tmp_path_factory.mktemp("model")
    model = tiny_models.make(base, directory / "base", DTYPES[dtype])
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **arguments)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    randomise(model, arguments)
    model.save_pretrained(directory / "adapter")
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights"):
        theirs[what] = {file_name(name): value for name, value in theirs[what].items()}
    ours = tool.run(directory / "base", documents, directory / "run", adapter=directory / "adapter", dtype=dtype, steps=STEPS,
                    lr=LR, weight_decay=WEIGHT_DECAY)
    return dtype, ours, theirs


def test_logits_with_the_adapter_agree(pair):
    dtype, ours, theirs = pair
    check(dtype, ours["logits"], theirs["logits"])
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-5 if dtype == "fp32" else 5e-3)


def test_gradients_of_a_and_b_agree_and_nothing_else_has_one(pair):
    dtype, ours, theirs = pair
    check_all(dtype, ours["gradients"], theirs["gradients"])


def test_five_adamw_steps_of_the_adapter_agree(pair):
    dtype, ours, theirs = pair
    check_all(dtype, ours["weights"], theirs["weights"])
    assert theirs["losses"][-1] < theirs["losses"][0]
