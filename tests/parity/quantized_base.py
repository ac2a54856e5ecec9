"""What bitsandbytes makes of a matrix, as it is computed with."""

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

torch._dynamo.config.disable = True  # bitsandbytes compiles a function for each shape


def four_bits(weight, kind, double):
    """As it is computed with. (Dequantized by the portable implementation: the AVX-512 one of 0.50.2 errs where a row ends
    inside a block.)"""
    codes, state = bnb.quantize_4bit(weight, quant_type=kind, blocksize=64)
    scales = state.absmax
    if double:
        offset = scales.double().mean().float()
        theirs, outer = bnb.quantize_blockwise(scales - offset, blocksize=256)
        scales = bnb.dequantize_blockwise(theirs, outer) + offset
    shape = torch.Size((1, weight.numel()))
    return _dequantize_4bit_compute(codes.reshape(-1), scales, state.code, 64, shape, weight.dtype).reshape(weight.shape)
