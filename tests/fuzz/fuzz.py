#!/usr/bin/env python3
"""Fuzzes the parsers of files that we did not write (parsers.txt), with the address and undefined-behaviour sanitizers.

  fuzz.py BUILD corpus                     every input that is kept, once
  fuzz.py BUILD short NAME [--seconds 10]  one parser, beginning with its corpus
  fuzz.py BUILD long [NAME...] [--runs 10000000] [--minutes M]
                                           every parser, or those named, one after the other at the lowest priority, until it
                                           has had that many executions, or for so long; then how much of its code all
                                           inputs together reach. A table, and BUILD/fuzz.json. What an earlier long run of the
                                           same program has done counts: it may be interrupted, and several
                                           may go on at once.
  fuzz.py BUILD coverage [NAME...]         that last part alone, with the places that no input reaches

`long` and `coverage` fail where less than 90 % of a parser's regions are reached, `long` also where a parser has had fewer
executions. All but `coverage` write rows of the reliability report (tests/faults/rows.py).

BUILD: the ordinary build directory; the targets are built in BUILD/fuzz, which needs clang, its sanitizers and llvm-cov, and not
torch. What the parser does wrong is a finding: the input that shows it stays in BUILD/fuzz/findings, and the exit is 1. Exit 77:
there is no clang here (with CI in the environment that is an error)."""

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "faults"))
from rows import Row  # noqa: E402

LIMITS = ["-rss_limit_mb=512", "-timeout=5", "-max_len=65536"]
SLICE_SECONDS = 120  # of a long run; what a slice has done is kept
PATIENCE = "-timeout=60"  # at the lowest priority what takes milliseconds may take seconds
QUICK = 1  # seconds within which an input that is run alone has not taken too long
# Choosing inputs by how rare their paths are takes up to half of the time where a parser has thousands of paths.
ALIKE = "-entropic=0"
LENGTHS = [65536, 512, 128]  # of the slices in turn: most mistakes need few bytes, and short inputs are several times as many
LEAST_COVERAGE = 0.9
FAILURE = "a hostile file"
# A small quarantine leaves most of the memory limit to the parser.
SANITIZERS = {"ASAN_OPTIONS": "quarantine_size_mb=64", "UBSAN_OPTIONS": "print_stacktrace=1"}


@dataclass
class Parser:
    name: str
    files: list  # its own
    without: str  # functions in them that do not parse

    def inputs(self):
        return HERE / "corpus" / self.name

    def words(self):
        file = HERE / "dictionaries" / f"{self.name}.txt"
        return [f"-dict={file}"] if file.exists() else []


def read_parsers():
    out = {}
    for line in (HERE / "parsers.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, rest = line.split(":")
            words = rest.split()
            without = [word[1:] for word in words if word.startswith("-")]
            files = [path.resolve() for word in words if not word.startswith("-") for path in sorted(ROOT.glob(word))]
            out[name] = Parser(name, files, without[0] if without else "")
    return out


def tool(name):
    """Of the compiler's own version."""
    beside = Path(os.path.realpath(shutil.which("clang++"))).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        sys.exit(f"fuzz.py: no {name}: install llvm")
    return found


def call(command, **options):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"fuzz.py: {Path(command[0]).name} failed:\n{done.stdout[-5000:]}")


@dataclass
class Run:
    executions: int = 0
    seconds: float = 0
    finding: str = ""  # what is wrong; "": nothing
    output: str = ""


class Fuzzer:
    def __init__(self, build):
        self.json = build / "fuzz.json"
        self.build = build / "fuzz"
        self.findings = self.build / "findings"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # CMake and Ninja are the environment's
        self.environment = {**os.environ, **SANITIZERS, "PATH": path}

    def make(self, targets):
        """Several runs may ask at once."""
        self.findings.mkdir(parents=True, exist_ok=True)
        with open(self.build / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.build / "build.ninja").exists():
                call(["cmake", "--preset", "fuzz", "-B", self.build], cwd=ROOT, env=self.environment)
            call(["ninja", "-C", self.build, *targets], env=self.environment)

    def program(self, parser, kind="fuzz"):
        return self.build / "bin" / f"{parser.name}_{kind}"

    def run(self, parser, arguments, kind="fuzz", nice=0, environment={}):
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lmlaunch-fuzz-") as temporary:
            command = [self.program(parser, kind), f"-artifact_prefix={self.findings}/{parser.name}-", "-print_final_stats=1", *LIMITS,
                       *parser.words(), *arguments]
            done = subprocess.run(list(map(str, command)), env={**self.environment, "TMPDIR": temporary, **environment},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=lambda: os.nice(nice))
        output = done.stdout.decode(errors="replace")
        count = re.search(r"stat::number_of_executed_units:\s*(\d+)", output)
        finding = ""
        if done.returncode != 0 or not count:
            said = re.search(r"runtime error: .*|SUMMARY: .*|ERROR: .*", output)
            kept = re.search(r"Test unit written to (\S+)", output)
            if not (kept and "libFuzzer: timeout" in output and self.in_time(parser, kept[1], environment)):
                finding = (said[0] if said else f"exit {done.returncode}") + (f"; {Path(kept[1]).name}" if kept else "")
        return Run(int(count[1]) if count else 0, time.monotonic() - start, finding, output)

    def in_time(self, parser, path, environment):
        """Limits of time are the wall clock's: of a machine that stood still, or had too much to do, they are no finding. The input is
        run again, alone; if it is quick then, it is deleted."""
        try:
            again = subprocess.run([self.program(parser), path], env={**self.environment, **environment}, capture_output=True, timeout=QUICK)
        except subprocess.TimeoutExpired:
            return False
        if again.returncode != 0:
            return False
        os.remove(path)
        return True

    def corpus(self, parsers):
        """Also shows that no parser is without one."""
        self.make([f"{parser.name}_fuzz" for parser in parsers])
        row, failed = Row("fuzz_corpus", FAILURE, "every input that is kept, once, with ASan and UBSan"), 0
        for parser in parsers:
            inputs = sorted(parser.inputs().iterdir())
            run = self.run(parser, ["-runs=0", parser.inputs()])
            say(parser, run, f"{len(inputs)} inputs")
            failed += bool(run.finding or run.executions < len(inputs) or not inputs)
            row.row["tries"] += run.executions
        row.count("parsers with a finding", failed)
        row.write()
        return failed

    def short(self, parser, seconds):
        self.make([f"{parser.name}_fuzz"])
        row = Row(f"fuzz_{parser.name}", FAILURE, f"{seconds} s of libFuzzer with ASan and UBSan, from the inputs that are kept")
        with tempfile.TemporaryDirectory(prefix="lmlaunch-fuzz-") as grown:
            run = self.run(parser, [f"-max_total_time={seconds}", "-seed=1", grown, parser.inputs()])
        say(parser, run, f"{run.executions} executions in {run.seconds:.0f} s")
        row.row["tries"] = run.executions
        row.count("finding" if run.finding else "no finding")
        long = self.long_run(parser)
        if long:
            row.row["figures"] = {"executions of a long run": long["executions"], "its findings": len(long["findings"])}
        if "coverage" in long:
            row.row["figures"]["regions covered"] = f"{100 * long['coverage']:.1f} %"
        row.write()
        return bool(run.finding)

    def long_run(self, parser):
        """What a long run of this very program has kept; {}: there was none."""
        row = self.rows().get(parser.name, {})
        return row if row.get("program") == hashlib.sha256(self.program(parser).read_bytes()).hexdigest() else {}

    def long(self, parsers, runs, minutes):
        self.make([f"{parser.name}_{kind}" for parser in parsers for kind in ("fuzz", "cover")])
        for parser in parsers:
            row = self.add(parser)
            grown = self.build / "corpus" / parser.name
            grown.mkdir(parents=True, exist_ok=True)
            end = time.monotonic() + 60 * minutes
            lengths = itertools.cycle(LENGTHS)
            while row["executions"] < runs and (left := end - time.monotonic()) > 1 and not row["findings"]:
                run = self.run(parser, [f"-runs={runs - row['executions']}", f"-max_total_time={min(SLICE_SECONDS, int(left))}",
                                        PATIENCE, ALIKE, f"-max_len={next(lengths)}", grown, parser.inputs()], nice=19)
                row = self.add(parser, run)
                if run.finding:
                    say(parser, run)
            row = self.add(parser, reached=self.coverage(parser))
            shown = Row(f"fuzz_{parser.name}", FAILURE, "libFuzzer with ASan and UBSan, from the inputs that are kept")
            shown.row["tries"] = row["executions"]
            shown.count("finding", len(row["findings"]))
            shown.row["figures"] = {"regions covered": f"{100 * row['coverage']:.1f} %", "seconds of all long runs": row["seconds"]}
            shown.write()
        return self.table(parsers, runs)

    def rows(self):
        return json.loads(self.json.read_text())["parsers"] if self.json.exists() else {}

    def add(self, parser, run=None, reached={}):
        """To what long runs of this very program have kept, which is returned. Several may go on at once, of one parser, too."""
        with open(self.build / ".rows", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            program = hashlib.sha256(self.program(parser).read_bytes()).hexdigest()
            row = self.long_run(parser) or {"program": program, "executions": 0, "seconds": 0, "findings": []}
            if run:
                row["executions"] += run.executions
                row["seconds"] = round(row["seconds"] + run.seconds)
                row["findings"] += [run.finding] if run.finding else []
            row |= reached
            new = self.json.with_suffix(".new")
            new.write_text(json.dumps({"parsers": {**self.rows(), parser.name: row}}, indent=1) + "\n")
            new.replace(self.json)
        return row

    def table(self, parsers, runs):
        """False where nothing falls short."""
        print("| parser | executions | findings | regions | covered | coverage |\n|---|---|---|---|---|---|")
        good = True
        for name, row in self.rows().items():
            if name in {parser.name for parser in parsers}:
                print(f"| {name} | {row['executions']} | {len(row['findings'])} | {row['regions']} | {row['covered']} "
                      f"| {100 * row['coverage']:.1f} % |")
                short = [f"{len(row['findings'])} findings"] if row["findings"] else []
                short += [f"{row['executions']} executions of {runs}"] if row["executions"] < runs else []
                short += [f"less than {100 * LEAST_COVERAGE:.0f} % of its regions"] if row["coverage"] < LEAST_COVERAGE else []
                if short:
                    print(f"fuzz.py: {name} falls short: {', '.join(short)}")
                good = good and not short
        return not good

    def coverage(self, parser):
        """Of the parser's own files, by its corpus and by what long runs have found."""
        self.make([f"{parser.name}_cover"])
        grown = self.build / "corpus" / parser.name
        with tempfile.TemporaryDirectory(prefix="lmlaunch-fuzz-") as temporary:
            raw, profile = Path(temporary) / "raw", Path(temporary) / "profile"
            run = self.run(parser, ["-runs=0", parser.inputs(), *([grown] if grown.exists() else [])], kind="cover",
                           environment={"LLVM_PROFILE_FILE": str(raw)})
            if run.finding:
                sys.exit(f"fuzz.py: {parser.name}: {run.finding}\n{run.output[-3000:]}")
            call([tool("llvm-profdata"), "merge", "-o", profile, raw])
            exported = subprocess.run([tool("llvm-cov"), "export", f"-instr-profile={profile}", str(self.program(parser, "cover"))],
                                      check=True, capture_output=True).stdout
        regions = count_regions(parser, json.loads(exported)["data"][0]["functions"])
        if not regions:
            sys.exit(f"fuzz.py: {parser.name}: none of its own files is in the target")
        covered = sum(map(bool, regions.values()))
        return {"regions": len(regions), "covered": covered, "coverage": covered / len(regions),
                "uncovered": [f"{file}:{line}:{column}" for (file, line, column, *_), count in sorted(regions.items()) if not count]}


def count_regions(parser, functions):
    """How often each region of code was reached. A region may stand in several functions: instances of one template. What is
    inside of a macro (LM_CHECK, which no input reaches) is no region of the file."""
    out = {}
    for function in functions:
        file = Path(function["filenames"][0]).resolve()
        if file not in parser.files or (parser.without and re.search(parser.without, function["name"])):
            continue
        for *place, count, of_file, _, kind in function["regions"]:
            if of_file == 0 and kind == 0:
                key = (str(file.relative_to(ROOT)), *place)
                out[key] = out.get(key, 0) + count
    return out


def say(parser, run, what=""):
    print(f"fuzz.py: {parser.name}: " + (f"FINDING: {run.finding}\n{run.output[-6000:]}" if run.finding else f"{what}, no finding"), flush=True)


def show_coverage(fuzzer, parsers):
    good = True
    for parser in parsers:
        row = fuzzer.coverage(parser)
        good = good and row["coverage"] >= LEAST_COVERAGE
        print(f"{parser.name}: {row['covered']} of {row['regions']} regions, {100 * row['coverage']:.1f} %", *row["uncovered"], sep="\n  ")
    return 0 if good else 1


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("build", type=Path)
    options.add_argument("verb", choices=["corpus", "short", "long", "coverage"])
    options.add_argument("names", nargs="*")
    options.add_argument("--seconds", type=int, default=30 if os.environ.get("LM_COUNTS") == "full" else 10)
    options.add_argument("--runs", type=int, default=10_000_000)
    options.add_argument("--minutes", type=float, default=1e6)
    given = options.parse_args()
    if not shutil.which("clang++"):
        print("fuzz.py: no clang++: install clang, libclang-rt-dev and llvm")
        return 1 if os.environ.get("CI") else 77
    known = read_parsers()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        options.error(f"no such parser: {', '.join(unknown)}; there are {', '.join(known)}")
    parsers = [known[name] for name in given.names or known]
    fuzzer = Fuzzer(given.build.resolve())
    if given.verb == "corpus":
        return min(1, fuzzer.corpus(parsers))
    if given.verb == "short":
        return max(fuzzer.short(parser, given.seconds) for parser in parsers)
    return fuzzer.long(parsers, given.runs, given.minutes) if given.verb == "long" else show_coverage(fuzzer, parsers)


if __name__ == "__main__":
    sys.exit(main())
