"""What ctest's last run says of each entry: why it failed, and why a part of it was skipped, a line each. After hundreds of lines
of output, and of a run elsewhere perhaps only the end is kept."""

import re


def outputs(logs):
    """{entry: its output} of ctest's last run, which has left its logs in `logs`."""
    log = logs / "LastTest.log"
    entries = re.split(r"^\d+/\d+ Testing: (\S+)\n", log.read_text(errors="replace"), flags=re.M)[1:] if log.exists() else []
    return {name: re.sub(r"\A.*?^Output:\n-+\n|<end of output>.*", "", entry, flags=re.S | re.M)
            for name, entry in zip(entries[::2], entries[1::2])}


def in_a_line(text, most=400):
    return re.sub(r"\s+", " ", text).strip()[:most]


def last_line(output):
    return output.strip().rpartition("\n")[2]


def reason(output):
    """The first line of a test's output that says why it failed, of GoogleTest, pytest or a program that ended; "" if none does."""
    lines = [line.strip() for line in output.splitlines()]
    for i, line in enumerate(lines):
        if re.search(r": Failure$", line):
            place = re.sub(r"^.*/", "", line).removesuffix(": Failure")
            return f"{place} {' '.join(lines[i + 1:i + 6])}".split("Google Test trace")[0]
        if line.startswith(">  "):  # pytest's line that failed
            return line[1:].strip()
        if re.match(r"emulator: (?!note)|terminate called|C\+\+ exception|\[  FAILED  \]|\w+\.(cu|py):|E  ", line) or "error" in line:
            return line
    return ""


def why_failed(output):
    return in_a_line(reason(output) or last_line(output)) or "no output"  # what crashed says where it was


def why_skipped(output):
    """Each reason once, with the number of tests that were skipped for it; of another program its last line."""
    counts = {}
    for number, why in re.findall(r"^SKIPPED \[(\d+)\] \S+?(?::\d+)?: (.*)$", output, re.M):  # pytest -rs
        counts[why] = counts.get(why, 0) + int(number)
    # GoogleTest: FILE:LINE: Skipped, what was streamed, and a blank line or what it says next, in brackets.
    for why in re.findall(r"^\S+:\d+: Skipped\n(.*?)\n(?:\n|\[)", output, re.M | re.S):
        counts[in_a_line(why)] = counts.get(in_a_line(why), 0) + 1
    if not counts:
        return in_a_line(last_line(output)) or "no output"
    return in_a_line("; ".join(f"{number} of its tests: {why or 'no reason said'}" for why, number in counts.items()))
