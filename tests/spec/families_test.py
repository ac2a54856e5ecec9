"""What our side reads from a config.json against the class that transformers builds from it: names and shapes of tensors, and what
the layers compute.

Called by ctest with LM_WEIGHTS_TOOL = the path of weights_tool.
"""
import copy
import json
import math
import os
import subprocess
import sys

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

sys.path[:0] = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "..", "parity")]
from expert_files import all_in_files  # noqa: E402
from published import PUBLISHED, SPARSE, SWITCHES, least  # noqa: E402

TOOL = os.environ.get("LM_WEIGHTS_TOOL")
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

CONFIGS = {**PUBLISHED, **SPARSE, **SWITCHES}
TOWERS = ("vision_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.", "audio_tower.", "vision_embedder.")
SAYS_NOTHING_OF_TYING = {"Mistral-Small-3.1"}  # such a file holds a head; the class would take it for tied
NORMS = ["rms", "rms late", "rms offset", "rms plain", "layer", "layer offset", "layer without bias"]  # NormKind
ACTIVATIONS = [torch.nn.functional.silu, lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
               lambda x: torch.nn.functional.relu(x).square()]  # Activation


def tool(config, directory, *arguments, code=0):
    (directory / "config.json").write_text(json.dumps(config))
    done = subprocess.run([TOOL, "spec", str(directory), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


class Reference:
    """The class that transformers builds, without memory."""

    def __init__(self, config, directory):
        (directory / "config.json").write_text(json.dumps(config))
        self.config = transformers.AutoConfig.from_pretrained(directory)
        self.text = self.config.get_text_config()
        cls = (getattr(transformers, config["architectures"][0]) if "architectures" in config
               else transformers.AutoModelForCausalLM._model_mapping[type(self.config)])
        with torch.device("meta"):
            self.model = cls._from_config(self.config, attn_implementation="eager")
        inner = self.model.transformer if hasattr(self.model, "transformer") else self.model.model
        self.decoder = getattr(inner, "language_model", inner)
        self.layers = getattr(self.decoder, "layers", None) or self.decoder.h
        self.embedding = getattr(self.decoder, "embed_tokens", None) or self.decoder.wte
        self.norm = getattr(self.decoder, "norm", None) or self.decoder.ln_f
        self.module = sys.modules[type(self.attention(0)).__module__]

    def attention(self, i):
        layer = self.layers[i]
        return getattr(layer, "self_attn", None) or layer.attn

    def tensors(self):
        out = {}
        for name, tensor in all_in_files(self.text.model_type, self.model.state_dict()).items():
            name = name.replace("model.language_model.", "model.").replace("language_model.model.", "model.")
            if not name.removeprefix("model.").startswith(TOWERS):
                out[name] = list(tensor.shape)
        return out

    def kind(self, i):
        kinds = getattr(self.text, "layer_types", None)
        return kinds[i] if kinds else None

    def window(self, i):
        window = getattr(self.text, "sliding_window", None) or 0
        return window if self.kind(i) in (None, "sliding_attention") else 0

    def source(self, i):
        """Of layer i: whose keys and values it reads; -1: its own."""
        modes = getattr(self.text, "kv_sharing_modes", [None] * len(self.layers))
        return next(j for j in range(i) if modes[j] == "store" and self.kind(j) == self.kind(i)) if modes[i] == "reuse" else -1

    def rotates(self, i):
        attention, family = self.attention(i), self.text.model_type
        if family == "exaone4":
            return self.text.sliding_window is None or attention.is_sliding
        if family == "cohere2":
            return attention.sliding_window is not None
        return getattr(self.decoder, "rotary_emb", None) is not None and bool(getattr(attention, "use_rope", True))

    def frequencies(self, i):
        """Of layer i, and the factor of its cosines."""
        rotary = type(self.decoder.rotary_emb)(self.text)
        prefix = f"{self.kind(i)}_" if hasattr(rotary, f"{self.kind(i)}_inv_freq") else ""
        return getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")

    def neighbours(self):
        quarter = lambda x: self.module._apply_rotary_emb(x, torch.zeros(2), torch.ones(2))
        turned = getattr(self.module, "rotate_half", quarter)(torch.arange(4.0))
        return turned.tolist() == [-1, 0, -3, 2]


def norm_kind(module):
    """The name of what it computes in bf16."""
    module = copy.deepcopy(module).to_empty(device="cpu").to(torch.bfloat16)
    width = next(module.parameters()).shape[0]
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(8, width, generator=generator).to(torch.bfloat16)
    eps = getattr(module, "eps", None) or module.variance_epsilon
    weight, wide = module.weight.detach().float(), x.float()
    if torch.allclose(module(x + 50).float(), module(x).float(), atol=1):  # whatever the mean
        hat = torch.nn.functional.layer_norm(wide, (width,), eps=eps)
        bias = getattr(module, "bias", None)
        rows = ({"layer": weight * hat + bias.detach().float(), "layer offset": (1 + weight) * hat + bias.detach().float()}
                if bias is not None else {"layer without bias": weight * hat})
        near = [name for name, row in rows.items() if torch.allclose(module(x).float(), row, atol=0.05, rtol=0.02)]
    else:
        hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        rows = {"rms": weight.to(torch.bfloat16) * hat.to(torch.bfloat16), "rms late": (weight * hat).to(torch.bfloat16),
                "rms offset": ((1 + weight) * hat).to(torch.bfloat16)}
        # pow(-0.5) in place of rsqrt moves a last bit now and then.
        near = [name for name, row in rows.items() if (module(x) == row).float().mean() > 0.99]
    assert len(near) == 1, (type(module).__name__, near)
    return near[0]


def check_layer(spec, reference, i):
    ours, layer, attention = spec["layers"][i], reference.layers[i], reference.attention(i)
    assert ours["window"] == reference.window(i)
    assert ours["rope"] == reference.rotates(i)
    assert ours["scale"] == pytest.approx(attention.scaling, rel=1e-6)
    cap = attention.attn_logit_softcapping if reference.text.model_type == "gemma2" else None
    assert ours["softcap"] == (cap or 0)
    assert ours["value_norm"] == (dict(kind=3, eps=reference.text.rms_norm_eps) if hasattr(attention, "v_norm") else None)
    assert ours["source"] == reference.source(i)
    assert ours["sinks"] == hasattr(attention, "sinks")
    assert ours["scalar"] == hasattr(layer, "layer_scalar")
    mlp = getattr(layer, "mlp", None) or getattr(layer, "shared_mlp", None) or layer.block_sparse_moe
    beside = reference.text.model_type == "gemma4_text" and layer.enable_moe_block
    if beside:
        check_experts_beside(ours, layer)
    else:
        check_experts(ours, mlp, reference.text)
        assert ours["joined"] == [None] * len(ours["joined"])
    shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
    assert ours.get("shared") == (None if shared is None else {"ffn": shared.intermediate_size, "gated": hasattr(mlp, "shared_expert_gate")})
    shared = [] if shared is None else [True]
    mlp = getattr(mlp, "experts", mlp)
    assert ours.get("clamped") == ([mlp.alpha, mlp.limit] if hasattr(mlp, "limit") else None)
    if ours.get("clamped"):
        assert ours["residual_scale"] == [1, 1] and ours["beside"] == [False, False]
        return
    activation = next(getattr(mlp, name) for name in ("act_fn", "activation_fn", "activation", "act") if hasattr(mlp, name))
    x = torch.linspace(-4, 4, 97)
    torch.testing.assert_close(activation(x), ACTIVATIONS[ours["activation"]](x), rtol=1e-5, atol=1e-6)
    inputs = [False] if getattr(layer, "hidden_size_per_layer_input", None) else []
    shared = [True] if beside else shared
    assert ours["residual_scale"] == [getattr(layer, "residual_multiplier", 1)] * (2 + len(inputs) + len(shared))
    assert ours["beside"] == [False, reference.text.model_type.startswith("cohere"), *shared, *inputs]


def check_experts_beside(ours, layer):
    """Gemma 4's, beside the MLP: which norms there are, what the router reads and what its weights become."""
    late, kinds = dict(kind=1, eps=layer.post_feedforward_layernorm.eps), [norm_kind(module) for module in (
        layer.post_feedforward_layernorm, layer.post_feedforward_layernorm_1, layer.post_feedforward_layernorm_2, layer.pre_feedforward_layernorm_2)]
    assert kinds == ["rms late"] * 4 and ours["joined"][:3] == [None, late, None]
    assert ours["norms"][1:3] == [[late, late], [None, late]]
    experts, router = layer.experts, copy.deepcopy(layer.router).to_empty(device="cpu").to(torch.bfloat16)
    assert (ours["experts"], ours["expert_ffn"]) == ([experts.num_experts, router.config.top_k_experts], experts.intermediate_dim)
    assert ours["router"] == {"sigmoid": False, "groups": [1, 1], "scale": 1.0, "wide_logits": False, "factors": True,
                              "norms": [late, dict(kind=0, eps=router.eps)]}
    generator = torch.Generator().manual_seed(7)
    for parameter in router.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    x, seen = torch.randn(5, router.hidden_size, generator=generator).to(torch.bfloat16), []
    router.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    weights, chosen = router(x)[1:]
    hat = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + router.eps)).to(torch.bfloat16)
    torch.testing.assert_close(seen[0], hat * router.scale * router.hidden_size ** -0.5, rtol=0.01, atol=0)
    assert ours["round_weights"] == (weights.dtype == torch.bfloat16)
    assert ours["renormalise"] == torch.allclose((weights / router.per_expert_scale[chosen]).sum(-1), torch.ones(5), atol=0.02)


def check_experts(ours, mlp, config):
    """How many there are and are chosen, and what the router's weights become."""
    assert ("experts" in ours) == hasattr(mlp, "experts")
    if "experts" not in ours:
        return
    router = getattr(mlp, "gate", None) or mlp.router
    assert ours["experts"] == [router.num_experts, router.top_k]
    corrected = hasattr(router, "e_score_correction_bias") or hasattr(mlp, "e_score_correction_bias")
    router = copy.deepcopy(router).to_empty(device="cpu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    if getattr(router, "bias", None) is not None:
        router.bias.data.zero_()
    router.weight.data.copy_(0.01 * torch.randn(router.weight.shape, generator=generator))  # larger: one has all the weight
    correction = torch.zeros(router.num_experts)
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias = correction
    x = torch.randn(5, router.weight.shape[1], generator=generator).to(torch.bfloat16)
    logits, weights = router(x, *[correction] * hasattr(mlp, "e_score_correction_bias"))[:2]
    assert ours["round_weights"] == (weights.dtype == torch.bfloat16)
    scale = getattr(config, "routed_scaling_factor", 1.0)
    assert ours["router"] == {"sigmoid": corrected, "groups": [getattr(config, "n_group", 1), getattr(config, "topk_group", 1)], "scale": scale,
                              "wide_logits": logits.dtype == torch.float32 and corrected, "factors": False, "norms": [None, None]}
    sums = weights.float().sum(-1) / scale
    assert ours["renormalise"] == torch.allclose(sums, torch.ones(5), atol=0.02) or router.num_experts == router.top_k


def check_rope(spec, reference, i):
    if not spec["layers"][i]["rope"]:
        return
    table = spec["ropes"][spec["layers"][i]["table"]]
    theirs, factor = reference.frequencies(i)
    ours = torch.tensor(table["frequencies"])
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=5e-7, atol=0)
    assert table["attention_factor"] == pytest.approx(factor, rel=1e-12)
    assert table["neighbours"] == reference.neighbours()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_means_what_transformers_understands(name, tmp_path):
    config = CONFIGS[name]
    reference = Reference(config, tmp_path)
    spec = tool(config, tmp_path)
    if name not in SAYS_NOTHING_OF_TYING:
        assert spec["tied"] == reference.config.tie_word_embeddings
    theirs = reference.tensors()
    if spec["tied"]:
        del theirs["lm_head.weight"]
    assert spec["tensors"] == theirs
    assert spec["wrapper"] == (reference.config.model_type if "text_config" in config else "")
    assert spec["architecture"] == type(reference.model).__name__
    padding = reference.embedding.padding_idx
    assert spec["pad_token"] == (-1 if padding is None else padding)
    assert spec["max_positions"] == reference.text.max_position_embeddings
    assert NORMS[spec["final_norm"]["kind"]] == norm_kind(reference.norm)
    assert spec["final_norm"]["eps"] == (getattr(reference.norm, "eps", None) or reference.norm.variance_epsilon)
    scale = getattr(reference.embedding, "scalar_embed_scale", None)
    assert spec["round_scale"] == (scale is not None)
    assert spec["embedding_scale"] == pytest.approx(scale or getattr(reference.decoder, "embedding_multiplier", 1))
    by = 1 / getattr(reference.text, "logits_scaling", 1)
    assert spec["logit_scale"] == pytest.approx(getattr(reference.model, "logit_scale", by))
    capped = spec["wrapper"] != "gemma3"
    assert spec["logit_cap"] == (capped and getattr(reference.text, "final_logit_softcapping", None) or 0)
    assert len(spec["layers"]) == len(reference.layers)
    balanced = getattr(reference.text, "output_router_logits", False)
    assert spec["router_aux_loss"] == (reference.text.router_aux_loss_coef if balanced else 0)
    for i in range(len(reference.layers)):
        check_layer(spec, reference, i)
        check_rope(spec, reference, i)
    if "ministral3" in name or "Ministral" in name:
        rope = reference.text.rope_parameters
        assert spec["layers"][0]["position_slope"] == rope["llama_4_scaling_beta"]
        assert spec["layers"][0]["position_period"] == rope["original_max_position_embeddings"]


KINDS = {
    "default": {},
    "linear": dict(factor=2.5),
    "dynamic": dict(factor=3.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    "yarn": dict(factor=32.0, original_max_position_embeddings=128),
    "yarn without whole frequencies": dict(factor=32.0, original_max_position_embeddings=4096, truncate=False, beta_fast=16, beta_slow=2),
    "yarn with mscale": dict(factor=40.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=1.3),
    "yarn with a factor of its own": dict(factor=4.0, original_max_position_embeddings=64, attention_factor=1.5),
    "yarn without a factor": dict(factor=None, original_max_position_embeddings=64),
    "longrope": dict(short_factor=[1 + i / 8 for i in range(16)], long_factor=[2.0 + i for i in range(16)],
                     original_max_position_embeddings=64),
    "longrope with a factor": dict(short_factor=[1.0] * 16, long_factor=[4.0] * 16, factor=8.0, original_max_position_embeddings=64),
    "proportional": dict(partial_rotary_factor=0.3, factor=2.0),
}


def rope_config(kind, **more):
    rope = dict(rope_type=kind.split()[0], rope_theta=12345.0, **KINDS[kind])
    return {**least("llama"), "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256, "rope_parameters": rope, **more}


@pytest.mark.parametrize("longest", [0, 64, 65, 256, 257, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind, longest, tmp_path):
    config = rope_config(kind)
    rope = tool(config, tmp_path, longest)["ropes"][0]
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    length = torch.tensor(longest) if longest > 256 else longest or None  # beyond the model's positions: as its forward pass does
    if kind == "default":
        expected, factor = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind.split()[0]](theirs, None, seq_len=length)
    torch.testing.assert_close(torch.tensor(rope["frequencies"]), expected, rtol=1e-6 if kind == "dynamic" else 5e-7, atol=0)
    assert rope["attention_factor"] == pytest.approx(factor, rel=1e-12)


def test_longrope_changes_beyond_the_original_positions_and_dynamic_beyond_the_models(tmp_path):
    def first(kind, longest):
        return tool(rope_config(kind), tmp_path, longest)["frequencies"]
    assert first("longrope", 0) == first("longrope", 64) != first("longrope", 65)
    assert first("dynamic", 0) == first("dynamic", 256) != first("dynamic", 257)
    assert first("yarn", 0) == first("yarn", 10**6)


def test_known_factors_of_yarn_and_longrope(tmp_path):
    by_factor = tool(rope_config("yarn"), tmp_path)["ropes"][0]["attention_factor"]
    assert by_factor == pytest.approx(1.3465735902799727, rel=1e-15)
    longrope = tool(PUBLISHED["Phi-3.5-mini"], tmp_path)["ropes"][0]["attention_factor"]
    assert longrope == pytest.approx(1.1902380714, rel=1e-9) and longrope == math.sqrt(1 + math.log(32) / math.log(4096))


REFUSED = {
    "Mamba": least("granitemoehybrid", shared_intermediate_size=96, num_local_experts=0, layer_types=["mamba"] * 7),
    "layer_types is missing": least("granitemoehybrid", shared_intermediate_size=96, num_local_experts=0),
    "num_experts_per_tok": least("qwen3_moe", num_experts=4, num_experts_per_tok=5),
    "mlp_only_layers": least("qwen3_moe", mlp_only_layers=["first"]),
    "num_experts ": least("qwen3_moe", num_experts=5000),
    "router_aux_loss_coef": least("qwen2_moe", router_aux_loss_coef=-0.1),
    "shared_expert_intermediate_size": least("qwen2_moe", shared_expert_intermediate_size=0),
    "swiglu_limit": least("gpt_oss", swiglu_limit=0.0),
    "hidden_size": least("gpt_oss", hidden_size=100, head_dim=16, quantization_config=dict(quant_method="mxfp4")),
    "quantization_config": least("mixtral", quantization_config=dict(quant_method="mxfp4")),
    "clip_qkv": least("olmoe", clip_qkv=8.0),
    "router_jitter_noise": least("mixtral", router_jitter_noise=0.1),
    "n_group": least("glm4_moe", n_group=3),
    "topk_group": least("glm4_moe", n_group=64, topk_group=2),
    "num_local_experts": least("granitemoehybrid", shared_intermediate_size=96, layer_types=["attention"] * 7),
    "enable_moe_block": least("gemma4_unified_text", enable_moe_block=True),
    "top_k_experts is missing": least("gemma4_text", hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8),
    "top_k_experts =": least("gemma4_text", hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8, top_k_experts=9),
    "moe_intermediate_size is missing": least("gemma4_text", hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8, top_k_experts=2),
    "vocab_size_per_layer_input": least("gemma4_text"),  # 262144, fewer than the tokens
    "num_kv_shared_layers": least("gemma4_text", hidden_size_per_layer_input=0, num_kv_shared_layers=7),
    "resid_pdrop": least("phi3", resid_pdrop=0.1),
    "embd_pdrop": least("phi3", embd_pdrop=0.1),
    "use_qk_norm": least("cohere2", use_qk_norm=True),
    "hidden_activation": least("gemma2", hidden_activation="gelu"),
    "hidden_act ": least("gemma", hidden_act="silu"),
    "activation_function": dict(model_type="gpt2", n_embd=128, n_layer=2, n_head=4, vocab_size=300, activation_function="relu"),
    "n_embd is missing": dict(model_type="gpt2", n_layer=2, n_head=4, vocab_size=300),
    "layer_norm_epsilon": dict(model_type="gpt2", n_embd=128, n_layer=2, n_head=4, vocab_size=300, layer_norm_epsilon=-1),
    "norm_eps": least("nemotron", num_key_value_heads=32, norm_eps={"__float__": "Infinity"}),
    "text_config.model_type": dict(model_type="mistral3", text_config=least("mistral4")),
    "text_config is missing": dict(model_type="gemma3"),
    "text_config.vocab_size": dict(model_type="gemma3", text_config=dict(vocab_size=0)),
    "architectures": {**PUBLISHED["gemma-3-4b"], "architectures": ["Gemma3ForSequenceClassification"]},
    "use_bidirectional_attention": least("gemma4_text", hidden_size_per_layer_input=0, use_bidirectional_attention="all"),
    "partial_rotary_factor": least("mistral", partial_rotary_factor=0.5),
    "rope_parameters.truncate": least("olmo3", rope_parameters=dict(full_attention=dict(rope_type="yarn", factor=2.0, truncate=False))),
    "llama_4_scaling_beta": least("ministral3", rope_parameters=dict(rope_type="yarn", factor=2.0)),
    "sliding_window": least("cohere2", sliding_window=None),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(key, tmp_path):
    said = tool(REFUSED[key], tmp_path, code=11)
    assert key.strip().replace("rope_parameters.truncate", "rope_parameters.full_attention.truncate") in said
