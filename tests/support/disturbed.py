"""Runs a command on a machine that is busy or that stops: what a neighbour on the core and a frozen virtual machine do to a test.

--busy N: N loops that take a core each. --freeze: all that the command starts is frozen for half a second of every one and a half
(the kernel's freezer, which no process can see or catch; root). The status is the command's.

Usage: disturbed.py [--busy N] [--freeze] COMMAND [ARGUMENT ...]; e.g. disturbed.py --freeze ./dev test
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

FREEZER = Path("/sys/fs/cgroup/freezer")
FROZEN, PERIOD = 0.5, 1.5  # seconds


def freeze_in_turns(group, child):
    state = group / "freezer.state"
    try:
        while child.poll() is None:
            time.sleep(PERIOD - FROZEN)
            state.write_text("FROZEN")
            time.sleep(FROZEN)
            state.write_text("THAWED")
    finally:
        state.write_text("THAWED")


def join(group):
    (group / "cgroup.procs").write_text(str(os.getpid()))


def run_frozen(command):
    if not FREEZER.is_dir():
        sys.exit(f"{FREEZER} is missing: mount -t cgroup -o freezer none {FREEZER}")
    group = FREEZER / f"disturbed-{os.getpid()}"
    group.mkdir()
    child = subprocess.Popen(command, preexec_fn=lambda: join(group))
    freeze_in_turns(group, child)
    try:
        group.rmdir()
    except OSError:
        print(f"{group} still has processes of the command", file=sys.stderr)
    return child.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        if options.freeze:
            return run_frozen(options.command)
        return subprocess.call(options.command)
    finally:
        for loop in loops:
            loop.kill()


if __name__ == "__main__":
    sys.exit(main())
