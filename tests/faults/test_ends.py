"""A run of several processes of which one is killed, crashes or is stopped, while it loads, computes, waits for the others or saves:
all end within seconds, one message names the rank, what it was at and the cause, and nothing is left. One that is stopped as a whole
goes on afterwards. With --ranks and under mpirun."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from runs import FULL, ROOT, Report, Run, make_work

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import mpi  # noqa: E402
from stuck import Stuck  # noqa: E402

SILENCE = 3  # seconds that a stopped rank may be silent
SIGNALS = ["SIGKILL", "SIGSEGV", "SIGSTOP"]
ENDLESS = ["train.steps=1000000", "train.eval_every=0", 'optimizer.schedule="constant"', "optimizer.warmup=0",
           "zero.stage=3", "train.global_batch=6"]
RANKS = 3
LAUNCHERS = ["--ranks", "mpirun"]
PHASES = ["load", "forward", "reduce", "save"]
CASES = [(launcher, name, phase, rank) for launcher in LAUNCHERS for name in SIGNALS for phase in PHASES for rank in range(RANKS)]
FEW = [("--ranks", "SIGKILL", "save", 2), ("--ranks", "SIGSTOP", "forward", 1), ("--ranks", "SIGSEGV", "reduce", 0),
       ("mpirun", "SIGKILL", "forward", 1), ("mpirun", "SIGKILL", "reduce", 0), ("mpirun", "SIGSEGV", "load", 2),
       ("mpirun", "SIGSTOP", "save", 2), ("mpirun", "SIGSTOP", "forward", 0), ("mpirun", "SIGSTOP", "reduce", 1)]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return make_work(tmp_path_factory.mktemp("ends"))


@pytest.fixture(scope="module")
def report():
    out = Report("ends", "T07, T08: a rank dies or is stopped", f"{RANKS} processes, --ranks and mpirun: SIGKILL, SIGSEGV, SIGSTOP at {', '.join(PHASES)}")
    yield out
    out.write()


def command(run, launcher):
    if launcher == "--ranks":
        return [run.program, "--ranks", str(RANKS), *run.arguments]
    return ["mpirun", "--oversubscribe", "-n", str(RANKS), run.program, *run.arguments]


@contextlib.contextmanager
def launched(work, run, launcher):
    """The process that starts all ranks; it ends inside, and leaves nothing behind."""
    if launcher == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("no mpirun (openmpi-bin)")
    process = subprocess.Popen(command(run, launcher), cwd=work, env=mpi.environment(LMLAUNCH_SILENCE=SILENCE), stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    mpi.nothing_left(work)


def reached(run, phase):
    if phase == "load":
        return (run.directory / "plan.json").exists()
    if run.steps_done() < 3:
        return False
    return phase != "save" or any(".tmp" in name for name in run.checkpoints())


@pytest.mark.parametrize("launcher, name, phase, rank", CASES if FULL else FEW)
def test_all_end(work, report, launcher, name, phase, rank):
    run = Run(work, "ends", "full", "resident", *ENDLESS, f"checkpoint.every={1 if phase == 'save' else 0}")
    with launched(work, run, launcher) as process:
        mpi.until(lambda: process.poll() is not None or reached(run, phase), 60, f"the run at {phase}")
        ranks = mpi.processes(work)
        assert len(ranks) == RANKS, process.communicate()[1] if process.poll() is not None else ranks
        other = ranks[(rank + 1) % RANKS]
        if phase == "reduce":  # then it waits for one that is away for a moment
            os.kill(other, signal.SIGSTOP)
            time.sleep(0.3)
        elif phase == "forward":
            time.sleep(random.Random(rank).random() / 20)
        os.kill(ranks[rank], getattr(signal, name))
        if phase == "reduce":
            os.kill(other, signal.SIGCONT)
        _, messages = process.communicate(timeout=60)
    host = f" on {socket.gethostname()}" if launcher == "mpirun" else ""
    if name == "SIGSTOP":
        # By who has seen it, or by rank 0, which passes on what another one has.
        by = rf"(HANG-09 \(exit 41\)|PEER-32 \(exit 41\): rank \d{host} has ended the run)"
        said = re.findall(rf'error {by}: no heartbeat from rank {rank}{host} for \d.*"', messages)
        assert len(said) == 1 and "next: see whether that process is stopped" in messages, messages
    else:
        assert re.search(rf'error PEER-08 \(exit 40\): the worker was killed by signal \d+ \({name}\).* at rank {rank}{host}, step \d+, in "', messages), messages
    code = 41 if name == "SIGSTOP" else 40
    assert process.returncode == code, messages
    assert run.status()["exit_code"] == code and run.status()["state"] == "failed", (run.status(), messages)
    report.count(f"{launcher} {name}: exit {code}, rank, operation and cause named, nothing left", tries=1)


@pytest.mark.parametrize("launcher, rank", [(launcher, rank) for launcher in LAUNCHERS for rank in range(RANKS)] if FULL else [("--ranks", 0), ("mpirun", 1)])
def test_all_end_where_one_is_stuck(work, report, launcher, rank):
    """Its compute thread is held in a step, while its other threads say that it lives."""
    run = Run(work, "ends", "full", "resident", *ENDLESS, "checkpoint.every=0")
    with launched(work, run, launcher) as process:
        mpi.until(lambda: process.poll() is not None or reached(run, "forward"), 60, "steps")
        held = Stuck(mpi.processes(work)[rank])
        mpi.until(held.has_ended, 90, "the end of the rank that is stuck")
        _, messages = process.communicate(timeout=60)
    # Under mpirun the first process may be the one to say it, as it heard it.
    stuck = rf'rank {rank} on {socket.gethostname()} has made no progress for [\d.]+ s: it is stuck in "\w'
    assert len(re.findall(stuck, messages)) == 1 and messages.count("lmlaunch: error") == 1, messages
    assert process.returncode == 41 and run.status()["exit_code"] == 41, (run.status(), messages)
    report.count(f"{launcher}, stuck: exit 41, rank, host and operation named, nothing left", tries=1)


def session(leader):
    out = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            out += [int(entry)] if os.getsid(int(entry)) == leader else []
    return out


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_that_was_stopped_as_a_whole_goes_on(work, report, launcher):
    """By Ctrl-Z, or by a scheduler that suspends jobs: for longer than any rank may be silent."""
    run = Run(work, "ends", "full", "resident", *ENDLESS, "checkpoint.every=0")
    with launched(work, run, launcher) as process:
        mpi.until(lambda: process.poll() is not None or reached(run, "forward"), 60, "steps")
        everyone = {*session(process.pid), *mpi.processes(work).values()}
        assert len(everyone) > RANKS
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        done = run.steps_done()
        time.sleep(2.5 * SILENCE)
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        mpi.until(lambda: process.poll() is not None or run.steps_done() > done + 5, 60, "steps after it")
        process.send_signal(signal.SIGUSR1)  # mpirun passes it on
        _, messages = process.communicate(timeout=60)
    assert "lmlaunch: error" not in messages and run.status()["exit_code"] == 75, (run.status(), messages)
    report.count(f"{launcher}, stopped as a whole for longer than a rank may be silent: goes on", tries=1)
