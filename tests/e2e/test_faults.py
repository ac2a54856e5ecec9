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
import sys
import time
from pathlib import Path

import pytest
from limits import memory_limit
from test_offload import BIN, children_of, environment, lmlaunch, loop_disk, on_disk, runs_on, skip_without, wait_for, work  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))
from rows import Row  # noqa: E402

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the files and limits of another process are root's")


@pytest.fixture(scope="module", autouse=True)
def row(request):
    """Of the reliability report; the last test is counted by now, its fixtures go after it."""
    out = Row("failing_machine", "a disk, memory, a limit or a directory fails under the whole program",
              "a file system shut down, frozen or full, swapped bytes, cgroups and RLIMITs, a directory without rights")
    yield
    results = request.config.pluginmanager.get_plugin("terminalreporter").stats
    for outcome, tests in [("as specified", results.get("passed", [])), ("otherwise", results.get("failed", []))]:
        out.count(outcome, len(tests))
        out.row["tries"] += len(tests)
    out.write()


@contextlib.contextmanager
def training(work, name, disk, *changes):
    """A run that would last for hours, once it trains: (CLI process, rank's process id, where its stderr goes)."""
    err = work / f"{name}.err"
    with open(err, "w") as file:
        cli = subprocess.Popen([BIN / "lmlaunch", "c.toml", f"run.dir=runs/{name}", *on_disk(disk), "train.steps=1000000", *changes],
                                cwd=work, env=environment(work), stderr=file)
    try:
        status = work / "runs" / name / "status.json"
        wait_for(lambda: cli.poll() is not None or status.exists() and json.loads(status.read_text())["step"] >= 2, "no second step")
        assert cli.poll() is None, err.read_text()
        yield cli, children_of(cli.pid)[0], err
    finally:
        if cli.poll() is None:
            cli.kill()
        cli.wait()


def ended(cli, err, code, *words):
    """The code, one error with these words and a next step, and the last line."""
    text = err.read_text()
    assert cli.returncode == code, f"exit {cli.returncode}\n{text[-2000:]}"
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
    with training(work, f"changed_{method}_{engine}", swap, f"io.engine={engine}", *METHODS[method]) as (cli, rank, err):
        assert runs_on(engine, err.read_text())
        file = swap_file(rank, swap)
        try:
            size, deadline = os.fstat(file).st_size, time.monotonic() + 30
            while cli.poll() is None and time.monotonic() < deadline:
                # A bit of every chunk; some are written over before they are read.
                for offset in range(0, size, 8192):
                    byte = os.pread(file, 1, offset + 100)
                    os.pwrite(file, bytes([byte[0] ^ 4]), offset + 100)
                    if cli.poll() is not None:
                        break
        finally:
            os.close(file)
        assert cli.poll() is not None, "the run goes on with changed bytes"
    ended(cli, err, 22, "IO-06", r"(weights|optimizer state|gradient|input) of ", "8192 bytes at [0-9]+ of [0-9]+ are not what was written",
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
        with training(work, "eio", disk) as (cli, rank, err):
            shut_down(disk)
            cli.wait(timeout=30)
        ended(cli, err, 21, "IO-03", "(read|write) of ", "EIO", rf" at {re.escape(str(disk))}\+[0-9]+")


@contextlib.contextmanager
def frozen(directory):
    """A file system whose writes wait in the kernel, where no signal reaches them, until the end."""
    fifreeze, fithaw = 0xC0045877, 0xC0045878
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, fifreeze, 0)
        try:
            yield
        finally:
            fcntl.ioctl(descriptor, fithaw, 0)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_disk_that_no_longer_answers_for_its_timeout_is_exit_21(work, tmp_path, engine):
    """Also where the rank cannot even be killed: the CLI process goes without it, and gives the directory back."""
    skip_without(engine)
    with loop_disk(tmp_path, 64) as disk:
        with training(work, f"hang_{engine}", disk, f"io.engine={engine}", "io.timeout=2") as (cli, rank, err):
            with frozen(disk):
                cli.wait(timeout=60)
                text = err.read_text()
                assert Path(f"/proc/{rank}").exists(), "the rank was expected to be held by the kernel"
                assert f"process {rank} is left behind" in text, text[-2000:]
                with open(work / "runs" / f"hang_{engine}" / ".lock", "r+") as lock:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the run's directory is given back
            ended(cli, err, 21, "IO-05", "the disk has not answered for 2 s; waiting for the write of ",
                  rf" at {re.escape(str(disk))}\+[0-9]+")
            assert text.index("error IO-05") < text.index("is left behind")
        wait_for(lambda: not Path(f"/proc/{rank}").exists(), "the rank outlives the hang")


def test_room_that_ends_while_a_run_trains_is_exit_20(work):
    """By the limit on a file's size: unlike a full disk it may come after the space was reserved."""
    swap = work / "swap"
    with training(work, "limit", swap) as (cli, rank, err):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (8192, 8192))
        cli.wait(timeout=30)
    ended(cli, err, 20, "IO-02", "write of ", "EFBIG", rf" at {re.escape(str(swap))}\+[0-9]+")
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
        # The kernel says "try again" where a thread's stack is refused: the advice names memory then.
        errors = re.findall(r"^lmlaunch: error (?:MEM-16 .*|CKPT-03 .* cannot start the save's thread.*\n  next: .*)", done.stderr, re.M)
        assert len(errors) == 1 and "memory" in errors[0], done.stderr[-2000:]
        assert re.search(r"^  next: \S", done.stderr, re.M)
    assert {0, 12, 31} <= set(codes.values()), codes


def test_a_rank_killed_for_want_of_memory_is_exit_31_and_says_what_saves_most(work):
    """By the kernel, in a group whose limit others use up."""
    with memory_limit(512 << 20, group_only=True) as enter, open(work / "oom.err", "w") as file:
        cli = subprocess.Popen([BIN / "lmlaunch", "c.toml", "run.dir=runs/oom", "train.steps=1000000", "train.recompute=none"], cwd=work,
                                env=environment(work), stderr=file, preexec_fn=enter)
        hog = None
        try:
            status = work / "runs" / "oom" / "status.json"
            wait_for(lambda: cli.poll() is not None or status.exists() and json.loads(status.read_text())["step"] >= 2, "no second step")
            assert cli.poll() is None, (work / "oom.err").read_text()[-2000:]
            Path(f"/proc/{children_of(cli.pid)[0]}/oom_score_adj").write_text("1000")  # it goes first
            hog = subprocess.Popen([sys.executable, "-c", "import time; held = bytearray(b'x' * (500 << 20)); time.sleep(60)"], preexec_fn=enter)
            cli.wait(timeout=60)
        finally:
            for process in filter(None, [hog, cli]):
                process.kill()
                process.wait()
    ended(cli, work / "oom.err", 31, "MEM-16", "killed by the kernel; cgroup limit 512 MiB")
    advice = re.search(r"^  next: raise the limit, or set (.*)", (work / "oom.err").read_text(), re.M)
    saved = [float(bytes_) * (1024 if unit == "MiB" else 1) for bytes_, unit in re.findall(r"\(saves ([0-9.]+) ([KM]iB)\)", advice[1])]
    assert saved and saved == sorted(saved, reverse=True), advice[0]


# What a run needs of its files is tried before anything is loaded.

def attribute(directory, change):
    done = subprocess.run(["chattr", change, directory], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no attributes of files here: {done.stderr}")


def test_a_run_directory_in_which_nothing_can_be_renamed_is_exit_12(work, tmp_path):
    with loop_disk(tmp_path, 64) as disk:
        run = disk / "run"
        run.mkdir()
        attribute(run, "+a")
        try:
            done = lmlaunch(work, "c.toml", f"run.dir={run}", check=False)
        finally:
            attribute(run, "-a")
        assert done.returncode == 12, done.stderr[-2000:]
        assert re.search(r"^lmlaunch: error RUN-33 .*rename is refused: EPERM", done.stderr, re.M), done.stderr[-2000:]
        assert "computing" not in done.stderr and not (run / "metrics.jsonl").exists()
        done = lmlaunch(work, "c.toml", f"run.dir={run}", "train.steps=2")
        assert not list(run.glob(".preflight*"))


def test_too_few_descriptors_are_exit_12_and_what_may_be_raised_is(work):
    def limit(soft, hard):
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    done = lmlaunch(work, "c.toml", "run.dir=runs/descriptors", check=False, preexec_fn=limit(20, 20))
    assert done.returncode == 12 and "RLIMIT_NOFILE" in done.stderr, done.stderr[-2000:]
    assert not (work / "runs" / "descriptors").exists()
    # The least that is let through is enough.
    lmlaunch(work, "c.toml", "run.dir=runs/descriptors", *on_disk(work / "swap"), "train.steps=2", preexec_fn=limit(20, 64))
