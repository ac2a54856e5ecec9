"""Stop signals at random times: the run saves and exits with 75, or had ended; the start after it goes on, and what comes out in
the end is the undisturbed run, bit for bit. A second signal ends it at once and damages nothing."""

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest

from runs import EVERY, FULL, METHODS, PLACES, STEPS, Report, Run, Undisturbed, make_work, ready, resumed_at, shared, wait

SIGNALS = 500 if FULL else 50  # over all places and methods
KINDS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
IN_A_ROW = 8
TWICE = 0.1  # share of starts that get a second signal
LAST_LINE = re.compile(r"lmlaunch: stop code=(\d+) reason=(\S+) step=(\d+) checkpoint=(\S+) repeat=(\d+)$")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(make_work(tmp_path_factory.mktemp("signals")))


@pytest.fixture(scope="module")
def report():
    out = Report("signals", "F27: stop signals", "SIGINT, SIGTERM, SIGUSR1 or SIGHUP at times uniform over a start's duration, from the "
                 "CLI process's first line on; to the CLI process, or to the whole group as a terminal does; one start in ten gets a second one")
    yield out
    out.write()


def send(process, number, group):
    try:
        (os.killpg if group else os.kill)(process.pid, number)
    except ProcessLookupError:
        return False  # it has just ended
    return process.poll() is None


def signalled_once(run, pace, random, report):
    """Whether a signal came before the end, and the messages."""
    expected, group, first = pace.left(run), random.random() < 0.3, random.choice(KINDS)
    begin, process = time.monotonic(), run.start()
    assert ready(process), wait(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(random.uniform(0, expected))
    if process.poll() is not None:
        pace.learn(expected, time.monotonic() - begin)
    alive = send(process, first, group)
    again = time.monotonic() if alive and random.random() < TWICE else None
    sent = {f"signal:{first.name}"}
    if again:
        time.sleep(random.uniform(0, 0.05))
        second = random.choice(KINDS)
        send(process, second, group)
        sent.add(f"signal:{second.name}")  # of two that wait, the kernel gives the lower number first
    code, messages = wait(process)
    last = LAST_LINE.match(messages.rstrip().splitlines()[-1])
    assert last and code == int(last[1]) and code in (75, 0), f"exit {code}\n{messages}"
    if code == 0:
        assert run.done()
        report.count("the run had ended")
        return False, messages
    step, repeat = int(last[3]), int(last[5])
    assert last[2] in sent and run.status()["state"] == "stopped" and run.status()["step"] == step, messages
    assert step - run.begun() <= EVERY if again else repeat == 0, messages
    if again:
        report.most("seconds from the first signal to the end, of two", round(time.monotonic() - again, 2))
    report.count("75 at once after a second signal" if again else "75 before the first step" if step == 0 else "75, and saved", tries=1)
    return True, messages


def a_run_that_is_stopped_until_it_ends(undisturbed, name, method, place, pace, random, most, report):
    run = Run(undisturbed.work, name, method, place)
    signals, begun = 0, 0
    while signals < most:
        at = run.steps_done()
        begun = min(at, max(begun, run.begun()))  # a start may delete a save and be stopped then
        stopped, messages = signalled_once(run, pace, random, report)
        if "resumes from" in messages:
            assert 0 <= at - begun <= EVERY and 0 <= begun - resumed_at(messages) <= EVERY
        if not stopped:
            break
        signals += 1
    if not run.done():
        run.finish()
    assert run.result() == undisturbed(method)
    assert not run.leftovers()
    report.count("runs that ended with the undisturbed one's rows and model")
    return signals


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_stopped_goes_on_as_if_nothing_had_happened(undisturbed, report, method, place):
    pace = undisturbed.pace(method, place)

    def share(number, wanted):
        source, done, signals = report.random(method, place, number), 0, 0
        while signals < wanted:
            signals += a_run_that_is_stopped_until_it_ends(undisturbed, f"{method}_{place}_{number}_{done}", method, place, pace, source,
                                                           min(IN_A_ROW, wanted - signals), report)
            done += 1

    shared(-(-SIGNALS // (len(METHODS) * len(PLACES))), share)


def test_a_second_signal_in_a_save_leaves_the_checkpoint_before_it(undisturbed, report):
    """The rank is stopped in its save, so that the second signal finds it there."""
    run = Run(undisturbed.work, "in_a_save")
    process = run.start("checkpoint.every=1", "checkpoint.keep=100")
    while process.poll() is None and not any(".tmp-" in name for name in run.checkpoints()):
        pass
    whole = [name for name in run.checkpoints() if ".tmp-" not in name]
    send(process, signal.SIGTERM, False)
    send(process, signal.SIGINT, False)  # another one: of two of a kind that wait, the kernel keeps one
    code, messages = wait(process)
    assert code == 75 and ": stopping at once" in messages, messages
    assert set(whole[-1:]) <= set(run.checkpoints()) and run.steps_done() < STEPS
    report.count("75 at once in a save", tries=1)
    run.finish()
    assert run.result() == undisturbed("full")
    assert not run.leftovers()
