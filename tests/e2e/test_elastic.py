"""Runs that look after themselves, with the real program: ranks that are killed at random steps (`--restarts`), and a run that
continues with fewer ranks (`--elastic`; its rules: tests/launcher/restarts_test.cpp, with GPUs: gpus_test.cpp, test_gpus.py)."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from counts import FULL

from test_ranks import prepared, result, run, work  # noqa: F401
from test_run import BIN, rows

EVERY = 5


def ranks_of(cli):
    """{rank: pid} of a CLI process's workers."""
    out = {}
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{cli.pid}/task/{cli.pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"--rank" in words:
                    out[int(words[words.index(b"--rank") + 1])] = int(pid)
    return out


def steps_done(work, name):
    """Of the last row that is whole."""
    with contextlib.suppress(FileNotFoundError):
        lines = (work / "runs" / name / "metrics.jsonl").read_text().split("\n")[:-1]
        return max((row["step"] for row in map(json.loads, lines) if "loss" in row), default=0)
    return 0


class Restarted:
    """A run under --restarts, whose ranks are killed one after the other."""

    def __init__(self, work, name, *arguments):
        self.work, self.name, self.kills, self.messages = work, name, 0, work / f"{name}.messages"
        with open(self.messages, "w") as messages:
            self.cli = subprocess.Popen([BIN / "lmlaunch", *map(str, arguments), f"{name}.toml"], cwd=work, stderr=messages)

    def restarts(self):
        return self.messages.read_text().count("note RUN-42: restart ")

    def kill(self, rank, after):
        """Kills that rank, once the start that follows the last kill has it and `after` steps are done; whether it could."""
        while self.cli.poll() is None:
            pid = ranks_of(self.cli).get(rank) if self.restarts() == self.kills else None
            if pid is not None and steps_done(self.work, self.name) >= after:
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
                return True
            time.sleep(0.002)
        return False

    def ends(self):
        """Its exit code and messages."""
        try:
            code = self.cli.wait(timeout=300)
        finally:
            self.cli.kill()
        return code, self.messages.read_text()


def repeated_steps(messages):
    """Of each start that resumed from a checkpoint: how many steps the start before had done beyond it."""
    out, before = [], 0
    for line in messages.splitlines():
        if found := re.search(r"RUN-42: restart .* after step (\d+);", line):
            before = max(before, int(found[1]))
        if found := re.search(r"resumes from \S+: step (\d+)", line):
            out.append(before - int(found[1]))
            before = int(found[1])
    return out


def test_ranks_that_are_killed_at_random_steps_leave_no_trace(work):
    draw, ranks, kills = random.Random(46), 3, 50 if FULL else 4
    # More steps than so many starts can take: none of them draws more than EVERY + 3.
    settings = {"train__steps": kills * (EVERY + 5) + 10, "train__eval_every": 7, "checkpoint__every": EVERY, "model__dtype": "bf16"}
    prepared(work, "undisturbed", **settings)
    run(work, "undisturbed", ranks)
    prepared(work, "random", **settings)
    disturbed, at = Restarted(work, "random", "--ranks", ranks, "--restarts", kills), 0
    half_written = work / "runs" / "random" / f"status.json.tmp-{disturbed.cli.pid}-1"
    for kill in range(kills):
        # Below what the last start has done it is killed while it loads, or repeats steps.
        at = max(steps_done(work, "random"), at) + draw.randint(-3, EVERY + 2)
        if kill == kills // 2:
            half_written.touch()  # as a rank leaves it that is killed while it writes
        assert disturbed.kill(draw.randrange(ranks), at), disturbed.ends()
    code, messages = disturbed.ends()
    assert code == 0 and disturbed.restarts() == kills, messages
    assert result(work, "random") == result(work, "undisturbed")
    repeated = repeated_steps(messages)
    assert len(repeated) >= kills // 3 and all(0 <= steps <= EVERY for steps in repeated), (repeated, messages)
    assert not [path for path in (work / "runs" / "random").rglob("*") if ".tmp" in path.name]


def test_an_elastic_run_of_four_ranks_continues_with_three(work):
    """Rank 3 is killed once while it trains, then before the first step of two starts."""
    settings = {"train__steps": 40, "train__eval_every": 8, "checkpoint__every": EVERY, "zero__stage": 3}
    prepared(work, "four", **settings)
    run(work, "four", 4)
    prepared(work, "elastic", **settings)
    elastic = Restarted(work, "elastic", "--ranks", 4, "--restarts", 4, "--elastic")
    assert elastic.kill(3, after=12)
    assert elastic.kill(3, after=0) and elastic.kill(3, after=0)
    code, messages = elastic.ends()
    assert code == 0, messages
    notes = [line for line in messages.splitlines() if "RUN-42" in line]
    assert len(notes) == 3 and "; with " not in notes[0] + notes[1], messages
    assert notes[2].endswith("; with 3 of 4 ranks: rank 3 was killed before its first step, twice in a row")
    assert "this run began with 4, and losses differ in rounding" in messages
    # The run is that of four ranks, but for rounding from the step on at which three resumed.
    status = json.loads((work / "runs" / "elastic" / "status.json").read_text())
    assert (status["state"], status["ranks"], status["ranks_asked"]) == ("done", 3, 4)
    got, wanted = rows(work, "elastic"), rows(work, "four")
    assert [row["step"] for row in got] == [row["step"] for row in wanted]
    begin = int(re.findall(r"resumes from \S+: step (\d+)", messages)[-1])
    assert 10 <= begin < 40
    for one, other in zip(got, wanted, strict=True):
        key = "eval_loss" if "eval_loss" in one else "loss"
        assert one[key] == (other[key] if one["step"] <= begin else pytest.approx(other[key], rel=1e-4)), one["step"]
        assert one["target_tokens"] == other["target_tokens"]
    assert "ranks" not in json.loads((work / "runs" / "four" / "status.json").read_text())
