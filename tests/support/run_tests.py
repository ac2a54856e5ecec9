#!/usr/bin/env python3
"""Runs entries of ctest for `./dev test`, says how far it is, and ends with what a person wants to know.

  run_tests.py BUILD TIER [--label LABEL] [--changed [BASE]] [--only REGEX]
  run_tests.py BUILD --write-costs

TIER: quick, test, full, faults or faults_full (tiers()). --only: only entries whose name matches. --label: only those that have it, too.
--changed: only those that what differs from BASE can reach (changed.py). Entries of the test apparatus (label `apparatus`) run in
the tier `test` only with --only, or if a file of theirs differs from the last landed commit.

Every entry's line comes when it ends, the output of what fails right after it. Then: what failed and its first message, what was
skipped and why, the ten slowest; ctest's own summary is the last.

The longest entry begins first. What this build folder has measured last (test_seconds.json) says how long each takes; for what it
has not run yet tests/costs.txt does, which --write-costs writes from those measurements. With LM_CPU in the environment nothing is
kept: entries take as long as that processor needs."""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import changed
import reasons

ROOT = Path(__file__).resolve().parents[2]
COSTS = ROOT / "tests" / "costs.txt"
CTEST = Path(sys.executable).with_name("ctest")  # that of requirements.txt: Debian's ignores options that it does not know
# A line of ctest: how an entry ended.
ENDED = re.compile(r"\s*\d+/\d+ Test\s+#\d+: (\S+) [.\s]*(?:\*\*\*)?(\S.*?)\s+([\d.]+) sec\s*$")
STARTED = re.compile(r"\s+Start\s+\d+: (\S+)$")
SUMMARY = re.compile(r"\d+% tests passed, \d+ tests failed out of \d+")
FAULTS = {"faults": "short", "faults_full": "full"}  # and their counts
WORDS = {"Passed": "passed", "Skipped": "skipped"}


def at_once(tier):
    """Cores' worth of entries that run at once, on 2 cores: entries wait for disks, for each other's ranks and for deadlines (with 3 the
    cores were idle for a third of the time). Faults have no more than there are: some of them count what a run reaches within a second."""
    return 2 if tier in FAULTS else 4


def tiers(labels):
    """The tiers that an entry with these labels belongs to."""
    out = {tier for tier in FAULTS if tier in labels}
    if "hours" not in labels:
        out.add("full")
    if not labels & {"long", "hours", *FAULTS}:
        out.update({"test", "quick"} if "quick" in labels else {"test"})
    return out


# ---------------------------------------------------------------------------------------------- what takes how long


def known_seconds(measured, costs):
    """{entry: seconds}: what was measured here, else what the repository has."""
    out = {}
    for line in costs.read_text().splitlines() if costs.exists() else []:
        if not line.startswith("#"):
            name, seconds = line.split()
            out[name] = float(seconds)
    if measured.exists():
        out.update(json.loads(measured.read_text()))
    return out


def keep(measured, results):
    """Of what failed the time says nothing."""
    seconds = json.loads(measured.read_text()) if measured.exists() else {}
    seconds.update({name: took for name, (how, took) in results.items() if how in WORDS})
    measured.write_text(json.dumps(seconds, indent=0, sort_keys=True) + "\n")


def write_costs(measured, costs):
    """Entries that were not run keep their cost."""
    seconds = known_seconds(measured, costs)
    lines = [f"{name} {max(1, round(seconds[name]))}\n" for name in sorted(seconds)]
    head = "# Seconds of each entry on 2 cores, which decide what begins first: tests/support/run_tests.py --write-costs.\n"
    costs.write_text(head + "".join(lines))


def order(logs, seconds, cores):
    """ctest begins with what failed last time, then with the longest; it reads that here. What takes several cores comes before all that
    takes one, which would else fill each core that is left until the end."""
    data = logs / "CTestCostData.txt"
    failed = data.read_text().partition("---\n")[2] if data.exists() else ""
    logs.mkdir(parents=True, exist_ok=True)
    before = {name: 1000 * (cores.get(name, 1) - 1) for name in seconds}
    data.write_text("".join(f"{name} 1 {took + before[name]:g}\n" for name, took in seconds.items()) + "---\n" + failed)


class Pace:
    """How long it will take still. `seconds`: what is known; `cores`: what each entry takes of the `at_once` cores."""

    def __init__(self, seconds, cores, at_once):
        self.at_once = at_once
        usual = statistics.median(seconds.values()) if seconds else 1
        self.expected = {name: seconds.get(name, usual) for name in cores}
        self.cores = cores
        self.left, self.running = set(cores), {}
        self.took = self.planned = 0

    def begins(self, name, now):
        self.running[name] = now

    def ends(self, name, took):
        self.left.discard(name)
        self.running.pop(name, None)
        self.took += took
        self.planned += self.expected.get(name, took)

    def seconds_left(self, now):
        # Until a minute's worth has ended the pace of this run is not known.
        scale = self.took / self.planned if self.planned > 60 else 1
        rest = {name: max(0, self.expected[name] * scale - (now - self.running.get(name, now))) for name in self.left}
        return max([sum(took * self.cores[name] for name, took in rest.items()) / self.at_once, *rest.values()])


def duration(seconds):
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


# ---------------------------------------------------------------------------------------------- what runs


def described(build):
    done = subprocess.run([CTEST, "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["tests"]


def properties(test):
    return {each["name"]: each["value"] for each in test.get("properties", [])}


def labels(test):
    return set(properties(test).get("LABELS", []))


def without_apparatus(tests):
    """The tests, without those of the test apparatus whose files are as they have landed, and the names of these."""
    of_apparatus = [test for test in tests if "apparatus" in labels(test)]
    files = changed.differing(ROOT, changed.base_of(ROOT))
    selection = changed.Selection(ROOT, of_apparatus)
    concerned = set().union(*(selection.named(file) for file in files))
    unchanged = {test["name"] for test in of_apparatus} - concerned
    return [test for test in tests if test["name"] not in unchanged], sorted(unchanged)


def write_selected(folder, tests, selection):
    """A folder for ctest in which `tests` are the entries that were chosen, without the suites that need not run."""
    quoted = lambda word: f"[==[{word}]==]"  # noqa: E731
    lines = []
    for entry in selection.entries:
        if entry.name not in tests:
            continue
        command, environment = entry.command, entry.properties.get("ENVIRONMENT", [])
        if leave_out := selection.chosen[entry.name]:
            command, environment = changed.filtered(entry, leave_out)
        values = {**entry.properties, **({"ENVIRONMENT": environment} if environment else {})}
        texts = {name: ";".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in values.items()}
        lines.append(f"add_test({entry.name} {' '.join(map(quoted, command))})")
        lines.append(f"set_tests_properties({entry.name} PROPERTIES {' '.join(f'{name} {quoted(text)}' for name, text in texts.items())})")
    folder.mkdir(exist_ok=True)
    (folder / "CTestTestfile.cmake").write_text("\n".join(lines) + "\n")


def reached(build, tests, base):
    """Those of the tests that what differs from `base` can reach; ctest's folder for them."""
    base = changed.base_of(ROOT, base)
    files = changed.differing(ROOT, base)
    selection = changed.Selection(ROOT, tests, changed.read_build(ROOT, build))
    chosen = selection.select(files)
    in_part = [name for name, leave_out in chosen.items() if leave_out]
    print(f"{len(files)} files differ from {base[:8]}; they reach {len(chosen)} of {len(tests)} entries, {len(in_part)} of them in part")
    print("".join(f"  {note}\n" for note in selection.notes), end="")
    write_selected(build / "changed", chosen, selection)
    return [test for test in tests if test["name"] in chosen], build / "changed"


# ---------------------------------------------------------------------------------------------- the run


class Progress:
    """Takes ctest's lines: says how each entry ended, passes on what else it prints, and keeps its summary for the end."""

    def __init__(self, pace, total, width):
        self.pace, self.total, self.width = pace, total, width
        self.results, self.summary, self.begun = {}, [], False

    def take(self, line, now):
        if self.summary or (len(self.results) == self.total and SUMMARY.match(line)):
            self.summary.append(line)
        elif (begins := STARTED.match(line)) and begins[1] in self.pace.cores:
            self.begun = True
            self.pace.begins(begins[1], now)
        elif (ends := ENDED.match(line)) and ends[1] in self.pace.running:
            self.ends(ends[1], ends[2], float(ends[3]), now)
        elif self.begun and (line or len(self.results) < self.total):  # before that ctest says where it is
            print(line, flush=True)

    def ends(self, name, how, took, now):
        word = WORDS.get(how, "FAILED")
        self.results[name] = (how, took)
        self.pace.ends(name, took)
        left = f"about {duration(self.pace.seconds_left(now))} left" if len(self.results) < self.total else ""
        place = f"[{len(self.results):{len(str(self.total))}}/{self.total}]"
        print(f"{place} {word:7} {name:{self.width}} {took:7.1f} s   {left}".rstrip(), flush=True)


def told(results, outputs, not_run):
    """The lines before ctest's own summary."""
    failed = sorted(name for name, (how, _) in results.items() if how not in WORDS)
    skipped = sorted(name for name, (how, _) in results.items() if how == "Skipped")
    lines = [f"Failed: {len(failed) or 'none'}"]
    for name in failed:
        how = results[name][0]
        lines.append(f"  {name}: {'' if how == 'Failed' else how + ': '}{reasons.why_failed(outputs.get(name, ''))}")
    lines += [f"Skipped: {len(skipped) or 'none'}", *(f"  {name}: {reasons.why_skipped(outputs.get(name, ''))}" for name in skipped)]
    if not_run:
        lines.append(f"Not run: {len(not_run)} of the test apparatus, which has not changed (./dev test --full runs them)")
    slowest = sorted(results, key=lambda name: -results[name][1])[:10]
    return lines + ["Slowest:", *(f"  {results[name][1]:7.1f} s  {name}" for name in slowest)]


def with_reasons(summary, outputs):
    """ctest's summary, with the first message of each entry behind its line: of a run elsewhere often nothing but the end is kept."""
    lines = []
    for line in summary:
        lines.append(line)
        if failed := re.match(r"\s*\d+ - (\S+) \((?!Skipped)", line):
            lines.append(f"\t      {reasons.why_failed(outputs.get(failed[1], ''))}")
    return lines


def run(folder, names, junit, seconds, pace):
    """ctest's status, {entry: (how, seconds)}, its summary."""
    listed = junit.with_suffix(".txt")
    listed.write_text("".join(f"{name}\n" for name in names))
    order(folder / "Testing" / "Temporary", seconds, pace.cores)
    command = [CTEST, "--test-dir", folder, f"-j{pace.at_once}", "--output-on-failure", "--no-tests=error", "--no-label-summary",
               "--timeout", "900", "--tests-from-file", listed, "--output-junit", junit]
    progress = Progress(pace, len(names), max(map(len, names)))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            for line in process.stdout:
                progress.take(line.rstrip("\n"), time.monotonic())
        except KeyboardInterrupt:  # ctest has it as well, and ends what it began
            pass
        status = process.wait()
    return status, progress.results, progress.summary


def main():
    parser = argparse.ArgumentParser(prog="run_tests.py")
    parser.add_argument("build", type=Path)
    parser.add_argument("tier", nargs="?", choices=["quick", "test", "full", *FAULTS])
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--label")
    parser.add_argument("--changed", nargs="?", const="", metavar="BASE")
    parser.add_argument("--write-costs", action="store_true")
    options = parser.parse_args()
    build = options.build.resolve()
    measured = build / "test_seconds.json"
    if options.write_costs:
        return write_costs(measured, COSTS)
    tests = [test for test in described(build) if options.tier in tiers(labels(test)) and re.search(options.only, test["name"])]
    tests = [test for test in tests if options.label in (None, *labels(test))]
    folder, not_run = build, []
    if not tests:
        print(f"run_tests.py: no entry of this tier matches {options.only!r}")
        return 1
    if options.changed is not None:
        tests, folder = reached(build, tests, options.changed)
        if not tests:
            print("nothing to run")
            return 0
    elif options.tier == "test" and not options.only:
        tests, not_run = without_apparatus(tests)
    names = [test["name"] for test in tests]
    together = at_once(options.tier)
    cores = {test["name"]: min(together, properties(test).get("PROCESSORS", 1)) for test in tests}
    junit = build / ("reliability.xml" if options.tier in FAULTS else "tests.xml")
    seconds = known_seconds(measured, COSTS)
    status, results, summary = run(folder, names, junit, seconds, Pace(seconds, cores, together))
    if options.changed is None and not os.environ.get("LM_CPU"):
        keep(measured, results)
    if options.tier in FAULTS:
        report = [sys.executable, "-B", ROOT / "tests" / "faults" / "report.py", build, junit, FAULTS[options.tier]]
        status = subprocess.run(report).returncode or status
    outputs = reasons.outputs(folder / "Testing" / "Temporary")
    lines = told(results, outputs, not_run)
    held = [f"LM_CPU={os.environ['LM_CPU']}"] if os.environ.get("LM_CPU") else []
    print("\n".join(["", *lines, *held, *with_reasons(summary, outputs)]), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
