"""gpt-oss's files: experts in MXFP4 against transformers' own reading of them, and the bf16 form byte for byte.

Called by ctest with LM_BIN = the folder of weights_tool.
"""
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TOOL = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin")) / "weights_tool"
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

LAYERS, EXPERTS, HIDDEN, FFN = 2, 3, 64, 96
SHAPES = {"gate_up_proj": (2 * FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}


def tool(*args, code=0):
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stderr


def bits(x):
    return x.contiguous().view(torch.int16)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A directory in bf16, as transformers writes it."""
    directory = tmp_path_factory.mktemp("plain")
    torch.manual_seed(3)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_local_experts=EXPERTS, num_experts_per_tok=2, vocab_size=67))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def packed(plain, tmp_path_factory):
    """The same with random codes in place of the experts' matrices: with any scales."""
    directory = tmp_path_factory.mktemp("packed")
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for layer in range(LAYERS):
        for name, (rows, columns) in SHAPES.items():
            path = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[path]
            tensors[path + "_blocks"] = torch.randint(256, (EXPERTS, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            tensors[path + "_scales"] = torch.randint(256, (EXPERTS, rows, columns // 32), generator=generator, dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                                                         "model.embed_tokens", "lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def by_transformers(packed, layer, name):
    """[experts, in, out] in bf16."""
    tensors = load_file(packed / "model.safetensors")
    path = f"model.layers.{layer}.mlp.experts.{name}"
    return convert_moe_packed_tensors(tensors[path + "_blocks"], tensors[path + "_scales"])


def test_a_file_of_all_experts_is_written_as_it_was_read(plain, tmp_path):
    tool("model", plain, tmp_path / "out", "bf16", 10**9)
    before, after = (load_file(path / "model.safetensors") for path in (plain, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape and torch.equal(bits(before[name]), bits(after[name])) for name in before)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_is_trained_whole_is_dequantized_to_the_bits_of_transformers(packed, tmp_path, dtype):
    tool("model", packed, tmp_path / "out", dtype, 10**9)
    before, after = (load_file(path / "model.safetensors") for path in (packed, tmp_path / "out"))
    assert not any(name.endswith(("_blocks", "_scales")) for name in after)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    for layer in range(LAYERS):
        for name in SHAPES:
            theirs, ours = by_transformers(packed, layer, name), after[f"model.layers.{layer}.mlp.experts.{name}"]
            assert theirs.ne(0).float().mean() > 0.8 and ours.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
            assert torch.equal(bits(ours.bfloat16()), bits(theirs)), (layer, name)
            assert torch.equal(ours.float(), theirs.float())  # bf16 holds them exactly
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before if name in after)


def test_codes_are_kept_where_adapters_are_trained_and_mean_the_same(packed, tmp_path):
    tool("quantized", packed, tmp_path / "out", "bf16", "mxfp4")
    ours, stored = load_file(tmp_path / "out"), load_file(packed / "model.safetensors")
    assert {name.rsplit(".", 1)[0] for name in ours} == {f"model.layers.{layer}.mlp.experts.{name}.{e}.weight"
                                                         for layer in range(LAYERS) for name in SHAPES for e in range(EXPERTS)}
    for layer in range(LAYERS):
        for name in SHAPES:
            path, theirs = f"model.layers.{layer}.mlp.experts.{name}", by_transformers(packed, layer, name)
            for e in range(EXPERTS):
                assert torch.equal(ours[f"{path}.{e}.weight.codes"], stored[path + "_blocks"][e].flatten())
                assert torch.equal(ours[f"{path}.{e}.weight.scales"], stored[path + "_scales"][e].flatten())
                assert torch.equal(bits(ours[f"{path}.{e}.weight.bf16"]), bits(theirs[e].T.flatten())), (path, e)


def damaged(packed, directory, change):
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text((packed / "config.json").read_text())


BLOCKS, SCALES = ("model.layers.1.mlp.experts.down_proj_" + end for end in ("blocks", "scales"))
DAMAGES = {
    "an expert is missing": (lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS][1:].clone()}), BLOCKS),
    "scales of other blocks": (lambda tensors: tensors.update({SCALES: tensors[SCALES][:, :, 1:].clone()}), SCALES),
    "scales of another type": (lambda tensors: tensors.update({SCALES: tensors[SCALES].to(torch.int32)}), SCALES),
    "no scales": (lambda tensors: tensors.pop(SCALES), "down_proj"),
    "no codes": (lambda tensors: tensors.pop(BLOCKS), "down_proj"),
    "a matrix beside its codes": (lambda tensors: tensors.update({BLOCKS.removesuffix("_blocks"): torch.zeros(EXPERTS, FFN, HIDDEN)}), BLOCKS),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_fit_is_refused_with_its_tensor(packed, tmp_path, name):
    change, tensor = DAMAGES[name]
    damaged(packed, tmp_path, change)
    assert tensor in tool("model", tmp_path, tmp_path / "out", "bf16", 10**9, code=11)


def test_a_config_that_promises_codes_is_refused_where_adapters_want_them(plain, packed, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    assert "is not in MXFP4" in tool("quantized", tmp_path, tmp_path / "out", "bf16", "mxfp4", code=11)
