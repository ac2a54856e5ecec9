"""Our files against the Python libraries that everyone uses: safetensors, transformers, peft.

Called by ctest with LM_WEIGHTS_TOOL = the path of weights_tool.
"""
import copy
import json
import os
import random
import shutil
import struct
import subprocess

import peft
import pytest
import safetensors
import torch
import transformers
from foreign_adapters import ADAPTERS, OTHERS, case_of, keys_without_a_case
from safetensors.torch import load_file, save_file

TOOL = os.environ["LM_WEIGHTS_TOOL"]
torch.set_num_threads(1)


def tool(*args, code=0):
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


BASE = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=67, max_position_embeddings=256)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
FAMILIES = {
    "llama": (transformers.LlamaConfig, dict(pad_token_id=5)),
    "llama tied llama3 biases": (transformers.LlamaConfig, dict(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_theta=5e5, rope_scaling=LLAMA3)),
    "llama linear": (transformers.LlamaConfig, dict(rope_scaling=dict(type="linear", factor=3.0), head_dim=10)),
    "qwen2": (transformers.Qwen2Config, dict(rope_theta=1e6)),
    "qwen2 windows": (transformers.Qwen2Config, dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=8, attention_bias=True, tie_word_embeddings=True)),
    "mistral": (transformers.MistralConfig, dict(head_dim=8)),
    "mistral no window": (transformers.MistralConfig, dict(sliding_window=None)),
    "smollm3": (transformers.SmolLM3Config, dict(no_rope_layer_interval=2, pad_token_id=5, bos_token_id=1, eos_token_id=2)),
    "smollm3 windows biases": (transformers.SmolLM3Config, dict(
        no_rope_layers=[0, 0, 1], use_sliding_window=True, sliding_window=16, attention_bias=True, mlp_bias=True,
        pad_token_id=None, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)),
}


def make(family, seed=0, **more):
    cls, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(cls(**{**BASE, **extra, **more}))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model


def old_form(config):
    """The same config.json as version 4 wrote it."""
    config = dict(config)
    config["torch_dtype"] = config.pop("dtype")
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_is_what_transformers_understands(family, tmp_path):
    model = make(family)
    model.save_pretrained(tmp_path)
    config = model.config
    path = tmp_path / "config.json"
    new = json.loads(path.read_text())
    for text in (new, old_form(new)):
        path.write_text(json.dumps(text))
        spec = json.loads(tool("spec", tmp_path))
        theirs = model.model.rotary_emb.inv_freq
        ours = torch.tensor(spec["frequencies"])
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2.5e-7, atol=0)  # two units of the last place
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        window = getattr(config, "sliding_window", None) or 0
        assert len(spec["layers"]) == config.num_hidden_layers
        for ours, theirs, kind in zip(spec["layers"], model.model.layers, kinds):
            attention = theirs.self_attn
            assert spec["heads"] * spec["head_dim"] == attention.q_proj.out_features
            assert spec["kv_heads"] * spec["head_dim"] == attention.k_proj.out_features
            assert ours["qkv_bias"] == (attention.q_proj.bias is not None)
            assert ours["o_bias"] == (attention.o_proj.bias is not None)
            assert ours["mlp_bias"] == (theirs.mlp.up_proj.bias is not None)
            assert ours["qk_norm"] == hasattr(attention, "q_norm")
            assert ours["rope"] == bool(getattr(attention, "use_rope", True))
            assert ours["window"] == (window if kind == "sliding_attention" else 0)
            assert spec["rms_eps"] == theirs.input_layernorm.variance_epsilon
        assert spec["max_positions"] == config.max_position_embeddings
        padding = model.model.embed_tokens.padding_idx
        assert spec["pad_token"] == (-1 if padding is None else padding)
        stored = set(load_file(tmp_path / "model.safetensors"))
        assert set(spec["names"]) == stored


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_written_by_transformers_comes_back_from_us_unchanged(family, tmp_path):
    model = make(family)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert (tmp_path / "in/model.safetensors.index.json").exists()
    tool("model", tmp_path / "in", tmp_path / "out", "fp32", 30000)
    assert (tmp_path / "out/model.safetensors.index.json").exists()
    back, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    theirs = model.state_dict()
    for name, value in back.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    ids = torch.arange(20).reshape(2, 10)
    assert torch.equal(back.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_types_are_converted_as_torch_does(stored, tmp_path):
    model = make("llama").to(stored)
    model.save_pretrained(tmp_path / "in")
    tool("model", tmp_path / "in", tmp_path / "out", "bf16", 10**9)
    tensors = load_file(tmp_path / "out/model.safetensors")
    theirs = model.state_dict()
    assert tensors.keys() == theirs.keys()
    for name, value in tensors.items():
        assert torch.equal(value, theirs[name].to(torch.bfloat16)), name
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_the_hash_does_not_depend_on_the_parts(tmp_path):
    model = make("qwen2")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    one, many = (json.loads(tool("verify", tmp_path / d)) for d in ("one", "many"))
    assert one["ok"] and many["ok"] and len(many["files"]) > len(one["files"])
    assert one["weights_hash"] == many["weights_hash"]


class Foreign:
    """A model, and adapters that peft has made of it, each once."""

    def __init__(self, directory):
        self.directory, self.model, self.made = directory, make("qwen3", tie_word_embeddings=False), {}
        self.model.save_pretrained(directory / "base")

    def fresh(self):
        return copy.deepcopy(self.model)

    def adapter(self, arguments):
        """(its directory, the logits with it)"""
        key = repr(arguments)
        if key not in self.made:
            torch.manual_seed(1)
            model = peft.get_peft_model(self.fresh(), peft.LoraConfig(**{**dict(r=4, lora_alpha=6, task_type="CAUSAL_LM"), **arguments}))
            for name, p in model.named_parameters():
                if "lora_" in name or "modules_to_save" in name or "tokens_delta" in name or (p.requires_grad and name.endswith(".bias")):
                    torch.nn.init.normal_(p, std=0.1)
            out = self.directory / str(len(self.made))
            model.save_pretrained(out)
            self.made[key] = out, logits(model)
        return self.made[key]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return Foreign(tmp_path_factory.mktemp("foreign"))


def logits(model):
    return model.eval()(torch.arange(20).reshape(2, 10)).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_peft_goes_both_ways_or_is_refused_by_name(name, foreign, tmp_path):
    arguments, edits, refused = case_of(name)
    directory = foreign.directory / "base"
    made, expected = foreign.adapter(arguments)
    shutil.copytree(made, tmp_path / "in")
    config = json.loads((tmp_path / "in/adapter_config.json").read_text())
    (tmp_path / "in/adapter_config.json").write_text(json.dumps({**config, **edits}))
    if refused:
        message = tool("adapter", directory, tmp_path / "in", tmp_path / "out", code=11)
        assert refused in message and not (tmp_path / "out").exists(), message
        return
    theirs = load_file(tmp_path / "in/adapter_model.safetensors")
    theirs = {name: tensor for name, tensor in theirs.items() if not name.endswith(".base_layer.weight")}  # the base's, which are compared and left alone
    for command in ("adapter", "adapter-patterns"):
        tool(command, directory, tmp_path / "in", tmp_path / command)
        ours = load_file(tmp_path / command / "adapter_model.safetensors")
        written = json.loads((tmp_path / command / "adapter_config.json").read_text())
        assert ours.keys() == theirs.keys()
        patterns = written["rank_pattern"] or written["alpha_pattern"]
        if command == "adapter":  # what servers read alike
            assert not patterns and not written["use_rslora"]
            assert {t.shape[0] for n, t in ours.items() if "lora_A" in n} == {written["r"]}
        else:
            assert all(torch.equal(ours[n], theirs[n]) for n in ours)
        back = logits(peft.PeftModel.from_pretrained(foreign.fresh(), tmp_path / command))
        torch.testing.assert_close(back, expected, rtol=1e-5, atol=1e-5)
        if not patterns and command == "adapter-patterns":
            break
    assert json.loads(tool("verify", tmp_path / "adapter"))["ok"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_factors_and_norms_of_peft_go_both_ways_or_are_refused_by_name(name, foreign, tmp_path):
    make, arguments, edits, refused = OTHERS[name]
    torch.manual_seed(1)
    model = peft.get_peft_model(foreign.fresh(), make(task_type="CAUSAL_LM", **arguments))
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, mean=1, std=0.3)
    model.save_pretrained(tmp_path / "in")
    config = json.loads((tmp_path / "in/adapter_config.json").read_text())
    (tmp_path / "in/adapter_config.json").write_text(json.dumps({**config, **edits}))
    base = foreign.directory / "base"
    if refused:
        message = tool("adapter", base, tmp_path / "in", tmp_path / "out", code=11)
        assert refused in message and not (tmp_path / "out").exists(), message
        return
    tool("adapter", base, tmp_path / "in", tmp_path / "out")
    theirs, ours = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("in", "out"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    back = logits(peft.PeftModel.from_pretrained(foreign.fresh(), tmp_path / "out"))
    torch.testing.assert_close(back, logits(model), rtol=1e-5, atol=1e-5)


def test_every_key_of_pefts_configurations_has_a_case():
    assert len(ADAPTERS) >= 60 and not keys_without_a_case(), keys_without_a_case()


def test_safetensors_files_of_every_type_go_both_ways(tmp_path):
    tensors = {}
    for i, dtype in enumerate((torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                               torch.int16, torch.int8, torch.uint8, torch.bool)):
        tensors[f"t{i}.é"] = (torch.randn(3, i + 1) * 9).to(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 4)
    save_file(tensors, tmp_path / "a", metadata={"format": "pt", "x": "\"y\"\n"})
    tool("copy", tmp_path / "a", tmp_path / "b")
    back = load_file(tmp_path / "b")
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype and torch.equal(back[name], value), name
    with safetensors.safe_open(tmp_path / "b", "pt") as file:
        assert file.metadata() == {"format": "pt", "x": "\"y\"\n"}


def mutations(good, rng):
    """Files with one small change, and headers with one changed number."""
    (length,) = struct.unpack("<Q", good[:8])
    for _ in range(60):
        bad = bytearray(good)
        at = rng.randrange(8 + length)
        bad[at] = rng.choice(b'0123456789{}[]",: \x00') if at >= 8 else rng.randrange(256)
        yield bytes(bad)
    for _ in range(40):
        header = good[8:8 + length].decode()
        digits = [i for i, c in enumerate(header) if c.isdigit()]
        at = rng.choice(digits)
        header = header[:at] + rng.choice("0123456789") + header[at + 1:]
        yield good[:8] + header.encode() + good[8 + length:]


def test_what_the_reference_refuses_we_refuse_too(tmp_path):
    rng = random.Random(7)
    save_file({"a": torch.arange(6.0), "b.c": torch.ones(2, 3, dtype=torch.int16), "d": torch.zeros(5)}, tmp_path / "x")
    good = (tmp_path / "x").read_bytes()
    refused = accepted = 0
    for bad in mutations(good, rng):
        (tmp_path / "y").write_bytes(bad)
        try:
            load_file(tmp_path / "y")
        except Exception:
            tool("copy", tmp_path / "y", tmp_path / "z", code=11)
            refused += 1
        else:
            # A changed name or nothing at all: ours may be stricter, and if it accepts, the values agree.
            done = subprocess.run([TOOL, "copy", tmp_path / "y", tmp_path / "z"], capture_output=True)
            assert done.returncode in (0, 11)
            if done.returncode == 0:
                ours, theirs = load_file(tmp_path / "z"), load_file(tmp_path / "y")
                assert ours.keys() == theirs.keys()
                # As bytes: a changed dtype may make NaNs.
                for name in ours:
                    assert ours[name].numpy().tobytes() == theirs[name].numpy().tobytes()
                accepted += 1
    assert refused >= 20 and accepted >= 5
