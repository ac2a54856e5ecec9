"""The programs that a benchmark starts."""

import json
import statistics
import subprocess
import sys


class Side:
    """A process that makes one step per line of its input and answers with a JSON line, so that two can take turns."""

    def __init__(self, command, **more):
        self.command = command
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)
        self.rows = []
        ready = self.process.stdout.readline()
        if ready.strip() != "ready":
            sys.exit(f"{command[0]} did not start: {ready!r}")

    def step(self):
        self.rows.append(self.ask("step"))

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.command[0]} ended with {self.process.wait()}")
        return json.loads(line)

    def finish(self):
        self.process.stdin.close()
        if self.process.wait() != 0:
            sys.exit(f"{self.command[0]} ended with {self.process.returncode}")

    def median(self, key, warm):
        """Of the steps after `warm`, or of the last one where there are no more."""
        return statistics.median(row[key] for row in self.rows[min(warm, len(self.rows) - 1):])

    def peak(self):
        return self.rows[-1]["peak_rss"]


def json_rows(command, **more):
    """Runs a program, prints what it says and gives the JSON lines of it."""
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more) as process:
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
            else:
                print(line, end="", flush=True)
    if process.returncode != 0:
        sys.exit(f"{command[0]} ended with {process.returncode}")
    return rows
