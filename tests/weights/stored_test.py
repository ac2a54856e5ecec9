"""Directories that bitsandbytes quantized, saved by transformers on the CPU: their codes are read as they are, and what is
damaged is refused with file and tensor.
"""
import json
import os
import subprocess
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

TOOL = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin")) / "weights_tool"
torch.set_num_threads(1)

KINDS = {"nf4": ("nf4", False), "nf4, double": ("nf4", True), "fp4": ("fp4", False), "fp4, double": ("fp4", True), "int8": None}
SIZES = dict(hidden_size=80, intermediate_size=136, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1, vocab_size=67,
             max_position_embeddings=256, tie_word_embeddings=False)


def tool(*args, code=0):
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """(encoding, directory, the model in memory)."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(directory / "plain")
    if request.param == "int8":
        settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        kind, double = KINDS[request.param]
        settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(directory / "plain", quantization_config=settings, device_map="cpu",
                                                                  dtype=torch.bfloat16)
    quantized.save_pretrained(directory / "quantized")
    return request.param, directory / "quantized", quantized


def bits(x):
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_codes_and_scales_are_those_of_the_model(saved, tmp_path):
    encoding, directory, model = saved
    tool("quantized", directory, tmp_path / "out", "bf16", encoding)
    ours = load_file(tmp_path / "out")
    layers = {name + ".weight": m for name, m in model.named_modules()
              if isinstance(m, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)) and "layers" in name}
    assert len(layers) == 7 * SIZES["num_hidden_layers"]
    assert {name.rsplit(".", 1)[0] for name in ours} == set(layers)
    for name, layer in layers.items():
        weight = layer.weight
        assert bits(ours[name + ".codes"]) == bits(weight.data), name
        if encoding == "int8":
            assert bits(ours[name + ".scales"]) == bits(weight.SCB), name
            continue
        state = weight.quant_state
        assert bits(ours[name + ".scales"]) == bits(state.absmax), name
        if state.nested:
            nested = torch.cat([state.offset.reshape(1), state.state2.absmax])
            assert bits(ours[name + ".nested"]) == bits(nested), name


def changed(directory, out, change):
    """A copy of the directory with other tensors."""
    out.mkdir()
    (out / "config.json").write_text((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def state_of(tensors, name):
    (key,) = (k for k in tensors if k.startswith(name + ".quant_state."))
    return key, json.loads(bytes(tensors[key].tolist()))


def with_state(name, **changes):
    def change(tensors):
        key, state = state_of(tensors, name)
        state.update(changes)
        tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return change


NAME = "model.layers.1.mlp.up_proj.weight"


def cut(suffix):
    def change(tensors):
        tensors[NAME + suffix] = tensors[NAME + suffix][:-1].clone()
    return change


def text(value):
    def change(tensors):
        key, _ = state_of(tensors, NAME)
        tensors[key] = torch.tensor(list(value), dtype=torch.uint8)
    return change


def without(suffix):
    def change(tensors):
        for key in [k for k in tensors if k.startswith(NAME + suffix)]:
            del tensors[key]
    return change


def other_map(tensors):
    tensors[NAME + ".quant_map"][3] += 0.01


DAMAGE = {
    "blocksize": (with_state(NAME, blocksize=128), "blocksize is 128"),
    "type": (with_state(NAME, quant_type="nf3"), "quant_type is \"nf3\""),
    "shape": (with_state(NAME, shape=[80, 136]), "shape is [80,136]"),
    "not_json": (text(b"{\"quant_type\": "), "quant_state"),
    "no_object": (text(b"[]"), "JSON object"),
    "absmax_short": (cut(".absmax"), ".absmax"),
    "codes_short": (cut(""), "bytes of codes"),
    "no_absmax": (without(".absmax"), ".absmax"),
    "no_state": (without(".quant_state"), "quant_state"),
    "map": (other_map, "quant_map"),
}
DAMAGE_OF_DOUBLE = {
    "nested_blocksize": (with_state(NAME, nested_blocksize=64), "nested_blocksize is 64"),
    "nested_offset": (with_state(NAME, nested_offset="x"), "nested_offset"),
    "nested_short": (cut(".nested_absmax"), ".nested_absmax"),
}


def test_what_is_damaged_is_refused_with_file_and_tensor(saved, tmp_path):
    encoding, directory, _ = saved
    cases = {} if encoding == "int8" else {**DAMAGE, **(DAMAGE_OF_DOUBLE if "double" in encoding else {})}
    if encoding == "int8":
        module = NAME.removesuffix(".weight")

        def short(tensors):
            tensors[module + ".SCB"] = tensors[module + ".SCB"][:-1].clone()

        def short_codes(tensors):
            tensors[NAME] = tensors[NAME][:-1].clone()

        def columns(tensors):
            tensors[module + ".weight_format"] = torch.tensor(1, dtype=torch.uint8)
        cases = {"scb": (short, ".SCB"), "codes": (short_codes, "[135, 80]"), "format": (columns, ".weight_format")}
    for name, (change, words) in cases.items():
        bad = changed(directory, tmp_path / name, change)
        error = tool("quantized", bad, tmp_path / "out", "bf16", encoding, code=11)
        assert words in error and NAME.removesuffix(".weight") in error and "model.safetensors" in error, (name, error)


def test_another_encoding_is_refused(saved, tmp_path):
    encoding, directory, _ = saved
    other = "int8" if encoding != "int8" else "nf4"
    error = tool("quantized", directory, tmp_path / "out", "bf16", other, code=11)
    assert "is stored as " + encoding in error and other in error


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "mxfp4"])
def test_other_methods_are_refused_by_name(method, tmp_path):
    transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method, "bits": 4}}))
    error = tool("spec", tmp_path, code=11)
    assert method in error and "config.json" in error
