#!/usr/bin/env python3
"""Why tests have failed, a line each: after hundreds of lines of output, and of a run elsewhere perhaps only the end is kept.

  reasons.py BUILD

BUILD: where ctest ran, of whose last run the failed tests are told."""

import re
import sys
from pathlib import Path


def reason(output):
    """The first line of a test's output that says why it failed, of GoogleTest, pytest or a program that ended; "" if none does."""
    lines = [line.strip() for line in output.splitlines()]
    for i, line in enumerate(lines):
        if re.search(r": Failure$", line):
            place = re.sub(r"^.*/", "", line).removesuffix(": Failure")
            return f"{place} {' '.join(lines[i + 1:i + 6])}".split("Google Test trace")[0]
        if line.startswith(">  "):  # pytest's line that failed
            return line[1:].strip()
        if re.match(r"twin: (?!note)|terminate called|C\+\+ exception|\[  FAILED  \]|\w+\.(cu|py):|E  ", line) or "error" in line:
            return line
    return ""


def failed(logs):
    """(name, output) of each test that failed in ctest's last run, which has left its logs in `logs`."""
    if not (logs / "LastTestsFailed.log").exists():  # there was no test to run
        return
    names = [line.partition(":")[2] for line in (logs / "LastTestsFailed.log").read_text().splitlines()]
    entries = re.split(r"^\d+/\d+ Testing: (\S+)\n", (logs / "LastTest.log").read_text(errors="replace"), flags=re.M)[1:]
    for name, entry in zip(entries[::2], entries[1::2]):
        if name in names:
            yield name, re.sub(r"\A.*?^Output:\n-+\n|<end of output>.*", "", entry, flags=re.S | re.M)


def main():
    for name, output in failed(Path(sys.argv[1]) / "Testing" / "Temporary"):
        said = re.sub(r"\s+", " ", reason(output) or output.strip().rpartition("\n")[2])  # what crashed says where it was
        print(f"{name}: {said[:400] or 'no output'}")


if __name__ == "__main__":
    main()
