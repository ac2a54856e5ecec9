"""A step whose transfers overlap nothing misses the target of one whose transfers do."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from figures import Figures  # noqa: E402
from offload_step import FIGURES, OVERLAPPED  # noqa: E402


def test_no_step_meets_both_targets():
    overlapped, not_overlapped = FIGURES[2:]
    figures = Figures(argparse.Namespace(smoke=False, impossible=False), [overlapped, not_overlapped])
    assert overlapped.at_most == OVERLAPPED and not_overlapped.name == overlapped.name + ", no overlap"
    assert figures.target(not_overlapped) >= figures.target(overlapped)
