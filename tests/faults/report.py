"""Collects the rows that the suites of `./dev test --faults` have written into build/reliability.json, and prints them as a table.

  report.py BUILD SUITES_RESULT short|full

SUITES_RESULT is ctest's own account of the entries that ran (--output-junit), with the counts of CI or full ones; the rows of an
entry are in BUILD/reliability/ENTRY, and each says which counts it has. An entry that was skipped, or that wrote no row, is named
as not shown: it is never a pass. Exits 1 if a suite failed, if one passed and wrote no row, or if docs/reliability.md does not
name a row."""

import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commit():
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def entries(junit):
    """{name: passed, failed or not shown}"""
    words = {"run": "passed", "fail": "failed"}
    return {case.get("name"): words.get(case.get("status"), "not shown") for case in ElementTree.parse(junit).iter("testcase")}


def named(row):
    """Whether the second column of docs/reliability.md has it, between backticks; `fuzz_*` are all that begin so."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    columns = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ")]
    return any(fnmatch(row, name) for column in columns for name in re.findall(r"`([^`]+)`", column))


def cells(name, row):
    text = lambda values: ", ".join(f"{key}: {value}" for key, value in values.items())  # noqa: E731
    if "skipped" in row:
        return [name, row["failure"], f"not shown: {row['skipped']}", "", row["counts"]]
    return [name, row["failure"], f"{row['tries']} tries; " + text(row["outcomes"]), text(row["figures"]),
            f"{row['counts']} counts, {row['seconds']} s"]


def report(rows, results, counts):
    """Everything, and what is wrong. `rows`: {entry: {name: row}}; `counts`: those that were asked for."""
    silent = sorted(entry for entry, result in results.items() if result == "passed" and not rows.get(entry))
    everything = {name: row for of_entry in rows.values() for name, row in of_entry.items()}
    wrong = [f"{entry}: FAILED" for entry, result in sorted(results.items()) if result == "failed"]
    wrong += [f"{entry}: not shown, it has written no row" for entry in silent]
    wrong += [f"{name}: docs/reliability.md does not name it" for name in sorted(everything) if not named(name)]
    skipped = sorted(entry for entry, result in results.items() if result == "not shown")
    return {"commit": commit(), "machine": platform.platform(), "counts": counts, "entries": results, "rows": everything,
            "not_shown": skipped + silent}, skipped, wrong


def main():
    build, junit, counts = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    rows = {}
    for path in sorted((build / "reliability").glob("*/*.json")):
        rows.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    out, skipped, wrong = report(rows, entries(junit), counts)
    (build / "reliability.json").write_text(json.dumps(out, indent=1) + "\n")
    print(f"{out['commit']} on {out['machine']}, {counts} counts" +
          (": those of CI; ./dev test --faults --full has the full ones" if counts == "short" else ""))
    for name, row in out["rows"].items():
        name, failure, outcomes, figures, seconds = cells(name, row)
        print(f"{name} ({seconds})\n  {failure}\n  {outcomes}" + (f"\n  {figures}" if figures else ""))
    for entry in skipped:
        print(f"{entry}: not shown, it was skipped")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
