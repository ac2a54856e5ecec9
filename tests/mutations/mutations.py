#!/usr/bin/env python3
"""Plants known mistakes into the sources, one at a time, and runs the test that must find each.

  mutations.py BUILD [--only REGEX] [--list FILE] [--jobs N] [--write] [--work DIR]
  mutations.py --check [--write]

BUILD: a build directory that ./dev build has made. The sources are copied and built with its options elsewhere, through ccache;
neither they nor BUILD change. --check only looks whether each mistake can still be planted. --write: the verdicts go into
MUTATIONS.md, where those of earlier runs stay.

A list (lists/*.txt) has a line per mistake, `#` begins a comment:

  NAME | FILE | OLD | NEW | TEST | what it is

OLD stands once in FILE. `\\n` is a line break, `\\|` a bar; one space beside each bar belongs to the bar. TEST is what one would
type, variables first: an executable of BUILD/twin/bin or BUILD/bin and its filter (`X`: --gtest_filter=X), `ctest -R NAME`,
`pytest FILE ...`, or `python FILE ...`. What only a sanitizer sees begins with LM_SANITIZE=thread: a BUILD with it (build/tsan) plants
those alone, another one the others.

Exits 1 if more than two mistakes are missed, if a line does not fit the sources any more or does not compile, or if a test fails
without any mistake. Those whose test is skipped on this machine, or passes without the part that is, do not count."""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from reasons import reason  # noqa: E402

LISTS = ROOT / "tests" / "mutations" / "lists"
TABLE = ROOT / "tests" / "mutations" / "MUTATIONS.md"
MISSES_ALLOWED = 2
SKIPPED = 77  # the exit status of a test of which some was skipped and nothing failed (support/test_main.cpp, conftest.py)
NOT_RUN = ("not run", "")
HEADER = """# Mistakes that the tests must find

Each row is a mistake in our own sources. `mutations.py` plants one at a time into a copy of the sources, builds what its test needs
and runs that test, which must fail; every test passes without the mistake. A test that hangs has found its mistake, too. The lists:
`lists/bugs.txt` has the bugs that the twin found when it was first run, so that none comes back unseen; `kernels`, `model` and
`waits` are about the GPU's half, the others about everything else.

Written by `tests/mutations/mutations.py build --write`; do not edit. `./dev test` looks whether each mistake can still be planted,
`./dev test --full` plants them all. A run with `--only` or `--list` replaces its own rows; "not run": no verdict since the mistake
or its test was changed.
"""


@dataclass
class Mutation:
    list: str
    name: str
    file: str
    old: str
    new: str
    test: str
    what: str


class ListError(Exception):
    pass


def unescape(text):
    return re.sub(r"\\([n|])", lambda m: "\n" if m[1] == "n" else "|", text)


def read_list(path):
    out = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [re.sub(r"^ | $", "", field) for field in re.split(r"(?<!\\)\|", line)]
        if len(fields) != 6:
            raise ListError(f"{path.name}:{number}: {len(fields)} fields instead of 6")
        name, file, old, new, test, what = map(unescape, fields)
        out.append(Mutation(path.stem, name.strip(), file.strip(), old, new, test.strip(), what.strip()))
    return out


def read_lists(only=None, files=None):
    out = [m for path in files or sorted(LISTS.glob("*.txt")) for m in read_list(path)]
    names = [m.name for m in out]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ListError(f"names that come twice: {sorted(twice)}")
    return [m for m in out if not only or re.search(only, f"{m.list}/{m.name}")]


def stale(mutation, root=ROOT):
    """Why it cannot be planted; "" if it can."""
    path = root / mutation.file
    if not path.exists():
        return f"{mutation.file} is not there"
    count = path.read_text().count(mutation.old)
    if count != 1 or not mutation.old:
        return f"OLD stands {count} times in {mutation.file}"
    return "" if mutation.old != mutation.new else "NEW is OLD"


def tools_of(arguments):
    """The test programs that a file of tests names, or a module beside it that it imports."""
    files = [ROOT / word for word in arguments if word.endswith(".py")]
    for file in files:
        beside = {file.with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.M)}
        files += sorted(path for path in beside if path.exists() and path not in files)
    return sorted({name for file in files for name in re.findall(r'"(\w+_tool)"', file.read_text())})


def sanitizer(test):
    return next((word.split("=", 1)[1] for word in shlex.split(test) if word.startswith("LM_SANITIZE=")), "")


def program(test):
    return next(word for word in shlex.split(test) if "=" not in word)


# ---------------------------------------------------------------------------------------------- a copy of the sources


class Copy:
    def __init__(self, build, directory, jobs):
        cache = (build / "CMakeCache.txt").read_text()
        self.cached = dict(re.findall(r"^([A-Za-z_]+):[A-Z]+=(.*)$", cache, re.M))
        self.root, self.build, self.jobs = directory, directory / "build", jobs
        self.python = self.cached["LM_PYTHON"]
        self.environment = {**os.environ, "CCACHE_BASEDIR": str(self.root), "CCACHE_NOHASHDIR": "1",
                            "CCACHE_SLOPPINESS": "pch_defines,time_macros", "GOMP_SPINCOUNT": "0",
                            "PATH": f"{Path(self.python).parent}:{os.environ['PATH']}"}
        self.copy_sources()
        options = [f"-D{name}={self.cached[name]}" for name in self.cached
                   if re.fullmatch(r"LM_(PYTHON|CUDA|CUDA_ARCHS|NVCC|WERROR|SANITIZE)|CMAKE_BUILD_TYPE|CMAKE_(C|CXX|CUDA)_COMPILER_LAUNCHER",
                                   name)]
        self.call(self.cached["CMAKE_COMMAND"], "-G", "Ninja", "-S", self.root, "-B", self.build,
                  f"-DCMAKE_MAKE_PROGRAM={self.cached['CMAKE_MAKE_PROGRAM']}", *options)

    def copy_sources(self):
        """Whatever git tracks or would; a file that did not change keeps its time, so that a copy is built once."""
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                                capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, listed):
            source, target = ROOT / name, self.root / name
            if not source.exists() or (target.exists() and target.read_bytes() == source.read_bytes()):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def call(self, *command):
        done = subprocess.run(list(map(str, command)), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise ListError(f"{' '.join(map(str, command[:1]))} failed:\n" + done.stdout[-3000:])

    def make(self, targets):
        self.call(self.cached["CMAKE_MAKE_PROGRAM"], "-C", self.build, f"-j{self.jobs}", *targets)


# ------------------------------------------------------------------------------------------------------------- a test


@dataclass
class Result:
    code: int = 0
    output: str = ""
    hung: bool = False
    seconds: float = 0


class Test:
    def __init__(self, text, copy):
        self.text, self.copy, self.environment = text, copy, dict(copy.environment)
        self.partly_skipped = False  # without any mistake
        words = shlex.split(text)
        while "=" in words[0]:
            name, value = words.pop(0).split("=", 1)
            self.environment[name] = value
        program, arguments = words[0], words[1:]
        bin, twin = copy.build / "bin", copy.build / "twin"
        if program == "ctest":
            self.targets = ["mpi_group_test", "lm_mpi"] if "mpi_group" in text else ["build.ninja"]
            self.command = [str(Path(copy.cached["CMAKE_COMMAND"]).with_name("ctest")), "--test-dir", str(copy.build), "--no-tests=error",
                            "--output-on-failure", *arguments]
        elif program in ("pytest", "python"):
            self.targets = ["twin"] if "tests/twin/" in text else ["executables", *tools_of(arguments)]
            if "tests/faults/" in text:
                self.targets = ["save_tool", "clock_jumps"] + (["executables"] if "power_cut" not in text else [])
            if re.search(r"test_(twin|gpus|page|ranks_memory)", text):
                self.targets = ["twin", *self.targets]
            self.command = [copy.python, *(["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"] if program == "pytest" else []), *arguments]
            self.environment |= {"LM_BIN": str(bin), "LM_TWIN_BIN": str(twin / "bin"), "LMLAUNCH_PYTHON": copy.python,
                                 "PYTHONDONTWRITEBYTECODE": "1"}
        else:
            self.targets = [program]
            place = twin / "bin" if program.startswith("twin_") else bin
            self.command = [str(place / program)] + [a if a.startswith("-") else f"--gtest_filter={a}" for a in arguments]

    def run(self, limit):
        start = time.monotonic()
        process = subprocess.Popen(self.command, cwd=self.copy.root, env=self.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            output, hung = process.communicate(timeout=limit)[0], False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, hung = process.communicate()[0], True
        return Result(process.returncode, output.decode(errors="replace"), hung, time.monotonic() - start)


def skipped(result):
    """All of it."""
    told = r"^\[  PASSED  \] 0 tests\.\n\[  SKIPPED \]|\*\*\*Skipped|^\d+ skipped|^skipped: "
    return result.code in (0, SKIPPED) and bool(re.search(told, result.output, re.M))


def ran_nothing(result):
    return bool(re.search(r"Running 0 tests", result.output))  # ctest and pytest fail by themselves


def how(result, root):
    """By what a test has failed: its exit and the first line that says why, shortened."""
    if result.hung:
        return "hangs"
    code = f"signal {-result.code}" if result.code < 0 else f"exit {result.code}"
    said = re.sub(r"\s+", " ", reason(result.output).replace(str(root) + "/", "").replace("|", "/"))
    said = re.sub(r"/\S*/", "", said)
    return code + (": " + (said if len(said) <= 100 else said[:97] + "...") if said else "")


# ---------------------------------------------------------------------------------------------------------- the table


def row(mutation, verdict, by):
    return f"| {mutation.name} | {mutation.file} | {mutation.what.replace('|', '/')} | {verdict} | {by} |"


def read_table():
    """Verdicts of earlier runs, by all that a row says of the mistake."""
    out = {}
    if TABLE.exists():
        for line in TABLE.read_text().splitlines():
            fields = [field.strip() for field in line.strip("|").split(" | ")]
            if line.startswith("| ") and len(fields) == 5:
                out[tuple(fields[:3])] = tuple(fields[3:])
    return out


def earlier_verdict(table, mutation):
    """Of the same mistake and the same test."""
    verdict, by = table.get((mutation.name, mutation.file, mutation.what.replace("|", "/")), NOT_RUN)
    return (verdict, by) if by.startswith(f"`{mutation.test}`") else NOT_RUN


def write_table(verdicts):
    kept, lines = read_table(), []
    everything = read_lists()
    for mutation in everything:
        lines.append(row(mutation, *verdicts.get(mutation.name, earlier_verdict(kept, mutation))))
    caught = sum("| caught |" in line for line in lines)
    TABLE.write_text(f"{HEADER}\n{caught} of {len(everything)} caught.\n\n"
                     "| name | file | what it is | verdict | by what |\n|---|---|---|---|---|\n" + "\n".join(lines) + "\n")


# ------------------------------------------------------------------------------------------------------------ the run


def plant(mutation, copy, test, limit):
    path = copy.root / mutation.file
    original = path.read_text()
    path.write_text(original.replace(mutation.old, mutation.new))
    try:
        copy.make(test.targets)
        result = test.run(limit)
    except ListError as error:
        return ("does not compile", ""), str(error)
    finally:
        path.write_text(original)
    if result.hung or result.code not in (0, SKIPPED):
        return ("caught", f"`{test.text}`: {how(result, copy.root)}"), result.output
    if test.partly_skipped and result.code == SKIPPED:  # what was skipped could have found it
        return ("not run", f"`{test.text}`: a part of it is skipped here"), ""
    return ("MISSED", f"`{test.text}` passes"), ""


def unmutated(texts, copy):
    """Of each test: itself and how long it may take; None where it is skipped. Raises where it does not pass."""
    out = {}
    tests = [Test(text, copy) for text in texts]
    copy.make(sorted({target for test in tests for target in test.targets}))
    for test in tests:
        result = test.run(900)
        test.partly_skipped = result.code == SKIPPED
        if skipped(result):
            out[test.text] = None
        elif result.code not in (0, SKIPPED) or result.hung or ran_nothing(result):
            raise ListError(f"without any mistake: {test.text}\n{result.output[-3000:]}")
        else:
            out[test.text] = test, 60 + 10 * result.seconds
        print(f"passes in {result.seconds:5.1f} s: {test.text}", flush=True)
    return out


def check():
    wrong = [f"{m.list}/{m.name}: {stale(m)}" for m in read_lists() if stale(m)]
    for line in wrong:
        print(f"STALE {line}")
    print(f"{len(read_lists()) - len(wrong)} of {len(read_lists())} can be planted")
    return 1 if wrong else 0


def run(arguments, directory):
    chosen = read_lists(arguments.only, arguments.list)
    broken = {m.name: ("stale", stale(m)) for m in chosen if stale(m)}
    # One test after the other, one file after the other: what is built again is little.
    chosen = sorted((m for m in chosen if m.name not in broken), key=lambda m: (program(m.test), m.file))
    copy = Copy(arguments.build.resolve(), directory, arguments.jobs)
    chosen = [m for m in chosen if sanitizer(m.test) == copy.cached.get("LM_SANITIZE", "")]
    tests = unmutated(dict.fromkeys(m.test for m in chosen), copy)
    verdicts = dict(broken)
    for mutation in chosen:
        if tests[mutation.test] is None:
            verdicts[mutation.name] = ("not run", "its test is skipped here")
            continue
        start = time.monotonic()
        verdicts[mutation.name], output = plant(mutation, copy, *tests[mutation.test])
        verdict, by = verdicts[mutation.name]
        print(f"{verdict:8} {mutation.name:36} {time.monotonic() - start:4.0f} s  {by or output[-1500:]}", flush=True)
        if arguments.write:
            write_table(verdicts)
    counted = [verdict for verdict, _ in verdicts.values() if verdict != "not run"]
    caught = counted.count("caught")
    for name, (verdict, by) in verdicts.items():
        if verdict != "caught":
            print(f"{verdict}: {name} {by}")
    print(f"{caught} of {len(counted)} caught")
    listless = [v for v in counted if v not in ("caught", "MISSED")]
    return 1 if listless or counted.count("MISSED") > MISSES_ALLOWED else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", help="names (LIST/NAME) that match")
    parser.add_argument("--list", type=Path, action="append", help="only this list")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once")
    parser.add_argument("--write", action="store_true", help="the verdicts into MUTATIONS.md")
    parser.add_argument("--work", type=Path, help="where the copy is made, and kept for the next time")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            if arguments.write:
                write_table({})
            return check()
        if arguments.build is None:
            parser.error("BUILD, or --check")
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
