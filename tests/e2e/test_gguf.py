"""`export --gguf`, read with gguf's own reader: every tensor against the weights that transformers loads, converted by gguf's own
functions, and the values that llama.cpp reads. Llama's near relatives are here, the other families in gguf_families.py.
test_llama_cpp.py runs the files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import gguf_families
import numpy as np
import pytest
import torch
from test_run import BIN, config, lmlaunch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

sys.path.append(str(Path(__file__).resolve().parents[1] / "data"))

from prepare_models import CHATML, byte_level, sentence_piece  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 256, "vocab_size": 512, "pad_token_id": None}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, head_dim=32, sliding_window=100),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "smollm3": SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}, tie_word_embeddings=True, bos_token_id=0, eos_token_id=2),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THEIRS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
            "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
PLAIN = {"f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def make_model(directory, family, tokenizer=None):
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    for parameter in model.parameters():  # norms and biases must not be ones and zeros
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(directory)
    pieces = family == "mistral"
    (tokenizer or (sentence_piece() if pieces else byte_level(SPECIAL))).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if pieces else
        {"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}))
    return model


def name_of(name):
    stem, kind = name.rsplit(".", 1)
    if stem in THEIRS:
        return f"{THEIRS[stem]}.{kind}"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{IN_LAYER[rest]}.{kind}"


def permuted(weights, heads):
    """As llama.cpp's convert_hf_to_gguf.py turns q and k."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def expected_tensors(model, kind):
    c, out = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        weights = tensor.float().numpy()
        if c.model_type in ("llama", "mistral", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            weights = permuted(weights, c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads)
        out[name_of(name)] = gguf.quants.quantize(weights, PLAIN[kind] if weights.ndim > 1 else gguf.GGMLQuantizationType.F32)
    return out


def values_of(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


def check_tensors(reader, expected):
    got = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    assert set(got) == set(expected)
    for name, weights in expected.items():
        assert got[name].tobytes() == weights.tobytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_type(family, tmp_path):
    model = make_model(tmp_path / "model", family)
    for kind in PLAIN:
        lmlaunch("export", "model", "--gguf", kind, "-o", f"{kind}.gguf", cwd=tmp_path)
        reader = gguf.GGUFReader(tmp_path / f"{kind}.gguf")
        expected = expected_tensors(model, kind)
        if family == "llama3":
            factors = next(t for t in reader.tensors if t.name == "rope_freqs.weight")
            inverse = model.model.rotary_emb.inv_freq.numpy()
            plain = 5e5 ** -(np.arange(0, 16, 2) / 16)
            np.testing.assert_allclose(plain / np.asarray(factors.data), inverse, rtol=1e-6)
            expected["rope_freqs.weight"] = np.asarray(factors.data)
        check_tensors(reader, expected)
        values = values_of(reader)
        assert values["general.file_type"] == {"f16": 1, "bf16": 32, "q8_0": 7}[kind]
    c, arch = model.config, {"llama3": "llama", "mistral": "llama"}.get(family, family)
    assert values["general.architecture"] == arch
    for key, value in {"block_count": c.num_hidden_layers, "embedding_length": 64, "feed_forward_length": 96, "vocab_size": 512,
                       "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": model.model.layers[0].self_attn.head_dim,
                       "context_length": 100 if family == "mistral" else 256}.items():
        assert values[f"{arch}.{key}"] == value, key
    assert values[f"{arch}.attention.layer_norm_rms_epsilon"] == pytest.approx(c.rms_norm_eps)
    assert values[f"{arch}.rope.freq_base"] == pytest.approx(c.rope_parameters["rope_theta"])


@pytest.mark.parametrize("name", gguf_families.SUPPORTED)
def test_the_other_families_are_as_llama_cpp_has_them(name, tmp_path):
    model = gguf_families.make(name, tmp_path / "model")
    for kind in ("f16", "q8_0"):
        lmlaunch("export", "model", "--gguf", kind, "-o", f"{kind}.gguf", cwd=tmp_path)
        reader = gguf.GGUFReader(tmp_path / f"{kind}.gguf")
        check_tensors(reader, gguf_families.expected_tensors(model, kind))
    values, arch = values_of(reader), gguf_families.architecture(model)
    assert values["general.architecture"] == arch
    for key, value in gguf_families.expected_values(model).items():
        assert values[f"{arch}.{key}"] == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize("name", [name for name in ("qwen3_moe", "mixtral", "olmoe") if name in gguf_families.SUPPORTED])
def test_a_model_with_one_tensor_for_all_experts_is_the_same_file(name, tmp_path):
    model = gguf_families.make(name, tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "stacked/model")
    model.save_pretrained(tmp_path / "stacked/model", save_original_format=False)
    for path in tmp_path, tmp_path / "stacked":
        lmlaunch("export", "model", "--gguf", "f16", "-o", "f16.gguf", cwd=path)
    assert (tmp_path / "f16.gguf").read_bytes() == (tmp_path / "stacked/f16.gguf").read_bytes()


@pytest.mark.parametrize("name", [name for name in gguf_families.REFUSED if name in gguf_families.NAMES])
def test_what_llama_cpp_does_not_compute_is_refused_by_name(name, tmp_path):
    gguf_families.make(name, tmp_path / "model")
    done = lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path, check=False)
    assert done.returncode == 11 and not (tmp_path / "a.gguf").exists()
    assert "llama.cpp does not support " + gguf_families.REFUSED[name] in done.stderr


GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def split_by(pattern):
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, {**BYTES, "use_regex": False}]}


@pytest.mark.parametrize("splits,ignores,name", [
    (split_by(CL100K), True, "llama-bpe"), (split_by(CL100K), False, "dbrx"), (split_by(GPT4O), False, "gpt-4o"),
    (split_by(TEKKEN), True, "tekken"), (split_by(CL100K.replace("{1,3}", "")), False, "qwen2"),
    ({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}]}, False, "smollm")])
def test_a_tokenizer_is_called_by_how_it_splits(splits, ignores, name, tmp_path):
    make_model(tmp_path / "model", "qwen3")
    path = tmp_path / "model" / "tokenizer.json"
    file = json.loads(path.read_text())
    path.write_text(json.dumps({**file, "pre_tokenizer": splits, "model": {**file["model"], "ignore_merges": ignores}}))
    lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path)
    assert values_of(gguf.GGUFReader(tmp_path / "a.gguf"))["tokenizer.ggml.pre"] == name


def test_added_tokens_are_control_tokens_or_looked_for_in_the_text(tmp_path):
    make_model(tmp_path / "model", "qwen3")
    path = tmp_path / "model" / "tokenizer.json"
    file = json.loads(path.read_text())
    added = ["<|tool|>", "<unused7>", "[@BOS@]", "<tool>", "\u2581\u2581"]
    file["added_tokens"] += [{"id": 500 + i, "content": text, "special": False} for i, text in enumerate(added)]
    path.write_text(json.dumps(file))
    lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path)
    values = values_of(gguf.GGUFReader(tmp_path / "a.gguf"))
    assert values["tokenizer.ggml.token_type"][500:505] == [3, 3, 3, 4, 4]
    assert values["tokenizer.ggml.tokens"][500:505] == [*added[:4], "  "]


def test_the_tokenizer_is_in_the_file(tmp_path):
    make_model(tmp_path / "model", "qwen2")
    lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path)
    values, file = values_of(gguf.GGUFReader(tmp_path / "a.gguf")), json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    tokens = values["tokenizer.ggml.tokens"]
    known = len(file["model"]["vocab"])
    assert len(tokens) == 512 and tokens[:3] == SPECIAL and tokens[known] == f"[PAD{known}]"
    assert all(tokens[i] == text for text, i in file["model"]["vocab"].items())
    assert values["tokenizer.ggml.token_type"] == [3] * 3 + [1] * (known - 3) + [5] * (512 - known)
    assert values["tokenizer.ggml.merges"] == [" ".join(merge) for merge in file["model"]["merges"]]
    assert (values["tokenizer.ggml.model"], values["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert values["tokenizer.ggml.eos_token_id"] == 2 and "tokenizer.ggml.bos_token_id" not in values
    assert values["tokenizer.ggml.add_bos_token"] is False and values["tokenizer.chat_template"] == CHATML


def test_pieces_are_scored_by_the_order_of_their_merges(tmp_path):
    make_model(tmp_path / "model", "mistral")
    lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path)
    values, file = values_of(gguf.GGUFReader(tmp_path / "a.gguf")), json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    assert values["tokenizer.ggml.model"] == "llama" and values["tokenizer.ggml.add_bos_token"] is True
    assert values["tokenizer.ggml.bos_token_id"] == 1 and values["tokenizer.ggml.add_space_prefix"] is True
    ids, scores = file["model"]["vocab"], values["tokenizer.ggml.scores"]
    joined = [scores[ids["".join(merge)]] for merge in file["model"]["merges"]]
    assert joined == sorted(joined, reverse=True) and len(set(joined)) == len(set(map("".join, file["model"]["merges"]))) and max(joined) < 0
    types = values["tokenizer.ggml.token_type"]
    assert types[ids["<0x0A>"]] == 6 and types[ids["<unk>"]] == 2 and types[ids["</s>"]] == 3


def test_what_llama_cpp_does_not_know_is_refused_by_name(tmp_path):
    make_model(tmp_path / "model", "llama")
    path = tmp_path / "model" / "tokenizer.json"
    file = json.loads(path.read_text())

    def refused(*arguments, code=11):
        done = lmlaunch("export", "model", "-o", "a.gguf", *arguments, cwd=tmp_path, check=False)
        assert done.returncode == code and not (tmp_path / "a.gguf").exists(), done.stderr
        return done.stderr

    path.write_text(json.dumps({**file, "pre_tokenizer": {"type": "Whitespace"}}))
    assert "its pre-tokenizer has no name there" in refused("--gguf", "f16") and "Whitespace" in refused("--gguf", "f16")
    path.write_text(json.dumps({**file, "model": {**file["model"], "type": "WordPiece"}}))
    assert "WordPiece" in refused("--gguf", "f16")
    path.write_text(json.dumps(file))
    assert "expected f16, bf16 or q8_0" in refused("--gguf", "q4", code=2)
    smollm3 = json.loads((tmp_path / "model" / "config.json").read_text())
    lmlaunch("export", "model", "--gguf", "f16", "-o", "b.gguf", cwd=tmp_path)
    done = lmlaunch("export", "model", "--gguf", "f16", "-o", "b.gguf", cwd=tmp_path, check=False)
    assert done.returncode == 14 and "exists already" in done.stderr and smollm3


def test_a_merged_adapter_is_a_model_in_the_file_and_an_adapter_is_refused(tmp_path):
    make_model(tmp_path / "model", "llama3")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"hello world {n} the quick brown fox"}) + "\n" for n in range(16)))
    data = {"data__eval": [], "data__train": ["train.jsonl"], "train__steps": 3}
    lmlaunch(config(tmp_path, "lora", train__method="lora", **data), cwd=tmp_path)
    done = lmlaunch("export", "runs/lora", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path, check=False)
    assert done.returncode == 2 and "add --merge" in done.stderr
    lmlaunch("export", "runs/lora", "--merge", "-o", "merged", cwd=tmp_path)
    lmlaunch("export", "runs/lora", "--merge", "--gguf", "bf16", "-o", "a.gguf", cwd=tmp_path)
    expected = expected_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), "bf16")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    check_tensors(reader, {**expected, "rope_freqs.weight": np.asarray(next(t for t in reader.tensors if t.name == "rope_freqs.weight").data)})
    lmlaunch(config(tmp_path, "full", **data), cwd=tmp_path)
    lmlaunch("export", "runs/full", "--gguf", "q8_0", "-o", "full.gguf", cwd=tmp_path)
    expected = expected_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "full" / "model"), "q8_0")
    reader = gguf.GGUFReader(tmp_path / "full.gguf")
    check_tensors(reader, {**expected, "rope_freqs.weight": np.asarray(next(t for t in reader.tensors if t.name == "rope_freqs.weight").data)})


def test_a_merged_model_is_read_again_and_compared(tmp_path):
    make_model(tmp_path / "model", "qwen3")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"hello world {n} the quick brown fox"}) + "\n" for n in range(16)))
    for dtype, bound in [("fp32", 1e-4), ("bf16", 0.2)]:
        changes = {"data__eval": [], "data__train": ["train.jsonl"], "train__steps": 3, "train__method": "lora", "model__dtype": dtype}
        lmlaunch(config(tmp_path, dtype, **changes), cwd=tmp_path)
        done = lmlaunch("export", f"runs/{dtype}", "--merge", "-o", f"merged_{dtype}", cwd=tmp_path)
        assert "read again: its logits differ by at most" in done.stderr
        told = json.loads(lmlaunch("export", f"runs/{dtype}", "--merge", "-o", f"again_{dtype}", "--json", cwd=tmp_path).stdout)
        assert 0 < told["logits_differ_by"] < bound
    assert "all of its weights" in lmlaunch("export", "model", "--adapter", "-o", "x", cwd=tmp_path, check=False).stderr
    lmlaunch("export", "runs/fp32", "--adapter", "-o", "adapter", cwd=tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in (tmp_path / "adapter").iterdir()}


# A disk that keeps zeros in place of the weights: preloaded, since nothing in the program writes wrong ones.
ZEROS = r"""#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

ssize_t write(int file, const void* bytes, size_t count) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const int weights = readlink(link, path, sizeof path - 1) > 0 && strstr(path, ".safetensors") != NULL;
  const int header = count > 8 && ((const char*)bytes)[8] == '{';
  if (!weights || header) return syscall(SYS_write, file, bytes, count);
  void* zeros = calloc(1, count);
  const ssize_t done = syscall(SYS_write, file, zeros, count);
  free(zeros);
  return done;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_a_merged_model_that_is_not_what_it_should_be_is_refused(tmp_path):
    (tmp_path / "zeros.c").write_text(ZEROS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "zeros.so", "zeros.c"], cwd=tmp_path, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "zeros.so")}
    if subprocess.run([BIN / "lmlaunch", "--version"], env=environment, capture_output=True).returncode != 0:
        pytest.skip("nothing can be preloaded into this build")
    make_model(tmp_path / "model", "qwen3")
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "hello world"}) + "\n")
    lmlaunch(config(tmp_path, "run", data__eval=[], data__train=["train.jsonl"], train__steps=1, train__method="lora", train__global_batch=1,
                    train__micro_batch=1), cwd=tmp_path)
    done = subprocess.run([BIN / "lmlaunch", "export", "runs/run", "--merge", "-o", "merged"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 22 and "the merged model's logits differ by" in done.stderr, done.stderr
