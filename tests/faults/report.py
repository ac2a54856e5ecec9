"""Collects the rows that the suites of `./dev test --faults` have written into build/reliability.json, and prints them as a table.

  report.py BUILD SUITES_RESULT

SUITES_RESULT is ctest's own account of the entries with the label `faults` (--output-junit). An entry that was skipped, or that
wrote no row, is named as not shown: it is never a pass. Exits 1 if a suite failed."""

import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def commit():
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def entries(junit):
    """{name: passed, failed or not shown}"""
    words = {"run": "passed", "fail": "failed"}
    return {case.get("name"): words.get(case.get("status"), "not shown") for case in ElementTree.parse(junit).iter("testcase")}


def cells(name, row):
    text = lambda values: ", ".join(f"{key}: {value}" for key, value in values.items())  # noqa: E731
    if "skipped" in row:
        return [name, row["failure"], f"not shown: {row['skipped']}", "", ""]
    return [name, row["failure"], f"{row['tries']} tries; " + text(row["outcomes"]), text(row["figures"]), f"{row['seconds']} s"]


def report(rows, results):
    """The rows by suite, and the names of entries of which nothing is shown: `results` has more of them than rows are there."""
    shown = {name for name, row in rows.items() if "skipped" not in row}
    missing = sorted(name for name, result in results.items() if result == "not shown")
    silent = len([r for r in results.values() if r == "passed"]) > 0 and not shown
    return {"commit": commit(), "machine": platform.platform(), "entries": results, "rows": rows, "not_shown": missing}, silent


def main():
    build, junit = Path(sys.argv[1]), Path(sys.argv[2])
    rows = {path.stem: json.loads(path.read_text()) for path in sorted((build / "reliability").glob("*.json"))}
    results = entries(junit)
    out, silent = report(rows, results)
    (build / "reliability.json").write_text(json.dumps(out, indent=1) + "\n")
    for name, row in rows.items():
        name, failure, outcomes, figures, seconds = cells(name, row)
        print(f"{name} ({seconds})\n  {failure}\n  {outcomes}" + (f"\n  {figures}" if figures else ""))
    for name in out["not_shown"]:
        print(f"{name}: not shown, it was skipped")
    failed = sorted(name for name, result in results.items() if result == "failed")
    for name in failed:
        print(f"{name}: FAILED")
    if silent:
        print("no suite has written a row")
    return 1 if failed or silent else 0


if __name__ == "__main__":
    sys.exit(main())
