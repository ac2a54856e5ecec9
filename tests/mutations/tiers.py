"""Which mistakes `./dev test` finds and which only `./dev test --full`, and how many of each list are caught.

`--full` plants the mistakes and runs their tests itself, so it finds each that is caught. `./dev test` finds one if an entry of ctest that
it runs has the test that caught it: the same program, with at least the variables that TEST names and a filter that lets the failed test
through, or the same file of tests, with an expression (-k, -m) that does."""

import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mistakes import ROOT, words_of
from planting import matches
from run_tests import tiers  # of tests/support, as planting.py's reasons


@dataclass(frozen=True)
class Entry:
    name: str
    command: tuple
    variables: dict
    labels: tuple

    def short(self):
        """Whether `./dev test` runs it; of tests of the test apparatus those whose files changed, as files with a mistake have."""
        return "test" in tiers(set(self.labels))

    def option(self, word):
        """What follows `word`; "" if nothing does."""
        return dict(zip(self.command, self.command[1:])).get(word, "")

    def filter(self):
        """GoogleTest's, of the command or of the variable."""
        return next((a.partition("=")[2] for a in self.command if a.startswith("--gtest_filter=")), self.variables.get("GTEST_FILTER", "*"))

    def lets_through(self, name):
        wanted, _, without = self.filter().partition("-")
        return matches(wanted or "*", name) and not (without and matches(without, name))


def entries(build, ctest):
    listed = subprocess.run([ctest, "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True, check=True)
    out = []
    for test in json.loads(listed.stdout)["tests"]:
        properties = {one["name"]: one["value"] for one in test.get("properties", [])}
        variables = dict(value.partition("=")[::2] for value in properties.get("ENVIRONMENT", []))
        out.append(Entry(test["name"], tuple(test.get("command", ())), variables, tuple(properties.get("LABELS", ()))))
    return out


def is_long(file, name):
    """Whether pytest's mark `long` stands above a test of that name. (Of one that some parameters have it is not known.)"""
    function = re.escape(name.rpartition("::")[2].partition("[")[0])
    return bool(re.search(rf"^@(?:pytest\.mark\.)?long\b(?:(?!\n\n)[\s\S])*?\ndef {function}\(", (ROOT / file).read_text(), re.M))


def holds(expression, name):
    """pytest's -k, of names of tests and words alone."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression)
    return eval(" ".join(t if t in ("(", ")", "and", "or", "not") else str(t.lower() in name.lower()) for t in tokens))


def chosen(entry, file, name):
    """Whether pytest's -m and -k let a test through."""
    mark, words = entry.option("-m"), entry.option("-k")
    if "long" in mark and is_long(file, name) == ("not" in mark):
        return False
    return not words or holds(words, name)


def finds(entry, words, failed):
    """Whether an entry runs the test that has found a mistake. `failed`: the names of those that failed; without them only an entry that
    leaves nothing out does."""
    if words.program == "ctest":
        return bool(re.search(words.arguments[-1], entry.name))
    if not entry.command or any(entry.variables.get(name) != value for name, value in words.variables):
        return False
    if words.is_executable():
        of_program = Path(entry.command[0]).name == words.program
        return of_program and (any(map(entry.lets_through, failed)) if failed else entry.filter() == "*")
    if words.file() not in " ".join(entry.command):
        return False
    return any(chosen(entry, words.file(), name) for name in failed) if failed else not (entry.option("-k") or entry.option("-m"))


def in_short_tier(mistake, found, listed):
    words = words_of(mistake.test)
    return any(entry.short() and finds(entry, words, found.get("failed", [])) for entry in listed)


COLUMNS = {"mistakes": "mistakes", "caught": "caught", "short": "by ./dev test", "missed": "missed", "left": "not tried",
           "earlier": "of these caught earlier"}


def table(counts):
    lines = [("list", *COLUMNS.values())] + [(name, *(str(count[key]) for key in COLUMNS)) for name, count in counts.items()]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))) for line in lines]


def report(mistakes, verdicts, earlier, listed):
    """Lines. verdicts: {name: what was found} that hold; earlier: names of those that were caught at an earlier state of the sources."""
    counts, alone, missed = {}, [], []
    for mistake in mistakes:
        found = verdicts.get(mistake.name, {"verdict": "", "failed": []})
        what = {"mistakes"} | {"caught": {"caught"}, "MISSED": {"missed"}}.get(found["verdict"], {"left"})
        if "caught" in what:
            what |= {"short"} if in_short_tier(mistake, found, listed) else set()
            alone += [] if "short" in what else [mistake]
        elif "missed" in what:
            missed.append(mistake)
        elif mistake.name in earlier:
            what.add("earlier")
        for name in (mistake.list, "all"):
            counts.setdefault(name, Counter()).update(what)
    total = counts.pop("all", Counter())
    share = total["short"] / total["caught"] if total["caught"] else 0
    return [*table(counts | {"all": total}),
            *(f"caught by ./dev test --full alone: {m.list}/{m.name}: {m.test}" for m in alone),
            *(f"MISSED: {m.list}/{m.name}: {m.test}" for m in missed),
            f"{total['caught']} of {total['mistakes']} caught, {total['short']} of them ({share:.0%}) by ./dev test; {total['missed']} "
            f"missed, {total['left']} not tried ({total['earlier']} of them caught at an earlier state of what they depend on)"]
