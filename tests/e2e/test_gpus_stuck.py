"""`lmlaunch --gpus N`, and mpirun, on the emulator while a rank with a GPU is stopped, its compute thread is held, or its GPU never
ends what it is at: all ranks end, one message names rank, host and operation, and no process is left. What the GPUs are at when
ranks only wait is no reason to end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import mpi
from stuck import Stuck
from test_gpus import came_to, cards, mpirun, no_mpi, prepared, started
from test_ranks import gone
from test_run import filled

SILENCE = 4  # seconds; a rank is given up after that, or ten steps
DEADLINE = 120  # ends a test that hangs
HOST = re.escape(socket.gethostname())


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("gpus"), layers=5)


KEEPS_A_LOCK = """
import ctypes, threading, time
libc = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(lock)
threading.Thread(target=libc.pthread_mutex_lock, args=[lock], daemon=True).start()
print("locked", flush=True)
time.sleep(60)
"""


def test_no_thread_is_held_where_it_keeps_a_lock_that_others_want():
    """Else the emulated GPU stands still as well as the host, whose locks it takes, and is rightly blamed."""
    process = subprocess.Popen([sys.executable, "-c", KEEPS_A_LOCK], stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        with pytest.raises(AssertionError, match="where its other threads need it"):
            Stuck(process.pid)
    finally:
        process.kill()
        process.communicate()


def running(work, name, gpus, **variables):
    """A run in its steps: the CLI process, and the ranks' process ids."""
    prepared(work, name, train__steps=100000, train__eval_every=0, zero__stage=3)
    cli, ranks = started(work, name, gpus, 3, LMLAUNCH_SILENCE=str(SILENCE), **variables)
    assert len(ranks) == gpus, cli.stderr.read() if cli.poll() is not None else ranks
    return cli, ranks


def ended(work, name, cli, ranks, held=None):
    """The only error, once all have ended."""
    try:
        if held:
            mpi.until(held.has_ended, DEADLINE, "the end of the rank whose thread is held")
        messages = cli.communicate(timeout=DEADLINE)[1]
    finally:
        if cli.poll() is None:
            cli.kill()  # its ranks go with it
    assert cli.returncode == 41, messages
    gone(ranks)
    errors = re.findall(r"^lmlaunch: error .*", messages, re.M)
    assert len(errors) == 1 and errors[0].startswith("lmlaunch: error HANG-09 (exit 41): "), messages
    assert messages.rstrip().splitlines()[-1].startswith("lmlaunch: stop code=41 ")
    assert json.loads((work / "runs" / name / "status.json").read_text())["exit_code"] == 41
    return errors[0]


def log_of(work, name, rank):
    return (work / "runs" / name / ("log.txt" if rank == 0 else f"log.rank{rank}.txt")).read_text()


def waits_for(work, name, rank, other):
    """In a call of the GPUs, or in one of the processes."""
    log = log_of(work, name, rank)
    assert re.search(rf'the GPU of rank {rank} waits in "[^"]*" \(collective \d+\) for rank {other}, whose GPU|another rank has ended during "\w', log), log


def test_a_rank_that_is_stopped_is_named_by_one_that_waits_for_it(work):
    cli, ranks = running(work, "stopped", 2)
    os.kill(ranks[1], signal.SIGSTOP)
    error = ended(work, "stopped", cli, ranks)
    assert re.search(r'no heartbeat from rank 1 for [\d.]+ s.* at rank 0, in "\w', error), error
    # Where rank 0 waits in a call of the processes, the machine is not named: it is the one.
    assert re.search(rf'(on {HOST} the GPU of rank 0 |last in "\w[^"]*" \(collective \d+\) at rank 0)', error), error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_compute_thread_is_held_names_itself(work, rank):
    """Its other threads say that it lives, and its GPU does what it was given."""
    name = f"held{rank}"
    cli, ranks = running(work, name, 3)
    held = Stuck(ranks[rank])
    error = ended(work, name, cli, ranks, held)
    assert re.search(rf'rank {rank} on {HOST} has made no progress for [\d.]+ s: it is stuck in "\w[^"]*" of step \d+', error), error
    assert "its GPU has completed " in error, error
    for other in {0, 1, 2} - {rank}:
        waits_for(work, name, other, rank)


def test_a_gpu_that_never_ends_a_kernel_is_named(work):
    """Its rank's host has enqueued as much as the others' and waits for the GPU, as they do."""
    trigger = work / "hang"
    cli, ranks = running(work, "hangs", 2, EMULATOR_HANG=f"1:{trigger}")
    trigger.touch()
    error = ended(work, "hangs", cli, ranks)
    trigger.unlink()
    assert re.search(rf"rank 1 on {HOST} has made no progress for ", error), error
    assert re.search(r'its GPU has completed (collective \d+ and does not reach "\w[^"]*" \(collective \d+\)|all \d+ collectives)', error), error
    waits_for(work, "hangs", 0, 1)


def test_a_call_to_which_all_have_come_and_that_never_ends(work):
    """NCCL, or the link between two GPUs, is stuck: any rank may say so, and one does."""
    cli, ranks = running(work, "stuck_call", 2, EMULATOR_NCCL="hang:1:200")
    error = ended(work, "stuck_call", cli, ranks)
    assert re.search(rf'rank [01] on {HOST} has made no progress for .*its GPU does not complete "\w[^"]*" \(collective \d+\), which all ranks have entered', error), error


def test_ranks_that_wait_for_a_slow_one_are_spared(work):
    """A rank that is held for a moment again and again is slow; nobody is given up."""
    cli, ranks = running(work, "slow", 2)
    for _ in range(10):  # for three silences
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(SILENCE / 4)
        os.kill(ranks[1], signal.SIGCONT)
        time.sleep(0.2)
    assert cli.poll() is None, cli.stderr.read()
    cli.send_signal(signal.SIGTERM)
    messages = cli.communicate(timeout=120)[1]
    assert cli.returncode == 75, messages


@no_mpi
@pytest.mark.parametrize("how, said", [
    ("stopped", rf"no heartbeat from rank 1 on {HOST} for "),
    ("held", rf'rank 1 on {HOST} has made no progress for [\d.]+ s: it is stuck in "\w[^"]*" of step \d+'),
    ("hung", rf'rank 1 on {HOST} has made no progress for [^;]*; its GPU has completed (collective \d+ and does not reach "\w|all \d+ collectives)')])
def test_under_mpirun_all_end_with_the_rank_named(work, how, said):
    """They share no memory there: each knows of its own GPU alone, and a word goes round that ranks live."""
    name, trigger = f"mpi_{how}", work / f"mpi_{how}.trigger"
    file = prepared(work, name, train__steps=100000, train__eval_every=0, zero__stage=3)
    job = mpirun(work, file, 2, EMULATOR_GPUS=cards(2), LMLAUNCH_SILENCE=str(SILENCE), EMULATOR_HANG=f"1:{trigger}")
    try:
        mpi.until(lambda: job.poll() is not None or came_to(work, name, 3), 120, "steps")
        assert job.poll() is None, job.communicate()[1]
        rank = mpi.processes(work)[1]
        if how == "stopped":
            os.kill(rank, signal.SIGSTOP)
        elif how == "hung":
            trigger.touch()
        else:
            held = Stuck(rank)
            mpi.until(held.has_ended, DEADLINE, "the end of the rank whose thread is held")
        messages = job.communicate(timeout=DEADLINE)[1]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode == 41, messages
    mpi.nothing_left(work)
    errors = re.findall(r"^lmlaunch: error .*", messages, re.M)
    # Once, as a rule: who has not heard within a second that the leader says it says it as well (mpi_link_test).
    assert len(errors) in (1, 2) and all(re.search(said, error) for error in errors), messages
    assert mpi.status(work, name)["exit_code"] == 41
