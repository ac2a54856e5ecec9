"""What gpu_checks.sh runs: the program itself, every GPU test, parity with transformers, then benchmarks, then
transformers and peft beside ours; one table at the end. Tests run side by side; what measures, a time or the memory that is free on the card, runs alone.

  python checks.py [--bin DIR] [--seconds N] [--jobs N] [--list] [NAME|BLOCK[=SECONDS]...]
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
LEAST_S = 5  # with less time left an item is not begun
SKIPPED = 77  # the exit status of a test executable that skipped a test (tests/support/test_main.cpp)
EMULATOR_FACTOR = 10  # the emulator (tests/emulator) is slower than any card
MAX_JOBS = 8  # so many contexts, and what is in them, fit on a card


@dataclass
class Item:
    """`words`: the command; a program's name is looked up in the bin directory, `name` is what the table says."""

    name: str
    words: list
    budget_s: int
    emulator_words: list = None  # on the emulator, which shows that a benchmark works and no more
    together: bool = False  # may run beside others
    shards: int = 1  # processes that share a GoogleTest's tests where several run at once
    shard: int = 0
    block: str = ""  # items that answer one question, which may be asked for together

    @property
    def environment(self):
        return {"GTEST_TOTAL_SHARDS": str(self.shards), "GTEST_SHARD_INDEX": str(self.shard)} if self.shards > 1 else {}

    @property
    def title(self):
        return self.name if self.shards == 1 else f"{self.name} {self.shard + 1}/{self.shards}"


def items():
    """In order: what would make all the rest worthless if it failed comes first, then what measures free memory, then tests,
    longest first, then benchmarks, then others' programs beside ours."""
    python = [sys.executable, "-B"]
    test = lambda name, budget, shards=1: Item(name, [name], budget, together=True, shards=shards)
    return [
        # On the emulator two pairs, which have each method and each type: e2e_emulator has the rest.
        Item("smoke", [*python, str(HERE / "smoke.py"), "BIN"], 60, [*python, str(HERE / "smoke.py"), "BIN", "full-fp32", "lora-bf16"],
             block="correct"),
        Item("model_gpu_test", ["model_gpu_test"], 100, block="correct"),
        # Seconds that these took on an H200 with ten at once: above 110, 110, 104, 97, 78, 76, 76, 62.
        # Disks and drawn runs take minutes, and differ from the rest in what the host does.
        Item("offload_run_gpu_test but disks, drawn runs",
             ["offload_run_gpu_test", "--gtest_filter=-*OnDisk*:*Drawn*"], 200,
             ["offload_run_gpu_test", "--gtest_filter=*StateIsRead*"], together=True, shards=2),
        test("gpu_ranks_test", 200, shards=2),
        test("in_backward_gpu_test", 200, shards=2),
        test("step_save_gpu_test", 200, shards=2),
        test("run_ahead_gpu_test", 60),
        test("gpu_kernels_test", 200),
        test("pairwise_gpu_test", 200),
        test("gpu_ranks_save_test", 200),
        test("nccl_group_test", 200),
        Item("parity", [*python, str(HERE / "parity.py"), "BIN"], 130,
             [*python, str(HERE / "parity.py"), "BIN", "mistral_window_shorter_than_documents"], together=True),
        Item("resume", [*python, str(HERE / "resume.py"), "BIN"], 120, [*python, str(HERE / "resume.py"), "BIN", "full"], together=True),
        test("store_gpu_test", 60),
        test("arena_gpu_test", 60),
        test("offload_gpu_test", 60),
        test("library_error_gpu_test", 60),
        test("gemm_gpu_test", 60),
        test("state_gpu_test", 60),
        test("load_gpu_test", 60),
        Item("bench_copies", ["bench_copies"], 15, block="host"),
        Item("bench_gpu_attention", ["bench_gpu_attention"], 45, ["bench_gpu_attention", "--quick"], block="attention"),
        Item("bench_gpu_gemm", ["bench_gpu_gemm"], 50, ["bench_gpu_gemm", "--quick"], block="products"),
        Item("slices of 8B", ["bench_gpu_steps", "8b-slice*"], 45, ["bench_gpu_steps", "tiny", "tiny-off-device"], block="slices"),
        Item("slices of 1B", ["bench_gpu_steps", "1b-slice*"], 45, ["bench_gpu_steps", "tiny"], block="slices"),
        Item("slices of 7B", ["bench_gpu_steps", "7b-slice*"], 45, ["bench_gpu_steps", "tiny-lora"], block="slices"),
        Item("bench_gpu_kernels", ["bench_gpu_kernels"], 20, ["bench_gpu_kernels", "--quick"], block="kernels"),
        # Whole models: more than eight minutes with the tests, so by name or as a block.
        *(Item(f"row {name}", ["bench_gpu_steps", "--steps", "2", name], limit, ["bench_gpu_steps", "--steps", "1", tiny], block="rows")
          for name, limit, tiny in (("8b-lora", 30, "tiny-lora"), ("8b-lora-4k", 30, "tiny-lora"), ("8b-lora-32k", 45, "tiny-lora"),
                                    ("8b", 45, "tiny"), ("7b", 60, "tiny"), ("8b-qlora", 45, "tiny-lora"))),
        Item("peers", [*python, str(HERE / "peers.py"), "BIN"], 150, [*python, str(HERE / "peers.py"), "BIN", "--tiny"]),
    ]


@dataclass
class Row:
    name: str
    result: str  # "passed", "failed(1)", "2 tests skipped", "NOT RUN: why"
    seconds: float = 0
    figure: str = ""

    @property
    def kind(self):
        return "not run" if self.result.startswith("NOT RUN") else "passed" if self.result == "passed" else "failed"


def listed(bin_directory, name):
    """Names in the lists that the build wrote: beside the bundle's bin, above build/emulator/bin."""
    for directory in (bin_directory.parent, bin_directory.parent.parent):
        if (directory / name).exists():
            return (directory / name).read_text().split()
    return []


def all_items(bin_directory):
    """The items above, and what the build made besides: nothing is left out because nobody entered it here."""
    known = items()
    used = {word for item in known for word in item.words}
    new = lambda name, **more: Item(name, [name], 60, **more)
    after_tests = max(index for index, item in enumerate(known) if item.together) + 1
    tests = [new(name, together=True) for name in listed(bin_directory, "gpu_tests.txt") if name not in used]
    benchmarks = [new(name) for name in listed(bin_directory, "gpu_benchmarks.txt") if name not in used]
    return known[:after_tests] + tests + known[after_tests:-1] + benchmarks + known[-1:]  # the peers come last


def asked_for(words, known):
    """({name of an item: its limit in seconds, or None for its own}, words that name nothing). A block's limit is for all of it: each
    item has the same share."""
    limits, unknown = {}, set()
    for word in words:
        name, _, seconds = word.rpartition("=") if re.search(r"=\d+$", word) else (word, "", "")
        found = [item.name for item in known if name in (item.name, item.block)]
        if not found:
            unknown.add(name)
        for item in found:
            limits[item] = int(seconds) // len(found) if seconds else None
    return limits, unknown


def resolve(item, bin_directory, emulator):
    """The command line; None if its program is not there."""
    words = [str(bin_directory) if word == "BIN" else word for word in (emulator and item.emulator_words or item.words)]
    if os.sep in words[0]:
        return words
    program = next((p for p in (bin_directory / words[0], bin_directory / ("emulator_" + words[0])) if p.exists()), None)
    return program and [str(program), *words[1:]]


running = set()  # processes that lead a group, which ends with them


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_all(number, _frame):
    """Who stops this script stops everything."""
    for process in list(running):
        kill_group(process)
    os._exit(128 + number)


def stream(command, limit_s, environment, show):
    """Runs it; (status or None at the limit, lines). `show`: prints them as they come. Whatever it started ends with it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True, env={**os.environ, **environment})
    running.add(process)
    lines = []

    def read():
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if show:
                print(line, end="", flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
        kill_group(process)
        process.wait()
    finally:
        running.discard(process)
    reader.join(2)  # who left the group may still hold the pipe
    return status, lines


def judge(status, lines, allowed):
    """(result, figure) of a program's end and its output."""
    figure = next((line.removeprefix("figure: ") for line in reversed(lines) if line.startswith("figure: ")), "")
    tests = [int(m[1]) for m in (re.match(r"\[  PASSED  \] (\d+) tests?", line) for line in lines) if m]
    skipped = sum(bool(re.match(r"\[  SKIPPED \] .* ms\)$", line)) for line in lines)
    figure = figure or (f"{tests[-1]} tests passed" if tests else "")
    if status is None:
        return f"NOT RUN to its end: stopped after {allowed:.0f} s", figure
    if status not in (0, SKIPPED):
        return f"failed({status})", figure
    # A test skips where it finds no device, or too small a one, and a benchmark then ends well without a figure.
    if skipped or status == SKIPPED:
        return f"skipped tests: {skipped}", figure
    return "passed" if figure else "failed(nothing measured or tested)", figure


def run_item(item, bin_directory, emulator, deadline, alone=True):
    left = deadline - time.monotonic()
    if left < LEAST_S:
        return Row(item.title, "NOT RUN: no time left")
    command = resolve(item, bin_directory, emulator)
    if command is None:
        return Row(item.title, f"NOT RUN: no {item.words[0]} in {bin_directory}")
    allowed, begin = min(left, item.budget_s * (EMULATOR_FACTOR if emulator else 1)), time.monotonic()
    # Threads that spin while they wait take the cores from the programs beside them.
    environment = item.environment | ({} if alone else {"GOMP_SPINCOUNT": "0"})
    print(f"== {item.title}" + ("" if alone else " begins") + "\n", end="", flush=True)
    status, lines = stream(command, allowed, environment, show=alone)
    seconds = time.monotonic() - begin
    result, figure = judge(status, lines, allowed)
    said = "" if alone else "".join(f"{line}\n" for line in [f"== {item.title}", *lines])
    print(f"{said}== {item.title}: {result}, {seconds:.0f} s\n", end="", flush=True)  # in one piece
    return Row(item.title, result, seconds, figure)


def run_items(wanted, bin_directory, emulator, deadline, jobs):
    """Rows in the order of the items. Those that may run together do, the first ones first; the others wait for them."""
    rows, at = [], 0
    while at < len(wanted):
        if jobs == 1 or not wanted[at].together:
            rows.append(run_item(wanted[at], bin_directory, emulator, deadline))
            at += 1
            continue
        end = next((i for i in range(at, len(wanted)) if not wanted[i].together), len(wanted))
        batch = [replace(item, shard=shard) for item in wanted[at:end] for shard in range(item.shards)]
        with ThreadPoolExecutor(jobs) as pool:
            rows += pool.map(lambda item: run_item(item, bin_directory, emulator, deadline, alone=False), batch)
        at = end
    return rows


def print_table(rows):
    width, wide = max(len(row.name) for row in rows), max(len(row.result) for row in rows)
    print(f"\n{'name':{width}} | {'result':{wide}} | seconds | figure")
    for row in rows:
        print(f"{row.name:{width}} | {row.result:{wide}} | {row.seconds:7.1f} | {row.figure}".rstrip())


def print_summary(rows, emulator):
    of = lambda kind: [row.name for row in rows if row.kind == kind]
    failed, missing = of("failed"), of("not run")
    print(f"gpu_checks: {len(of('passed'))} passed, {len(failed)} failed: {', '.join(failed) or 'none'}, "
          f"{len(missing)} not run: {', '.join(missing) or 'none'}")
    print("gpu_checks: no run here shows several GPUs (ranks share this one), models at their full depth or real weights, long runs, a full disk as home "
          "of state, or other cards and drivers than this one" + ("; and nothing here ran on a GPU" if emulator else ""))
    return 0 if not failed and not missing else 1


def print_card(emulator):
    if emulator:
        print("gpu_checks: on the emulator: no GPU is here")
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20)
        print("gpu_checks: card, driver, memory, clock, power: " + (out.stdout or out.stderr).strip().replace("\n", "; "))
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"gpu_checks: nvidia-smi failed: {error}")


def main():
    parser = argparse.ArgumentParser(prog="gpu_checks.sh")
    parser.add_argument("--bin", type=Path, default=HERE.parent / "bin")
    parser.add_argument("--seconds", type=float, default=475)  # with the script's own start, 8 minutes
    parser.add_argument("--jobs", type=int, help="tests at once; otherwise one for two cores, at most 8, and on the emulator 1")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME|BLOCK[=SECONDS]")
    options = parser.parse_args()
    deadline, bin_directory = time.monotonic() + options.seconds, options.bin.resolve()
    known = all_items(bin_directory)
    if options.list:
        print("\n".join(item.name + (f" ({item.block})" if item.block else "") for item in known))
        return 0
    limits, unknown = asked_for(options.names, known)
    if unknown:
        print(f"gpu_checks: nothing here is called {', '.join(sorted(unknown))}; --list names what there is", file=sys.stderr)
        return 2
    emulator = any(bin_directory.glob("emulator_*"))
    jobs = max(1, options.jobs or (1 if emulator else min(MAX_JOBS, (os.cpu_count() or 1) // 2)))
    if jobs == 1:
        known = [replace(item, shards=1) for item in known]
    print_card(emulator)
    # Rows of whole models are run where they are asked for.
    wanted = [replace(item, budget_s=limits[item.name] or item.budget_s) for item in known if item.name in limits] if options.names else [
        item for item in known if item.block != "rows"]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_all)
    rows = run_items(wanted, bin_directory, emulator, deadline, jobs)
    names = {item.name for item in wanted}
    rows += [Row(item.name, "NOT RUN: not asked for") for item in known if item.name not in names]
    print_table(rows)
    return print_summary([row for row in rows if row.result != "NOT RUN: not asked for"], emulator)


if __name__ == "__main__":
    sys.exit(main())
