"""A copy of the sources in which mistakes are planted, and the tests that must find them there."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from mistakes import ROOT, ListError, needs, tracked, words_of

sys.path.insert(0, str(ROOT / "tests" / "support"))
from reasons import reason  # noqa: E402

SKIPPED = 77  # the exit status of a test of which some was skipped and nothing failed (support/test_main.cpp, conftest.py)
WARM = ROOT / "tests" / "support" / "warm_pytest.py"  # not the copy's, in which a mistake may be
OPTIONS = r"LM_(PYTHON|CUDA|CUDA_ARCHS|NVCC|WERROR|SANITIZE)|CMAKE_BUILD_TYPE|CMAKE_(C|CXX|CUDA)_COMPILER_LAUNCHER"
WARM_MODULES = ("torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "peft")


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
        options = [f"-D{name}={self.cached[name]}" for name in self.cached if re.fullmatch(OPTIONS, name)]
        if shutil.which("ld.lld"):  # it links lmlaunch-cpu in 0.2 seconds of a core, ld in 0.9
            options += [f"-DCMAKE_{kind}_LINKER_FLAGS=-fuse-ld=lld" for kind in ("EXE", "SHARED", "MODULE")]
        self.call(self.cached["CMAKE_COMMAND"], "-G", "Ninja", "-S", self.root, "-B", self.build,
                  f"-DCMAKE_MAKE_PROGRAM={self.cached['CMAKE_MAKE_PROGRAM']}", *options)

    def copy_sources(self):
        """A file that did not change keeps its time, so that a copy is built once. What is no longer there goes."""
        names = {name for group in tracked(ROOT).values() for name in group}
        for name in names:
            source, target = ROOT / name, self.root / name
            if target.exists() and target.read_bytes() == source.read_bytes():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        manifest = self.root / ".copied"
        for name in (manifest.read_text().splitlines() if manifest.exists() else []):
            if name not in names:
                (self.root / name).unlink(missing_ok=True)
        manifest.write_text("\n".join(sorted(names)))

    def call(self, *command):
        done = subprocess.run(list(map(str, command)), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise ListError(f"{' '.join(map(str, command[:1]))} failed:\n" + done.stdout[-3000:])
        return done.stdout

    def make(self, targets):
        wanted = [target for target in targets if target != "lm_mpi" or self.has_mpi()]
        if wanted:
            self.call(self.cached["CMAKE_MAKE_PROGRAM"], "-C", self.build, f"-j{self.jobs}", *wanted)

    def has_mpi(self):
        return "\nbuild lm_mpi: phony" in (self.build / "build.ninja").read_text()


class WarmPytest:
    """The server of tests/support/warm_pytest.py, for as long as mistakes are planted; that of `./dev test` where there is one."""

    def __init__(self, copy):
        self.process = None
        if "LM_WARM_PYTEST" in copy.environment:
            return
        self.directory = tempfile.TemporaryDirectory(prefix="lmlaunch-warm-")
        socket = Path(self.directory.name) / "socket"
        self.process = subprocess.Popen([copy.python, "-B", WARM, "serve", socket, *WARM_MODULES], env=copy.environment)
        while not socket.exists() and self.process.poll() is None:
            time.sleep(0.05)
        copy.environment["LM_WARM_PYTEST"] = str(socket)

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.directory.cleanup()


# ------------------------------------------------------------------------------------------------------------- a test


@dataclass
class Result:
    code: int = 0
    output: str = ""
    hung: bool = False
    seconds: float = 0


class Test:
    def __init__(self, text, copy):
        self.text, self.copy, self.words = text, copy, words_of(text)
        self.targets = needs(text)[0] or (("build.ninja",) if self.words.program == "ctest" else ())
        self.environment = {**copy.environment, **dict(self.words.variables)}
        program, arguments = self.words.program, self.words.arguments
        bin, emulator = copy.build / "bin", copy.build / "emulator"
        if program == "ctest":
            self.command = [str(Path(copy.cached["CMAKE_COMMAND"]).with_name("ctest")), "--test-dir", str(copy.build), "--no-tests=error",
                            "--output-on-failure", *arguments]
        elif self.words.is_python():
            pytest = [str(WARM), "-x", "-q", "-p", "no:cacheprovider"] if program == "pytest" else []
            self.command = [copy.python, "-B", *pytest, *arguments]
            self.environment |= {"LM_BIN": str(bin), "LM_EMULATOR_BIN": str(emulator / "bin"), "LMLAUNCH_PYTHON": copy.python,
                                 "PYTHONDONTWRITEBYTECODE": "1"}
            if "tests/support/" in text:  # the server's own tests have their own
                self.environment.pop("LM_WARM_PYTEST", None)
        else:
            place = emulator / "bin" if program.startswith("emulator_") else bin
            self.command = [str(place / program)] + [a if a.startswith("-") else f"--gtest_filter={a}" for a in arguments]

    def run(self, limit, first_failure=False):
        environment = self.environment | ({"GTEST_FAIL_FAST": "1"} if first_failure else {})
        start = time.monotonic()
        process = subprocess.Popen(self.command, cwd=self.copy.root, env=environment, stdout=subprocess.PIPE,
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
    said = re.sub(r"\s+", " ", reason(result.output).replace(str(root) + "/", ""))
    said = re.sub(r"/\S*/", "", said)
    return code + (": " + (said if len(said) <= 100 else said[:97] + "...") if said else "")


def failed_names(output):
    """Their names, GoogleTest's or pytest's; of a test program that died the one that it was in."""
    named = re.findall(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)", output, re.M) + re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return list(dict.fromkeys(named)) or re.findall(r"^\[ RUN      \] (\S+)", output, re.M)[-1:]


# --------------------------------------------------------------------------------------------- without any mistake


@dataclass
class Baseline:
    """How a test goes without any mistake."""
    state: str  # "passes", "skipped", "fails"
    seconds: float = 0
    partly: bool = False  # a part of it was skipped
    output: str = field(default="", repr=False)

    def limit(self):
        """Seconds after which a test with a mistake hangs."""
        return 60 + 10 * self.seconds


def baseline(result):
    if skipped(result):
        return Baseline("skipped", result.seconds)
    if result.code not in (0, SKIPPED) or result.hung or ran_nothing(result):
        return Baseline("fails", result.seconds, output=result.output[-3000:])
    return Baseline("passes", result.seconds, result.code == SKIPPED)


def matches(pattern, name):
    """As GoogleTest matches a filter; nothing behind a minus."""
    return any(re.fullmatch(re.escape(part).replace(r"\*", ".*").replace(r"\?", "."), name) for part in pattern.split(":"))


def all_at_once(tests):
    """Baselines of tests that are filters of one program: one run of the tests that any of them names, since most take less time than the
    program to start. None for those that such a run cannot judge."""
    first = tests[0]
    together = Test(first.text, first.copy)
    together.command = [first.command[0], "--gtest_filter=" + ":".join(test.words.filter() for test in tests)]
    result = together.run(1800)
    ended = re.findall(r"^\[ +(OK|SKIPPED) +\] ([\w/]+\.[\w/]+) \((\d+) ms\)", result.output, re.M)
    if result.code not in (0, SKIPPED) or result.hung:
        return {}
    out = {}
    for test in tests:
        own = [(state, int(ms)) for state, name, ms in ended if matches(test.words.filter(), name)]
        seconds = sum(ms for _, ms in own) / 1000
        states = {state for state, _ in own}
        if states:
            out[test.text] = Baseline("skipped" if states == {"SKIPPED"} else "passes", seconds, "SKIPPED" in states)
    return out


def baselines(tests):
    out, programs = {}, {}
    for test in tests:
        if test.words.is_executable() and "-" not in test.words.filter():
            programs.setdefault((test.words.variables, test.words.program), []).append(test)
    for group in programs.values():
        if len(group) > 1:
            out |= all_at_once(group)
    for test in tests:
        if test.text not in out:
            out[test.text] = baseline(test.run(1800))
    return out


# ---------------------------------------------------------------------------------------------------------- with one


# A mistake that leaves something unused is to compile where warnings are errors, and is found by no compiler where they are none.
UNUSED = "".join(f'#pragma GCC diagnostic ignored "-Wunused-{what}"\n' for what in ("variable", "function", "parameter", "but-set-variable"))


def with_mistake(original, mistake):
    prefix = f"{UNUSED}#line 1\n" if mistake.file.endswith((".cpp", ".h")) else ""
    return prefix + original.replace(mistake.old, mistake.new)


def plant(mistake, copy, test, without):
    """(verdict, by what, the tests that failed, what was said): the verdict is "caught", "MISSED", "does not compile" or "skipped"."""
    path = copy.root / mistake.file
    original = path.read_text()
    path.write_text(with_mistake(original, mistake))
    try:
        copy.make(test.targets)
        result = test.run(without.limit(), first_failure=True)
    except ListError as error:
        return "does not compile", "", [], str(error)
    finally:
        path.write_text(original)
    if result.hung or result.code not in (0, SKIPPED):
        return "caught", how(result, copy.root), failed_names(result.output), result.output
    if without.partly and result.code == SKIPPED:  # what was skipped could have found it
        return "skipped", "a part of its test is skipped here", [], ""
    return "MISSED", "passes", [], result.output
