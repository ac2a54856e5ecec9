"""run_tests.py: a line for each entry, and at the end what failed and why, what was skipped and why, the slowest, ctest's summary."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import changed  # noqa: E402
import reasons  # noqa: E402
import run_tests  # noqa: E402

ENTRIES = """
add_test(passes "echo" "error: not at all")
add_test(google "sh" "-c" "echo start; echo '../tests/x/a_test.cpp:12: Failure'; echo 'Expected: (2) < (1), actual: 2 vs 1'; exit 1")
add_test(pytest "sh" "-c" "echo '>       assert a == b'; echo 'E       assert 1 == 2'; exit 1")
add_test(crashes "sh" "-c" "echo begin; echo '[ RUN      ] A.B'; kill -SEGV $$")
add_test(silent "false")
add_test(absent "/no/such/program")
add_test(slow "sleep" "30")
set_tests_properties(slow PROPERTIES TIMEOUT 1)
add_test(skips "sh" "-c" "printf 'a_test.cpp:3: Skipped\\\\nno GPU here\\\\n\\\\n[  SKIPPED ] A.B (0 ms)\\\\n'; exit 77")
set_tests_properties(skips PROPERTIES SKIP_RETURN_CODE 77)
add_test(long_one "false")
set_tests_properties(long_one PROPERTIES LABELS long)
"""


def run(build, *arguments, **environment):
    """(exit status, lines) of the runner in a build folder of its own."""
    environment = {**{name: value for name, value in os.environ.items() if name != "LM_CPU"}, **environment}
    done = subprocess.run([sys.executable, "-B", run_tests.__file__, build, *arguments], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def build(tmp_path):
    (tmp_path / "CTestTestfile.cmake").write_text(ENTRIES)
    return tmp_path


def test_the_end_says_what_failed_and_why_and_what_was_skipped_and_why(build):
    status, lines = run(build, "test")
    assert status != 0
    begin, summary = lines.index("Failed: 6"), lines.index("25% tests passed, 6 tests failed out of 8")
    slowest = lines.index("Slowest:")
    assert lines[begin + 1:slowest] == [
        "  absent: Not Run: no output", "  crashes: Exception: SegFault: [ RUN ] A.B",
        "  google: a_test.cpp:12 Expected: (2) < (1), actual: 2 vs 1", "  pytest: assert a == b", "  silent: no output",
        "  slow: Timeout: no output", "Skipped: 1", "  skips: 1 of its tests: no GPU here"]
    assert slowest < summary and re.fullmatch(r" +1\.\d s  slow", lines[slowest + 1])
    # ctest's list of failures is the last, each with its reason.
    google, = (i for i in range(summary, len(lines)) if "- google (Failed)" in lines[i])
    assert lines[google + 1].strip() == "a_test.cpp:12 Expected: (2) < (1), actual: 2 vs 1"
    assert "skips (Skipped)" in "\n".join(lines[summary:]) and len(lines) - lines.index("The following tests FAILED:") == 1 + 2 * 6
    # The output of a failure follows its line, above the end.
    at = next(i for i, line in enumerate(lines) if re.match(r"\[\d/8\] FAILED  google ", line))
    assert lines[at + 1] == "start" and at < begin


def test_each_entry_has_a_line_with_the_time_left(build):
    status, lines = run(build, "test", "--only", "passes|skips")
    assert status == 0
    ended = [line for line in lines if line.startswith("[")]
    assert len(ended) == 2 and re.fullmatch(r"\[1/2\] (passed |skipped) (passes|skips ) +0\.\d s   about \d+ s left", ended[0])
    assert re.fullmatch(r"\[2/2\] (passed |skipped) (passes|skips ) +0\.\d s", ended[1])
    assert "Failed: none" in lines and "100% tests passed, 0 tests failed out of 2" in lines


def test_a_name_that_nothing_has_is_an_error(build):
    assert run(build, "test", "--only", "no_such_entry")[0] != 0
    assert run(build, "test", "--only", "long_one")[0] != 0  # it is not of this tier
    assert "[1/1] FAILED  long_one" in "\n".join(run(build, "full", "--only", "long_one")[1])


def test_the_tiers_of_an_entry():
    assert run_tests.tiers({"torch_free", "quick"}) == {"quick", "test", "full"}
    assert run_tests.tiers({"apparatus"}) == {"test", "full"}
    assert run_tests.tiers({"long"}) == {"full"}
    assert run_tests.tiers({"faults"}) == {"faults", "full"}
    assert run_tests.tiers({"quick", "torch_free", "faults", "faults_full"}) == {"faults", "faults_full", "full"}
    assert run_tests.tiers({"hours", "faults_full"}) == {"faults_full"}


def in_turn(build, entries, alone=True, **environment):
    """The entries in the order in which they began. `alone`: each takes all cores; else as many as the number that its name ends with."""
    (build / "CTestTestfile.cmake").write_text("".join(
        f"add_test({name} sh -c \"echo {name} >>{build}/begun; {does}\")\n"
        f"set_tests_properties({name} PROPERTIES PROCESSORS {run_tests.at_once('test') if alone else name[-1]})\n"
        for name, does in entries.items()))
    run(build, "test", **environment)
    out = (build / "begun").read_text().split()
    (build / "begun").unlink()
    return out


def test_what_took_longest_begins_first(build):
    (build / "test_seconds.json").write_text(json.dumps({"b": 5, "c": 9}))
    assert in_turn(build, {"a": "true", "b": "true", "c": "sleep 0.3", "d": "sleep 0.2; false"}) == ["c", "b", "a", "d"]
    kept = json.loads((build / "test_seconds.json").read_text())
    assert kept["c"] >= 0.3 and kept["b"] < 0.3 and "a" in kept and "d" not in kept  # what fails may have ended early
    (build / "test_seconds.json").write_text(json.dumps({"a": 1, "b": 2, "c": 3}))
    assert in_turn(build, {"a": "true", "b": "true", "c": "true"}, LM_CPU="avx2") == ["c", "b", "a"]
    assert json.loads((build / "test_seconds.json").read_text()) == {"a": 1, "b": 2, "c": 3}


def test_what_takes_several_cores_does_not_wait_for_all_others(build):
    """Two of two cores each, then what takes one."""
    seconds = {"a1": 9, "b1": 9, "c1": 9, "d1": 9, "x2": 1, "y2": 2}
    (build / "test_seconds.json").write_text(json.dumps(seconds))
    begun = in_turn(build, dict.fromkeys(seconds, "sleep 0.2"), alone=False)
    assert set(begun[:2]) == {"x2", "y2"} and set(begun[2:]) == {"a1", "b1", "c1", "d1"}


def test_costs_are_what_was_measured_and_what_was_known(tmp_path):
    measured, costs = tmp_path / "test_seconds.json", tmp_path / "costs.txt"
    costs.write_text("# a line\na 7\nb 8\n")
    assert run_tests.known_seconds(measured, costs) == {"a": 7, "b": 8}
    measured.write_text(json.dumps({"b": 12.6, "c": 0.1}))
    assert run_tests.known_seconds(measured, costs) == {"a": 7, "b": 12.6, "c": 0.1}
    run_tests.write_costs(measured, costs)
    assert costs.read_text().splitlines()[1:] == ["a 7", "b 13", "c 1"]


def test_the_time_left_is_that_of_what_has_not_ended():
    pace = run_tests.Pace({"a": 100, "b": 60, "c": 40}, {"a": 1, "b": 1, "c": 2, "new": 1}, 2)
    assert pace.seconds_left(0) == (100 + 60 + 2 * 40 + 60) / 2  # a new one takes as long as others
    pace.begins("a", 0)
    pace.begins("b", 0)
    assert pace.seconds_left(50) == (50 + 10 + 2 * 40 + 60) / 2
    pace.ends("b", 60)
    assert pace.seconds_left(60) == (40 + 2 * 40 + 60) / 2
    pace.ends("a", 220)  # so this machine is slow: 280 seconds for 160
    assert pace.seconds_left(220) == pytest.approx((2 * 40 + 60) / 2 * 280 / 160)
    assert run_tests.Pace({}, {"a": 1}, 2).seconds_left(0) == 1


def test_of_the_longest_that_runs_the_rest_is_waited_for():
    pace = run_tests.Pace({"a": 100, "b": 10}, {"a": 1, "b": 1}, 2)
    pace.begins("a", 0)
    pace.ends("b", 10)
    assert pace.seconds_left(10) == 90


def test_reasons_of_skips():
    said = "SKIPPED [2] tests/e2e/test_x.py:12: no mpirun here\nSKIPPED [1] test_x.py:40: no mpirun here\nSKIPPED [1] ../a.py:3: a disk\n"
    assert reasons.why_skipped(said) == "3 of its tests: no mpirun here; 1 of its tests: a disk"
    google = "[ RUN ] A.B\n/x/a_test.cpp:12: Skipped\nno CUDA\n  device\n\n[  SKIPPED ] A.B (0 ms)\n/x/a_test.cpp:12: Skipped\n\n\n"
    assert reasons.why_skipped(google) == "1 of its tests: no CUDA device; 1 of its tests: no reason said"
    assert reasons.why_skipped("a_test.cpp:1: Skipped\nno amx\n[  SKIPPED ] A.B (0 ms)\n[----------] 3 tests\n\n") == "1 of its tests: no amx"
    assert reasons.why_skipped("begins\nnot shown: no clang here\n\n") == "not shown: no clang here"


def test_pytest_says_why_it_skips(tmp_path):
    tests = Path(__file__).resolve().parents[1]
    for name in ("conftest.py", "pytest.ini"):
        (tmp_path / name).write_text((tests / name).read_text())
    (tmp_path / "test_drawn.py").write_text("import pytest\ndef test_skips(): pytest.skip('no disk here')\n")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path], capture_output=True, text=True)
    assert reasons.why_skipped(done.stdout) == "1 of its tests: no disk here"


@pytest.mark.parametrize("files, not_run", [
    ([], ["own_test"]), (["src/base/" + "arena" + ".cpp"], ["own_test"]), (["tests/support/reasons.py"], [])])
def test_tests_of_the_apparatus_run_when_it_has_changed(monkeypatch, files, not_run):
    command = [sys.executable, "tests/support/warm_pytest.py", "tests/support/run_tests_test.py"]
    tests = [{"name": "own_test", "command": command, "properties": [{"name": "LABELS", "value": ["apparatus"]}]},
             {"name": "other", "command": ["true"]}]
    monkeypatch.setattr(changed, "differing", lambda root, base: files)
    kept, left_out = run_tests.without_apparatus(tests)
    assert left_out == not_run and [test["name"] for test in kept] == [test["name"] for test in tests if test["name"] not in not_run]


def test_an_entry_keeps_its_properties_where_a_part_of_it_runs(tmp_path):
    (tmp_path / "prints.sh").write_text('echo "$WORD,$GTEST_FILTER,$PWD"; exit 5\n')
    (tmp_path / "CTestTestfile.cmake").write_text(
        f"add_test(one sh {tmp_path}/prints.sh)\nadd_test(other false)\n"
        "set_tests_properties(one PROPERTIES ENVIRONMENT \"WORD=a b;GTEST_FILTER=X*\" SKIP_RETURN_CODE 5 LABELS \"a;b\" PROCESSORS 2)\n")
    tests = run_tests.described(tmp_path)
    selection = changed.Selection(run_tests.ROOT, tests)
    selection.chosen = {"one": {"S"}}
    run_tests.write_selected(tmp_path / "changed", selection.chosen, selection)
    (again,) = run_tests.described(tmp_path / "changed")
    was = run_tests.properties(tests[0])
    assert {**was, "ENVIRONMENT": 0} == {**run_tests.properties(again), "ENVIRONMENT": 0} and again["command"] == tests[0]["command"]
    done = subprocess.run([run_tests.CTEST, "--test-dir", tmp_path / "changed", "-V"], capture_output=True, text=True)
    assert f"1: a b,X*-S.*:*/S.*:S/*:*/S/*,{tmp_path}\n" in done.stdout and "(Skipped)" in done.stdout
