"""A machine that refuses io_uring, as a container's filter or an old kernel does: with io.engine = "auto" threads do the same, which a
note says, and the run has the undisturbed one's bits; with "uring" the start is refused before anything is made, wherever the state
lies: a run writes its checkpoints by that engine, too.

strace answers every io_uring_setup of the whole program with an error."""

import signal
import subprocess
import time

import pytest

from runs import Report, Run, Undisturbed, make_work, resumed_at, wait

ERRORS = ["EPERM", "ENOSYS", "ENOMEM"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(make_work(tmp_path_factory.mktemp("no_ring")))


@pytest.fixture(scope="module")
def report():
    out = Report("no_ring", "F18: io_uring is refused", "io_uring_setup fails in the whole program (strace): EPERM, ENOSYS, ENOMEM; auto, uring")
    yield out
    out.write()


class Refused(Run):
    """A run under strace, which counts the calls that it has refused."""

    def __init__(self, work, name, error, place, *changes):
        super().__init__(work, name, "full", place, *changes)
        self.error, self.calls, self.does = error, work / f"{name}.strace", []

    def start(self, *more, errors=subprocess.PIPE):
        strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", self.calls, "-e", "trace=io_uring_setup", "-e", f"inject=io_uring_setup:error={self.error}"]
        return subprocess.Popen([*strace, self.program, *self.does, *self.arguments, *more], cwd=self.work, stdout=subprocess.DEVNULL, stderr=errors,
                                text=True, start_new_session=True)

    def refused(self):
        return self.calls.read_text().count("(INJECTED)")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", ["nvme", "resident"])
def test_threads_do_instead_and_change_no_bit(undisturbed, report, error, place):
    run = Refused(undisturbed.work, f"auto_{place}_{error}", error, place)
    messages = run.finish()
    assert run.refused() > 0
    notes = [line for line in messages.splitlines() if "io_uring unavailable" in line]
    assert len(notes) == 1 and f"io_uring unavailable ({error}" in notes[0] and "I/O threads" in notes[0], messages
    assert run.result() == undisturbed("full")
    assert len([name for name in run.checkpoints() if name.startswith("step_")]) > 0 and not run.leftovers()
    report.count("threads, the same bits", tries=1)


def refused(run, error):
    messages = run.finish(code=10)
    assert run.refused() > 0
    assert "error IO-18 (exit 10)" in messages and error in messages, messages


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", ["nvme", "resident"])
def test_who_wants_a_ring_is_refused_before_anything_is_made(undisturbed, report, error, place):
    run = Refused(undisturbed.work, f"uring_{place}_{error}", error, place, 'io.engine="uring"')
    refused(run, error)
    run.does = ["plan"]  # says what a start would
    refused(run, error)
    assert not run.directory.exists()
    report.count("refused, exit 10", tries=1)


def test_who_wants_a_ring_is_refused_where_a_run_would_go_on(undisturbed, report):
    first = Run(undisturbed.work, "goes_on", "full", "resident", 'io.engine="uring"')
    process = first.start()
    while not first.steps_done() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert wait(process)[0] == 75
    saved = first.checkpoints()
    run = Refused(undisturbed.work, "elsewhere", "EPERM", "resident", 'io.engine="uring"')
    run.directory, run.arguments = first.directory, list(first.arguments)
    refused(run, "EPERM")
    assert run.checkpoints() == saved and len(saved) > 0
    run.arguments[run.arguments.index('io.engine="uring"')] = 'io.engine="threads"'
    assert resumed_at(run.finish()) > 0
    assert run.result() == undisturbed("full")
    report.count("refused, exit 10", tries=1)


def test_who_reads_alone_needs_no_ring(undisturbed, report):
    """What is in memory is evaluated without the engine of disks."""
    run = Run(undisturbed.work, "trained", "full", "resident", 'io.engine="uring"')
    run.finish()
    reader = Refused(undisturbed.work, "evaluated", "EPERM", "resident")
    reader.does, reader.arguments = ["eval"], [f"runs/{run.name}"]
    reader.finish()
    report.count("evaluated", tries=1)


def test_who_wants_threads_asks_for_no_ring(undisturbed, report):
    run = Refused(undisturbed.work, "threads", "EPERM", "nvme", 'io.engine="threads"')
    messages = run.finish()
    assert run.refused() == 0 and "IO-18" not in messages
    assert run.result() == undisturbed("full")
    report.count("threads, no ring asked for", tries=1)
