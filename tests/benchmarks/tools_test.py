"""A benchmark whose peer is not installed measures nothing, and says so by its exit status: it does not pass."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("name, tool", [("io.py", "fio"), ("save.py", "fio"), ("resident_instructions.py", "valgrind")])
@pytest.mark.parametrize("form", [[], ["--smoke"]])
def test_a_benchmark_without_its_peer_fails(tmp_path, name, tool, form):
    done = subprocess.run([sys.executable, "-B", BENCHMARKS / name, tmp_path, *form], cwd=tmp_path, env={"PATH": ""}, capture_output=True,
                          text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"no {tool} here" in done.stdout and "missing" in done.stdout and "MISSED" in done.stdout
