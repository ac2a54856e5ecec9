"""parity.py on the emulator: against this machine's transformers, and the way without it."""

import os
import subprocess
import sys
from pathlib import Path

import parity
import pytest

HERE = Path(__file__).resolve().parent
EMULATOR = Path(os.environ.get("LM_BIN", HERE.parents[1] / "build" / "bin")).parent / "emulator" / "bin"


def run(*arguments):
    done = subprocess.run([sys.executable, "-B", HERE / "parity.py", *map(str, arguments)], capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fixtures") / "made"
    assert run("--make", directory)[0] == 0
    return directory


def test_every_family_agrees_with_transformers():
    count = len(parity.pairs())
    status, out = run(EMULATOR)
    assert status == 0 and "against this machine's transformers" in out and f"{count} of {count} agree" in out, out


def test_fixtures_do_without_transformers(fixtures):
    status, out = run("--fixtures", fixtures, EMULATOR)
    assert status == 0 and "5 of 5 agree" in out, out


def test_another_result_is_told(fixtures):
    case = fixtures / "mistral_window_shorter_than_documents-bf16"
    theirs = parity.read_tensors(case / "theirs.safetensors")
    theirs["grad.model.layers.1.self_attn.k_proj.weight"] *= -1
    parity.write_tensors(theirs, case / "theirs.safetensors")
    status, out = run("--fixtures", fixtures, EMULATOR, "mistral_window_shorter_than_documents")
    assert status == 1 and "k_proj" in out and "0 of 1 agree" in out, out


def test_where_there_is_nothing_to_compare_with_nothing_agrees(tmp_path):
    assert run("--fixtures", tmp_path, EMULATOR)[0] == 1
