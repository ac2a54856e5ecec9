"""Tiny random models of every supported family, made and saved by transformers: the shapes in which implementations
usually differ (grouped heads, tied heads, biases, q/k norms, sliding windows, RoPE scaling, odd sizes). Llama and its near
relatives are here, the others in tiny_families.py."""

import json

import reference
import torch
import transformers
from expert_files import all_in_files
from tiny_families import FAMILIES, KERNELS, ROUTED  # noqa: F401

LAYERS = 3
MATRIX_STD = 0.1  # larger: gradients so steep that two bf16 runs of anything disagree; smaller: uniform attention

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # over 8 pairs this keeps, blends and divides frequencies

# A key bias moves all scores of a query alike where positions hardly turn, and its gradient is then nothing but rounding:
# models with such biases turn fast.
FAST_ROPE = {"rope_type": "default", "rope_theta": 20.0}


def sizes(hidden, ffn, heads, kv_heads, vocab=331, **more):
    return dict(hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=kv_heads,
                vocab_size=vocab, num_hidden_layers=LAYERS, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, **more)


# name -> (config class, its arguments, its style). Words of a style:
#   old_config      config.json is written as transformers 4 wrote it (write_old_style)
#   max_shard_size  of the files
#   wrapper         (prefix of its classes, arguments): the model that the text model is a part of
#   norms           a word in names of norms -> what their factors are around, if not 1
#   lengths         of the documents that it is run with
#   tool            further arguments of tool.run
#   idle            elements without a gradient (bounds.determined)
#   dtypes          in which it is compared; missing: in all
MODELS = {
    "llama_every_head_its_own_keys_odd_sizes": ("LlamaConfig", sizes(40, 104, 5, 5, tie_word_embeddings=False), {}),
    "llama_three_heads_per_key_tied_with_pad_token":
        ("LlamaConfig", sizes(48, 112, 6, 2, tie_word_embeddings=True, pad_token_id=3), {}),
    "llama_one_key_head_llama3_rope":
        ("LlamaConfig", sizes(64, 96, 4, 1, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False), {"old_config": True}),
    "llama_tied_llama3_rope_sharded":
        ("LlamaConfig", sizes(64, 96, 4, 2, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True), {"max_shard_size": "40KB"}),
    "llama_linear_rope":
        ("LlamaConfig", sizes(32, 72, 4, 2, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}), {}),
    "llama_biases_everywhere":
        ("LlamaConfig", sizes(40, 104, 5, 1, attention_bias=True, mlp_bias=True, rope_parameters=FAST_ROPE, tie_word_embeddings=True), {}),
    "llama_wide_heads": ("LlamaConfig", sizes(40, 88, 4, 2, head_dim=24, rms_norm_eps=1e-5,
                                              rope_parameters={"rope_type": "default", "rope_theta": 1e6}), {"old_config": True}),
    "qwen2_untied": ("Qwen2Config", sizes(48, 120, 6, 2, rope_parameters=FAST_ROPE, tie_word_embeddings=False), {"old_config": True}),
    "qwen2_tied_last_layer_slides": ("Qwen2Config", sizes(32, 72, 4, 4, use_sliding_window=True, sliding_window=5,
                                                          max_window_layers=2, rope_parameters=FAST_ROPE, tie_word_embeddings=True), {}),
    "qwen3_untied": ("Qwen3Config", sizes(40, 104, 4, 2, head_dim=24, tie_word_embeddings=False), {}),
    "qwen3_tied_biases": ("Qwen3Config", sizes(48, 88, 6, 2, head_dim=16, attention_bias=True, rope_parameters=FAST_ROPE, tie_word_embeddings=True), {}),
    "mistral_window_shorter_than_documents": ("MistralConfig", sizes(40, 104, 5, 1, head_dim=8, sliding_window=7), {}),
    "mistral_no_window": ("MistralConfig", sizes(48, 104, 6, 2, head_dim=16, sliding_window=None), {"old_config": True}),
    "smollm3_every_second_layer_without_positions":
        ("SmolLM3Config", sizes(48, 104, 6, 2, no_rope_layer_interval=2, pad_token_id=3), {"old_config": True}),
    # A key's bias without positions has no gradient at all.
    "smollm3_untied_windows_without_positions":
        ("SmolLM3Config", sizes(40, 104, 5, 1, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=7, mlp_bias=True,
                                pad_token_id=None, tie_word_embeddings=False), {}),
}


ALL = {**MODELS, **FAMILIES}

# Those whose files hold the distance of a norm's factor from 1.
OFFSET_NORMS = {"gemma", "gemma2", "gemma3_text", "nemotron"}
# Those that multiply the embedding: with values as large as elsewhere nothing that a layer adds would matter beside it.
SCALED_EMBEDDING = ("gemma", "granite")


def text_config(model):
    """Of the text model, which another one may hold."""
    return model.config.get_text_config()


def is_norm(name):
    return "norm" in name or ".ln_" in name


def randomise(model, seed, norms):
    """Weights that leave no parameter special: norms around the neutral value, biases and everything else around 0."""
    generator = torch.Generator().manual_seed(seed)
    offset = 1.0 if text_config(model).model_type in OFFSET_NORMS else 0.0
    embedding = 2 * MATRIX_STD if text_config(model).model_type.startswith(SCALED_EMBEDDING) else 0.5
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            center, std = 0.0, 0.5
        elif is_norm(name):
            center, std = next((norms[word] for word in norms if word in name), 1.0) - offset, 0.2
        elif name.endswith("sinks"):
            center, std = 0.0, 1.0
        elif name.endswith("router.scale"):
            center, std = 5.0, 1.0  # as for a router below: what it multiplies is divided by sqrt(H)
        elif name.endswith("per_expert_scale"):
            center, std = 1.0, 0.3
        elif name.endswith(("mlp.gate.weight", "block_sparse_moe.router.weight", "mlp.router.weight", "router.proj.weight")):
            center, std = 0.0, 0.3  # of a router: chosen and left out are not near each other
        else:
            center, std = 0.0, embedding if name.split(".")[-2] in ("embed_tokens", "wte", "wpe") else MATRIX_STD
        parameter.data.copy_(center + std * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(0.7 + 0.2 * torch.rand(buffer.shape, generator=generator))
        elif name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def old_rope(config):
    """The keys of RoPE as transformers 4 had them. Where kinds of layers differ, one dictionary was for full ones alone."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if "original_max_position_embeddings" in config:
        rope.pop("original_max_position_embeddings", None)
    if rope["rope_type"] == "longrope":
        rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope if rope.get("rope_type") != "default" else None


def write_old_style(directory, keep=()):
    """config.json as transformers 4 wrote it: rope_theta and rope_scaling at the top, torch_dtype, and layer_types only where the model
    has been given some."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    old_rope(text)
    config["torch_dtype"] = config.pop("dtype")
    if "layer_types" not in keep:
        text.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2))


def make(name, directory, dtype=torch.float32, seed=8, **changes):
    """Writes the model and returns it as transformers reads it back, with attention in its plainest form."""
    config_class, arguments, style = ALL[name]
    config, wrapper = getattr(transformers, config_class)(**{**arguments, **changes}), style.get("wrapper")
    if wrapper:
        config = getattr(transformers, wrapper[0] + "Config")(text_config=config.to_dict(), **wrapper[1])
        model = getattr(transformers, wrapper[0] + "ForConditionalGeneration")(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, seed, style.get("norms", {}))
    model.to(dtype).save_pretrained(directory, **{k: v for k, v in style.items() if k == "max_shard_size"})
    if style.get("old_config"):
        write_old_style(directory, keep=arguments)
    return load(directory, dtype)


def load(directory, dtype):
    """Of a model that holds the text model only that one is trained."""
    architecture, = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(directory, dtype=dtype, attn_implementation="eager",
                                                                experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if is_of_tower(name):
            parameter.requires_grad_(False)
    return model


def is_of_tower(name):
    return any(word in name for word in ("vision_tower", "multi_modal_projector", "embed_vision"))


def documents(name, model):
    """What a model of that name is trained with."""
    lengths = ALL[name][2].get("lengths")
    return reference.random_documents(text_config(model).vocab_size, *([lengths] if lengths else []))


def options(name):
    """What tool.run has to be told of it."""
    return ALL[name][2].get("tool", {})


def idle(name):
    return ALL[name][2].get("idle", ())


def as_in_files(name, tensors):
    """Of a model of that name, each expert's matrices by themselves."""
    return all_in_files(ALL[name][0].removesuffix("Config").lower(), tensors, together=False)


def compared(cases, dtypes):
    """(name, dtype) of each case, a model of that name or (model, ...), in its types where it has some of its own: see counts.alternating."""
    from counts import alternating  # of pytest's path: whoever runs without it compares by itself
    own = {name: ALL[cases[name][0] if cases[name][0] in ALL else name][2].get("dtypes") for name in cases}
    return [*alternating([name for name in cases if own[name] is None], dtypes), *[(name, dtype) for name in cases for dtype in own[name] or ()]]


def canonical(name):
    """A tensor's name in the text model alone, where another one holds it."""
    return name.replace("model.language_model.", "model.")
