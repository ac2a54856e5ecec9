#!/usr/bin/env python3
"""Plants known mistakes into the sources, one at a time, and runs the test that must find each.

  mutations.py BUILD [--all] [--shard I/N] [--only REGEX] [--list FILE] [--jobs N] [--work DIR]
  mutations.py BUILD --report
  mutations.py --check

BUILD: a build directory that ./dev build has made. The sources are copied and built with its options elsewhere, through ccache;
neither they nor BUILD change. The lists of mistakes and their grammar: mistakes.py.

A test must pass without the mistake and fail with it; one that hangs has found it, too. Verdicts are kept in the user's cache and
hold as long as the mistake, the mutated file and what the test depends on are the same (verdicts.py). Only mistakes without such a
verdict are planted (--all: every one). --shard 3/8: the third of eight parts; several machines, or several runs on one,
may plant a part each. --report: how many are caught, list by list, and how many of those by `./dev test` alone (tiers.py).
--check only looks whether each mistake can still be planted. `./dev test` does that, `./dev test --full` plants.

A BUILD with a sanitizer (build/tsan) plants what begins with LM_SANITIZE, another one the others. Exits 1 if a mistake is missed, if
a line does not fit the sources any more or does not compile, or if a test fails without any mistake. Those whose test is skipped on
this machine, or passes without the part that is, do not count."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from mistakes import ROOT, ListError, group_of, misfit, read_lists, shard, words_of
from planting import Baseline, Copy, Test, WarmPytest, baselines, plant
from tiers import entries, report
from verdicts import Dependencies, Kept, name_of


def check():
    everything = read_lists()
    wrong = [f"{m.list}/{m.name}: {why}" for m in everything if (why := misfit(m))]
    for line in wrong:
        print(f"MISFIT {line}")
    print(f"{len(everything) - len(wrong)} of {len(everything)} can be planted")
    return 1 if wrong else 0


def holding(mistakes, dependencies, kept):
    """({name: what was found} of verdicts that hold, names of others that were caught at an earlier state of the sources)."""
    found, earlier = {}, set()
    for mistake in mistakes:
        rows = kept.read(name_of(mistake))
        row = rows.get(dependencies.key(mistake) or "")
        if row:
            found[mistake.name] = row
        elif any(one["verdict"] == "caught" for one in rows.values()):
            earlier.add(mistake.name)
    return found, earlier


def without_mistakes(tests, dependencies, kept):
    """The baseline of each; those that have passed already, with all that they depend on, do not run again."""
    out, left = {}, []
    for test in tests:
        row = kept.get(f"test--{test.text}", dependencies.of_test(test.text))
        if row:
            out[test.text] = Baseline(**row)
        else:
            left.append(test)
    for text, found in baselines(left).items():
        out[text] = found
        print(f"{found.state} in {found.seconds:5.1f} s: {text}\n{found.output}".rstrip(), flush=True)
        if found.state == "passes":
            kept.put(f"test--{text}", dependencies.of_test(text), {"state": found.state, "seconds": found.seconds, "partly": found.partly})
    return out


class Run:
    """Of one process: plants what it is given and keeps the verdicts."""

    def __init__(self, arguments, directory, todo):
        self.copy = Copy(arguments.build, directory, arguments.jobs)
        self.kept, self.verdicts, self.failing = Kept(), {}, []
        self.todo, self.done = todo, 0

    def all(self):
        groups = {}
        for mistake in self.todo:
            groups.setdefault(group_of(mistake), []).append(mistake)
        warm = WarmPytest(self.copy) if any(words_of(m.test).program == "pytest" for m in self.todo) else None
        try:
            for group in groups.values():
                self.group(group)
        finally:
            if warm:
                warm.close()

    def group(self, mistakes):
        """One file after the other: what is built again is little."""
        tests = {text: Test(text, self.copy) for text in dict.fromkeys(m.test for m in mistakes)}
        try:
            self.copy.make(sorted({target for test in tests.values() for target in test.targets}))
        except ListError as error:
            print(error)
            self.failing += list(tests)
            return
        dependencies = Dependencies(self.copy.root, self.copy.build)  # now that all is built
        without = without_mistakes(list(tests.values()), dependencies, self.kept)
        self.failing += [text for text, found in without.items() if found.state == "fails"]
        for mistake in sorted(mistakes, key=lambda m: (m.file, m.test)):
            self.done += 1
            key = dependencies.key(mistake)
            if without[mistake.test].state != "passes":
                found = {"verdict": "skipped" if without[mistake.test].state == "skipped" else "its test fails without it", "by": ""}
            else:
                found = self.one(mistake, tests[mistake.test], without[mistake.test])
            self.verdicts[mistake.name] = found
            if found["verdict"] in ("caught", "MISSED"):
                self.kept.put(name_of(mistake), key, found)

    def one(self, mistake, test, without):
        start = time.monotonic()
        verdict, by, failed, output = plant(mistake, self.copy, test, without)
        seconds = time.monotonic() - start
        print(f"[{self.done:3}/{len(self.todo)}] {verdict:8} {mistake.name:36} {seconds:4.0f} s  {by or output[-1500:]}", flush=True)
        return {"verdict": verdict, "by": by, "failed": failed[:20], "seconds": round(seconds, 1)}


def summary(chosen, verdicts, failing):
    """Prints it; the exit status."""
    counted = {m.name: verdicts[m.name]["verdict"] for m in chosen if m.name in verdicts and verdicts[m.name]["verdict"] != "skipped"}
    for mistake in chosen:
        if (verdict := verdicts.get(mistake.name, {}).get("verdict", "not tried")) != "caught":
            print(f"{verdict}: {mistake.list}/{mistake.name}: {mistake.test}")
    for text in failing:
        print(f"fails without any mistake: {text}")
    print(f"{list(counted.values()).count('caught')} of {len(counted)} caught")
    return 1 if failing or any(verdict != "caught" for verdict in counted.values()) else 0


def run(arguments, directory):
    chosen = read_lists(arguments.only, arguments.list)
    if arguments.shard:
        number, count = map(int, arguments.shard.split("/"))
        if not 1 <= number <= count:
            raise ListError(f"--shard {arguments.shard}: the first is 1/{count}, the last {count}/{count}")
        chosen = shard(chosen, number, count)
    cache = (arguments.build / "CMakeCache.txt").read_text()
    sanitizer = next((line.partition("=")[2] for line in cache.splitlines() if line.startswith("LM_SANITIZE:")), "")
    chosen = [m for m in chosen if words_of(m.test).sanitizer() == sanitizer]
    broken = {m.name: {"verdict": f"does not fit: {misfit(m)}"} for m in chosen if misfit(m)}
    found = {} if arguments.all else holding(chosen, Dependencies(ROOT, arguments.build), Kept())[0]
    todo = [m for m in chosen if m.name not in broken and m.name not in found]
    print(f"{len(chosen)} mistakes, {len(found)} with a verdict that holds, {len(todo)} to plant", flush=True)
    planted = Run(arguments, directory, todo) if todo else None
    if planted:
        planted.all()
    verdicts = broken | found | (planted.verdicts if planted else {})
    return summary(chosen, verdicts, planted.failing if planted else [])


def print_report(build):
    everything = read_lists()
    found, earlier = holding(everything, Dependencies(ROOT, build), Kept())
    cache = (build / "CMakeCache.txt").read_text()
    cmake = next(line.partition("=")[2] for line in cache.splitlines() if line.startswith("CMAKE_COMMAND:"))
    print("\n".join(report(everything, found, earlier, entries(build, Path(cmake).with_name("ctest")))))
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--all", action="store_true", help="those with a verdict that holds, too")
    parser.add_argument("--shard", metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--only", help="those of which LIST/NAME: TEST matches")
    parser.add_argument("--list", type=Path, action="append", help="only this list")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    parser.add_argument("--work", type=Path, help="where the copy is made, and kept for the next time")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            return check()
        if arguments.build is None:
            parser.error("BUILD, or --check")
        arguments.build = arguments.build.resolve()
        if arguments.report:
            return print_report(arguments.build)
        if arguments.work:
            arguments.work.mkdir(parents=True, exist_ok=True)
            return run(arguments, arguments.work.resolve())
        with tempfile.TemporaryDirectory(prefix="lmlaunch-mutations-") as directory:
            return run(arguments, Path(directory).resolve())
    except ListError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
