"""What was skipped is seen: a pytest run of which a part was skipped ends with 77, and ctest takes 77 of every entry that runs
pytest or GoogleTest for a skip (CMakeLists.txt, targets.cmake)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("LM_BIN", TESTS.parent / "build" / "bin")).parent
START = "import pytest\n"
PASSES = "def test_passes(): pass\n"
SKIPS = "def test_skips(): pytest.skip('not here')\n"
FAILS = "def test_fails(): assert False\n"
MARKED = "@pytest.mark.skipif(True, reason='not here')\ndef test_marked(): pass\n"
WHOLE = "pytest.skip('not here', allow_module_level=True)\n"


@pytest.mark.parametrize("text, code", [(PASSES, 0), (PASSES + SKIPS, 77), (PASSES + MARKED, 77), (SKIPS, 77), (WHOLE, 77),
                                        (PASSES + SKIPS + FAILS, 1), ("", 5)])
@pytest.mark.parametrize("started_in", [".", "tests/e2e"])
def test_a_run_with_skips_ends_with_77(tmp_path, text, code, started_in):
    (tmp_path / "tests" / "e2e").mkdir(parents=True)
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(TESTS / name, tmp_path / "tests")
    (tmp_path / "tests" / "e2e" / "test_drawn.py").write_text(START + text)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "tests/e2e/test_drawn.py"],
                          cwd=tmp_path / started_in, capture_output=True, text=True)
    assert done.returncode == code, done.stdout


def test_ctest_takes_77_for_a_skip_of_every_entry(tmp_path):
    ctest = Path(sys.executable).with_name("ctest")
    # From elsewhere: it empties the log of the run that this test is part of.
    (tmp_path / "CTestTestfile.cmake").write_text(f'subdirs("{BUILD}")\n')
    listed = subprocess.run([ctest, "--test-dir", tmp_path, "--show-only=json-v1"], capture_output=True, text=True, check=True)
    entries = json.loads(listed.stdout)["tests"]
    assert len(entries) > 100
    blind = [entry["name"] for entry in entries
             if not any(p["name"] == "SKIP_RETURN_CODE" and p["value"] == 77 for p in entry["properties"])]
    # No test of theirs can be skipped: the format, the lists of mistakes, the table of gpu_checks.sh (which names its own skips).
    assert [name for name in blind if not name.startswith(("gpu_checks_", "mutations", "format_check"))] == []
