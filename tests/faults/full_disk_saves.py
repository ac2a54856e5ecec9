"""Disks that are full when a run wants to save: the run goes on, says so (CKPT-03) and tries again when the next save is due; after
three failures in a row it ends with exit 20 and its model. What was saved before is untouched, and once there is room again the
next start goes on.

  full_disk_saves.py [--short]

The checkpoints of a run lie on a disk of their own, a tmpfs or an ext4 of 16 MiB (loop device; root), so that it can be filled to
its last byte. It is filled before a save (which the save's preflight sees), between the preflight and the writing of the shard, or
of the manifest (strace holds the save there); or the process may not write files of that size (RLIMIT_FSIZE). --short: some of this, on tmpfs."""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import BIN, Row

FAILED = r"warning CKPT-03: the checkpoint of step \d+ cannot be saved"
EVERY = 2  # seconds between saves: what is full can be seen, and emptied, before the next
SPACE = "16m"  # two checkpoints of 5 MiB, and not three


def sh(*argv):
    return subprocess.run([str(word) for word in argv], capture_output=True, text=True)


def must(*argv):
    done = sh(*argv)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {done.stdout}{done.stderr}")
    return done


def begin(work, name):
    """A run's directory, in which nothing is saved yet."""
    run = Run(work, name, strace=())
    while not (work / "runs" / name / "config.toml").exists():
        assert run.process.poll() is None, run.text()
        time.sleep(0.01)
    run.kill()


@contextlib.contextmanager
def disk(system, work, at):
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir(parents=True)
    if system == "tmpfs":
        must("mount", "-t", "tmpfs", "-o", f"size={SPACE}", "tmpfs", at)
    else:
        image = work / f"{at.parent.name}.img"
        must("truncate", "-s", SPACE, image)
        must("mkfs.ext4", "-q", image)
        must("mount", "-o", "loop,errors=remount-ro", image, at)
    try:
        yield at
    finally:
        for _ in range(200):  # a killed run's files are closed a moment later
            if sh("umount", at).returncode == 0:
                break
            time.sleep(0.05)


def prepare(work):
    """A model of which only the shape is told, whose state takes 5 MiB, and examples that are already tokens."""
    (work / "shape").mkdir()
    (work / "shape" / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 64, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0}))
    with open(work / "train.jsonl", "w") as file:
        for i in range(32):
            file.write(json.dumps({"input_ids": [(7 * i + 3 * k) % 500 for k in range(24)]}) + "\n")
    (work / "c.toml").write_text(f"""
[run]
device = "cpu"
threads = 1
[model]
path = "shape"
init = "random"
dtype = "bf16"
[data]
train = ["train.jsonl"]
max_length = 32
cache_dir = "cache"
[train]
steps = 1000000
global_batch = 4
micro_batch = 4
[checkpoint]
every = "{EVERY}s"
keep = 1
""")


def fill(at, leave=0):
    """To the last byte, but for `leave`."""
    with open(at / "filler", "ab", buffering=0) as file:
        state = os.statvfs(at)
        with contextlib.suppress(OSError):  # the run has taken some of it in the meantime
            os.posix_fallocate(file.fileno(), 0, max(state.f_bavail * state.f_frsize - leave - (1 << 16), 1))
        file.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):
            while leave == 0 and file.write(bytes(4096)):
                pass


def empty(at):
    (at / "filler").unlink(missing_ok=True)


def hashes(at):
    """Of what was saved. The next save may be under way as soon as one is reported."""
    return {str(path.relative_to(at)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(at.glob("step_*/*"))
            if ".tmp-" not in path.parent.name}


class Run:
    """A run that is looked at from outside."""

    def __init__(self, work, name, *options, strace=()):
        self.err = work / f"{name}.err"
        self.name, self.work = name, work
        self.file = open(self.err, "a")
        self.begin = self.err.stat().st_size
        self.process = subprocess.Popen([*strace, BIN / "lmlaunch", "c.toml", f"run.dir=runs/{name}", *options], cwd=work, stderr=self.file,
                                        start_new_session=True)

    def text(self):
        return self.err.read_bytes()[self.begin:].decode()

    def wait_for(self, pattern, count=1, seconds=60):
        deadline = time.monotonic() + seconds
        while len(re.findall(pattern, self.text())) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {count}th \"{pattern}\":\n{self.text()[-3000:]}"
            time.sleep(0.005)

    def cli(self):
        """strace's child, where it watches."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if self.process.args[0] == "strace" else self.process.pid

    def rank(self):
        for pid in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if pid.name.isdigit() and b"lmlaunch-cpu" in (pid / "cmdline").read_bytes().split(b"\0")[0] \
                        and f"runs/{self.name}".encode() in (pid / "cmdline").read_bytes():
                    return int(pid.name)
        raise AssertionError("no rank")

    def ended(self, code):
        try:
            self.process.wait(timeout=60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.file.close()
        text = self.text()
        assert self.process.returncode == code, f"exit {self.process.returncode}, not {code}:\n{text[-3000:]}"
        assert text.rstrip().splitlines()[-1].startswith(f"lmlaunch: stop code={code} "), text[-3000:]
        return text

    def stop(self, code=75):
        os.kill(self.cli(), signal.SIGTERM)
        return self.ended(code)

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        with open(self.work / "runs" / self.name / ".lock", "r+b") as lock:  # the rank has it for some milliseconds more
            for _ in range(1000):
                try:
                    return fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    time.sleep(0.01)


def goes_on(work, name, at):
    """The next start finds what is there, and the next save succeeds and leaves no litter."""
    run = Run(work, name)
    try:
        run.wait_for(r"resumes from \S+step_\d+")
        run.wait_for("COMMITTED")
        run.stop()
    finally:
        run.kill()
    assert [path.name for path in at.glob("step_*.tmp-*")] == [], list(at.iterdir())
    assert len(list(at.glob("step_*"))) == 1
    must(BIN / "save_tool", "verify", next(at.glob("step_*")))


def saved_once(work, name, **how):
    run = Run(work, name, **how)
    try:
        run.wait_for("COMMITTED")
    except BaseException:
        run.kill()
        raise
    return run


# Each gets a run that has just committed a checkpoint, and the disk; and ends the run.

def survives(failures, times=1):
    def scenario(run, at):
        for time_ in range(times):
            fill(at)
            before = hashes(at)
            run.wait_for(FAILED, failures * (time_ + 1))
            assert hashes(at) == before and not list(at.glob("*.tmp-*"))
            empty(at)
            run.wait_for("COMMITTED", len(re.findall("COMMITTED", run.text())) + 1)
            assert len(re.findall(FAILED, run.text())) == failures * (time_ + 1)
        run.stop()
    return scenario


def gives_up(run, at):
    fill(at)
    before = hashes(at)
    text = run.ended(20)
    assert len(re.findall(FAILED, text)) == 2 and "cannot be saved" in text.splitlines()[-4], text[-3000:]
    assert re.search(r"kept: the model after step \d+, in \S+model", text), text[-3000:]
    assert hashes(at) == before and before and not list(at.glob("*.tmp-*"))
    empty(at)


def cannot_stop(run, at):
    """Who asks for a stop is told that nothing was saved."""
    fill(at)
    before = hashes(at)
    text = run.stop(20)
    assert "cannot be saved" in text and re.search(r"kept: \S+step_\d+", text), text[-3000:]
    assert hashes(at) == before
    empty(at)


def limited(run, at):
    rank = run.rank()
    before = hashes(at)
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (1 << 20, -1))
    run.wait_for(FAILED, 2)
    assert hashes(at) == before
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (-1, -1))
    run.wait_for("COMMITTED", len(re.findall("COMMITTED", run.text())) + 1)
    run.stop()


def filled_between(run, at):
    """strace holds each save where it has just reserved its shard, or could not, for seconds."""
    before, deadline = hashes(at), time.monotonic() + 60
    while not list(at.glob("*.tmp-*/*")):
        before = hashes(at)
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.002)
    fill(at)
    run.wait_for(FAILED)
    assert hashes(at) == before and before and not list(at.glob("*.tmp-*"))
    empty(at)
    run.wait_for("COMMITTED", len(re.findall("COMMITTED", run.text())) + 1)
    run.stop()


def held(what):
    return ["strace", "-f", "-qq", "--seccomp-bpf", "-o", "/dev/null", "-e", "trace=fallocate", "-e", f"inject=fallocate:{what}:when=2+"]


SCENARIOS = {
    "one failed save": (survives(1), ()),
    "two failed saves, twice": (survives(2, 2), ()),
    "three in a row": (gives_up, ()),
    "a stop": (cannot_stop, ()),
    "RLIMIT_FSIZE": (limited, ()),
    "full before the shard is written": (filled_between, held("error=EOPNOTSUPP:delay_exit=3s")),
    "full before the manifest is written": (filled_between, held("delay_exit=3s")),
}


SHORT = ["two failed saves, twice", "three in a row", "full before the shard is written"]


def try_scenario(work, row, system, name, scenario, strace):
    """Runs the scenario with a run of its own on a file system of that kind, into the row: what was wrong, none or one."""
    run_name = f"{system}-{name.replace(' ', '_')}"
    at = work / "runs" / run_name / "checkpoints"
    start = time.monotonic()
    row.row["tries"] += 1
    begin(work, run_name)
    with disk(system, work, at):
        run = None
        try:
            run = saved_once(work, run_name, strace=strace)
            scenario(run, at)
            goes_on(work, run_name, at)
            row.count("as specified")
            print(f"{system}, {name}: as specified ({time.monotonic() - start:.1f} s)", flush=True)
        except (AssertionError, RuntimeError, OSError, subprocess.TimeoutExpired) as what:
            row.count("wrong")
            return [f"{system}, {name}: {what}"]
        finally:
            if run is not None:
                run.kill()
    return []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    row = Row("full_disk_saves", "a full disk at a save", "tmpfs and ext4 filled before and while a save writes, RLIMIT_FSIZE; through lmlaunch")
    if os.geteuid() != 0:
        row.skip("mounting a file system needs root")
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        for system in ["tmpfs"] if short else ["tmpfs", "ext4"]:
            for name in SHORT if short else SCENARIOS:
                wrong += try_scenario(work, row, system, name, *SCENARIOS[name])
    row.write()
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
