"""A flipped bit in the swap file of a running program, put there by another process while the rank stands still. With a checkpoint
the run goes back to it and ends as the undisturbed one, bit for bit; without one it ends with 22. A flip that nobody reads (its
bytes were written over first, or belong to no state) changes nothing, and is counted apart."""

import contextlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from runs import FULL, METHODS, Report, Run, make_work, rank_of, wait

FLIPS = 1000 if FULL else 20  # with checkpoints, over all cases
ENDING = 40 if FULL else 4  # without, over all cases
CLASSES = {"optimizer": ("optimizer",), "base": ("weights",), "all": ("optimizer", "weights", "gradients")}  # what lies on the disk
# What is trained, what lies on the disk, and the rule: state of adamw_8bit is codes, and qlora's base is codes and scales.
CASES = [("full", "optimizer", "adamw"), ("full", "optimizer", "adamw_8bit"), ("full", "all", "adamw"), ("lora", "all", "adamw"),
         ("qlora", "base", "adamw")]
PAGE = 4096
AFTER = 3  # steps in which what is used has been read or written over
FLIPS_OF_A_RUN, STEPS_OF_A_FLIP = 25, 12


@pytest.fixture(scope="module")
def report():
    out = Report("swap_flips", "F06: a bit of a live swap file changes", "one random bit of what has been written to the anonymous file, through "
                 "/proc/RANK/fd while the rank is stopped; optimizer state alone (floats, 8-bit codes), then all state, in full and with LoRA, and a quantized base, "
                 "io_uring and threads by turns")
    yield out
    out.write()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return make_work(tmp_path_factory.mktemp("swap_flips"), layers=14)


@pytest.fixture(scope="module")
def undisturbed(work):
    known = {}

    def result(method, rule, steps):
        if (method, rule, steps) not in known:
            run = Run(work, f"undisturbed_{method}_{rule}_{steps}", method, "resident", *settings(rule, steps, 0))
            run.finish()
            known[method, rule, steps] = run.result()
        return known[method, rule, steps]

    return result


def settings(rule, steps, every):
    return (f'optimizer.name="{rule}"', 'optimizer.schedule="constant"', "optimizer.warmup=0", "optimizer.lr=0.01", f"train.steps={steps}",
            "train.eval_every=0", f"checkpoint.every={every}")


def on_disk(work, name, case, engine, steps, every):
    method, classes, rule = case
    swap = work / "swap" / name
    swap.mkdir(parents=True, exist_ok=True)
    placements = [f'offload.{c}="nvme"' for c in CLASSES[classes]]
    return Run(work, name, method, "resident", *placements, f'offload.paths=["swap/{name}"]', f'io.engine="{engine}"', *settings(rule, steps, every))


class Flipper:
    """Of one running program."""

    def __init__(self, run, process, random):
        self.run, self.process, self.random = run, process, random
        self.rank, self.file = rank_of(process), None

    def open_swap(self):
        for link in Path(f"/proc/{self.rank}/fd").iterdir():
            with contextlib.suppress(OSError):
                place = os.readlink(link)
                if place.startswith(str(self.run.swap)) and place.endswith("(deleted)") and os.stat(link).st_size > 0:
                    self.file = os.open(link, os.O_RDWR)

    @contextlib.contextmanager
    def standing_still(self):
        """Whether it does: it may have ended."""
        stopped = False
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):
            os.kill(self.rank, signal.SIGSTOP)
            while (state := Path(f"/proc/{self.rank}/stat").read_text().rsplit(") ", 1)[1][0]) not in "TZX":
                time.sleep(0.001)
            stopped = state == "T"
        try:
            yield stopped
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rank, signal.SIGCONT)

    def pages(self):
        """Those in which something stands; the others are spare room, or of arrays that have never left memory."""
        raw = os.pread(self.file, os.fstat(self.file).st_size, 0)
        return [at for at in range(0, len(raw), PAGE) if any(raw[at:at + PAGE])]

    def flip(self):
        """Where, and what is there now; None: too late."""
        with self.standing_still() as stopped:
            if not stopped:
                return None
            if self.file is None:
                self.open_swap()
            at = self.random.choice(self.pages()) + self.random.randrange(PAGE)
            byte = os.pread(self.file, 1, at)[0] ^ (1 << self.random.randrange(8))
            os.pwrite(self.file, bytes([byte]), at)
            os.fsync(self.file)
            return at, byte

    def unread(self, flipped):
        """What has become of a flip that was not found."""
        with self.standing_still():
            there = os.pread(self.file, 1, flipped[0])[0]
        return "not found: in bytes of no state" if there == flipped[1] else "not found: written over before it was read"

    def close(self):
        if self.file is not None:
            os.close(self.file)


def until(what, process):
    while process.poll() is None and not what():
        time.sleep(0.002)
    return process.poll() is None


def flipped_again_and_again(work, name, case, engine, random, flips, report, undisturbed):
    """How many flips the run has met."""
    steps = STEPS_OF_A_FLIP * flips
    run, messages = on_disk(work, name, case, engine, steps, 2), work / f"{name}.txt"
    with open(messages, "w") as file:
        process = run.start(errors=file)
    flipper, met = None, 0
    went_back = lambda: messages.read_text().count("; restoring from ")  # noqa: E731
    while met < flips:
        newest = max(run.begun(), 2)
        # After each return a new checkpoint: a disk that is damaged again and again ends the run.
        if not until(lambda: run.steps_done() > newest + 2, process):
            break
        flipper = flipper or Flipper(run, process, random)
        before = went_back()
        time.sleep(random.uniform(0, 0.02))  # anywhere in a step
        flipped = flipper.flip()
        at = run.steps_done()
        if flipped is None or not until(lambda: went_back() > before or run.steps_done() >= at + AFTER, process):
            break
        met += 1
        report.count("found: gone back to the checkpoint" if went_back() > before else flipper.unread(flipped), tries=1)
    code, _ = wait(process)
    if flipper:
        flipper.close()
    text = messages.read_text()
    assert code == 0, text
    assert len(re.findall(r"IO-06.*are not what was written", text)) >= went_back(), text
    assert run.result() == undisturbed(case[0], case[2], steps), text
    assert not run.leftovers()
    shutil.rmtree(run.directory)
    return met


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_run_goes_back_to_its_checkpoint_and_ends_as_if_nothing_had_happened(work, report, undisturbed, case):
    wanted, runs = -(-FLIPS // len(CASES)), 0
    while wanted > 0:
        engine = ("uring", "threads")[runs % 2]
        flips = min(FLIPS_OF_A_RUN, wanted)
        wanted -= flipped_again_and_again(work, f"{'_'.join(case)}_{runs}", case, engine, report.random(*case, runs), flips, report, undisturbed)
        runs += 1
        assert runs < 2 * FLIPS, "runs end before they are met"


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_without_a_checkpoint_the_run_ends_with_22(work, report, case):
    for i in range(-(-ENDING // len(CASES))):
        run = on_disk(work, f"alone_{'_'.join(case)}_{i}", case, ("uring", "threads")[i % 2], 400, 0)
        process = run.start()
        until(lambda: run.steps_done() > 2, process)
        flipper, flips = Flipper(run, process, report.random("alone", *case, i)), 0
        while flipper.flip():
            flips, at = flips + 1, run.steps_done()
            if not until(lambda: run.steps_done() >= at + AFTER, process):
                break
            report.count("not found without a checkpoint", tries=1)
        code, messages = wait(process)
        flipper.close()
        assert code == 22, f"{flips} flips and exit {code}\n{messages}"
        assert re.search(r"error IO-06 \(exit 22\).*are not what was written", messages), messages
        assert not (run.directory / "model").exists() and not run.leftovers()
        report.count("found without a checkpoint: exit 22", tries=1)


def test_many_flips_were_in_bytes_that_are_used(report):
    """Else nothing was shown."""
    assert report.outcomes.get("found: gone back to the checkpoint", 0) >= FLIPS / 4, report.outcomes
