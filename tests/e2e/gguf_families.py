"""The tiny models of tests/parity/tiny_families.py as files of `export --gguf`: what llama.cpp has a place for, and what each file must
hold. Names are those of gguf's own map; what becomes of the values is what llama.cpp's convert_hf_to_gguf.py does."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("parity", "data")]

import tiny_models  # noqa: E402
from prepare_models import byte_level, sentence_piece  # noqa: E402

# Of the other mixtures of experts none is written as GGUF (test_experts.py).
MIXTURES = ("Qwen3MoeConfig", "MixtralConfig", "OlmoeConfig")
FAMILIES = {name: family for name, family in getattr(tiny_models, "FAMILIES", {}).items()
            if family[0] in MIXTURES or not family[1].get("num_experts_per_tok")}
VOCABULARY = 512  # the tokenizers have up to 459 tokens
ARCHITECTURES = {"mistral": "llama", "ministral3": "mistral3", "cohere": "command-r", "granitemoehybrid": "granite", "olmo3": "olmo2", "gemma3_text": "gemma3",
                 "gemma4_text": "gemma4", "glm": "chatglm", "qwen3_moe": "qwen3moe", "mixtral": "llama"}

# So that llama.cpp has a place for the model: it computes the softmax's scale from the size of a head, has a row of Gemma 4's inputs for
# each token, and knows Command R+ by its number of layers. Keys are borrowed from the last two layers that have some, of which the last
# has no window.
CHANGES = {"gemma2": {"query_pre_attn_scalar": 16}, "gemma3_text_odd_capped_old_keys": {"query_pre_attn_scalar": 12},
           "gemma4_text_inputs_and_borrowed_keys": {"vocab_size_per_layer_input": VOCABULARY},
           "gemma4_text_odd_experts_in_gemma4": {"vocab_size_per_layer_input": VOCABULARY},
           "gemma4_text_odd_inputs_in_gemma4": {"vocab_size_per_layer_input": VOCABULARY, "layer_types": ["sliding_attention", "full_attention"] * 2},
           "cohere_norms_of_each_head": {"num_hidden_layers": 64}, "olmoe": {"num_key_value_heads": 4}}
# Further models: name -> (that of which it is a variant, what is different).
VARIANTS = {
    "qwen3_moe": ("qwen3_moe_one_dense_layer", {"mlp_only_layers": []}),
    "qwen3_moe_without_renormalisation": ("qwen3_moe_one_dense_layer", {"mlp_only_layers": [], "norm_topk_prob": False}),
    "olmoe_shared_keys": ("olmoe", {}),
    "cohere": ("cohere_norms_of_each_head", {"use_qk_norm": False}),
    "cohere_norms_in_few_layers": ("cohere_norms_of_each_head", {}),
    "gemma4_text_inputs_of_more_tokens": ("gemma4_text_inputs_and_borrowed_keys", {}),
    "gemma4_text_keys_of_other_layers": ("gemma4_text_odd_inputs_in_gemma4", {"vocab_size_per_layer_input": VOCABULARY}),
}
REFUSED = {
    "qwen3_moe_one_dense_layer": "layers without experts",
    "qwen3_moe_odd_without_renormalisation": "layers without experts",
    "qwen3_moe_without_renormalisation": "experts' weights that do not add up to 1",
    "olmoe_shared_keys": "heads that share their keys",
    "llama_dynamic_rope_past_its_positions": "dynamic RoPE scaling",
    "llama_yarn_uncut_range": "yarn with frequencies that are not whole",
    "olmo3_yarn_in_full_layers": "RoPE of several bases",  # an old file's rope_theta is that of full layers alone
    "gemma2_odd_without_caps": "a model without soft caps of scores",
    "gemma4_text_inputs_of_more_tokens": "a table of layers' inputs with other rows than the embedding's",
    "gemma4_text_keys_of_other_layers": "keys and values that are borrowed from these layers",
    "glm_odd_without_biases": "heads whose size is not hidden_size / heads",
    "glm4_odd_biases": "heads whose size is not hidden_size / heads",
    "starcoder2_odd_without_biases": "a model without biases of the MLP",
    "cohere_norms_in_few_layers": "norms of q and k in fewer than 64 layers",
    "cohere2_odd_every_second_slides": "a head of its own",
    "nemotron_odd_quarter_turns": "heads whose size is not hidden_size / heads",
    "arcee_odd_biases": "biases of the MLP",
    "exaone4": "windows but in 64 layers",
}
NAMES = [*FAMILIES, *(name for name, (of, _) in VARIANTS.items() if of in FAMILIES)]
SUPPORTED = [name for name in NAMES if name not in REFUSED]

TURNED = {"llama", "mistral3", "granite", "arcee"}  # their RoPE turns neighbouring rows, the models' do not
OFFSET = {"gemma", "gemma2", "gemma3", "nemotron"}
F32 = gguf.GGMLQuantizationType.F32
KIND = {"f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def text_config(model):
    return model.config.get_text_config()


def architecture(model):
    kind = text_config(model).model_type
    return ARCHITECTURES.get(kind, kind)


def make(name, directory, **changes):
    """The model, and a tokenizer for it."""
    of, different = VARIANTS.get(name, (name, CHANGES.get(name, {})))
    model = tiny_models.make(of, directory, **{"vocab_size": VOCABULARY, **different, **changes})
    pieces = text_config(model).model_type.startswith("gemma")
    (sentence_piece() if pieces else byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])).save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if pieces else {"bos_token": None, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    return model


def permuted(weights, heads):
    """As llama.cpp's convert_hf_to_gguf.py turns q and k."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def weights_of(model):
    """Name in the file -> fp32 values."""
    config, arch, out = text_config(model), architecture(model), {}
    names = gguf.get_tensor_name_map({text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        towers = ("vision_tower", "multi_modal_projector", "embed_vision")
        if any(tower in name for tower in towers) or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        name = name.replace("model.language_model.", "model.")
        if name.endswith("layer_scalar"):
            name += ".weight"
        values = tensor.float().numpy()
        if config.model_type == "gpt2" and ".c_" in name and values.ndim > 1:
            values = values.T
        if arch in OFFSET and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if arch in TURNED and (".q_proj." in name or ".k_proj." in name):
            values = permuted(values, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        if "shared_mlp.input_linear" in name:
            block = f"blk.{name.split('.')[2]}."
            out[block + "ffn_gate.weight"], out[block + "ffn_up.weight"] = np.split(values, 2)
        elif name.endswith(("router.scale", "router.per_expert_scale")):
            out[f"blk.{name.split('.')[2]}.{'ffn_gate_inp' if name.endswith('router.scale') else 'ffn_down_exps'}.scale"] = values
        elif ".experts." in name and arch == "gemma4":
            out[names.get_name(name) + ".weight"] = values
        elif ".mlp.experts." in name:
            parts = {"gate_proj": values[:, :values.shape[1] // 2], "up_proj": values[:, values.shape[1] // 2:]} if "gate_up" in name else {"down_proj": values}
            for part, stack in parts.items():
                out[names.get_name(f"{name.rsplit('.', 1)[0]}.{part}") + ".weight"] = stack
        elif "shared_mlp.output_linear" in name:
            out[f"blk.{name.split('.')[2]}.ffn_down.weight"] = values
        else:
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, name
            out[theirs] = values
    if arch in ("olmo2", "nemotron") and config.tie_word_embeddings:
        out["output.weight"] = out["token_embd.weight"]
    return {**out, **rope_tensors(model)}


def head_sizes(model):
    """Of Gemma 4: in layers without a window, and in those with one."""
    norms = {name.split(".")[-4]: len(values) for name, values in model.state_dict().items() if name.endswith("q_norm.weight")}
    kinds = text_config(model).layer_types
    return tuple(norms[str(kinds.index(kind))] for kind in ("full_attention", "sliding_attention"))


def rope_tensors(model):
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")}
    full = rope.get("full_attention", {})
    if full.get("rope_type") == "proportional":
        half = head_sizes(model)[0] // 2
        turned = int(half * full["partial_rotary_factor"])
        return {"rope_freqs.weight": np.asarray([1] * turned + [1e30] * (half - turned), np.float32)}
    return {}


def expected_tensors(model, kind):
    def converted(name, values):
        matrix = values.ndim > 1 and not name.startswith("position_embd") and not name.endswith(("_norm.weight", "ffn_gate_inp.weight"))
        fits = kind != "q8_0" or values.shape[-1] % 32 == 0
        return gguf.quants.quantize(np.ascontiguousarray(values), F32 if not matrix else KIND[kind] if fits else KIND["f16"])
    return {name: converted(name, values) for name, values in weights_of(model).items()}


def expected_values(model):
    """Of keys behind the architecture's name; what is left out is whatever llama.cpp assumes."""
    config = text_config(model)
    positions = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    slides = [kind == "sliding_attention" for kind in kinds]
    values = {"block_count": config.num_hidden_layers, "embedding_length": config.hidden_size, "vocab_size": VOCABULARY,
              "attention.head_count": config.num_attention_heads, "context_length": positions}
    arch = architecture(model)
    if hasattr(config, "num_experts_per_tok") and not arch.startswith("granite"):  # whose dense models have the key, too
        values |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok,
                   "expert_feed_forward_length": getattr(config, "moe_intermediate_size", config.intermediate_size)}
    if getattr(config, "enable_moe_block", False):
        values |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts,
                   "expert_feed_forward_length": config.moe_intermediate_size}
    if (arch in ("phi3", "starcoder2", "mistral3") or config.model_type == "mixtral") and window:
        values["context_length"] = window
    if arch in ("gemma2", "gemma3", "gemma4", "cohere2", "olmo2") and any(slides):
        values["attention.sliding_window"] = window
    if arch == "gemma4":
        full, sliding = head_sizes(model)
        values |= {"attention.sliding_window_pattern": slides, "attention.key_length": full, "attention.key_length_swa": sliding,
                   "rope.dimension_count": full, "rope.dimension_count_swa": sliding,
                   "attention.shared_kv_layers": config.num_kv_shared_layers, **sizes_of_inputs(config)}
    if arch in ("gemma3", "gemma4"):
        values["rope.freq_base"] = config.rope_parameters["full_attention"]["rope_theta"]
        values["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    if arch == "granite":
        values |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
                   "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling,
                   "rope.scaling.finetuned": getattr(config, "position_embedding_type", "rope") == "rope"}
    if arch in ("cohere2", "command-r"):
        values |= {"logit_scale": config.logit_scale, "attention.layer_norm_epsilon": config.layer_norm_eps}
    if arch == "gemma2":
        values |= {"attn_logit_softcapping": config.attn_logit_softcapping, "final_logit_softcapping": config.final_logit_softcapping}
    if arch == "mistral3":
        rope = config.rope_parameters
        values |= {"attention.temperature_scale": rope["llama_4_scaling_beta"], "rope.scaling.type": "yarn",
                   "rope.scaling.factor": rope["factor"], "rope.scaling.yarn_beta_fast": rope["beta_fast"],
                   "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        values |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": config.original_max_position_embeddings}
    if arch in ("phi3", "chatglm", "glm4", "nemotron"):
        values["rope.dimension_count"] = int(model_head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
    eps = getattr(config, "rms_norm_eps", None)
    return values if eps is None else {**values, "attention.layer_norm_rms_epsilon": eps}


def sizes_of_inputs(config):
    """Of Gemma 4's E models, whose layers with borrowed keys have wider MLPs."""
    width, borrowers = getattr(config, "hidden_size_per_layer_input", None) or 0, config.num_kv_shared_layers
    wide = [config.intermediate_size] * (config.num_hidden_layers - borrowers) + [2 * config.intermediate_size] * borrowers
    doubled = borrowers > 0 and config.use_double_wide_mlp
    return {"embedding_length_per_layer_input": width, "feed_forward_length": wide if doubled else config.intermediate_size}


def model_head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
