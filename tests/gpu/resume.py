"""Runs on the GPU that are killed (SIGKILL) or told to stop (SIGTERM) after some steps, and started again: the losses of all
steps are those of a run that nobody ended. In full, LoRA, with state in host memory, on disk, and of 8 bits.

  python resume.py BIN [KIND...]      exit status 0 if all went on bit for bit
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import smoke

STEPS, EVERY, BEFORE = 60, 7, 20  # steps, steps between checkpoints, steps before a run is ended
LIMIT_S = 60
KINDS = {"full": [], "lora": smoke.METHODS["lora"], "host": ['offload.optimizer="host"', 'offload.weights="host"'],
         "disk": ['offload.optimizer="nvme"', 'offload.paths=["."]'],
         "adamw_8bit": ['optimizer.name="adamw_8bit"', 'offload.optimizer="host"']}


def command(program, name, settings):
    return [program, "c.toml", 'run.device="cuda"', f'run.dir="runs/{name}"', f"checkpoint.every={EVERY}",
            f"train.steps={STEPS}", *settings]


def losses(work, name):
    file = work / "runs" / name / "metrics.jsonl"
    return smoke.losses_of(work, name)[0] if file.exists() else []


def run_whole(program, work, name, settings):
    """What went wrong, or nothing."""
    done = subprocess.run(command(program, name, settings), cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          timeout=LIMIT_S)
    return "" if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr[-800:]}"


def end_early(program, work, name, settings, how):
    """The exit status of a run that `how` ended."""
    run = subprocess.Popen(command(program, name, settings), cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    file = work / "runs" / name / "metrics.jsonl"
    while time.monotonic() < deadline and run.poll() is None and not (file.exists() and file.read_text().count('"loss"') >= BEFORE):
        time.sleep(0.005)
    if run.poll() is None:
        (os.killpg if how == signal.SIGKILL else os.kill)(run.pid, how)
    return run.wait(LIMIT_S)


def check(program, work, kind, how):
    """What went wrong, or nothing."""
    name = f"{kind}-{how.name}"
    ended = end_early(program, work, name, KINDS[kind], how)
    if ended != (-signal.SIGKILL if how == signal.SIGKILL else 75):
        return f"it ended with {ended} before it was told to"
    if problem := run_whole(program, work, name, KINDS[kind]):
        return problem
    want, found = losses(work, kind), losses(work, name)
    return "" if found == want and len(want) == STEPS else f"other losses: {found} instead of {want}"


def main():
    program = Path(sys.argv[1]).resolve() / "lmlaunch"
    kinds = sys.argv[2:] or list(KINDS)
    passed, hows = 0, (signal.SIGKILL, signal.SIGTERM)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        smoke.make_work(work)
        for kind in kinds:
            whole = run_whole(program, work, kind, KINDS[kind])
            for how in hows:
                problem = whole or check(program, work, kind, how)
                passed += not problem
                print(f"resume: {kind}, {how.name}: {'FAILED: ' + problem if problem else 'the same losses'}", flush=True)
    print(f"figure: {passed} of {len(kinds) * len(hows)} runs that were ended went on bit for bit")
    return 0 if passed == len(kinds) * len(hows) else 1


if __name__ == "__main__":
    sys.exit(main())
