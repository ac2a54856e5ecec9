"""The reliability report: what was skipped, failed or has written no row is never a pass."""

import json
import re
import subprocess
import sys
from pathlib import Path

REPORT = Path(__file__).with_name("report.py")
STATUS = {"passed": "run", "failed": "fail", "skipped": "notrun"}


def reported(build, results, rows, counts="short"):
    """Exit code, text and reliability.json for {entry: result} and {entry: [names of rows]} in a report of such counts."""
    cases = "".join(f'<testcase name="{name}" status="{STATUS[result]}"/>' for name, result in results.items())
    (build / "reliability.xml").write_text(f"<testsuite>{cases}</testsuite>")
    for entry, names in rows.items():
        (build / "reliability" / entry).mkdir(parents=True)
        for name in names:
            row = {"failure": "F", "how": "H", "tries": 3, "outcomes": {"made good": 3}, "figures": {"most": 2}, "seed": None, "seconds": 1, "counts": "full"}
            (build / "reliability" / entry / f"{name}.json").write_text(json.dumps(row))
    done = subprocess.run([sys.executable, "-B", REPORT, build, build / "reliability.xml", counts], capture_output=True, text=True)
    return done.returncode, done.stdout, json.loads((build / "reliability.json").read_text())


def test_rows_are_shown(tmp_path):
    code, text, out = reported(tmp_path, {"faults_x": "passed"}, {"faults_x": ["save_calls", "load_calls"]})
    assert code == 0, text
    assert "save_calls (full counts, 1 s)\n  F\n  3 tries; made good: 3\n  most: 2\n" in text and set(out["rows"]) == {"save_calls", "load_calls"}


def test_the_report_and_each_row_say_which_counts_they_have(tmp_path):
    for counts, said in [("short", "short counts: those of CI; ./dev test --faults --full has the full ones\n"), ("full", "full counts\n")]:
        build = tmp_path / counts
        build.mkdir()
        _, text, out = reported(build, {"faults_x": "passed"}, {"faults_x": ["kill"]}, counts)
        assert text.split("\n", 1)[0].endswith(said.rstrip()) and out["counts"] == counts and "kill (full counts, 1 s)" in text


def test_rows_have_the_counts_of_their_entry(tmp_path):
    """That lm_reliability_rows gives it."""
    write = "import sys; sys.path.insert(0, sys.argv[1]); from rows import Row; Row('kill', 'F', 'H').write()"
    for counts in ("short", "full"):
        environment = {"LM_FAULTS": counts, "LM_RELIABILITY": str(tmp_path / counts)}
        subprocess.run([sys.executable, "-B", "-c", write, REPORT.parent], env=environment, check=True, capture_output=True)
        assert json.loads((tmp_path / counts / "kill.json").read_text())["counts"] == counts


def test_an_entry_that_passed_without_a_row_is_named_and_fails(tmp_path):
    code, text, out = reported(tmp_path, {"faults_x": "passed", "faults_y": "passed"}, {"faults_x": ["kill"]})
    assert code == 1 and "faults_y: not shown, it has written no row" in text and out["not_shown"] == ["faults_y"]


def test_what_was_skipped_or_failed_is_named(tmp_path):
    code, text, out = reported(tmp_path, {"faults_x": "passed", "faults_y": "skipped"}, {"faults_x": ["kill"]})
    assert code == 0 and "faults_y: not shown, it was skipped" in text and out["not_shown"] == ["faults_y"]
    code, text, _ = reported(tmp_path, {"faults_z": "failed"}, {})
    assert code == 1 and "faults_z: FAILED" in text


def test_a_row_that_the_page_does_not_name_fails(tmp_path):
    code, text, _ = reported(tmp_path, {"faults_x": "passed"}, {"faults_x": ["something_new"]})
    assert code == 1 and "something_new: docs/reliability.md does not name it" in text


def test_every_entry_of_the_report_has_a_row_on_the_page():
    """By the names under which the suites write."""
    import report
    found = [match[1] for folder in ("faults", "e2e", "checkpoint", "train", "fuzz")
             for path in [*(REPORT.parents[1] / folder).glob("*.py"), *(REPORT.parents[1] / folder).glob("*.cpp")]
             for match in re.finditer(r'(?:Report|Row|Row row)\("(\w+)"', path.read_text())]
    assert {"kill", "power_cut", "load_calls", "failing_machine", "fuzz_corpus", "flips_in_process"} <= set(found)
    assert [name for name in found if not report.named(name)] == []
