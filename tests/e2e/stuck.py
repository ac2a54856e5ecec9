"""A process whose compute thread is held while its other threads run on, as in a call that never returns."""

import ctypes
import errno
import os

import pytest

SEIZE, INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000


class Stuck:
    """Holds the main thread of a process; the thread that makes this has to reap it, too."""

    def __init__(self, pid):
        self.pid = pid
        for request in (SEIZE, INTERRUPT):
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.ptrace(request, pid, None, None) != 0:
                if ctypes.get_errno() == errno.EPERM:
                    pytest.skip("this machine lets no process hold another's thread (ptrace)")
                raise OSError(ctypes.get_errno(), "ptrace")
        os.waitpid(pid, WALL)  # it is held

    def has_ended(self):
        """Before its parent learns of its end this one has to."""
        try:
            ended, status = os.waitpid(self.pid, os.WNOHANG | WALL)
        except ChildProcessError:
            return True
        return ended == self.pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status))
