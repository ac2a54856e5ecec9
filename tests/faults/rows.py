"""Rows of the reliability report: a suite writes its own, SUITE.json in the folder that LM_RELIABILITY names. LM_FAULTS says whether
its counts are short or full (lm_reliability_rows of cmake/targets.cmake sets both)."""

import json
import os
import time
from pathlib import Path

BIN = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin"))
SKIPPED = 77


def write_row(suite, row):
    row = {**row, "counts": os.environ.get("LM_FAULTS", "short")}
    print(json.dumps(row))
    if "LM_RELIABILITY" in os.environ:
        directory = Path(os.environ["LM_RELIABILITY"])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{suite}.json").write_text(json.dumps(row, indent=1) + "\n")


class Row:
    """What a suite shows; `outcomes` are counts, `figures` numbers or text."""

    def __init__(self, suite, failure, how, seed=None):
        self.suite, self.start = suite, time.monotonic()
        self.row = {"failure": failure, "how": how, "tries": 0, "outcomes": {}, "figures": {}, "seed": seed}

    def count(self, outcome, number=1):
        self.row["outcomes"][outcome] = self.row["outcomes"].get(outcome, 0) + number

    def write(self):
        self.row["seconds"] = round(time.monotonic() - self.start, 1)
        write_row(self.suite, self.row)

    def skip(self, why):
        """Not shown, and said so."""
        self.row["skipped"] = why
        self.write()
        print(f"skipped: {why}")
        raise SystemExit(SKIPPED)
