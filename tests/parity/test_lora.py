"""LoRA against peft: a random adapter (B not zero) continued on a frozen model."""

import numpy as np
import peft
import pytest
import reference
import tiny_models
import tool
import torch
from counts import alternating
from bounds import check_changes
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
    "all_linear_of_smollm3":
        ("smollm3_every_second_layer_without_positions", dict(r=4, lora_alpha=8, target_modules=ATTENTION + MLP)),
    "ranks_and_alphas_by_pattern":
        ("qwen3_untied", dict(r=4, lora_alpha=8, target_modules=ATTENTION + MLP, exclude_modules=["k_proj"], layers_to_transform=[1, 2],
                              rank_pattern={"q_proj": 2, r"layers\.2\.mlp\..*": 6}, alpha_pattern={"down_proj": 3, "layers.1.self_attn.v_proj": 16},
                              use_rslora=True)),
    "up_of_mistral": ("mistral_window_shorter_than_documents", dict(r=2, lora_alpha=2, target_modules=["up_proj", "k_proj"])),
}


# The same with trained lengths of rows, whose reference is a product slower: a test of its own, and one in test_qlora.py.
DORA = {
    "all_linear_dora":
        ("llama_three_heads_per_key_tied_with_pad_token", dict(r=8, lora_alpha=16, target_modules=ATTENTION + MLP, use_dora=True)),
    "biased_dora_rslora":
        ("qwen2_untied", dict(r=5, lora_alpha=7, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True, use_dora=True)),
    "mlp_dora_of_qwen3": ("qwen3_untied", dict(r=3, lora_alpha=12, target_modules=MLP, use_dora=True)),
}


def file_name(parameter):
    """The name that peft gives a parameter of the adapter "default" in its files."""
    name = parameter.replace(".default.", ".").removesuffix(".default")
    return name.removesuffix(".weight") if "magnitude" in name else name


def randomise(model, config):
    """A and B such that scale * B A is a third of a weight in size: larger ones make the model's gradients so steep that
    two bf16 runs of peft itself no longer agree."""
    generator, r = torch.Generator().manual_seed(11), config["r"]
    scale = config["lora_alpha"] / (r ** 0.5 if config.get("use_rslora") else r)
    std = {"lora_A": MATRIX_STD, "lora_B": 1 / 3 / (scale * r ** 0.5)}
    for name, parameter in model.named_parameters():
        if "magnitude" in name:  # of DoRA: lengths that are not the rows' own
            parameter.data.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
        elif parameter.requires_grad:
            parameter.data.copy_(std[name.split(".")[-3]] * torch.randn(parameter.shape, generator=generator))


def file_names(tensors):
    return {file_name(name): value for name, value in tensors.items()}


def adapted(base, directory, arguments, dtype=torch.float32, dropout=0.0, fp32_adapters=False):
    """A model with a random adapter, in directory/base and directory/adapter. `fp32_adapters`: whatever the model's type, as peft
    has them unless told otherwise."""
    model = tiny_models.make(base, directory / "base", dtype)
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=dropout, **arguments)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=fp32_adapters)
    randomise(model, arguments)
    model.save_pretrained(directory / "adapter")
    return model


@pytest.fixture(scope="module", params=alternating(ADAPTERS, DTYPES), ids="-".join)
def pair(request, tmp_path_factory):
    name, dtype = request.param
    base, arguments = ADAPTERS[name]
    directory = tmp_path_factory.mktemp("model")
    model = adapted(base, directory, arguments, DTYPES[dtype])
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = file_names(theirs[what])
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
    check_changes(dtype, ours["masters"], theirs)
    assert theirs["losses"][-1] < theirs["losses"][0]


# fp32 adapters over a bf16 model, peft's own default: bf16 ones within the same bounds, and nothing of them rounded to bf16.

@pytest.fixture(scope="module", params=ADAPTERS)
def wide(request, tmp_path_factory):
    base, arguments = ADAPTERS[request.param]
    directory = tmp_path_factory.mktemp("wide")
    model = adapted(base, directory, arguments, torch.bfloat16, fp32_adapters=True)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32} and model.dtype == torch.bfloat16
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = file_names(theirs[what])
    options = dict(adapter=directory / "adapter", dtype="bf16", steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY)
    runs = {kind: tool.run(directory / "base", documents, directory / kind, adapter_dtype=kind, **options) for kind in ("fp32", "auto")}
    return runs, theirs


def test_fp32_adapters_over_a_bf16_model_are_as_pefts(wide):
    ours, theirs = wide[0]["fp32"], wide[1]
    check("bf16", ours["logits"], theirs["logits"])
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=5e-3)
    check_all("bf16", ours["gradients"], theirs["gradients"])
    check_all("bf16", ours["weights"], theirs["weights"])
    check_changes("bf16", ours["masters"], theirs)
    assert theirs["losses"][-1] < theirs["losses"][0]


def test_fp32_adapters_have_what_bf16_ones_lose(wide):
    fp32, auto = wide[0]["fp32"], wide[0]["auto"]
    rounded = lambda w: w.bfloat16().float()
    for name, weight in fp32["weights"].items():
        assert torch.equal(weight, fp32["masters"][name]) and not torch.equal(weight, rounded(weight)), name
    assert all(torch.equal(w, rounded(w)) for w in auto["weights"].values())


# Dropout: the same function with the same mask, so that its gradient must be the same, too.

def philox(key, c0, c1, c2, c3):
    """Philox4x32-10 of arrays of counters, the four words in front: as published, not as our kernels have it."""
    mask = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, np.uint64) & mask for x in np.broadcast_arrays(c0, c1, c2, c3)]
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ k0, b & mask, (a >> np.uint64(32)) ^ c[3] ^ k1, a & mask]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.stack(c)


def masked(x, p, purpose, tensor, now, seed=42):
    """x [1, T, width] without the features that a number of (seed, step, tensor; sample, position, feature) names, the others scaled."""
    low, high, *_ = (int(word) for word in philox(seed, now.step, 0, tensor, purpose))
    feature, position = np.arange(x.shape[-1]), np.arange(x.shape[-2])[:, None]
    words = philox(low | high << 32, feature // 64 * 16 + feature % 16, 0, position, now.sample)
    number = np.take_along_axis(words, np.broadcast_to(feature // 16 % 4, words.shape[1:])[None], 0)[0]
    keep = torch.from_numpy((number >> np.uint64(8)) / 2 ** 24 >= p)
    return x * keep / (1 - p)


class MaskedDropout(torch.nn.Module):
    PURPOSE = 2
    MODULES = {name: i for i, name in enumerate(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])}

    def __init__(self, name, p, now):
        super().__init__()
        layer = int(name.split(".layers.")[1].split(".")[0])
        self.tensor, self.p, self.now = layer * 8 + self.MODULES[name.split(".")[-1]], p, now

    def forward(self, x):
        return masked(x, self.p, self.PURPOSE, self.tensor, self.now)


class Now:
    """Step and sample at hand: reference.train gives one document after the other, step after step."""

    def __init__(self, documents):
        self.calls, self.documents, self.step, self.sample = 0, documents, 0, 0

    def __call__(self, *_):
        self.step, self.sample = self.calls // self.documents + 1, self.calls % self.documents
        self.calls += 1


DROPOUTS = [(name, p, recompute) for name in ("all_linear", "mlp_of_qwen3") for p in (0.1, 0.5) for recompute in ("none", "block")]


@pytest.mark.parametrize("name,p,recompute", DROPOUTS + [("all_linear_dora", 0.5, "none"), ("biased_dora_rslora", 0.1, "block")])
def test_dropout_backward_has_the_mask_of_its_forward(tmp_path, name, p, recompute):
    base, arguments = (ADAPTERS | DORA)[name]
    model = adapted(base, tmp_path, arguments, dropout=p)
    documents = reference.random_documents(model.config.vocab_size)
    now = Now(len(documents))
    model.register_forward_pre_hook(now)
    for path, module in model.named_modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = MaskedDropout(path, p, now)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = file_names(theirs[what])
    ours = tool.run(tmp_path / "base", documents, tmp_path / "run", adapter=tmp_path / "adapter", recompute=recompute, steps=STEPS, lr=LR,
                    weight_decay=WEIGHT_DECAY)
    assert ours["losses"][:-1].tolist() == pytest.approx(theirs["losses"][:-1].tolist(), rel=1e-5)  # the last one has no dropout
    check_all("fp32", ours["gradients"], theirs["gradients"])
    check_changes("fp32", ours["masters"], theirs)


@pytest.mark.parametrize("name,recompute", [("all_linear_dora", "none"), ("biased_dora_rslora", "none"), ("mlp_dora_of_qwen3", "block")])
def test_dora_trains_as_pefts_does(tmp_path, name, recompute):
    base, arguments = DORA[name]
    model = adapted(base, tmp_path, arguments)
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = file_names(theirs[what])
    assert sum("magnitude" in n for n in theirs["gradients"]) == len(arguments["target_modules"]) * tiny_models.LAYERS
    ours = tool.run(tmp_path / "base", documents, tmp_path / "run", adapter=tmp_path / "adapter", recompute=recompute, steps=STEPS, lr=LR,
                    weight_decay=WEIGHT_DECAY)
    check("fp32", ours["logits"], theirs["logits"])
    errors = reference.worst(ours["gradients"], theirs["gradients"], reference.relative)
    assert errors[0][0] <= 2e-5, errors[:5]
    check_all("fp32", ours["weights"], theirs["weights"])
    check_changes("fp32", ours["masters"], theirs)


def test_dora_with_the_base_s_own_lengths_is_the_base(tmp_path):
    """B = 0 and lengths as they are: nothing changes."""
    base, arguments = DORA["all_linear_dora"]
    model = tiny_models.make(base, tmp_path / "base")
    documents = reference.random_documents(model.config.vocab_size)
    plain = tool.run(tmp_path / "base", documents, tmp_path / "plain")["logits"]
    peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **arguments)).save_pretrained(tmp_path / "adapter")
    assert reference.relative(tool.run(tmp_path / "base", documents, tmp_path / "dora", adapter=tmp_path / "adapter")["logits"], plain) <= 1e-5


# IA3 and LN tuning, whose modules are peft's own choice where none are named.

SCALES, NORMS = peft.IA3Config, peft.LNTuningConfig
OTHERS = {
    "ia3": ("llama_three_heads_per_key_tied_with_pad_token", SCALES, {}, "none"),
    "ia3_beside_biases": ("llama_biases_everywhere", SCALES, {}, "block"),
    "ia3_everywhere": ("qwen3_untied", SCALES, dict(target_modules=ATTENTION + MLP, feedforward_modules=["down_proj"]), "none"),
    "ia3_of_gpt2": ("gpt2_odd_own_width", SCALES, {}, "none"),
    "norms": ("llama_every_head_its_own_keys_odd_sizes", NORMS, {}, "block"),
    "norms_of_qwen3": ("qwen3_untied", NORMS, dict(target_modules=["q_norm", "post_attention_layernorm", "norm"]), "none"),
    "norms_of_gpt2": ("gpt2_odd_own_width", NORMS, {}, "none"),
}


def with_other(base, directory, make, arguments, dtype=torch.float32):
    model = tiny_models.make(base, directory / "base", dtype)
    model = peft.get_peft_model(model, make(task_type="CAUSAL_LM", **arguments), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory / "adapter")
    return model


def trained_both_ways(model, base, directory, dtype, **options):
    documents = tiny_models.documents(base, model)
    theirs = reference.train(model, documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = file_names(theirs[what])
    ours = tool.run(directory / "base", documents, directory / "run", adapter=directory / "adapter", dtype=dtype, steps=STEPS, lr=LR,
                    weight_decay=WEIGHT_DECAY, **tiny_models.options(base), **options)
    return ours, theirs


@pytest.mark.parametrize("name", OTHERS)
def test_factors_and_norms_are_trained_as_pefts(tmp_path, name):
    base, make, arguments, recompute = OTHERS[name]
    ours, theirs = trained_both_ways(with_other(base, tmp_path, make, arguments), base, tmp_path, "fp32", recompute=recompute)
    check("fp32", ours["logits"], theirs["logits"])
    check_all("fp32", ours["gradients"], theirs["gradients"])
    check_all("fp32", ours["weights"], theirs["weights"])
    check_changes("fp32", ours["masters"], theirs)


@pytest.mark.parametrize("name", ["ia3", "norms"])
def test_factors_and_norms_in_fp32_are_of_a_bf16_model(tmp_path, name):
    """The model computes with the rounded values, and nothing of the values themselves is rounded."""
    base, make, arguments, _ = OTHERS[name]
    ours, theirs = trained_both_ways(with_other(base, tmp_path, make, arguments, torch.bfloat16), base, tmp_path, "bf16", adapter_dtype="fp32")
    check("bf16", ours["logits"], theirs["logits"])
    check_all("bf16", ours["gradients"], theirs["gradients"])
    assert all(not torch.equal(w, w.bfloat16().float()) for w in ours["weights"].values())
