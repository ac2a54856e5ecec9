"""A process whose compute thread is held while its other threads run on, as in a call that never returns."""

import contextlib
import ctypes
import errno
import os
import re
import time
from pathlib import Path

import pytest

CONT, SEIZE, INTERRUPT = 7, 0x4206, 0x4207
WALL = 0x40000000
FUTEX, WAIT, PRIVATE = "202", 0, 128  # of x86-64
PATIENCE = 0.3  # seconds that nobody waits for a lock whose owner runs


def sleeps(pid):
    """How often the thread that says that a rank of an MPI job lives has gone to sleep; None where there is none."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text() == "lm-mpi\n":
                return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.M)[1])
    return None


def watched(pid):
    """Whether that thread still turns: where the main thread is held with its lock, it does not, and the rank counts as silent."""
    before, until = sleeps(pid), time.monotonic() + 1
    while before is not None and time.monotonic() < until:
        if sleeps(pid) != before:
            return True
        time.sleep(0.01)
    return before is None


def waits_for_locks(pid):
    """The other threads of a process that wait for a lock, each with the lock's address."""
    waits = set()
    for task in Path("/proc").glob(f"{pid}/task/*"):
        with contextlib.suppress(OSError):  # it has ended
            call = (task / "syscall").read_text().split()
            # glibc's way to wait for a lock, which is 2 while anybody does; conditions wait by another operation.
            if task.name != str(pid) and call[0] == FUTEX and int(call[2], 16) & ~PRIVATE == WAIT and int(call[3], 16) == 2:
                waits.add((task.name, call[1]))
    return waits


class Stuck:
    """Holds the main thread of a process, somewhere else every `again` seconds: between two lists of operations nobody watches it.
    The thread that makes this has to reap it, too."""

    def __init__(self, pid, again=15):
        self.pid, self.again = pid, again
        self.waits = {}  # who waits for which lock, since when
        self.ask(SEIZE)
        self.hold()

    def ask(self, request):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(request, self.pid, None, None) != 0:
            if ctypes.get_errno() == errno.EPERM:
                pytest.skip("this machine lets no process hold another's thread (ptrace)")
            raise OSError(ctypes.get_errno(), "ptrace")

    def hold(self):
        """Never where it holds what the others of its threads need."""
        for _ in range(20):
            self.ask(INTERRUPT)
            os.waitpid(self.pid, WALL)  # it is held
            self.since = time.monotonic()
            if watched(self.pid) and not self.keeps_a_lock(2 * PATIENCE):
                return
            self.ask(CONT)
            time.sleep(0.02)
        raise AssertionError(f"process {self.pid} has been held 20 times where its other threads need it")

    def keeps_a_lock(self, seconds=0.0):
        """Whether another thread has waited for the same lock for too long. Looks at them for so many seconds, or once."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            self.waits = {wait: self.waits.get(wait, now) for wait in waits_for_locks(self.pid)}
            if any(now - since > PATIENCE for since in self.waits.values()):
                return True
            if now >= until:
                return False
            time.sleep(0.02)

    def has_ended(self):
        """Before its parent learns of its end this one has to. To be called again and again: one of its threads may come to a lock late."""
        with contextlib.suppress(ProcessLookupError):  # it is about to have
            if time.monotonic() - self.since > self.again or self.keeps_a_lock():
                self.ask(CONT)
                time.sleep(0.05)
                self.hold()
        try:
            ended, status = os.waitpid(self.pid, os.WNOHANG | WALL)
        except ChildProcessError:
            return True
        return ended == self.pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status))
