"""docs/what-fits.md is what `lmlaunch plan` says: one model's table in `./dev test`, the page in `./dev test --full`."""

import subprocess
import sys
from pathlib import Path

from counts import FULL
from test_run import BIN

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_what_plans_say():
    models = [] if FULL else ["--models", "SmolLM2-1.7B"]
    made = subprocess.run([sys.executable, "-B", DOCS / "what_fits.py", BIN / "lmlaunch", *models], capture_output=True, text=True, check=True)
    page = (DOCS / "what-fits.md").read_text()
    assert made.stdout == page if FULL else made.stdout in page
