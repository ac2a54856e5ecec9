"""Two runs on one directory: exactly one has it, the other leaves with 13 and has touched nothing; when the one that has it dies,
the next start takes over. A run whose lock is no longer its own publishes nothing more."""

import time

import pytest

from runs import FULL, Report, Run, Undisturbed, kill, make_work, ready, shared, wait

RACES = 50 if FULL else 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(make_work(tmp_path_factory.mktemp("races")))


@pytest.fixture(scope="module")
def report():
    out = Report("races", "F30 F31: two runs, one directory", "two starts within 20 ms on a directory that is new or a dead run's; then "
                 "kill -9 of the one that has it, and a third start")
    yield out
    out.write()


def race(run, random):
    """The one that runs; the other has left with 13."""
    racers = [run.start()]
    time.sleep(random.uniform(0, 0.02))
    racers.append(run.start())
    while all(racer.poll() is None for racer in racers):
        time.sleep(0.001)
    ended = [racer for racer in racers if racer.poll() is not None]
    assert len(ended) == 1, [wait(racer) for racer in racers]
    code, messages = wait(ended[0])
    assert code == 13 and "error LOCK-30 (exit 13)" in messages and "in use by process" in messages, messages
    return next(racer for racer in racers if racer is not ended[0])


def test_exactly_one_of_two_runs_and_the_next_takes_over(undisturbed, report):
    pace = undisturbed.pace("full", "resident")

    def share(number, wanted):
        source = report.random(number)
        for i in range(wanted):
            run = Run(undisturbed.work, f"race_{number}_{i}")
            winner = race(run, source)
            time.sleep(source.uniform(0, pace.left(run) / 2))
            kill(winner)
            wait(winner)
            run.wait_until_free()
            report.count("one ran, the other left with 13", tries=1)
            run.killed_when_done = run.done()
            if not run.done():
                # Again, on a directory with something in it.
                winner = race(run, source)
                code, messages = wait(winner)
                assert code == 0 and "took over the lock of a dead run" in messages, messages
                report.count("the next start took over from the dead one, and another left with 13", tries=1)
            assert run.result() == undisturbed("full")
            assert not run.leftovers()

    shared(RACES, share)


def test_a_run_whose_lock_was_taken_away_publishes_nothing_more(undisturbed, report):
    run = Run(undisturbed.work, "lost")
    first = run.start("train.steps=100000")
    while first.poll() is None and "step_00000003" not in run.checkpoints():
        time.sleep(0.005)
    (run.directory / ".lock").unlink()
    (run.directory / ".lock").touch()
    code, messages = wait(first, 30)
    assert code == 13 and "the run directory's lock is no longer this run's" in messages, messages
    seen = [name for name in run.checkpoints() if ".tmp-" not in name]
    assert f"COMMITTED step {int(seen[-1].removeprefix('step_'))} " in messages
    assert not run.leftovers()
    report.count("13 at the first save after the lock was lost", tries=1)


def test_a_cli_that_is_killed_takes_its_rank_with_it(undisturbed, report):
    run = Run(undisturbed.work, "orphan")
    process = run.start("train.steps=100000")
    assert ready(process)
    while process.poll() is None and run.steps_done() < 2:
        time.sleep(0.005)
    kill(process, "cli")
    wait(process, 30)
    run.wait_until_free()
    assert run.steps_done() < 100000
    report.count("a dead CLI process's rank had let go long before its last step", tries=1)
