"""Rows of the reliability report: each suite writes its own, build/reliability/<suite>.json, when it runs with full counts."""

import json
import os
import time
from pathlib import Path

BIN = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin"))
ROWS = BIN.parent / "reliability"
SKIPPED = 77


class Row:
    """What a suite shows; `outcomes` are counts, `figures` numbers or text."""

    def __init__(self, suite, failure, how, seed=None, full=True):
        self.full, self.suite, self.start = full, suite, time.monotonic()
        self.row = {"failure": failure, "how": how, "tries": 0, "outcomes": {}, "figures": {}, "seed": seed}

    def count(self, outcome, number=1):
        self.row["outcomes"][outcome] = self.row["outcomes"].get(outcome, 0) + number

    def write(self):
        self.row["seconds"] = round(time.monotonic() - self.start, 1)
        print(json.dumps(self.row))
        if not self.full:
            return
        ROWS.mkdir(parents=True, exist_ok=True)
        (ROWS / f"{self.suite}.json").write_text(json.dumps(self.row, indent=1) + "\n")

    def skip(self, why):
        """Not shown, and said so."""
        self.row["skipped"] = why
        self.write()
        print(f"skipped: {why}")
        raise SystemExit(SKIPPED)
