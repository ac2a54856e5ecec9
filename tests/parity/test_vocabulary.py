"""Vocabulary matrices and norms that are trained beside adapters (lora.also), and rows of the embedding (lora.tokens), against peft's
modules_to_save and trainable_token_indices."""

import copy
import json

import peft
import pytest
import reference
import tiny_models
import tool
import torch
from bounds import check_changes
from safetensors.torch import load_file
from test_models import LR, STEPS, WEIGHT_DECAY, check, check_all

LINEAR = ["q_proj", "v_proj", "down_proj"]
ALL = ["embed_tokens", "lm_head", "norm"]

# name -> (model, LoraConfig's arguments); tied models share one matrix.
WHOLE = {
    "tied": ("llama_three_heads_per_key_tied_with_pad_token", dict(target_modules=LINEAR, modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "tied_by_both_names": ("qwen3_tied_biases", dict(target_modules=LINEAR, modules_to_save=ALL, ensure_weight_tying=True)),
    "untied": ("qwen3_untied", dict(target_modules=LINEAR, modules_to_save=ALL)),
    "untied_head_alone": ("qwen2_untied", dict(target_modules=LINEAR, modules_to_save=["lm_head", "model.norm"])),
    "scaled_embedding": ("gemma", dict(target_modules=LINEAR, modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "scaled_and_capped": ("gemma2", dict(target_modules=LINEAR, modules_to_save=ALL, ensure_weight_tying=True)),
    "embedding_of_an_untied_dora":
        ("llama_every_head_its_own_keys_odd_sizes", dict(target_modules=LINEAR, modules_to_save=["embed_tokens"], use_dora=True)),
    "positions_and_norms_of_gpt2": ("gpt2_odd_own_width", dict(target_modules=["c_attn"], modules_to_save=["wpe", "ln_1", "ln_2", "ln_f"])),
}


# Token 3 is the pad token where the model has one, and occurs in every document; 330 is the last one.
TOKENS = [16, 17, 18, 3, 330, 20]
ROWS = {
    "tied": ("llama_three_heads_per_key_tied_with_pad_token", dict(target_modules=LINEAR, trainable_token_indices=TOKENS)),
    "untied_beside_norms": ("qwen3_untied", dict(target_modules=LINEAR, trainable_token_indices={"embed_tokens": TOKENS}, modules_to_save=["norm"])),
    "scaled": ("gemma", dict(target_modules=LINEAR, trainable_token_indices=TOKENS[:4])),
    "capped_dora": ("gemma2", dict(target_modules=LINEAR, trainable_token_indices=TOKENS[:4], use_dora=True)),
    "untied_with_its_head": ("qwen2_untied", dict(target_modules=LINEAR, trainable_token_indices=[8, 31], modules_to_save=["lm_head"])),
    "gpt2": ("gpt2_odd_own_width", dict(target_modules=["c_attn"], trainable_token_indices=[0, 1, 2])),
}

# An untied head as a target; peft writes the base's matrix into the file, too.
HEADS = {
    "alone": ("qwen3_untied", dict(target_modules=["lm_head"])),
    "beside_layers": ("llama_every_head_its_own_keys_odd_sizes", dict(target_modules=[*LINEAR, "lm_head"], use_rslora=True)),
    "its_own_rank": ("qwen2_untied", dict(target_modules=[*LINEAR, "lm_head"], rank_pattern={"lm_head": 6}, alpha_pattern={"lm_head": 3},
                                          modules_to_save=["embed_tokens"])),
}

# The embedding, looked up with a scale and without; a pad token's row of B stays as it is.
TABLES = {
    "alone": ("qwen3_untied", dict(target_modules=["embed_tokens"])),
    "beside_layers_and_head": ("llama_every_head_its_own_keys_odd_sizes", dict(target_modules=[*LINEAR, "embed_tokens", "lm_head"], use_rslora=True)),
    "its_own_rank": ("qwen2_untied", dict(target_modules=[*LINEAR, "embed_tokens"], rank_pattern={"embed_tokens": 6}, alpha_pattern={"embed_tokens": 3},
                                          modules_to_save=["lm_head"])),
}


def file_name(parameter):
    """The name that peft gives a parameter of the adapter "default" in its files."""
    name = parameter.replace(".modules_to_save.default", "").replace(".default.", ".").removesuffix(".default")
    return name.removesuffix(".weight") if "magnitude" in name else name


def file_names(tensors):
    return {file_name(name): value for name, value in tensors.items()}


def randomise(model):
    """Adapters that change the model; what is trained whole differs from the base, so that it must be read."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
            parameter.data.copy_(0.1 * noise)
        elif "magnitude" in name:
            parameter.data.mul_(1 + 0.2 * noise)
        else:
            parameter.data.add_(0.05 * noise)


def adapted(base, directory, arguments, dtype=torch.float32):
    """A model with a random adapter, in directory/base and directory/adapter."""
    model = tiny_models.make(base, directory / "base", dtype)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **copy.deepcopy(arguments))  # peft changes the lists that it is given
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    randomise(model)
    model.save_pretrained(directory / "adapter")
    return model


def trained(base, directory, arguments, dtype="fp32", **options):
    """(what lmlaunch makes of five steps, what peft does)"""
    model = adapted(base, directory, arguments, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    documents = reference.random_documents(tiny_models.text_config(model).vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = file_names(theirs[what])
    ours = tool.run(directory / "base", documents, directory / "run", adapter=directory / "adapter", dtype=dtype, steps=STEPS, lr=LR,
                    weight_decay=WEIGHT_DECAY, **options)
    return ours, theirs


def check_run(ours, theirs, dtype="fp32"):
    check(dtype, ours["logits"], theirs["logits"])
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-5 if dtype == "fp32" else 5e-3)
    if dtype == "fp32":
        errors = reference.worst(ours["gradients"], theirs["gradients"], reference.relative)
        assert errors[0][0] <= 1e-5 or errors[0][0] <= 2e-5 and "magnitude" in errors[0][1], errors[:5]
        assert ours["losses"].tolist() == pytest.approx(theirs["losses"].tolist(), rel=1e-5)
    check_all(dtype, ours["gradients"], theirs["gradients"])
    check_all(dtype, ours["weights"], theirs["weights"])
    check_changes(dtype, ours["masters"], theirs)
    assert theirs["losses"][-1] < theirs["losses"][0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name,recompute", [(name, ("none", "block")[i % 2]) for i, name in enumerate(WHOLE)])
def test_modules_that_are_trained_whole_train_as_with_peft(tmp_path, name, recompute):
    base, arguments = WHOLE[name]
    ours, theirs = trained(base, tmp_path, arguments, recompute=recompute, micro_batches=1 + len(name) % 2)
    saved = set(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    # The head's copy of a matrix that it shares with the embedding is in peft's file, too.
    assert saved - set(ours["gradients"]) <= {"base_model.model.lm_head.weight"} and any("lora_" not in tensor for tensor in ours["gradients"])
    check_run(ours, theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tied", "untied", "scaled_and_capped"])
def test_in_bf16_they_have_masters_as_in_full_fine_tuning(tmp_path, name):
    base, arguments = WHOLE[name]
    ours, theirs = trained(base, tmp_path, arguments, dtype="bf16")
    check_run(ours, theirs, "bf16")
    rounded = lambda w: w.bfloat16().float()
    for tensor in (t for t in ours["weights"] if "lora_" not in t):
        assert torch.equal(ours["weights"][tensor], rounded(ours["weights"][tensor])), tensor
        assert not torch.equal(ours["masters"][tensor], rounded(ours["masters"][tensor])), tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name,recompute", [(name, ("block", "none")[i % 2]) for i, name in enumerate(ROWS)])
def test_rows_of_tokens_train_as_with_peft(tmp_path, name, recompute):
    base, arguments = ROWS[name]
    ours, theirs = trained(base, tmp_path, arguments, recompute=recompute, micro_batches=1 + len(name) % 2)
    assert set(ours["gradients"]) == set(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    assert sum("trainable_tokens_delta" in tensor for tensor in ours["gradients"]) == 1
    check_run(ours, theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name,dtype,micro_batches", [("alone", "fp32", 1), ("beside_layers", "fp32", 2), ("its_own_rank", "fp32", 1), ("beside_layers", "bf16", 1)])
def test_an_adapter_of_the_head_trains_as_with_peft(tmp_path, name, dtype, micro_batches):
    base, arguments = HEADS[name]
    ours, theirs = trained(base, tmp_path, arguments, dtype=dtype, micro_batches=micro_batches)
    saved = set(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    assert saved - set(ours["gradients"]) == {"base_model.model.lm_head.base_layer.weight"} and set(ours["gradients"]) <= saved
    check_run(ours, theirs, dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name,dtype,micro_batches", [("alone", "fp32", 1), ("beside_layers_and_head", "fp32", 2), ("its_own_rank", "fp32", 1), ("beside_layers_and_head", "bf16", 2)])
def test_an_adapter_of_the_embedding_trains_as_with_peft(tmp_path, name, dtype, micro_batches):
    base, arguments = TABLES[name]
    ours, theirs = trained(base, tmp_path, arguments, dtype=dtype, micro_batches=micro_batches)
    saved = set(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    assert all("base_layer" in tensor for tensor in saved - set(ours["gradients"])) and set(ours["gradients"]) <= saved
    assert sum("lora_embedding" in tensor for tensor in ours["gradients"]) == 2
    check_run(ours, theirs, dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_tied_head_gets_no_adapter(tmp_path, module):
    adapted("gemma", tmp_path / "tied", dict(target_modules=["q_proj", module]))
    with pytest.raises(AssertionError, match="a head that is tied to it"):
        tool.run(tmp_path / "tied/base", reference.random_documents(128), tmp_path / "run", adapter=tmp_path / "tied/adapter")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name,adapters", [("tied", "auto"), ("scaled", "fp32"), ("untied_beside_norms", "auto")])
def test_rows_of_tokens_of_a_bf16_model_have_masters(tmp_path, name, adapters):
    base, arguments = ROWS[name]
    ours, theirs = trained(base, tmp_path, arguments, dtype="bf16", adapter_dtype=adapters)
    check_run(ours, theirs, "bf16")
    rows, masters = (next(v for k, v in ours[what].items() if "tokens_delta" in k) for what in ("weights", "masters"))
    assert torch.equal(rows, rows.bfloat16().float()) == (adapters == "auto") and not torch.equal(masters, masters.bfloat16().float())


@pytest.mark.filterwarnings("ignore")
def test_generation_reads_the_trained_rows(tmp_path):
    base, arguments = ROWS["tied"]
    model = adapted(base, tmp_path, arguments).eval()
    documents = reference.random_documents(model.config.vocab_size, lengths=(6, 9))
    for row in model.named_parameters():
        if "tokens_delta" in row[0]:
            assert row[1].shape[0] == len(TOKENS)
    made = tool.run(tmp_path / "base", documents, tmp_path / "run", adapter=tmp_path / "adapter", generate=8, together="yes")
    for document, tokens in zip(documents, made):
        text = document.token[None]
        for _ in range(8):
            text = torch.cat([text, model(input_ids=text).logits[:, -1:].argmax(-1)], 1)
        assert text[0, -8:].tolist() == tokens.tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("indices, told", [({"lm_head": [1]}, "only those of the embedding"), ([1, 1], "has 1 twice"), ([331], "in 0 .. 330"),
                                           (["a"], "in 0 .. 330"), (7, "a list of tokens")])
def test_indices_that_mean_no_rows_of_the_embedding_are_refused(tmp_path, indices, told):
    adapted("qwen3_untied", tmp_path, dict(target_modules=LINEAR))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({**config, "trainable_token_indices": indices}))
    with pytest.raises(AssertionError, match=told):
        tool.run(tmp_path / "base", reference.random_documents(331), tmp_path / "run", adapter=tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
def test_tied_copies_that_drifted_apart_are_refused(tmp_path):
    """peft without ensure_weight_tying trains two matrices, of which a tied model has one."""
    base, arguments = "llama_three_heads_per_key_tied_with_pad_token", dict(target_modules=LINEAR, modules_to_save=["embed_tokens", "lm_head"])
    model = adapted(base, tmp_path, arguments)
    documents = reference.random_documents(model.config.vocab_size)
    with pytest.raises(AssertionError, match="PEFT has trained two matrices"):
        tool.run(tmp_path / "base", documents, tmp_path / "run", adapter=tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    with pytest.raises(AssertionError, match="the head without the embedding"):
        tool.run(tmp_path / "base", documents, tmp_path / "run", adapter=tmp_path / "adapter")
