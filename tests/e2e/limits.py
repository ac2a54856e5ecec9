"""Limits under which a program is started."""

import contextlib
import os
import resource
import time
from pathlib import Path

import pytest

memory_counts = pytest.mark.skipif(bool(os.environ.get("LM_SANITIZE")), reason="a sanitized program's memory is mostly the sanitizer's")


def make_group(limit):
    """A control group of that much resident memory; None where groups are not ours to make."""
    for root, file in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]:
        group = Path(root) / f"lmlaunch-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
            return group
        except OSError:
            group.rmdir()
    return None


@contextlib.contextmanager
def memory_limit(limit, group_only=False):
    """Gives a function for the child that puts it under the limit, which counts resident memory (a control group) or, where
    there is none, what it has allocated; with `group_only` the test is then skipped."""
    group = make_group(limit)
    if group is None:
        if group_only:
            pytest.skip("no control group of memory can be made here")
        yield lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        for attempt in range(100):  # a killed process leaves it a moment later
            try:
                group.rmdir()
                break
            except OSError:
                assert attempt < 99
                time.sleep(0.05)
