"""Every linear weight of the real SmolLM2, in each encoding, against bitsandbytes on the CPU: no byte differs."""
import subprocess
import sys
from pathlib import Path

import pytest
from quantize_test import FOUR_BITS, check_four_bits, check_int8, tool
from safetensors import safe_open
from safetensors.torch import load_file, save_file

MAKE_MODEL = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "make_model.py"
LAYERS, LINEARS = 30, 7  # of each layer
AT_ONCE = 21             # three layers: what is compared takes ten times their memory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, MAKE_MODEL, directory / "model"], check=True, timeout=600)
    return directory / "model" / "model.safetensors"


@pytest.mark.parametrize("encoding", [*FOUR_BITS, "int8"])
def test_every_linear_weight_has_bitsandbytes_bits(encoding, model, tmp_path):
    with safe_open(model, "pt") as file:
        names = sorted(n for n in file.keys() if ".layers." in n and file.get_slice(n).get_shape()[1:])
        assert len(names) == LAYERS * LINEARS
        for first in range(0, len(names), AT_ONCE):
            matrices = {name: file.get_tensor(name) for name in names[first:first + AT_ONCE]}
            save_file(matrices, tmp_path / "in.safetensors")
            tool("quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors", encoding)
            ours = load_file(tmp_path / "out.safetensors")
            for name, x in matrices.items():
                check_int8(name, x, ours) if encoding == "int8" else check_four_bits(name, x, ours, *FOUR_BITS[encoding])
