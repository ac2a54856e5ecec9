"""The families beyond Llama's relatives (tiny_families.py) against transformers: what test_models.py asks of the others; then each form
that files of one model may have, and LoRA against peft where a file's module is more than one projection, or its matrix lies
the other way round, or the model is a part of another one."""

import json
import re
from unittest import mock

import pytest
import reference
import tiny_models
import tool
import torch
from bounds import LOSS, LR, STEPS, WEIGHT_DECAY, check, check_all, check_changes
from peft.utils import transformers_weight_conversion
from quantized_base import four_bits
from safetensors.torch import load_file, save_file
from test_lora import Now, adapted, masked
from test_models import DTYPES, comparable, compared
from test_models import (test_five_adamw_steps_agree, test_logits_agree, test_the_gradient_of_every_parameter_agrees,  # noqa: F401
                         test_the_loss_agrees)
from tiny_families import FAMILIES
from transformers.pytorch_utils import Conv1D


@pytest.fixture(scope="module", params=tiny_models.compared(FAMILIES, DTYPES), ids="-".join)
def pair(request, tmp_path_factory):
    return compared(*request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", [name for name in FAMILIES if tiny_models.idle(name)])
def test_elements_that_are_set_aside_have_no_gradient(name, tmp_path):
    model = tiny_models.make(name, tmp_path)
    documents = tiny_models.documents(name, model)
    ours = tool.run(tmp_path, documents, tmp_path / "run")["gradients"]
    found = []
    for end, period, first, last in tiny_models.idle(name):
        for value in (value.flatten() for key, value in ours.items() if key.endswith(end)):
            place = torch.arange(value.numel()) % period
            found.append((value[(place >= first) & (place < last)].abs().max() / value.abs().max()).item())
    assert found and max(found) < 1e-5, found


FP16 = 2e-2  # relative


@pytest.mark.parametrize("name", [*tiny_models.MODELS, *FAMILIES])
def test_five_steps_in_fp16_are_near_those_in_fp32(name, tmp_path):
    """Losses after each step, and what the masters have become."""
    documents = tiny_models.documents(name, tiny_models.make(name, tmp_path))
    train = lambda **more: tool.run(tmp_path, documents, tmp_path / "run", steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY,
                                    **tiny_models.options(name), **more)
    exact, half = train(), train(dtype="fp16", master="fp32")
    assert half["losses"].tolist() == pytest.approx(exact["losses"].tolist(), rel=FP16)
    assert half["norms"].tolist() == pytest.approx(exact["norms"].tolist(), rel=FP16)
    assert half["losses"].tolist() != exact["losses"].tolist()
    together = lambda result: torch.cat([result["masters"][key].flatten() for key in sorted(exact["masters"])])
    assert reference.relative(together(half), together(exact)) <= FP16


# ---- dropouts of the model ------------------------------------------------------------------------------------------

class Dropped:
    """torch's dropout with masks of this program: of the calls that drop anything, a document's first one is the embedding's, and the
    others are those of sublayers, in their order."""
    PURPOSE, SUBLAYERS = 6, 8

    def __init__(self, now):
        self.now, self.calls = now, 0

    def begin(self, *_):
        self.calls = 0

    def __call__(self, x, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return x
        block, sublayer = (1 + (self.calls - 1) // 2, (self.calls - 1) % 2) if self.calls else (0, 0)
        self.calls += 1
        return masked(x, p, self.PURPOSE, block * self.SUBLAYERS + sublayer, self.now)


@pytest.mark.parametrize("name, keys", [("gpt2", ("embd_pdrop", "resid_pdrop")), ("starcoder2", ("embedding_dropout", "residual_dropout"))])
def test_what_a_model_drops_is_dropped_in_training_alone(name, keys, tmp_path, monkeypatch):
    model = tiny_models.make(name, tmp_path / "base", **dict(zip(keys, (0.2, 0.4))))
    documents = tiny_models.documents(name, model)
    now = Now(len(documents))
    dropped = Dropped(now)
    monkeypatch.setattr(torch.nn.functional, "dropout", dropped)
    for hook in (now, dropped.begin):
        model.register_forward_pre_hook(hook)
    theirs = comparable(name, reference.train(model, documents, STEPS, LR, WEIGHT_DECAY))
    assert dropped.calls == 1 + 2 * len(read_layers(model))
    evaluated = reference.forward(model.eval(), documents)[1].item()
    runs = [tool.run(tmp_path / "base", documents, tmp_path / "run", steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY, **more)
            for more in (dict(recompute="none"), dict(recompute="block"), dict(recompute="block", off_device="disk"), dict(recompute="attention"))]
    assert runs[1]["bytes"] == runs[0]["bytes"] and runs[3]["bytes"] == runs[0]["bytes"]
    # The tool does not write gradients that lie on disk.
    assert torch.equal(runs[2]["losses"], runs[0]["losses"]) and torch.equal(runs[2]["norms"], runs[0]["norms"])
    assert runs[2]["masters"].keys() == runs[0]["masters"].keys() and all(torch.equal(runs[2]["masters"][k], v) for k, v in runs[0]["masters"].items())
    ours = comparable(name, runs[0])
    assert ours["losses"].tolist() == pytest.approx([*theirs["losses"][:-1].tolist(), evaluated], rel=1e-4)
    assert abs(ours["losses"][-1] - theirs["losses"][-1]) > 1e-3  # not what dropout makes of it
    check_all("fp32", ours["gradients"], theirs["gradients"])
    check_changes("fp32", ours["masters"], theirs)


def read_layers(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


# ---- forms of files -------------------------------------------------------------------------------------------------

def read_config(directory):
    return json.loads((directory / "config.json").read_text())


def write_config(directory, config):
    (directory / "config.json").write_text(json.dumps(config))


def renamed(directory, change):
    """The tensors under the names that change(name) gives; None: without it."""
    path = directory / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items()}
    tensors.pop(None, None)
    save_file(tensors, path, {"format": "pt"})


def prefixes_of_5(directory):
    """transformers 5 has these in memory, and writes those of 4."""
    renamed(directory, lambda name: re.sub(r"^language_model\.lm_head\.", "lm_head.", re.sub(
        r"^language_model\.model\.", "model.language_model.", re.sub(r"^(vision_tower|multi_modal_projector)\.", r"model.\1.", name))))


def text_class(directory):
    """The text model alone, as its own class saves it."""
    renamed(directory, lambda name: None if tiny_models.is_of_tower(name) else tiny_models.canonical(name.removeprefix("language_model.")))
    text = read_config(directory)["text_config"]
    architecture = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
                    "gemma4_text": "Gemma4ForCausalLM"}
    write_config(directory, {**text, "architectures": [architecture[text["model_type"]]], "dtype": "float32"})


def as_published(directory):
    """The first files of GPT-2: without the module's name, and with the mask of each layer."""
    path = directory / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    layers = {name.split(".")[1] for name in tensors if name.startswith("h.")}
    for layer in layers:
        tensors[f"h.{layer}.attn.bias"] = torch.ones(256, 256).tril().reshape(1, 1, 256, 256)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path, {"format": "pt"})


def old_config(directory):
    tiny_models.write_old_style(directory, keep=["layer_types"])


def sliding_pattern(directory):
    """In place of layer_types, as configurations before these had it."""
    config = read_config(directory)
    write_config(directory, {**{k: v for k, v in config.items() if k not in ("layer_types", "_sliding_window_pattern")}, "sliding_window_pattern": 2})


def without_layer_types(directory):
    config = read_config(directory)
    write_config(directory, {k: v for k, v in config.items() if k != "layer_types"})


def global_sizes(directory):
    """Gemma 4's first files: sizes of full layers under names of their own."""
    config = read_config(directory)
    sizes = config.pop("per_layer_config")
    one = next(iter(sizes.values()))
    write_config(directory, {**config, "global_head_dim": one["head_dim"], "num_global_key_value_heads": one["num_key_value_heads"]})


def keys_that_nobody_reads(directory):
    """Of the layers that borrow: published files have them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2, 4):
        for name, shape in {"k_proj": (32, 64), "v_proj": (32, 64), "k_norm": (16,)}.items():
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(shape)
    save_file(tensors, path, {"format": "pt"})


def tied_head_in_the_file(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})


FORMS = [("phi3_partial_longrope_short_texts", old_config), ("mistral_in_mistral3", prefixes_of_5), ("mistral_in_mistral3", text_class),
         ("mistral_in_mistral3", old_config), ("ministral3_in_mistral3_odd", prefixes_of_5), ("gemma3_text_in_gemma3", prefixes_of_5),
         ("gemma3_text_in_gemma3", text_class), ("gemma3_text_in_gemma3", old_config), ("gemma3_text", old_config),
         ("gemma3_text", sliding_pattern), ("gemma4_text", global_sizes),
         ("gemma4_text_in_gemma4", text_class), ("gemma4_text_odd_inputs_in_gemma4", text_class),
         ("gemma4_text_inputs_and_borrowed_keys", keys_that_nobody_reads), ("glm4", old_config), ("nemotron", old_config), ("granite", old_config),
         ("cohere2", old_config), ("cohere2", without_layer_types), ("starcoder2", old_config), ("gpt2", as_published),
         ("gemma2", without_layer_types), ("gemma2", tied_head_in_the_file), ("exaone4", without_layer_types)]


@pytest.fixture(scope="module")
def first_forms(tmp_path_factory):
    """name -> (documents, what the tool makes of the directory as transformers wrote it)."""
    made = {}

    def get(name):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            documents = tiny_models.documents(name, tiny_models.make(name, directory))
            made[name] = documents, tool.run(directory, documents, directory / "run", **tiny_models.options(name))["bytes"]
        return made[name]

    return get


@pytest.mark.parametrize("name,form", FORMS, ids=lambda value: getattr(value, "__name__", value))
def test_every_form_of_its_files_is_the_same_model(name, form, first_forms, tmp_path):
    documents, expected = first_forms(name)
    tiny_models.make(name, tmp_path)
    form(tmp_path)
    assert tool.run(tmp_path, documents, tmp_path / "run", **tiny_models.options(name))["bytes"] == expected


# ---- LoRA -----------------------------------------------------------------------------------------------------------

# name -> (model, LoraConfig's arguments). A fused module has one pair for all of its projections.
ADAPTERS = {
    "phi3_fused": ("phi3", dict(r=4, lora_alpha=8, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])),
    "phi3_one_of_two_fused": ("phi3_odd_window", dict(r=3, lora_alpha=3, target_modules=["gate_up_proj"])),
    "glm4_fused_mlp": ("glm4", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_up_proj", "down_proj"])),
    "gpt2_transposed":
        ("gpt2", dict(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    "granite_shared_mlp":
        ("granitemoehybrid_dense", dict(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "input_linear", "output_linear"])),
    "plain_mlp": ("nemotron", dict(r=4, lora_alpha=8, target_modules=["up_proj", "down_proj", "k_proj"])),
    "values_that_are_keys": ("gemma4_text", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj"])),
    "inputs_and_borrowed_keys":
        ("gemma4_text_inputs_and_borrowed_keys",
         dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "per_layer_input_gate", "per_layer_projection"])),
    "attention_beside_experts":
        ("qwen3_moe_one_dense_layer", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    "attention_of_mixtral": ("mixtral", dict(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"])),
    "attention_and_mlp_beside_experts":
        ("gemma4_text_experts", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])),
    "attention_and_shared_expert":
        ("qwen2_moe_one_dense_layer", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj",
                                                                              "mlp.shared_expert.down_proj"])),
    # As peft has it without its conversion (as_named below), which makes adapters of all experts of these names instead.
    "attention_and_shared_expert_of_glm":
        ("glm4_moe", dict(r=4, lora_alpha=8, target_modules=r".*\.(self_attn\.[qv]_proj|mlp\.shared_experts\.(gate|up|down)_proj)")),
    "attention_of_minimax_m2": ("minimax_m2", dict(r=4, lora_alpha=8, target_modules=["k_proj", "o_proj"])),
    "attention_of_gpt_oss": ("gpt_oss", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    "attention_of_granitemoe": ("granitemoe", dict(r=4, lora_alpha=8, target_modules=["k_proj", "o_proj"])),
    "behind_norms_and_caps": ("gemma2", dict(r=4, lora_alpha=8, target_modules=["o_proj", "down_proj", "up_proj"])),
    "beside": ("cohere2", dict(r=4, lora_alpha=8, target_modules=["o_proj", "gate_proj", "down_proj"])),
    "inside_gemma3":
        ("gemma3_text_in_gemma3", dict(r=4, lora_alpha=8, target_modules=r".*language_model\..*\.(q_proj|v_proj|up_proj|down_proj)")),
    "inside_mistral3":
        ("mistral_in_mistral3", dict(r=4, lora_alpha=8, target_modules=r".*language_model\..*\.(k_proj|o_proj|gate_proj)")),
}


def as_named(base, *arguments):
    """The adapter on the modules that are named. (peft 0.21 takes GLM's shared expert for all experts, as Qwen2-MoE's it does not.)"""
    with mock.patch.dict(transformers_weight_conversion._MODEL_TO_CONVERSION_PATTERN):
        transformers_weight_conversion._MODEL_TO_CONVERSION_PATTERN.pop("glm4_moe")
        return adapted(base, *arguments)


@pytest.fixture(scope="module", params=tiny_models.compared(ADAPTERS, DTYPES), ids="-".join)
def adapted_pair(request, tmp_path_factory):
    name, dtype = request.param
    base, arguments = ADAPTERS[name]
    directory = tmp_path_factory.mktemp("adapter")
    model = as_named(base, directory, arguments, DTYPES[dtype])
    return compared(base, dtype, directory, model, adapter=directory / "adapter")


def test_an_adapter_is_as_pefts(adapted_pair):
    dtype, ours, theirs = adapted_pair
    check(dtype, ours["logits"], theirs["logits"])
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=LOSS[dtype])
    check_all(dtype, ours["gradients"], theirs["gradients"])
    check_all(dtype, ours["weights"], theirs["weights"])
    check_changes(dtype, ours["masters"], theirs)
    assert theirs["losses"][-1] < theirs["losses"][0]


def quantize_weights(model):
    """Every linear layer of the blocks, in place, as bitsandbytes quantizes it: with a row for each output, however it is stored. Of
    experts each matrix of the files."""
    changed = 0
    for module in model.modules():
        for of_expert in module.gate_up_proj.data if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts") else ():
            for part in of_expert.chunk(2):
                part.copy_(four_bits(part.contiguous(), "nf4", False))
        for of_expert in module.down_proj.data if hasattr(module, "num_experts") and hasattr(module, "down_proj") else ():
            of_expert.copy_(four_bits(of_expert.contiguous(), "nf4", False))
    for name, module in model.named_modules():
        if "lora_" in name or name.endswith("shared_expert_gate") or not isinstance(module, (torch.nn.Linear, Conv1D)) or not re.search(r"\.(layers|h)\.\d", name):
            continue
        weight = module.weight.data
        rows = weight.T.contiguous() if isinstance(module, Conv1D) else weight
        module.weight.data = four_bits(rows, "nf4", False).T.contiguous() if isinstance(module, Conv1D) else four_bits(rows, "nf4", False)
        changed += 1
    return changed


@pytest.mark.parametrize("name", ["phi3_fused", "gpt2_transposed", "values_that_are_keys", "inputs_and_borrowed_keys",
                                  "attention_beside_experts", "attention_and_shared_expert", "attention_of_granitemoe",
                                  "attention_and_shared_expert_of_glm", "attention_of_minimax_m2"])
def test_an_adapter_over_a_quantized_base_is_as_pefts(name, tmp_path):
    base, arguments = ADAPTERS[name]
    model = as_named(base, tmp_path, arguments)
    assert quantize_weights(model) >= 8
    dtype, ours, theirs = compared(base, "fp32", tmp_path, model, adapter=tmp_path / "adapter", quantize="nf4", double_quantize="no")
    check(dtype, ours["logits"], theirs["logits"])
    check_all(dtype, ours["gradients"], theirs["gradients"])
    check_changes(dtype, ours["masters"], theirs)
