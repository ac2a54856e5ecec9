"""What fuzz.py makes of what libFuzzer says."""

import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fuzz  # noqa: E402


@pytest.fixture
def fuzzer(tmp_path):
    out = fuzz.Fuzzer(tmp_path)
    out.findings.mkdir(parents=True)
    (out.build / "bin").mkdir()
    return out


def ended(fuzzer, what, again):
    """A run that ends with `what` for an input, which does `again` when it is run alone; and whether that input is still there."""
    parser = fuzz.Parser("some", [], "")
    kept = fuzzer.findings / "some-1234"
    program = fuzzer.program(parser)
    program.write_text(f"#!{sys.executable}\n" + textwrap.dedent(f"""
        import sys, time
        if sys.argv[1:] == [{str(kept)!r}]:
            {again}
            sys.exit()
        open({str(kept)!r}, "w").close()
        print("artifact_prefix='x'; Test unit written to {kept}\\nSUMMARY: libFuzzer: {what}\\nstat::number_of_executed_units: 7")
        sys.exit(70)"""))
    program.chmod(0o755)
    return fuzzer.run(parser, []), kept.exists()


def test_time_that_another_took_is_no_finding(fuzzer):
    run, kept = ended(fuzzer, "timeout", "pass")
    assert run.finding == "" and run.executions == 7 and not kept


@pytest.mark.parametrize("what, again", [("timeout", "time.sleep(1.2)"), ("timeout", "sys.exit(77)"), ("deadly signal", "pass")])
def test_a_finding_is_kept_with_its_input(fuzzer, what, again):
    run, kept = ended(fuzzer, what, again)
    assert run.finding == f"SUMMARY: libFuzzer: {what}; some-1234" and kept
