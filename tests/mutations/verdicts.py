"""The verdicts of earlier runs, in the user's cache, and when they still hold.

A verdict holds while its key is the same: a hash of the mistake (file, old, new, test), of the content of the mutated file, and of what
the test depends on:
  - for a test program and for the programs that a test in Python starts: every source and header that goes into them, by the build's own
    lists (`ninja -t inputs`, `ninja -t deps`), and how each object is compiled (compile_commands.json, flags and Python environment);
  - for a test in Python: its file, conftest.py, and what these import or mention by name, and so on (mistakes.python_files);
  - for fuzz targets and ptx_test: all of src and the folder of the test.
It does not cover: the machine and its kernel, compiler and system libraries (their headers neither), how programs are linked, files that a
test reads at run time without naming them, and the environment. Who changes these plants all of them again (--all)."""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from mistakes import ROOT, needs, tracked

KEPT = 4  # verdicts of one mistake: work trees of the same user have different sources


def directory():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmlaunch" / "mutations"


class Dependencies:
    """Of tests, by what BUILD's files say of the sources at `root`. A test whose programs were never built has none: what they include
    is not known."""

    def __init__(self, root, build):
        self.root, self.build = root, build
        cache = (build / "CMakeCache.txt").read_text()
        self.ninja = re.search(r"^CMAKE_MAKE_PROGRAM:\w+=(.*)$", cache, re.M)[1]
        self.digests, self.of_targets, self.headers = {}, {}, None
        self.commands = {}
        for entry in json.loads((build / "compile_commands.json").read_text()):
            command = entry["command"].replace(str(build), "<build>").replace(str(root), "<root>")
            self.commands[entry["output"]] = command

    def ask(self, *words):
        done = subprocess.run([self.ninja, "-C", str(self.build), *words], capture_output=True, text=True)
        return [line for line in done.stdout.splitlines() if not line.startswith("ninja: Entering")] if done.returncode == 0 else None

    def digest(self, name):
        """Of a file below root."""
        if name not in self.digests:
            path = self.root / name
            self.digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "none"
        return self.digests[name]

    def inside(self, path):
        """Its name below root; "" if it is elsewhere or was built."""
        full = os.path.normpath(os.path.join(self.build, path))
        if f"{full}/".startswith(f"{self.build}/") or not full.startswith(f"{self.root}/"):
            return ""
        return full[len(str(self.root)) + 1:]

    def read_headers(self):
        """Of each object that was built: files below root that it includes. (A command of it as the table has them: a line that is not
        indented begins an object.)"""
        self.headers, found = {}, None
        for line in self.ask("-t", "deps") or []:
            if not line.startswith(" "):
                found = self.headers.setdefault(line.partition(": #deps")[0], set()) if ": #deps" in line else None
            elif found is not None and (name := self.inside(line.strip())):
                found.add(name)

    def of_target(self, target):
        """Sorted lines; None where something was never built."""
        if target not in self.of_targets:
            self.of_targets[target] = self.look_up(target)
        return self.of_targets[target]

    def look_up(self, target):
        if target == "build.ninja":
            files = (name for group in tracked(ROOT).values() for name in group if name.endswith((".cmake", "CMakeLists.txt")))
            return sorted(f"{name} {self.digest(name)}" for name in files)
        if self.headers is None:
            self.read_headers()
        inputs = self.ask("-t", "inputs", target)
        if inputs is None:
            return [] if target == "lm_mpi" else None  # there is no MPI here
        names, commands = set(), set()
        for path in (line.strip().strip("'") for line in inputs):
            if path.endswith(".o"):
                if path not in self.headers:
                    return None
                names |= self.headers[path]
                commands.add(self.commands.get(path, ""))
            elif name := self.inside(path):
                names.add(name)
        return sorted(f"{name} {self.digest(name)}" for name in names) + sorted(commands)

    def of_test(self, test):
        """A hash; None where it is not known."""
        targets, files, folders = needs(test)
        parts = [test]
        for target in targets:
            lines = self.of_target(target)
            if lines is None:
                return None
            parts += lines
        files = set(files) | {name for group in tracked(ROOT).values() for name in group if name.startswith(folders)} if folders else files
        parts += sorted(f"{name} {self.digest(name)}" for name in files)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def key(self, mistake):
        of_test = self.of_test(mistake.test)
        parts = [mistake.file, mistake.old, mistake.new, self.digest(mistake.file), of_test]
        return of_test and hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class Kept:
    """A file per mistake or test, replaced as a whole: several runs may write at once."""

    def __init__(self, place=None):
        self.place = place or directory()

    def path(self, name):
        return self.place / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}.json"

    def read(self, name):
        """{key: what was found}, oldest first."""
        try:
            return json.loads(self.path(name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def get(self, name, key):
        return self.read(name).get(key) if key else None

    def put(self, name, key, found):
        if key is None:
            return
        rows = {k: row for k, row in self.read(name).items() if k != key} | {key: found}
        self.place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.place, delete=False) as file:
            json.dump(dict(list(rows.items())[-KEPT:]), file)
        os.replace(file.name, self.path(name))


def name_of(mistake):
    return f"{mistake.list}--{mistake.name}"
