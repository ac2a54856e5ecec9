"""Keeps tests from being judged by a clock: finds each place in tests/ that reads one and fails on those that are not in ALLOWED.

A busy or frozen machine makes everything take longer, and code is not wrong for that. A test has a clock that it moves itself,
counts (calls, requests, bytes), or the order of events; durations are judged in benchmarks/. A limit that only ends a hang needs no
clock either: count the looks (support/until.h, mpi.until), or leave it to the suite, which ends every test some day.

Run: python tests/clock_test.py [ROOT]. Prints one line per place and exits 1 if there is any.
"""

import re
import sys
from pathlib import Path

HANG = "ends a hang, and nothing else is judged by it"
FIGURE = "a figure that is printed or reported, and not judged"
RANDOM = "when a fault strikes: uniform over how long a start takes"
EMULATOR = "the clock of an emulated GPU or disk, or an interposed one, is itself what is asked"
CHECKS = "on GPUs that are lent for minutes: what is over its budget is named as not run"
STAMP = "a time of day that is given to the program or found in a file, not a duration"
MOVED = "a clock that the test moves"
STUCK = "for how long a lock has been waited for tells a held thread from one that keeps it; another place is tried then"
LEAST = "a lower bound: a slow machine only makes it longer"
BETWEEN = "a time that the program has measured lies within the one that has passed around it"

# (file, function, test or class): how many lines read a clock, and why they may. "*": the whole file, any number of them.
ALLOWED = {
    ("tests/data/options_test.py", "test_progress_is_told_as_time_passes"): (1, MOVED),
    ("tests/e2e/stuck.py", "*"): (0, STUCK),
    ("tests/e2e/test_faults.py", "test_bytes_that_change_on_the_disk_are_exit_22"): (2, HANG),
    ("tests/e2e/test_mpi.py", "test_who_is_not_the_first_leaves_an_error_to_it_and_gives_it_time"): (2, LEAST),
    ("tests/e2e/test_purposes.py", "test_rates_are_measured_once_a_week"): (2, STAMP),
    ("tests/e2e/test_resume.py", "test_a_stop_file_and_a_time_limit_save_and_exit_with_75"): (1, STAMP),
    ("tests/faults/clock_jumps.cpp", "*"): (0, EMULATOR),
    ("tests/faults/full_disk_saves.py", "Run"): (2, HANG),
    ("tests/faults/full_disk_saves.py", "filled_between"): (2, HANG),
    ("tests/faults/full_disk_saves.py", "try_scenario"): (2, FIGURE),
    ("tests/faults/read_only_saves.py", "mount_anew"): (2, HANG),
    ("tests/faults/read_only_saves.py", "remount"): (2, HANG),
    ("tests/faults/read_only_saves.py", "under_a_save"): (2, HANG),
    ("tests/faults/rows.h", "Row"): (2, FIGURE),
    ("tests/faults/rows.py", "Row"): (2, FIGURE),
    ("tests/faults/runs.py", "Report"): (2, FIGURE),
    ("tests/faults/runs.py", "Undisturbed"): (3, RANDOM),
    ("tests/faults/test_clock.py", "test_a_clock_that_jumps_changes_nothing"): (2, BETWEEN),
    ("tests/faults/test_clock.py", "test_the_clock_of_this_test_jumps"): (2, BETWEEN),
    ("tests/faults/test_kill.py", "killed_once"): (2, RANDOM),
    ("tests/faults/test_signals.py", "signalled_once"): (4, RANDOM),
    ("tests/fuzz/fuzz.py", "*"): (0, FIGURE),
    ("tests/gpu/checks.py", "*"): (0, CHECKS),
    ("tests/gpu/peers.py", "*"): (0, CHECKS),
    ("tests/gpu/resume.py", "*"): (0, CHECKS),
    ("tests/mutations/mutations.py", "*"): (0, FIGURE),
    ("tests/mutations/planting.py", "*"): (0, HANG),
    ("tests/offload/copy_probe_test.cpp", "CopyProbe.MeasuresEachWayAndBothForTheTimeItWasGiven"): (2, LEAST),
    ("tests/offload/io_queue_test.cpp", "Queue.CountsTheTimeInWhichSomethingIsUnderWayOnce"): (2, BETWEEN),
    ("tests/support/run_tests.py", "*"): (0, FIGURE),
    ("tests/support/sim_disk.h", "*"): (0, EMULATOR),
    ("tests/emulator/nccl.cpp", "*"): (0, EMULATOR),
    ("tests/emulator/streams.cpp", "*"): (0, EMULATOR),
}

# Names that mean a clock, wherever they stand.
CLOCKS = {
    "cpp": re.compile(r"\b(?:steady|system|high_resolution|utc|tai|file)_clock\b|\bstd::(?:clock|time)\b|\bmonotonic_seconds\b"
                      r"|\b(?:clock_gettime|gettimeofday|getrusage|timespec_get|omp_get_wtime|__rdtsc|elapsed_time|ftime|times)\s*\("
                      r"|(?<![\w.>])(?:clock|time)\s*\(\s*(?:NULL|nullptr|0)?\s*\)|\bnow_(?:ns|us|ms)\b"),
    "py": re.compile(r"\b(?:monotonic|perf_counter|process_time|thread_time|clock_gettime)(?:_ns)?\b|\btime\.time(?:_ns)?\b|\btimeit\b"
                     r"|\bfrom time import\b.*\b(?:time|time_ns|\*)|\bos\.times\b|\bgetrusage\b|\b(?:now|utcnow|today)\(\)"),
    "sh": re.compile(r"\bdate\b\s+\S*%[sN]|\$\{?(?:SECONDS|EPOCHREALTIME|EPOCHSECONDS)\b|/proc/uptime"),
}
LANGUAGES = {".cpp": "cpp", ".cu": "cpp", ".cuh": "cpp", ".h": "cpp", ".py": "py", ".sh": "sh"}


def without_comments(text, language):
    """The same lines without comments. Strings stay: they may be programs."""
    if language == "cpp":
        token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
        return token.sub(lambda match: match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0]), text)
    return re.sub(r"(?m)(^|\s)#.*", r"\1", text)


def name_of(line, language):
    """What a line without indentation begins: a function, a test or a class; None if nothing."""
    if language != "cpp":
        found = re.match(r"(?:async\s+)?(?:def|class)\s+(\w+)|(\w+)\s*\(\)\s*\{", line)
        return found and (found[1] or found[2])
    if found := re.match(r"TEST(?:_[FP])?\((\w+),\s*(\w+)\)", line):
        return f"{found[1]}.{found[2]}"
    if found := re.match(r"(?:class|struct)\s+(\w+)", line):
        return found[1]
    found = re.match(r"(?!(?:namespace|using|return|typedef)\b)[A-Za-z_][^=;]*?([\w:~]+)\(", line)
    return found and found[1]


def places(text, language):
    """(line, where, code) of each line that reads a clock."""
    where = ""
    for number, line in enumerate(without_comments(text, language).splitlines(), 1):
        if line[:1].strip():
            where = name_of(line, language) or where
        if CLOCKS[language].search(line):
            yield number, where, line.strip()


def breaches(texts, allowed):
    """One line per place of {path: text} that is not allowed, and per entry of the list that allows what is not there."""
    found = {}
    for path, text in texts.items():
        for number, where, line in places(text, LANGUAGES[Path(path).suffix]):
            key = (path, "*") if (path, "*") in allowed else (path, where)
            found.setdefault(key, []).append((number, line))
    for (path, where), lines in sorted(found.items()):
        if where == "*" or len(lines) == allowed.get((path, where), (0, ""))[0]:
            continue
        for number, line in lines:
            yield f"{path}:{number}: reads a clock: {line}"
        if (path, where) in allowed:
            yield f"{path}: {where} may read a clock in {allowed[path, where][0]} lines, and does in {len(lines)}"
    for path, where in sorted(set(allowed) - set(found)):
        yield f"{path}: {where or 'outside of functions'} reads no clock: strike it from the list of tests/clock_test.py"


SNIPPETS = [
    ("cpp", "TEST(A, B) {\n  const auto start = std::chrono::steady_clock::now();\n}\n", [(2, "A.B")]),
    ("cpp", "TEST_F(Long, Name) {\n  EXPECT_LT(monotonic_seconds() - start, 2);\n}\n", [(2, "Long.Name")]),
    ("cpp", "class Row {\n  Row() : start_(lm::monotonic_seconds()) {}\n};\n", [(2, "Row")]),
    ("cpp", "double processor_seconds(const Body& body) {\n  return std::clock();\n}\n", [(2, "processor_seconds")]),
    ("cpp", "int f() {\n  return time(nullptr) + clock();\n}\n", [(2, "f")]),
    ("cpp", "void f() {\n  // steady_clock\n  /* monotonic_seconds() */\n}\n", []),
    ("cpp", "void f() {\n  clock.move(ms); runtime(); run.time(0); work_a_second();\n}\n", []),
    ("cpp", "using Clock = std::chrono::steady_clock;\n", [(1, "")]),
    ("py", "def test_a():\n    begin = time.monotonic()\n    assert time.monotonic() - begin < 5\n", [(2, "test_a"), (3, "test_a")]),
    ("py", "class Stuck:\n    def hold(self):\n        self.since = time.perf_counter_ns()\n", [(3, "Stuck")]),
    ("py", "from time import monotonic, sleep\n", [(1, "")]),
    ("py", "import os\nbefore = os.times()\n", [(2, "")]),
    ("py", "def f():\n    program = 'import time; time.time()'\n", [(2, "f")]),
    ("py", "def f():\n    time.sleep(1)  # not time.monotonic()\n    run(timeout=60)\n", []),
    ("sh", "begin=$(date +%s)\nf() {\n  echo $SECONDS\n}\n", [(1, ""), (3, "f")]),
]


def self_test():
    for language, text, wanted in SNIPPETS:
        assert [place[:2] for place in places(text, language)] == wanted, (text, list(places(text, language)))
    reads = {"tests/a.py": "def f():\n    time.time()\n"}
    assert len(list(breaches(reads, {}))) == 1
    assert not list(breaches(reads, {("tests/a.py", "f"): (1, "")})) and not list(breaches(reads, {("tests/a.py", "*"): (0, "")}))
    assert len(list(breaches(reads, {("tests/a.py", "f"): (2, "")}))) == 2, "one reading fewer than the list has"
    assert len(list(breaches(reads, {("tests/a.py", "g"): (1, "")}))) == 2, "another function, and an entry too many"
    assert len(list(breaches({}, {("tests/a.py", "*"): (0, "")}))) == 1, "an entry for nothing"


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    self_test()
    files = sorted(file for file in (root / "tests").rglob("*") if file.suffix in LANGUAGES and file.name != Path(__file__).name)
    texts = {file.relative_to(root).as_posix(): file.read_text() for file in files}
    found = list(breaches(texts, ALLOWED))
    print("\n".join([*found, f"{len(texts)} files, {len(found)} breaches: no test is judged by a clock"]))
    return 1 if found or not texts else 0


if __name__ == "__main__":
    sys.exit(main())
