"""A run of ctest that failed ends with a line for each test that did: what it said first of its failure."""

import subprocess
import sys
from pathlib import Path

TESTS = """
add_test(passes "echo" "error: not at all")
add_test(google "sh" "-c" "echo start; echo '../tests/x/a_test.cpp:12: Failure'; echo 'Expected: (2) < (1), actual: 2 vs 1'; exit 1")
add_test(pytest "sh" "-c" "echo '>       assert a == b'; echo 'E       assert 1 == 2'; exit 1")
add_test(crashes "sh" "-c" "echo begin; echo '[ RUN      ] A.B'; kill -SEGV $$")
add_test(silent "false")
add_test(absent "/no/such/program")
add_test(slow "sleep" "30")
set_tests_properties(slow PROPERTIES TIMEOUT 1)
"""


def test_each_failure_is_told_in_a_line(tmp_path):
    (tmp_path / "CTestTestfile.cmake").write_text(TESTS)
    assert subprocess.run([Path(sys.executable).with_name("ctest"), "-j8"], cwd=tmp_path, capture_output=True).returncode != 0
    told = subprocess.run([sys.executable, Path(__file__).with_name("reasons.py"), tmp_path], capture_output=True, text=True, check=True)
    assert sorted(told.stdout.splitlines()) == [
        "absent: no output", "crashes: [ RUN ] A.B", "google: a_test.cpp:12 Expected: (2) < (1), actual: 2 vs 1",
        "pytest: assert a == b", "silent: no output", "slow: no output"]


def test_nothing_is_told_where_no_test_ran(tmp_path):
    (tmp_path / "Testing" / "Temporary").mkdir(parents=True)
    told = subprocess.run([sys.executable, Path(__file__).with_name("reasons.py"), tmp_path], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, "")
