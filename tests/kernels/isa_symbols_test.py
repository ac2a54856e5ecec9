"""Objects that are compiled for more than the least processor define no weak code. Of a function that several objects have as a
weak symbol (an inline one that was not inlined, a template of a header) the linker keeps one copy, whichever comes first: it would
be the program's, and end with SIGILL on a processor that lacks the instructions. (Weak data, `V` and `u`, are tables that have the
same bytes everywhere.)"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

BUILD = Path(os.environ["LM_BIN"]).parent
MORE = re.compile(r"-m(avx|fma|f16c|amx|sse4|arch=|cpu=|bmi)")
TEXT = "inline __attribute__((noipa)) int twice(int x) { return 2 * x; }\nint four() { return twice(2); }\n"


def objects():
    """Of the product; the emulator's kernels are a test's own program."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        words = entry.get("arguments") or shlex.split(entry["command"])
        place = Path(entry["directory"]) / words[words.index("-o") + 1]
        of_test = place.relative_to(BUILD).parts[0] == "tests"
        if any(MORE.match(word) for word in words) and not of_test and place.exists():
            yield place


def weak_code(paths):
    """["object: symbol"]"""
    done = subprocess.run(["nm", "-C", "-A", *map(str, paths)], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if re.search(r":[0-9a-f]+ W ", line)]


def test_objects_for_some_processors_define_no_weak_code():
    paths = list(objects())
    names = {path.name for path in paths}
    assert {"attention_avx512.cpp.o", "gemm_cpu.cpp.o", "update_cpu.cpp.o"} <= names, names
    assert weak_code(paths) == []


def test_an_inline_function_that_is_left_over_is_seen(tmp_path):
    source, out = tmp_path / "a.cpp", tmp_path / "a.o"
    source.write_text(TEXT)
    done = subprocess.run(["c++", "-O3", "-mavx2", "-c", str(source), "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = weak_code([out])
    assert len(found) == 1 and "twice(int)" in found[0]
