"""Limits under which a program is started."""

import contextlib
import os
import resource
from pathlib import Path


@contextlib.contextmanager
def memory_limit(limit):
    """Gives a function for the child that puts it under the limit, which counts resident memory (a control group) or, where
    groups are not ours to make, what it has allocated."""
    for root, file in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]:
        group = Path(root) / f"lmlaunch-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        try:
            yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
        finally:
            group.rmdir()
        return
    yield lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
