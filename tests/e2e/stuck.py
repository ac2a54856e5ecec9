"""A process whose compute thread is held while its other threads run on, as in a call that never returns."""

import ctypes
import errno
import os
import time

import pytest

CONT, SEIZE, INTERRUPT = 7, 0x4206, 0x4207
WALL = 0x40000000


class Stuck:
    """Holds the main thread of a process, somewhere else every `again` seconds: between two lists of operations nobody watches it.
    The thread that makes this has to reap it, too."""

    def __init__(self, pid, again=15):
        self.pid, self.again = pid, again
        self.ask(SEIZE)
        self.hold()

    def ask(self, request):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(request, self.pid, None, None) != 0:
            if ctypes.get_errno() == errno.EPERM:
                pytest.skip("this machine lets no process hold another's thread (ptrace)")
            raise OSError(ctypes.get_errno(), "ptrace")

    def hold(self):
        self.ask(INTERRUPT)
        os.waitpid(self.pid, WALL)  # it is held
        self.since = time.monotonic()

    def has_ended(self):
        """Before its parent learns of its end this one has to."""
        if time.monotonic() - self.since > self.again:
            self.ask(CONT)
            time.sleep(0.05)
            self.hold()
        try:
            ended, status = os.waitpid(self.pid, os.WNOHANG | WALL)
        except ChildProcessError:
            return True
        return ended == self.pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status))
