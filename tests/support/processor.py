"""Which instructions the program uses here, as src/base/processor.h has them: this processor's, up to LM_CPU."""

import os
import re
from pathlib import Path

CORE = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# Kind: the flags of /proc/cpuinfo that it wants.
KINDS = {"none": set(), "avx2": {"avx2", "fma"}, "avx512_core": CORE, "avx512_vbmi": CORE | {"avx512vbmi"},
         "avx512_bf16": CORE | {"avx512_bf16"}, "amx": CORE | {"avx512_bf16", "amx_tile", "amx_bf16"}}


def has(kind):
    order = list(KINDS)
    if order.index(kind) > order.index(os.environ.get("LM_CPU") or "amx"):
        return False
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return KINDS[kind] <= set(flags[1].split() if flags else ())


def best():
    return [kind for kind in KINDS if has(kind)][-1]


def library_multiplies_bf16():
    """Else the products of bf16 matrices are ours: terms are added in their order in fp32 (src/kernels/gemm_cpu.cpp)."""
    return has("avx512_bf16")
