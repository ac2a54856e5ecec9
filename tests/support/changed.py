"""Which entries of the suite a change can reach: for `./dev test --changed`, and for the tests of the test apparatus.

The build says what depends on what: build.ninja names the inputs of each program, `ninja -t deps` the files that each object was
compiled from. So build first: a source that was not compiled since it changed has the dependencies of its former text.

- A C++ entry runs if its program depends on a changed file. Of a program of several sources only the suites of those sources run
  that can notice the change: an object that has read a changed file is affected; so is each object that has read the header
  beside the source of an affected one, and so on. A source without such a header affects every suite of the program.
- An entry in Python runs if one of its files changed (its script, what that imports, pytest's settings), if one of its files names
  the changed file, or if a program that one of them names depends on it. Who names lmlaunch uses the CPU's rank, MPI's library
  and build/warm as well; who names the emulator, everything in build/emulator.
- A changed page of text selects the entries that name it, and those that check the documents.
- Build files, `dev` and what nobody names may concern everything: every entry runs, and the runner says so.

Each of the 930 mistakes in tests/mutations/lists (2026-11-28) is in a file whose change selects the entry, and the suite, that finds it.
If only the sources that include the changed source's own header were affected, 10 would be missed.

What it can miss: a function that is declared in another header than the one beside its source (affected objects are then too few
only if the source has a header beside it as well); a test that finds its files by a pattern and names neither them nor their
folder; a program that is started under a name put together at run time; what changes with the machine. `./dev test` is what counts.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

# Any of these may concern every entry.
EVERYTHING = re.compile(r"(^|/)CMakeLists\.txt$|\.cmake$|^dev$|^\.ci/|^CMakePresets\.json$|^requirements[\w-]*\.txt$")
CODE = {".h", ".cpp", ".cu", ".cuh", ".inc"}
HEADERS = (".h", ".cuh")
PAGES = {".md"}
SUITE = re.compile(r"^\s*(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+)\s*,", re.M)
WORD = re.compile(r"[\w-]+(?:\.[\w-]+)*")
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(.+)|import[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*))", re.M)
STARTED_BY_LMLAUNCH = ("lmlaunch-cpu", "liblm_mpi.so")
ALWAYS = ("format_check", "layering_test", "mutations_apply", "e2e_docs_architecture")  # seconds, and they look at every file


def git(root, *words):
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def base_of(root, base=None):
    """The commit to compare with: `base`, else where this branch left origin/main, else HEAD."""
    found = git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}") if base else git(root, "merge-base", "HEAD", "origin/main")
    if base and not found:
        raise SystemExit(f"--changed: no commit is called {base}")
    return (found or git(root, "rev-parse", "HEAD") or "").strip()


def differing(root, base):
    """Paths that differ from the commit `base`, committed or not, new files too."""
    changed = git(root, "diff", "--name-only", "--no-renames", "-z", base) or ""
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    return sorted({path for path in (changed + new).split("\0") if path})


class Build:
    """What the build knows. Paths are relative to the repository."""

    def __init__(self, root, directory, ninja_text, deps_text):
        """`ninja_text`: build.ninja; `deps_text`: what `ninja -t deps` prints."""
        self.root, self.directory = Path(root), Path(directory)
        self.inputs, self.reads = {}, {}
        for line in ninja_text.replace("$\n", "").splitlines():
            if line.startswith("build "):
                head, _, tail = line[6:].replace("$:", "\1").replace("$ ", "\2").partition(":")
                inputs = [self.path(word) for word in tail.split()[1:] if not word.startswith("|")]
                for output in (word for word in head.split() if word != "|"):
                    self.inputs.setdefault(self.path(output), []).extend(inputs)
        read = None
        for line in deps_text.splitlines():
            if line.startswith(" "):
                read.add(self.path(line.strip()))
            elif line:
                read = self.reads.setdefault(self.path(line.partition(": #deps")[0]), set())
        for output, inputs in self.inputs.items():
            if output.endswith(".o") and inputs:
                self.reads.setdefault(output, set()).add(inputs[0])
        self.known = set().union(*self.reads.values(), *self.inputs.values())
        self.closures, self.files_of = {}, {}

    def path(self, word):
        word = word.replace("\1", ":").replace("\2", " ").replace("$$", "$")
        whole = os.path.normpath(self.directory / word)
        return os.path.relpath(whole, self.root) if whole.startswith(f"{self.root}/") else whole

    def closure(self, output):
        """Everything that `output` is made of."""
        if output not in self.closures:
            found, left = set(), [output]
            while left:
                if (one := left.pop()) not in found:
                    found.add(one)
                    left += self.inputs.get(one, [])
            self.closures[output] = found
        return self.closures[output]

    def files(self, output):
        """The same, and what the objects among it were compiled from."""
        if output not in self.files_of:
            closure = self.closure(output)
            self.files_of[output] = closure.union(*(self.reads[one] for one in closure if one in self.reads))
        return self.files_of[output]

    def header_beside(self, output):
        stem = os.path.splitext(self.inputs[output][0])[0]
        return next((stem + suffix for suffix in HEADERS if stem + suffix in self.known), None)

    def affected(self, program, file):
        """The program's own objects that can notice that `file` changed; None: all of them."""
        objects = [one for one in self.closure(program) if one in self.reads]
        own = {one for one in self.inputs[program] if one in self.reads and suites(self.root / self.inputs[one][0])}
        left, seen = [one for one in objects if file in self.reads[one]], set()
        if not left:
            return None  # a script or a text that was compiled in
        while left:
            if (one := left.pop()) in seen:
                continue
            seen.add(one)
            if one in own:
                continue
            header = self.header_beside(one)
            if header is None:
                return None
            left += [other for other in objects if header in self.reads[other]]
        return seen & own or None


def read_build(root, directory):
    command = [Path(sys.executable).with_name("ninja"), "-C", directory, "-t", "deps"]
    deps = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Build(root, directory, (Path(directory) / "build.ninja").read_text(), deps)


def read(path):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@functools.cache
def suites(source):
    return set(SUITE.findall(read(source)))


class Scripts:
    """The repository's files in Python, and who imports whom."""

    def __init__(self, root):
        self.root, self.by_stem, self.folders, self.closures = Path(root), {}, set(), {}
        for top in sorted(self.root.iterdir()):
            if top.is_dir() and not top.name.startswith(("build", ".")):
                for path in top.rglob("*.py"):
                    self.by_stem.setdefault(path.stem, set()).add(path.relative_to(self.root).as_posix())
                    self.folders.add(path.parent.name)

    def imported(self, path):
        for module, names, plain in IMPORT.findall(read(self.root / path)):
            for dotted in [module] if module else re.split(r"\s*,\s*", plain):
                parts = dotted.split(".")
                if parts[-1] in self.folders and parts[-1] not in self.by_stem:  # from FOLDER import a, b
                    parts += re.findall(r"\w+", names)
                for part in parts:
                    found = self.by_stem.get(part, set())
                    yield from {one for one in found if PurePosixPath(one).parent == PurePosixPath(path).parent} or found

    def closure(self, path):
        """`path` and what it imports, directly or not."""
        if path not in self.closures:
            found, left = set(), [path]
            while left:
                if (one := left.pop()) not in found:
                    found.add(one)
                    left += self.imported(one)
            self.closures[path] = found
        return self.closures[path]


class Entry:
    """One of `ctest --show-only=json-v1`, and what it is made of."""

    def __init__(self, described, scripts, build):
        self.name, self.command = described["name"], described.get("command", [])
        self.properties = {each["name"]: each["value"] for each in described.get("properties", [])}
        self.labels = set(self.properties.get("LABELS", []))
        root = scripts.root
        told = [*self.command, *(word.partition("=")[2] for word in self.properties.get("ENVIRONMENT", []))]
        paths = {os.path.relpath(word, root) if os.path.isabs(word) else word for word in told}
        in_python = {word for word in paths if word.endswith(".py") and (root / word).is_file()}
        self.files = set().union(*(scripts.closure(path) for path in in_python))
        if "tests/support/warm_pytest.py" in in_python:
            self.files |= {"tests/conftest.py", "tests/pytest.ini"}
        # What warm_pytest.py names is not what this entry looks at.
        self.words = set(WORD.findall(" ".join([*(read(root / path) for path in self.files - {"tests/support/warm_pytest.py"}), *told])))
        self.programs, self.program, self.sources = set(), None, set()
        if build is None:
            return
        made = {word for word in paths if word in build.inputs}
        if self.command and os.path.relpath(self.command[0], root) in made:
            self.program = os.path.relpath(self.command[0], root)
        self.programs |= made | {path for path in build.inputs if self.names(path)}
        self.sources |= {build.inputs[one][0] for program in made for one in build.inputs[program] if one in build.reads}
        # Sources that it is given, e.g. to compile them itself.
        self.files |= {word for word in paths if word in build.known and word not in build.inputs}
        self.files |= set().union(*(read for one, read in build.reads.items() if build.inputs.get(one, [None])[0] in self.files))

    def names(self, path):
        """Whether its scripts use the program or library `path` of the build."""
        folder, name = os.path.split(path)
        if not self.files or not re.search(r"(^|/)(bin|lib)$", folder):
            return False
        if re.search(r"(^|/)emulator/(bin|lib)$", folder):
            return "emulator" in self.words
        if re.search(r"(^|/)warm/bin$", folder):  # what stands in for its ranks
            return "lmlaunch" in self.words
        return name in self.words or (name in STARTED_BY_LMLAUNCH and "lmlaunch" in self.words)


class Selection:
    """`chosen`: {entry: suites that need not run, or None: all of it}; `notes`: what there is to say about it."""

    def __init__(self, root, described, build=None):
        self.root, self.build, self.scripts = Path(root), build, Scripts(root)
        self.entries = [Entry(each, self.scripts, build) for each in described]
        self.chosen, self.notes = {}, []
        self.reached = {}  # {entry of a program of ours: its objects that a change affects, or None: all}

    def select(self, files):
        for file in files:
            if EVERYTHING.search(file):
                self.everything(file)
            elif not self.named(file) | self.compiled(file):
                self.nobody(file)
        if files:
            self.chosen |= {entry.name: None for entry in self.entries if entry.name in ALWAYS}
        for entry in self.entries:
            if entry.name in self.reached and entry.name not in self.chosen:
                self.chosen[entry.name] = self.without(entry, self.reached[entry.name])
        return self.chosen

    def everything(self, file):
        self.notes.append(f"{file} may concern everything")
        self.chosen |= {entry.name: None for entry in self.entries}

    def nobody(self, file):
        """Of a file that no entry has or names: data beside a test, or in a folder that a test names."""
        path = PurePosixPath(file)
        if path.suffix in CODE:
            self.notes.append(f"{file}: nothing that was built depends on it")
            return
        is_beside = lambda one: PurePosixPath(one).parent == path.parent  # noqa: E731
        beside = {entry.name for entry in self.entries if any(map(is_beside, entry.files | entry.sources))}
        found = beside or {entry.name for entry in self.entries if entry.files and path.parent.name in entry.words}
        self.chosen |= {name: None for name in found}
        if not found:
            self.everything(file)

    def named(self, file):
        """Entries in Python that have it among their files, or that name it."""
        name = PurePosixPath(file).name
        found = {entry.name for entry in self.entries if file in entry.files or (entry.files and name in entry.words)}
        if PurePosixPath(file).suffix in PAGES:
            found |= {entry.name for entry in self.entries if "docs" in entry.name}
        self.chosen |= {one: None for one in found}
        return found

    def compiled(self, file):
        """Entries of programs, and entries that use programs, that depend on it."""
        found = set()
        if self.build is None:
            return found
        for entry in self.entries:
            if not any(file in self.build.files(program) for program in entry.programs):
                continue
            found.add(entry.name)
            if entry.program is None:
                self.chosen[entry.name] = None
                continue
            objects = self.build.affected(entry.program, file)
            before = self.reached.get(entry.name, set())
            self.reached[entry.name] = None if objects is None or before is None else before | objects
        return found

    def without(self, entry, objects):
        """The suites of the entry's program that none of `objects` has; None if all have to run."""
        if objects is None:
            return None
        of = lambda one: suites(self.root / self.build.inputs[one][0])  # noqa: E731
        kept = set().union(*map(of, objects))
        own = [one for one in self.build.inputs[entry.program] if one in self.build.reads]
        return set().union(*map(of, own)) - kept or None


def filtered(entry, leave_out):
    """(command, environment) of an entry without these suites, on top of the filter that it has."""
    without = ":".join(f"{suite}.*:*/{suite}.*:{suite}/*:*/{suite}/*" for suite in sorted(leave_out))
    join = lambda former: former + (":" if "-" in former else "-") + without  # noqa: E731
    command, environment = list(entry.command), list(entry.properties.get("ENVIRONMENT", []))
    for words, start in ((command, "--gtest_filter="), (environment, "GTEST_FILTER=")):
        for i, word in enumerate(words):
            if word.startswith(start):
                words[i] = start + join(word.removeprefix(start))
                return command, environment
    return command, [*environment, "GTEST_FILTER=" + join("")]
