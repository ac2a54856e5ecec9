"""kill -9 of the whole program at random times, saves and starts included: the next start goes on, and what comes out in the end
is the undisturbed run, bit for bit. Runs are killed again and again until one start reaches the end."""

import contextlib
import random
import subprocess
import time

import pytest

from runs import EVERY, FULL, METHODS, PLACES, EMULATOR, Report, Run, Undisturbed, kill, make_work, resumed_at, shared, wait

KILLS = 200 if FULL else 20  # over all places and methods
KILLS_IN_A_ROW = 6
PLACEMENTS = [*PLACES, *(["host"] if (EMULATOR / "bin" / "lmlaunch").exists() else [])]
WHOM = ["group"] * 8 + ["cli", "rank"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(make_work(tmp_path_factory.mktemp("kill")))


@pytest.fixture(scope="module")
def report():
    out = Report("kill", "F01 F31: kill -9 of the whole program", "SIGKILL at times uniform over a start's duration, to the process "
                 "group (8 of 10), the CLI process or the rank, until a start reaches the end; state in memory, on disk, and in host memory beside "
                 "the emulated GPU")
    yield out
    out.write()


def killed_once(run, pace, random, report):
    """Whether the start was killed, and its messages."""
    before, expected, whom = run.checkpoints(), pace.left(run), random.choice(WHOM)
    begin, process = time.monotonic(), run.start()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(random.uniform(0, expected))
    ended_before = process.poll() is not None
    if ended_before:
        pace.learn(expected, time.monotonic() - begin)
    kill(process, whom)
    code, messages = wait(process)
    assert not ended_before or code == 0, messages
    run.killed_when_done = not ended_before and run.done()
    if ended_before or run.done():
        report.count("a start had ended before its kill")
        return False, messages
    # 40: the rank was killed, and the CLI process tells. The rank may have ended by itself at that moment.
    assert code in ({-9} if whom != "rank" else {40, 0}), messages
    run.wait_until_free()
    report.count("killed before the first checkpoint" if not run.checkpoints() else
                 "killed in a save" if any(".tmp-" in name for name in run.checkpoints()) else
                 "killed later, nothing new saved" if before == run.checkpoints() else "killed after a save", tries=1)
    return True, messages


def expect_little_lost(messages, steps_done, report):
    """Of the steps that have a row; a save that was under way counts for nothing."""
    repeated = steps_done - resumed_at(messages)
    report.most("most steps repeated", repeated)
    assert 0 <= repeated <= EVERY, messages


def a_run_that_is_killed_until_it_ends(undisturbed, name, method, place, pace, random, most, report):
    """Of at most `most` kills; how many there were."""
    # Some begin where tokens have not been prepared yet.
    cache = [f'data.cache_dir="cache/{name}"'] if random.random() < 0.2 else []
    run = Run(undisturbed.work, name, method, place, *cache)
    kills, steps_done = 0, 0
    while kills < most:
        killed, messages = killed_once(run, pace, random, report)
        if "resumes from" in messages or not killed:
            expect_little_lost(messages, steps_done, report)
        steps_done = run.steps_done()
        if not killed:
            break
        kills += 1
    if not run.done():
        expect_little_lost(run.finish(), steps_done, report)
    assert run.result() == undisturbed(method, place)
    assert not run.leftovers()
    report.count("runs that ended with the undisturbed one's rows and model")
    return kills


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", PLACEMENTS)
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(undisturbed, report, method, place):
    pace = undisturbed.pace(method, place)

    def share(number, wanted):
        source, done, kills = report.random(method, place, number), 0, 0
        while kills < wanted:
            most = min(KILLS_IN_A_ROW, wanted - kills)
            kills += a_run_that_is_killed_until_it_ends(undisturbed, f"{method}_{place}_{number}_{done}", method, place, pace, source, most,
                                                        report)
            done += 1

    shared(-(-KILLS // (len(METHODS) * len(PLACEMENTS))), share)


def test_a_run_killed_in_every_save_loses_nothing(undisturbed, report):
    """The moments that a uniform draw seldom meets: between the temporary directory's first file and the checkpoint's name."""
    run, source = Run(undisturbed.work, "saves"), random.Random(report.seed)
    for _ in range(60 if FULL else 6):
        before = set(run.checkpoints())
        process, steps_done = run.start(), 0
        while process.poll() is None and not any(".tmp-" in name for name in set(run.checkpoints()) - before):
            pass
        time.sleep(source.uniform(0, 0.03))
        kill(process)
        code, messages = wait(process)
        run.killed_when_done = code != 0 and run.done()
        if run.done():
            break
        run.wait_until_free()
        report.count("killed while a save was seen", tries=1)
    if not run.done():
        steps_done = run.steps_done()
        expect_little_lost(run.finish(), steps_done, report)
    assert run.result() == undisturbed("full")
    assert not run.leftovers()


def test_a_save_that_takes_long_keeps_rows_waiting(undisturbed, report):
    """However slow the disk is, no row is more than EVERY steps ahead of the last checkpoint that is committed."""
    run, slow = Run(undisturbed.work, "slow"), "0.4"
    program, run.program = run.program, "strace"
    traced, run.arguments = run.arguments, ["-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "-e",
                                            f"inject=fdatasync:delay_enter={slow}s", program, *run.arguments]
    process = run.start()
    newest, ahead = 0, []
    while process.poll() is None and newest < 2 * EVERY:
        done = run.steps_done()  # before the name is looked for, which may come meanwhile
        newest = max((int(name[len("step_"):]) for name in run.checkpoints() if ".tmp-" not in name), default=0)
        ahead.append(done - newest)
    kill(process)
    wait(process)
    run.wait_until_free()
    assert newest >= 2 * EVERY and max(ahead) == EVERY, (newest, max(ahead))
    run.program, run.arguments = program, traced
    steps_done = run.steps_done()
    expect_little_lost(run.finish(), steps_done, report)
    report.count("killed with slow saves", tries=1)
    assert run.result() == undisturbed("full")
