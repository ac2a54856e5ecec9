"""A wall clock that jumps by an hour and by ten years, forth and back, all through a run: no time is negative or years long, no limit
of time strikes, and what comes out is the undisturbed run, bit for bit. Ranks that watch each other do not give each other up."""

import json
import os
import subprocess
import sys
import time

import pytest

from runs import BIN, FULL, STEPS, Report, Run, Undisturbed, make_work

PRELOAD = str(BIN.parent / "lib" / "libclock_jumps.so")
JUMPING = {**os.environ, "LD_PRELOAD": PRELOAD}
CASES = [("full", "resident", 1), ("lora", "nvme", 1), ("full", "nvme", 3)]  # method, place, ranks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(make_work(tmp_path_factory.mktemp("clock")))


@pytest.fixture(scope="module")
def report():
    out = Report("clock", "F28: the wall clock jumps", "by an hour and by ten years, forth and back, every 7 ms of a run; run.time_limit = 1h")
    yield out
    out.write()


def test_the_clock_of_this_test_jumps():
    program = ("import time; began = time.monotonic(); seen = set()\n"
               "while time.monotonic() - began < 0.5: seen.add(round((time.time() - 1.5e9) / 3.15e8)); time.sleep(0.001)\nprint(len(seen))")
    done = subprocess.run([sys.executable, "-c", program], env=JUMPING, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 3, "three decades were to be seen"


@pytest.mark.parametrize("method, place, ranks", CASES)
def test_a_clock_that_jumps_changes_nothing(undisturbed, report, method, place, ranks):
    run = Run(undisturbed.work, f"{method}_{place}_{ranks}", method, place, environment=JUMPING)
    arguments = ["run.time_limit=1h", "checkpoint.every=1min", *(["--ranks", str(ranks)] if ranks > 1 else [])]
    for _ in range(20 if FULL else 1):
        run = Run(undisturbed.work, run.name, method, place, environment=JUMPING)
        begin = time.monotonic()
        messages = run.finish(*arguments)
        report.count("ran to its end", tries=1)
        took = time.monotonic() - begin
        rows = [row for row in run.rows() if "loss" in row]
        assert len(rows) == STEPS and all(0 < row["step_ms"] < 1e3 * took for row in rows), messages
        assert sum(row["step_ms"] for row in rows) < 1e3 * took
        summary = json.loads((run.directory / "status.json").read_text())
        assert summary["state"] == "done"
        if ranks == 1:
            assert run.result() == undisturbed(method)
        assert not run.leftovers()
