"""What ends a run from outside while it trains: a disk that is full or broken, bytes that change on it, memory that is refused.
Each has its exit code, one error that names the place, and no litter."""

import contextlib
import fcntl
import json
import os
import re
import resource
import struct
import subprocess
import time
from pathlib import Path

import pytest
from test_offload import BIN, children_of, environment, lmlaunch, loop_disk, on_disk, runs_on, skip_without, wait_for, work  # noqa: F401

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the files and limits of another process are root's")


@contextlib.contextmanager
def training(work, name, disk, *changes):
    """A run that would last for hours, once it trains: (door, rank's process id, where its stderr goes)."""
    err = work / f"{name}.err"
    with open(err, "w") as file:
        door = subprocess.Popen([BIN / "lmlaunch", "c.toml", f"run.dir=runs/{name}", *on_disk(disk), "train.steps=1000000", *changes],
                                cwd=work, env=environment(work), stderr=file)
    try:
        status = work / "runs" / name / "status.json"
        wait_for(lambda: door.poll() is not None or status.exists() and json.loads(status.read_text())["step"] >= 2, "no second step")
        assert door.poll() is None, err.read_text()
        yield door, children_of(door.pid)[0], err
    finally:
        if door.poll() is None:
            door.kill()
        door.wait()


def ended(door, err, code, *words):
    """The code, one error with these words and a next step, and the last line."""
    text = err.read_text()
    assert door.returncode == code, f"exit {door.returncode}\n{text[-2000:]}"
    errors = re.findall(r"^lmlaunch: error .*", text, re.M)
    assert len(errors) == 1 and all(re.search(word, errors[0]) for word in words), text[-2000:]
    assert re.search(r"^  next: \S", text, re.M)
    assert text.rstrip().splitlines()[-1].startswith(f"lmlaunch: stop code={code} ")


def swap_file(rank, swap):
    """The rank's anonymous file, by a descriptor of ours."""
    for link in Path(f"/proc/{rank}/fd").iterdir():
        with contextlib.suppress(OSError):
            place = os.readlink(link)
            if place.startswith(str(swap)) and place.endswith("(deleted)") and os.stat(link).st_size > 1 << 16:
                return os.open(link, os.O_RDWR)
    raise AssertionError("the rank has no anonymous file")


METHODS = {"full": [], "lora": ["train.method=lora", "lora.r=4", "optimizer.lr=1e-3"]}


@pytest.mark.parametrize("engine", ["uring", "threads"])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_change_on_the_disk_are_exit_22(work, method, engine):
    skip_without(engine)
    swap = work / "swap"
    with training(work, f"changed_{method}_{engine}", swap, f"io.engine={engine}", *METHODS[method]) as (door, rank, err):
        assert runs_on(engine, err.read_text())
        file = swap_file(rank, swap)
        try:
            size, deadline = os.fstat(file).st_size, time.monotonic() + 30
            while door.poll() is None and time.monotonic() < deadline:
                # A bit of every chunk; some are written over before they are read.
                for offset in range(0, size, 8192):
                    byte = os.pread(file, 1, offset + 100)
                    os.pwrite(file, bytes([byte[0] ^ 4]), offset + 100)
                    if door.poll() is not None:
                        break
        finally:
            os.close(file)
        assert door.poll() is not None, "the run goes on with changed bytes"
    ended(door, err, 22, "IO-06", r"(weights|optimizer state|gradient|input) of ", "8192 bytes at [0-9]+ of [0-9]+ are not what was written",
          rf" at {re.escape(str(swap))}\+[0-9]+")
    assert not list(swap.iterdir())


def shut_down(directory):
    """The file system answers everything with EIO from now on."""
    ext4_ioc_shutdown, no_log_flush = 0x8004587D, 2
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, ext4_ioc_shutdown, struct.pack("I", no_log_flush))
    finally:
        os.close(descriptor)


def test_a_disk_that_answers_eio_is_exit_21(work, tmp_path):
    with loop_disk(tmp_path, 64) as disk:
        with training(work, "eio", disk) as (door, rank, err):
            shut_down(disk)
            door.wait(timeout=30)
        ended(door, err, 21, "IO-03", "(read|write) of ", "EIO", rf" at {re.escape(str(disk))}\+[0-9]+")


def test_room_that_ends_while_a_run_trains_is_exit_20(work):
    """By the limit on a file's size: unlike a full disk it may come after the space was reserved."""
    swap = work / "swap"
    with training(work, "limit", swap) as (door, rank, err):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (8192, 8192))
        door.wait(timeout=30)
    ended(door, err, 20, "IO-02", "write of ", "EFBIG", rf" at {re.escape(str(swap))}\+[0-9]+")
    assert not list(swap.iterdir())


# Memory that the system refuses.

def test_memory_that_is_refused_is_exit_12_or_31_and_never_70(work):
    """From what the loader itself does not get through to what is enough, which depends on machine and libraries."""
    codes = {}
    for megabytes in [100, 250, *range(370, 1400, 60)]:
        limit = megabytes << 20
        done = lmlaunch(work, "c.toml", f"run.dir=runs/memory{megabytes}", "model.path=large", "model.init=random", "train.steps=2", "data.eval=[]",
                        check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        codes[megabytes] = done.returncode
        if done.returncode == 0:
            break
        assert done.returncode in (12, 31), f"{megabytes} MiB: exit {done.returncode}\n{done.stderr[-2000:]}"
        errors = re.findall(r"^lmlaunch: error MEM-16 .*", done.stderr, re.M)
        assert len(errors) == 1 and "memory" in errors[0], done.stderr[-2000:]
        assert re.search(r"^  next: \S", done.stderr, re.M)
    assert {0, 12, 31} <= set(codes.values()), codes
