"""The planted mistakes: their lists, and what the test that must find one is made of.

A list (lists/*.txt) has a line per mistake, `#` begins a comment:

  NAME | FILE | OLD | NEW | TEST | what it is

OLD stands once in FILE. `\\n` is a line break, `\\|` a bar; one space beside each bar belongs to the bar. TEST is what one would
type, variables first: an executable of BUILD/emulator/bin or BUILD/bin and its filter (`X`: --gtest_filter=X), `ctest -R NAME`,
`pytest FILE ...`, or `python FILE ...`. What only a sanitizer sees begins with LM_SANITIZE=thread.

`bugs` has the bugs that the emulator found when it was first run, so that none comes back unseen; `kernels`, `model` and `waits` are about
the GPU's half, the other lists about everything else."""

import functools
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = ROOT / "tests" / "mutations" / "lists"


class ListError(Exception):
    pass


@dataclass(frozen=True)
class Mistake:
    list: str
    name: str
    file: str
    old: str
    new: str
    test: str
    what: str


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
        out.append(Mistake(path.stem, name.strip(), file.strip(), old, new, test.strip(), what.strip()))
    return out


def read_lists(only=None, files=None):
    out = [m for path in files or sorted(LISTS.glob("*.txt")) for m in read_list(path)]
    names = [m.name for m in out]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ListError(f"names that come twice: {sorted(twice)}")
    return [m for m in out if not only or re.search(only, f"{m.list}/{m.name}: {m.test}")]


def misfit(mistake, root=ROOT):
    """Why it cannot be planted; "" if it can."""
    path = root / mistake.file
    if not path.exists():
        return f"{mistake.file} is not there"
    count = path.read_text().count(mistake.old)
    if count != 1 or not mistake.old:
        return f"OLD stands {count} times in {mistake.file}"
    if mistake.old == mistake.new:
        return "NEW is OLD"
    words = words_of(mistake.test)
    there = (root / words.file()).is_file() if words.is_python() else words.program == "ctest" or words.program.endswith("_test")
    return "" if there else f"{words.file() or words.program} is no test"


# ------------------------------------------------------------------------------------------------------ the text of a test


@dataclass(frozen=True)
class Words:
    """What TEST says: variables, then a program, then its arguments."""
    variables: tuple  # of (name, value)
    program: str
    arguments: tuple

    def is_python(self):
        return self.program in ("pytest", "python")

    def is_executable(self):
        return not self.is_python() and self.program != "ctest"

    def file(self):
        """Of tests in Python."""
        return next((word for word in self.arguments if word.endswith(".py")), "")

    def sanitizer(self):
        return dict(self.variables).get("LM_SANITIZE", "")

    def filter(self):
        """Of an executable, as GoogleTest has it."""
        return ":".join(a.removeprefix("--gtest_filter=") for a in self.arguments) or "*"


@functools.cache
def words_of(test):
    words, variables = shlex.split(test), []
    while "=" in words[0]:
        variables.append(tuple(words.pop(0).split("=", 1)))
    return Words(tuple(variables), words[0], tuple(words[1:]))


def group_of(mistake):
    """Mistakes of one group need the same files built: an executable, or those that one file of tests starts."""
    words = words_of(mistake.test)
    return words.file() or (" ".join(words.arguments) if words.program == "ctest" else words.program)


def shard(mistakes, number, count):
    """The number-th of `count` parts, 1 is the first. Groups stay together, the largest are dealt out first, each to the part that has
    the least so far: the parts depend on the lists alone, so that several machines agree on them."""
    groups = {}
    for mistake in mistakes:
        groups.setdefault(group_of(mistake), []).append(mistake)
    parts = [[] for _ in range(count)]
    for _, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        min(parts, key=len).extend(group)
    return parts[number - 1]


# ------------------------------------------------------------------------------------------------------------ what it needs


@functools.cache
def tracked(root):
    """By their last name: the files that git tracks or would."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, check=True,
                            capture_output=True, text=True).stdout.split("\0")
    out = {}
    for name in filter(None, listed):
        if (root / name).exists():
            out.setdefault(Path(name).name, []).append(name)
    return out


@functools.cache
def python_files(file, root=ROOT):
    """A file of tests, conftest.py, and by their names all that they import or mention, modules with what those import or mention. Not
    the lists, nor what CMake reads, which says how targets are built."""
    known, found, left = tracked(root), set(), [file, "tests/conftest.py"]
    while left:
        name = left.pop()
        if name in found or name.startswith("tests/mutations/lists/") or name.endswith((".cmake", "CMakeLists.txt")):
            continue
        found.add(name)
        if not name.endswith(".py"):
            continue
        text = (root / name).read_text()
        mentioned = {f"{module}.py" for module in re.findall(r"^\s*(?:from|import) (\w+)", text, re.M)}
        mentioned |= set(re.findall(r"[\w-]+(?:\.\w+)+", text))
        left += [path for last in mentioned for path in known.get(last, [])]
    return tuple(sorted(found))


PROGRAMS = ("lmlaunch", "lmlaunch-cpu", "lm_mpi")
FAULTS = ("save_tool", "clock_jumps")


def python_targets(words):
    """Of the build, for tests in Python. (lmlaunch-cuda, which takes longest to link, only where it is packed.)"""
    file = words.file()
    folder = file.split("/")[1]
    text = "".join((ROOT / name).read_text() for name in python_files(file) if name.endswith(".py"))
    tools = sorted({name for name in re.findall(r'"(\w+_tool)"', text)})
    if "test_package" in file:
        return ("executables",)
    if "skips_test" in file:
        return ("build.ninja",)
    if re.search(r"tests/emulator/|test_(emulator|gpus|gpus_stuck|page|ranks_memory)\.py|gpu/test_parity", file):
        return ("emulator", *tools)
    if folder == "faults":
        return (*FAULTS, *(() if "power_cut" in file else PROGRAMS))
    if folder in ("parity", "weights"):
        return (*tools, *(PROGRAMS if '/ "lmlaunch"' in text else ()))
    return (*PROGRAMS, *tools) if folder == "e2e" else ()


@functools.cache
def needs(test):
    """(targets of the build, files, folders) that a test is made of."""
    words = words_of(test)
    if words.is_python():
        return python_targets(words), python_files(words.file()), ()
    if words.is_executable():
        return (words.program,), (), ()
    if "mpi_group" in test:
        return ("mpi_group_test", "lm_mpi"), (), ()
    return (), (), ("src", "tests/fuzz") if "fuzz" in test else ("src", "tests/kernels")
