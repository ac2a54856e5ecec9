"""Random weights of a published shape as a Hugging Face directory, quantized as they are drawn: a shard at a time, in a few MB of memory.

Two forms that lmlaunch reads as they are: nf4 with double scales, as bitsandbytes and transformers write it (Qwen3-MoE), and MXFP4 experts
beside bf16 (gpt-oss). Numbers are a tile that repeats, about as large as those of trained models.
"""

import array
import json
import math
import random
import struct
from dataclasses import dataclass

TILE = 1 << 20
SIZES = {"U8": 1, "BF16": 2, "F32": 4}
BLOCK, NESTED = 64, 256  # codes that share a scale, and scales that share one
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524,
       0.44070983, 0.562617, 0.72295684, 1.0]
ONE = b"\x80\x3f"  # in bf16
QUANTIZED = {"qwen3_moe": dict(quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="nf4",
                               bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_quant_storage="uint8"),
             "gpt_oss": dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                                           "model.embed_tokens", "lm_head"])}


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple
    tile: bytes  # repeats

    @property
    def bytes(self):
        return math.prod(self.shape) * SIZES[self.dtype]


def dynamic_map():
    """bitsandbytes' signed map of 8 bits, of the scales of scales: seven decades, each with twice as many steps as the one below."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = [0.1 + 0.9 * k / 2**i for k in range(2**i + 1)]
        middles = [10.0 ** (i - 6) * (low + high) / 2 for low, high in zip(edges, edges[1:])]
        values += middles + [-value for value in middles]
    return sorted(values)


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


class Tiles:
    def __init__(self, seed=1):
        draw = random.Random(seed)
        self.codes = draw.randbytes(TILE)
        # Sign and fraction are random, and magnitudes are 1/64 to 1/32.
        self.numbers = array.array("H", (word & 0x807F | 0x3C80 for word in array.array("H", self.codes))).tobytes()


class Shape:
    """The tensors of a config.json, by shards: one for each layer, and one for the others."""

    def __init__(self, config):
        self.config, self.tiles = config, Tiles()
        self.hidden = config["hidden_size"]
        self.widths = [config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")]

    def shards(self):
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            norms = [self.ones(prefix + name, self.hidden) for name in ("input_layernorm", "post_attention_layernorm")]
            yield norms + list(self.oss(prefix) if self.config["model_type"] == "gpt_oss" else self.qwen(prefix))
        vocabulary = (self.config["vocab_size"], self.hidden)
        yield [self.plain("model.embed_tokens.weight", *vocabulary), self.ones("model.norm", self.hidden), self.plain("lm_head.weight", *vocabulary)]

    def plain(self, name, *shape):
        return Tensor(name, "BF16", shape, self.tiles.numbers)

    def ones(self, module, width):
        return Tensor(f"{module}.weight", "BF16", (width,), ONE)

    def zeros(self, name, *shape):
        return Tensor(name, "BF16", shape, bytes(2))

    def projections(self):
        """Of attention, with their rows and columns."""
        (q, kv), hidden = self.widths, self.hidden
        return {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}

    def nf4(self, module, rows, columns):
        name, scales = f"{module}.weight", rows * columns // BLOCK
        assert scales % NESTED == 0, f"{module}: not whole blocks"
        state = json.dumps(dict(quant_type="nf4", blocksize=BLOCK, dtype="bfloat16", shape=[rows, columns], nested_blocksize=NESTED,
                                nested_dtype="float32", nested_offset=0.03)).encode()
        yield Tensor(name, "U8", (rows * columns // 2, 1), self.tiles.codes)
        yield Tensor(f"{name}.absmax", "U8", (scales,), self.tiles.codes)
        yield Tensor(f"{name}.nested_absmax", "F32", (scales // NESTED,), floats([0.02]))
        yield Tensor(f"{name}.quant_map", "F32", (16,), floats(NF4))
        yield Tensor(f"{name}.nested_quant_map", "F32", (256,), floats(dynamic_map()))
        yield Tensor(f"{name}.quant_state.bitsandbytes__nf4", "U8", (len(state),), state)

    def qwen(self, prefix):
        for name, size in self.projections().items():
            yield from self.nf4(f"{prefix}self_attn.{name}", *size)
        for name in ("q_norm", "k_norm"):
            yield self.ones(f"{prefix}self_attn.{name}", self.config["head_dim"])
        experts, ffn = self.config["num_experts"], self.config["moe_intermediate_size"]
        yield self.plain(f"{prefix}mlp.gate.weight", experts, self.hidden)
        for e in range(experts):
            for name, size in (("gate_proj", (ffn, self.hidden)), ("up_proj", (ffn, self.hidden)), ("down_proj", (self.hidden, ffn))):
                yield from self.nf4(f"{prefix}mlp.experts.{e}.{name}", *size)

    def mxfp4(self, name, experts, rows, columns):
        yield Tensor(f"{name}_blocks", "U8", (experts, rows, columns // 32, 16), self.tiles.codes)
        yield Tensor(f"{name}_scales", "U8", (experts, rows, columns // 32), bytes([120, 121]))  # 1/128 and 1/64
        yield self.zeros(f"{name}_bias", experts, rows)

    def oss(self, prefix):
        for name, size in self.projections().items():
            yield self.plain(f"{prefix}self_attn.{name}.weight", *size)
            yield self.zeros(f"{prefix}self_attn.{name}.bias", size[0])
        yield self.zeros(f"{prefix}self_attn.sinks", self.config["num_attention_heads"])
        experts, ffn = self.config["num_local_experts"], self.config["intermediate_size"]
        yield self.plain(f"{prefix}mlp.router.weight", experts, self.hidden)
        yield self.zeros(f"{prefix}mlp.router.bias", experts)
        yield from self.mxfp4(f"{prefix}mlp.experts.gate_up_proj", experts, 2 * ffn, self.hidden)
        yield from self.mxfp4(f"{prefix}mlp.experts.down_proj", experts, self.hidden, ffn)


def write_shard(path, tensors):
    header, end = {}, 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + tensor.bytes]}
        end += tensor.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            whole = tensor.tile * -(-min(tensor.bytes, TILE) // len(tensor.tile))
            for start in range(0, tensor.bytes, len(whole)):
                file.write(memoryview(whole)[:tensor.bytes - start])


def checkpoint_bytes(config):
    return sum(tensor.bytes for tensors in Shape(config).shards() for tensor in tensors)


def write_checkpoint(directory, config):
    """All files but config.json, which has quantization_config of QUANTIZED."""
    index = {}
    for number, tensors in enumerate(Shape(config).shards(), 1):
        file = f"model-{number:05}.safetensors"
        write_shard(directory / file, tensors)
        index.update((tensor.name, file) for tensor in tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
