"""Codes, scales and the values that they stand for against bitsandbytes on the CPU, bit for bit."""
import os
import subprocess
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from safetensors.torch import load_file, save_file

TOOL = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin")) / "weights_tool"
torch.set_num_threads(1)
torch._dynamo.config.disable = True  # bitsandbytes compiles a function that is called a thousand shapes here

FOUR_BITS = {"nf4": ("nf4", False), "fp4": ("fp4", False), "nf4, double": ("nf4", True), "fp4, double": ("fp4", True)}
MATRICES = 1200


def tool(*args):
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def random_matrix(rng, i):
    """Of any size, with what is hard: blocks of zeros, both zeros, denormals, the largest numbers, ties, equal numbers."""
    rows, columns = int(rng.integers(1, 40)), int(rng.integers(1, 200))
    if i % 3 == 0:
        columns = 64 * int(rng.integers(1, 6))
    x = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(10.0 ** rng.integers(-6, 3))
    flat = x.reshape(-1)
    kind = i % 8
    if kind == 1:
        for start in range(0, flat.size, 192):
            flat[start:start + 64] = 0
    elif kind == 2:
        flat[rng.random(flat.size) < 0.4] = 0
        flat[rng.random(flat.size) < 0.3] = -0.0
    elif kind == 3:
        flat *= np.float32(1e-37)  # all of it below the smallest normal number, whole blocks below 1e-38
    elif kind == 4:
        flat[rng.random(flat.size) < 0.05] = np.finfo(np.float32).max
        flat[rng.random(flat.size) < 0.05] = -np.finfo(np.float32).max
    elif kind == 5:
        code = bnb.get_4bit_type("nf4" if i % 16 < 8 else "fp4", device="cpu").numpy()
        midpoints = (np.sort(code)[1:] + np.sort(code)[:-1]) / 2  # ties
        flat[:] = rng.choice(np.concatenate([midpoints, code, np.nextafter(midpoints, 2).astype(np.float32)]), flat.size)
    elif kind == 6:
        flat[:] = rng.choice([np.float32(-3), np.float32(3)])
    return torch.from_numpy(x).to([torch.float32, torch.bfloat16][i % 2])


@pytest.fixture(scope="module")
def matrices():
    rng = np.random.default_rng(5)
    out = {f"m{i:04}": random_matrix(rng, i) for i in range(MATRICES)}
    # Larger than what is quantized at once, with and without a rest; more scales than share one.
    out["large"] = torch.randn(700, 576, dtype=torch.float32, generator=torch.Generator().manual_seed(1)) * 0.02
    out["large_odd"] = torch.randn(517, 1031, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    return {name: x.contiguous() for name, x in out.items()}


def bits(x):
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def rounded(values):
    """To bf16, with the one NaN that our kernels store: torch has another where it converts vectors."""
    return torch.where(values.isnan(), torch.tensor(float("nan"), dtype=torch.bfloat16), values.to(torch.bfloat16))


def one_zero(values, codes, kind):
    code = torch.stack([codes.view(-1) >> 4, codes.view(-1) & 15], 1).view(-1)[:values.numel()].reshape(values.shape)
    return torch.where((code == 8) & (values == 0) & (kind == "fp4"), 0.0, values)


def values_of(codes, scales, kind, x):
    """In fp32. On AVX-512 bitsandbytes 0.50.2 takes another row's scales for rows that end inside a block: there its own
    portable implementation counts. Elsewhere the second zero of its fp4 is a negative one (`one_zero`)."""
    state = bnb.QuantState(absmax=scales, shape=x.shape, code=bnb.get_4bit_type(kind, device="cpu"), blocksize=64,
                           quant_type=kind, dtype=torch.float32)
    if x.shape[1] % 64 == 0:
        return one_zero(bnb.dequantize_4bit(codes, state), codes, kind)
    shape = torch.Size((1, x.numel()))
    return _dequantize_4bit_compute(codes.reshape(-1), scales, state.code, 64, shape, torch.float32).reshape(x.shape)


def check_four_bits(name, x, ours, kind, double):
    codes, state = bnb.quantize_4bit(x, quant_type=kind, blocksize=64)
    assert bits(ours[name + ".codes"]) == bits(codes), name
    scales = state.absmax
    if not double:
        assert bits(ours[name + ".scales"]) == bits(scales), name
    else:
        nested = ours[name + ".nested"].view(torch.float32)
        # torch adds the mean up in an order that threads and instruction set decide; ours is the mean in fp64, rounded.
        offset = scales.double().mean().float()
        assert bits(nested[:1]) == bits(offset.reshape(1)), name
        if scales.mean().isfinite():  # theirs overflows
            assert abs(float(scales.mean()) - float(offset)) <= 1e-6 * float(scales.max()), name
        theirs, outer = bnb.quantize_blockwise(scales - offset, blocksize=256)
        assert bits(ours[name + ".scales"]) == bits(theirs), name
        assert bits(nested[1:]) == bits(outer.absmax), name
        scales = bnb.dequantize_blockwise(theirs, outer) + offset
    values = values_of(codes, scales, kind, x)
    assert bits(ours[name + ".fp32"]) == bits(values), name
    assert bits(ours[name + ".bf16"]) == bits(rounded(values)), name
    # Their bf16 takes denormal numbers for 0, and has another NaN (double scales of the largest numbers overflow).
    normal = scales.abs().min() > 1e-30 and values.isfinite().all()
    if x.shape[1] % 64 == 0 and normal:
        state.absmax, state.dtype = scales, torch.bfloat16
        assert bits(ours[name + ".bf16"]) == bits(one_zero(bnb.dequantize_4bit(codes, state), codes, kind)), name


def check_int8(name, x, ours):
    codes, scales, _ = bnb.int8_vectorwise_quant(x)
    assert bits(ours[name + ".codes"]) == bits(codes), name
    assert bits(ours[name + ".scales"]) == bits(scales), name
    values = bnb.int8_vectorwise_dequant(codes, scales)
    assert bits(ours[name + ".fp32"]) == bits(values), name
    assert bits(ours[name + ".bf16"]) == bits(rounded(values)), name


@pytest.mark.parametrize("encoding", FOUR_BITS)
def test_random_matrices_have_bitsandbytes_bits(encoding, matrices, tmp_path):
    save_file(matrices, tmp_path / "in.safetensors")
    tool("quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors", encoding)
    ours = load_file(tmp_path / "out.safetensors")
    for name, x in matrices.items():
        check_four_bits(name, x, ours, *FOUR_BITS[encoding])


def test_random_matrices_have_bitsandbytes_int8_bits(matrices, tmp_path):
    save_file(matrices, tmp_path / "in.safetensors")
    tool("quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "int8")
    ours = load_file(tmp_path / "out.safetensors")
    for name, x in matrices.items():
        check_int8(name, x, ours)
