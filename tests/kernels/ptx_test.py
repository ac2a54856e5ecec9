"""The .cu files whose bits are the CPU's keep them through nvcc: in their PTX every addition, product, quotient and root is
rounded to nearest by itself (.rn; one without it may be fused by ptxas), a fused multiply-add stands only where the source
writes one, and nothing is approximate or flushed to zero.

ptx_test.py COMPILE_COMMANDS FILE.cu ...: each is compiled to PTX by its own command line. Exit 77 without nvcc. Every file whose
kernels gpu_fixed_bits_test.cpp compares with the CPU's must be among them."""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

OPERATION = re.compile(r"^\s*(?:@!?%p\d+\s+)?((add|sub|mul|mad|fma|div|sqrt|rcp|rsqrt|ex2|lg2|sin|cos|tanh)\b[.\w]*\.(?:f16|f16x2|bf16|bf16x2|f32|f64))\b")
PLACE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"')
WRITTEN = re.compile(r"__fmaf?_rn\(|\bstd::fma\(")
HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "src" / "kernels"


def left_out(files):
    """The .cu files that must keep the CPU's bits and are not among `files`: those with a launcher that gpu_fixed_bits_test.cpp
    calls, and theirs of longer names (update.cu, update_coded.cu)."""
    called = set(re.findall(r"\bk\.(\w+)\(", (HERE / "gpu_fixed_bits_test.cpp").read_text()))
    sources = {path.stem: path.read_text() for path in KERNELS.glob("*.cu")}
    fixed = {stem for stem, text in sources.items() if called & set(re.findall(r"^void (\w+)\(", text, re.M))}
    wanted = {stem for stem in sources for group in fixed if stem == group or stem.startswith(group + "_")}
    assert {"dropout", "update", "update_coded"} <= wanted, wanted
    return sorted(wanted - {Path(file).stem for file in files})


def command_of(entry):
    """The file's own command, made to write PTX with line numbers."""
    words = shlex.split(entry["command"])
    out = []
    skip = False
    for word in words:
        if skip or word == "-c" or word.startswith("--generate-code") or word.startswith("-gencode"):
            skip = False
        elif word == "-o":
            skip = True
        else:
            out.append(word)
    architecture = re.search(r"arch=(compute_\d+)", entry["command"])
    return [*out, "-arch=" + (architecture.group(1) if architecture else "compute_90"), "-ptx", "-lineinfo"]


def ptx_of(command):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.ptx"
        subprocess.run([*command, "-o", str(path)], check=True)
        return path.read_text()


@cache
def source_line(path, line):
    return Path(path).read_text().splitlines()[line - 1]


def mistakes(ptx):
    """(what was found, how many operations were looked at)"""
    files = {m.group(1): m.group(2) for m in map(FILE.match, ptx.splitlines()) if m}
    found = []
    place = None
    looked_at = 0
    for text in ptx.splitlines():
        if at := PLACE.match(text):
            if at.group(2) != "0":
                place = at.groups()
            continue
        where = f"{files[place[0]]}:{place[1]}" if place else "?"
        if re.search(r"\.(approx|ftz)\b", text):
            found.append(f"{where}: {text.strip()}")
        if not (operation := OPERATION.match(text)):
            continue
        looked_at += 1
        name = operation.group(1)
        if ".rn." not in name:
            found.append(f"{where}: {name} is not rounded by itself")
        written = place is not None and WRITTEN.search(source_line(files[place[0]], int(place[1])))
        if operation.group(2) in ("fma", "mad") and not written:
            found.append(f"{where}: {name} where the source writes none")
    return found, looked_at


def main():
    commands, files = Path(sys.argv[1]), sys.argv[2:]
    if missing := left_out(files):
        print("compiled with contraction, though gpu_fixed_bits_test.cpp compares bits:", *missing)
        sys.exit(1)
    entries = {e["file"]: e for e in json.loads(commands.read_text()) if " -x cu " in e["command"]}
    if not entries:
        print("skipped: no nvcc, so no .cu file is compiled for a GPU here")
        sys.exit(77)
    failed = False
    for path in files:
        found, looked_at = mistakes(ptx_of(command_of(entries[path])))
        print(f"{Path(path).name}: {looked_at} operations, {len(found)} mistakes")
        for line in sorted(set(found))[:10]:
            print("   ", line)
        failed |= bool(found) or looked_at == 0
    # What this test is for must be found: AdamW as nvcc makes it when nobody forbids contraction.
    path = next(p for p in files if p.endswith("update.cu"))
    command = [w for w in command_of(entries[path]) if w != "-fmad=false"]
    found, _ = mistakes(ptx_of(command))
    contracted = [line for line in found if "where the source writes none" in line]
    print(f"{Path(path).name} without -fmad=false: {len(contracted)} contractions")
    sys.exit(1 if failed or not contracted else 0)


if __name__ == "__main__":
    main()
