"""Targets of benchmarks: a missed one is told by the exit status, whatever kind of miss it is."""

import argparse
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from figures import Figure, Figures, common_options, loosened  # noqa: E402

SPEED = Figure("speed", "x", "the peer", at_least=1.6)
MEMORY = Figure("memory", "x", "the peer", at_most=0.8)


def figures(*announced, short=False, impossible=False):
    return Figures(argparse.Namespace(short=short, impossible=impossible), announced)


def exit_status(measured):
    with pytest.raises(SystemExit) as ended:
        measured.finish()
    return ended.value.code


def test_every_target_met_is_success():
    measured = figures(SPEED, MEMORY)
    measured.set("speed", 1.6)
    measured.set("memory", 0.8)
    assert exit_status(measured) == 0


@pytest.mark.parametrize("speed, memory", [(1.59, 0.7), (1.7, 0.81)])
def test_one_missed_target_is_failure(speed, memory):
    measured = figures(SPEED, MEMORY)
    measured.set("speed", speed)
    measured.set("memory", memory)
    assert exit_status(measured) == 1


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_value_that_is_none_is_failure(value):
    measured = figures(SPEED)
    measured.set("speed", value)
    assert exit_status(measured) == 1


def test_a_minus_infinite_value_does_not_meet_an_upper_bound():
    measured = figures(MEMORY)
    measured.set("memory", -math.inf)
    assert exit_status(measured) == 1


def test_a_figure_that_was_not_measured_is_failure(capsys):
    measured = figures(SPEED, MEMORY)
    measured.set("memory", 0.7)
    assert exit_status(measured) == 1
    assert "missing" in capsys.readouterr().out


def test_a_benchmark_without_figures_is_failure():
    assert exit_status(figures()) == 1


def test_what_cannot_be_measured_says_why_and_fails(capsys):
    with pytest.raises(SystemExit) as ended:
        figures(SPEED).fail("no fio here")
    assert ended.value.code == 1
    assert "no fio here" in capsys.readouterr().out


def test_a_figure_is_announced_and_set_once():
    measured = figures(SPEED)
    with pytest.raises(KeyError):
        measured.set("sped", 2)
    measured.set("speed", 2)
    with pytest.raises(KeyError):
        measured.set("speed", 3)
    with pytest.raises(ValueError):
        figures(SPEED, SPEED)


def test_a_figure_has_one_target():
    with pytest.raises(ValueError):
        Figure("speed", "x", "the peer")
    with pytest.raises(ValueError):
        Figure("speed", "x", "the peer", at_least=1, at_most=2)


@pytest.mark.parametrize("target, unit, at_least, loose", [
    (1.6, "x", True, 1.3), (0.8, "x", False, 0.9),    # better than 1: half the distance
    (0.95, "x", True, 0.90), (1.05, "x", False, 1.1),  # worse than 1: twice the distance
    (1.0, "x", True, 1.0), (1.0, "x", False, 1.0),
    (0.4, "x", True, 0.2),                             # never nothing
    (25, "ms/GB", False, 50), (6, "cases", True, 3), (5, "%", False, 10),
])
def test_short_runs_have_looser_targets(target, unit, at_least, loose):
    assert loosened(target, unit, at_least) == pytest.approx(loose)


def test_short_runs_use_them():
    for short, status in ((False, 1), (True, 0)):
        measured = figures(SPEED, short=short)
        measured.set("speed", 1.4)
        assert exit_status(measured) == status
    measured = figures(SPEED, short=True)
    measured.set("speed", 1.2)
    assert exit_status(measured) == 1


def test_a_figure_that_load_does_not_change_keeps_its_target():
    measured = figures(Figure("bytes", "MiB", "the file", at_most=300, loosened=False), short=True)
    measured.set("bytes", 301)
    assert exit_status(measured) == 1


@pytest.mark.parametrize("short", [False, True])
def test_nothing_meets_an_impossible_target(short, capsys):
    measured = figures(SPEED, MEMORY, short=short, impossible=True)
    measured.set("speed", 1e300)
    measured.set("memory", -1e300)
    assert exit_status(measured) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["met"] for row in rows[:2]] == [False, False]


def test_the_runner_gets_a_line_per_figure_and_one_for_the_end(capsys):
    measured = figures(SPEED, MEMORY)
    measured.set("speed", 2.0, ceiling="the peer, 10 tokens/s")
    measured.set("memory", 0.9)
    exit_status(measured)
    speed, memory, end = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert speed == {"benchmark": measured.benchmark, "figure": "speed", "value": 2.0, "unit": "x", "bound": "at least",
                     "target": 1.6, "ceiling": "the peer, 10 tokens/s", "met": True}
    assert (memory["bound"], memory["ceiling"], memory["met"]) == ("at most", "the peer", False)
    assert (end["figures"], end["missed"]) == (2, 1)


def test_every_benchmark_takes_the_same_options():
    options = common_options("One question.").parse_args(["bin", "--short", "--impossible"])
    assert (options.bin_dir, options.short, options.impossible) == (Path("bin"), True, True)
