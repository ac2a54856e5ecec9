"""A step whose transfers overlap nothing misses the target of one whose transfers do, in the full form and in the short one."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from figures import Figures  # noqa: E402
from offload_step import OVERLAPPED, SLOW, wanted  # noqa: E402


@pytest.mark.parametrize("short", [False, True])
def test_no_step_meets_both_targets(short):
    overlapped, not_overlapped = wanted(short)[2:]
    figures = Figures(argparse.Namespace(short=short, impossible=False), [overlapped, not_overlapped])
    assert overlapped.at_most == OVERLAPPED and not_overlapped.name == overlapped.name + ", no overlap"
    assert figures.target(not_overlapped) >= figures.target(overlapped)


def test_the_slow_disk_tells_them_apart():
    """By the short form's arithmetic: what is read, and what is written, hides under a forward, a third of a step; both do not."""
    figures = Figures(argparse.Namespace(short=True, impossible=False), wanted(True))
    assert SLOW / 2 < 1 / 3 and 1 + SLOW >= 1.2 * figures.target(wanted(True)[3])
