"""Runs benchmarks and says at the end which figures miss their target.

A full run writes results/CPU.md and .json, a run with NAMEs replaces their rows there; --smoke and --impossible keep nothing.
--impossible gives every benchmark targets that nothing meets and demands that each of its figures is measured and missed: a benchmark
that passes could not fail. --smoke does the same with the fewest rounds and the smallest sizes that give every figure: it shows that a
benchmark runs, prints its figures and can fail, and judges no time. Exits 1 if a target is missed (an impossible one: if it is met), if
a figure was not measured, or if a benchmark ends any other way than with its figures. A NAME may be without its .py.

--minutes M, with --smoke: no benchmark but the first begins later than that; the others are named.

Usage: run.py BIN_DIR [--smoke [--minutes M]] [--impossible] [NAME...]
"""

import datetime
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from figures import common_options, measured, number, table, verdict

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


@dataclass
class Outcome:
    rows: list = field(default_factory=list)  # of figures
    fault: str = ""  # why the benchmark counts as failed, whatever its figures say


def run_once(name, options):
    command = [sys.executable, "-B", str(HERE / name), str(options.bin_dir)]
    command += [flag for flag, on in (("--smoke", options.smoke), ("--impossible", options.impossible)) if on]
    environment = dict(os.environ)
    if options.smoke:  # beside other work, threads that spin for each other without end take ten times as long
        environment["GOMP_SPINCOUNT"] = "20000"
    outcome, end = Outcome(), None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            row = None
            if line.startswith('{"benchmark"'):
                row = json.loads(line)
            if row is None:
                print(line, end="", flush=True)
            elif "figure" in row:
                outcome.rows.append(row)
            else:
                end = row
    missed = sum(not row["met"] for row in outcome.rows)
    if end is None:
        outcome.fault = f"ended with {process.returncode} before its figures"
    elif not outcome.rows:
        outcome.fault = "gave no figure"
    elif (end["figures"], end["missed"]) != (len(outcome.rows), missed) or process.returncode != (1 if missed else 0):
        outcome.fault = f"ended with {process.returncode}, its figures say otherwise"
    return outcome


def run(name, options):
    print(f"== {name}", flush=True)
    start = time.monotonic()
    outcome = run_once(name, options)
    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
    return outcome


def faults(outcomes, impossible):
    """Lines: what makes this run a failure."""
    for name, outcome in outcomes.items():
        if outcome.fault:
            yield f"{name}: {outcome.fault}"
        for row in outcome.rows:
            if impossible and not measured(row["value"]):
                yield f"{name}: {row['figure']} was not measured"
            elif impossible and (row["met"] or "impossible" not in row):
                yield f"{name}: {row['figure']} was not missed by a target that nothing can meet"
            elif not impossible and not row["met"]:
                yield (f"{name}: {row['figure']} is {number(row['value'], row['unit'])}, "
                       f"{row['bound']} {number(row['target'], row['unit'])} wanted")


def cpu_name(cpuinfo):
    """With its generation, which the names that clouds give hide: AMD numbers it by family, Intel by the model of family 6.
    AMD's family 25 is Zen 3 and Zen 4, which differ by AVX-512."""
    def of(key):
        return (re.search(rf"^{key}\s*: (.*)$", cpuinfo, re.M) or ["", ""])[1].strip()

    generation = f"model {of('model')}" if of("cpu family") == "6" else f"family {of('cpu family')}"
    if of("cpu family") == "25":
        generation += " Zen 4" if "avx512f" in of("flags").split() else " Zen 3"
    return f"{of('model name')} {generation}" if of("cpu family") else platform.machine()


def machine():
    kib = int(re.search(r"^MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text(), re.M)[1])
    return {"cpu": cpu_name(Path("/proc/cpuinfo").read_text()), "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(kib / 2**20, 1), "kernel": platform.release()}


def results_file(kind):
    words = re.sub(r"\((R|TM)\)|\bCPU\b|@ [0-9.]+GHz", " ", kind["cpu"])
    slug = re.sub(r"[^a-z0-9]+", "-", f"{words} {kind['cores']} cores".lower()).strip("-")
    return RESULTS / f"{slug}.json"


def commit():
    def git(*words):
        return subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "..", ":!results")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")


def finite(row):
    """JSON knows no NaN."""
    return row if measured(row["value"]) else row | {"value": None}


def write_results(outcomes, names, every):
    """`names`: those that were run, of `every`; the others keep the rows that they have."""
    kind = machine()
    path = results_file(kind)
    before = json.loads(path.read_text())["rows"] if path.exists() and names != every else []
    when = {"date": datetime.date.today().isoformat(), "commit": commit()}
    rows = []
    for name in every:
        if name in outcomes:
            rows += [finite(row) | when for row in outcomes[name].rows]
        else:
            rows += [row for row in before if row["benchmark"] == name]
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": kind, "rows": rows}, indent=1) + "\n")
    text = [f"# {kind['cpu']}, {kind['cores']} cores", "",
            f"{kind['memory_gib']} GiB of memory, Linux {kind['kernel']}. Written by `./dev bench`.", "",
            "| benchmark | figure | value | target | ceiling | verdict | measured |", "|---|---|---|---|---|---|---|"]
    text += [f"| {row['benchmark']} | {row['figure']} | {number(row['value'], row['unit'])} "
             f"| {row['bound']} {number(row['target'], row['unit'])} | {row['ceiling']} | {verdict(row)} "
             f"| {row['date']}, {row['commit']} |" for row in rows]
    path.with_suffix(".md").write_text("\n".join(text) + "\n")
    print(f"{path.with_suffix('.md')}")


def main():
    parser = common_options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_intermixed_args()
    begun = time.monotonic()
    every = (options.bin_dir.parent / "benchmarks.txt").read_text().split()
    options.names = [name if name.endswith(".py") else f"{name}.py" for name in options.names]
    if unknown := [name for name in options.names if name not in every]:
        sys.exit(f"run.py: no benchmark {unknown[0]}: there are {', '.join(every)}")
    names = [name for name in every if not options.names or name in options.names]
    impossible = options.impossible or options.smoke
    outcomes, late = {}, []
    for name in names:
        if outcomes and options.smoke and time.monotonic() - begun > options.minutes * 60:
            late.append(name)
        else:
            outcomes[name] = run(name, options)
    rows = [row for outcome in outcomes.values() for row in outcome.rows]
    print("\n" + "\n".join(table([row | {"figure": f"{row['benchmark']}: {row['figure']}"} for row in rows])))
    if not impossible:
        write_results(outcomes, names, every)
    if late:
        print(f"NOT RUN, for want of time: {', '.join(late)}")
    wrong = list(faults(outcomes, impossible))
    for line in wrong:
        print(line)
    sys.exit(1 if wrong or not rows else 0)


if __name__ == "__main__":
    main()
