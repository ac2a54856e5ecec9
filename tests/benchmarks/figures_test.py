"""Targets of benchmarks: a missed one is told by the exit status, whatever kind of miss it is."""

import argparse
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from figures import Figure, Figures, common_options  # noqa: E402

SPEED = Figure("speed", "x", "the peer", at_least=1.6)
MEMORY = Figure("memory", "x", "the peer", at_most=0.8)


def figures(*announced, smoke=False, impossible=False):
    return Figures(argparse.Namespace(smoke=smoke, impossible=impossible), announced)


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


@pytest.mark.parametrize("how", ["smoke", "impossible"])
def test_nothing_meets_an_impossible_target(how, capsys):
    measured = figures(SPEED, MEMORY, **{how: True})
    measured.set("speed", 1e300)
    measured.set("memory", -1e300)
    assert exit_status(measured) == 1
    text = capsys.readouterr().out
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [(row["met"], row["impossible"], row["target"]) for row in rows[:2]] == [(False, True, 1.6), (False, True, 0.8)]
    assert text.count("can fail") == 2 and "MISSED" not in text


@pytest.mark.parametrize("value", [None, math.nan])
def test_what_was_not_measured_does_not_show_that_it_can_fail(value, capsys):
    measured = figures(SPEED, smoke=True)
    measured.set("speed", value)
    assert exit_status(measured) == 1
    text = capsys.readouterr().out
    assert "MISSED" in text and "can fail" not in text


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
    options = common_options("One question.").parse_args(["bin", "--smoke", "--impossible"])
    assert (options.bin_dir, options.smoke, options.impossible) == (Path("bin"), True, True)
