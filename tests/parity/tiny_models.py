"""Tiny random models of every supported family, made and saved by transformers: the shapes in which implementations
usually differ (grouped heads, tied heads, biases, q/k norms, sliding windows, RoPE scaling, odd sizes)."""

import json

import torch
import transformers

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


# name -> (config class, its arguments, how the directory is written)
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


def randomise(model, seed):
    """Weights that leave no parameter special: norms around 1, biases and everything else around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        center, std = (1.0, 0.2) if "norm" in name else (0.0, 0.5 if "embed_tokens" in name or name.endswith("bias") else MATRIX_STD)
        parameter.data.copy_(center + std * noise)


def write_old_style(directory):
    """config.json as transformers 4 wrote it: rope_theta and rope_scaling at the top, torch_dtype."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2))


def make(name, directory, dtype=torch.float32, seed=8, **changes):
    """Writes the model and returns it as transformers reads it back, with attention in its plainest form."""
    config_class, arguments, style = MODELS[name]
    config = getattr(transformers, config_class)(**{**arguments, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(directory, **{k: v for k, v in style.items() if k == "max_shard_size"})
    if style.get("old_config"):
        write_old_style(directory)
    return load(directory, dtype)


def load(directory, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
