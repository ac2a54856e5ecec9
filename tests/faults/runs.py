"""What the suites of whole-program faults share: a tiny run and what it gives when nothing happens to it, the ways to start, hurt
and resume it, and the row of a suite in the reliability report.

Short counts by default; LM_FAULTS=full in the environment asks for the counts of the report."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rows import BIN, write_row

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "parity"))
import tiny_models  # noqa: E402

FULL = os.environ.get("LM_FAULTS") == "full"
STEPS, EVERY = 30, 3
METHODS = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}
MODEL_FILES = {**METHODS, "qlora": METHODS["lora"]}
# Eval loss is least after some steps and far above it after the others, whatever a processor's bits are: the rate falls.
RATES = {"full": 0.005, "lora": 0.03, "qlora": 0.03}
# On the CPU, device and host are one tier.
PLACES = {"resident": [], "nvme": [f'offload.{name}="nvme"' for name in ("optimizer", "weights", "gradients")]}
# The emulated GPU (tests/emulator), beside which host memory is a tier of its own.
EMULATOR = BIN.parent / "emulator"
EMULATOR_ENVIRONMENT = {**os.environ, "LD_PRELOAD": str(EMULATOR / "lib" / "libemulator_devices.so"), "LD_LIBRARY_PATH": str(EMULATOR / "lib")}
EMULATOR_PLACES = {"device": ["run.device=cuda"],
               "host": ["run.device=cuda", *(f"offload.{name}=host" for name in ("optimizer", "weights", "gradients"))]}
# What a run computes; times and sizes differ.
COMPUTED = ("step", "loss", "grad_norm", "lr", "target_tokens", "tokens", "skipped", "eval_loss")


def make_work(directory, layers=5):
    """A model of more layers than there are slots, so that every step reads of what is on disk; 28 examples, and a run of several
    epochs whose rate falls at a plateau, with saves between."""
    model = tiny_models.make("llama_three_heads_per_key_tied_with_pad_token", directory / "model", num_hidden_layers=layers)
    generator = torch.Generator().manual_seed(2)
    for name, count in [("train", 28), ("eval", 4)]:
        with open(directory / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                ids = torch.randint(4, 331, (int(torch.randint(3, 21, (1,), generator=generator)),), generator=generator).tolist()
                if name == "eval":  # what the model says by itself: training on other text makes it less likely, on any processor
                    while len(ids) < 20:
                        with torch.no_grad():
                            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
                file.write(json.dumps({"input_ids": ids, "labels": [-100] * 2 + ids[2:]}) + "\n")
    (directory / "c.toml").write_text(
        'run.device = "cpu"\nrun.threads = 1\nmodel.path = "model"\nmodel.dtype = "bf16"\n'
        '[data]\ntrain = ["train.jsonl"]\neval = ["eval.jsonl"]\nmax_length = 24\ncache_dir = "cache"\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = 4\nmicro_batch = 2\nrecompute = "none"\neval_every = 1\n'
        '[optimizer]\nschedule = "reduce_lr_on_plateau"\nwarmup = 3\n'
        f'[lora]\nr = 4\nalpha = 8\ndropout = 0.1\n[checkpoint]\nevery = {EVERY}\n')
    return directory


class Run:
    """A run's directory, and how it is started."""

    def __init__(self, work, name, method="full", place="resident", *changes, bin=BIN, environment=None):
        self.work, self.name, self.method = work, name, method
        self.directory, self.swap = work / "runs" / name, work / "swap" / name
        shutil.rmtree(self.directory, ignore_errors=True)
        self.swap.mkdir(parents=True, exist_ok=True)
        if place in EMULATOR_PLACES:
            bin, environment = EMULATOR / "bin", EMULATOR_ENVIRONMENT
        paths = [f'offload.paths=["swap/{name}"]'] if PLACES.get(place) else []
        rate = [] if any(change.startswith("optimizer.lr=") for change in changes) else [f"optimizer.lr={RATES[method]}"]
        self.arguments = ["c.toml", f"run.dir=runs/{name}", f'train.method="{method}"', *rate, *{**PLACES, **EMULATOR_PLACES}[place], *paths, *changes]
        self.program, self.environment, self.killed_when_done = bin / "lmlaunch", environment, False

    def start(self, *more, errors=subprocess.PIPE):
        return subprocess.Popen([self.program, *self.arguments, *more], cwd=self.work, env=self.environment, stdout=subprocess.DEVNULL,
                                stderr=errors, text=True, start_new_session=True)

    def finish(self, *more, code=0):
        """Runs to its end; the messages."""
        ended, messages = wait(self.start(*more))
        assert ended == code, f"exit {ended} instead of {code}\n{messages}"
        return messages

    def rows(self):
        with contextlib.suppress(FileNotFoundError):
            lines = (self.directory / "metrics.jsonl").read_text().split("\n")
            return [json.loads(line) for line in lines[:-1]]  # what follows the last line break is a row that was cut off
        return []

    def steps_done(self):
        return max((row["step"] for row in self.rows() if "loss" in row), default=0)

    def status(self):
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.directory / "status.json").read_text())
        return {}

    def done(self):
        return self.status().get("state") == "done"

    def checkpoints(self):
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in (self.directory / "checkpoints").iterdir())
        return []

    def begun(self):
        """The newest step of which a save was begun, by the names that are there."""
        return max((int(name[len("step_"):][:8]) for name in self.checkpoints()), default=0)

    def result(self):
        """Everything that the run has computed: its rows, each step of which came once, and the bytes of its model."""
        curve = [tuple((key, row[key]) for key in COMPUTED if key in row) for row in self.rows()]
        return curve, (self.directory / "model" / MODEL_FILES[self.method]).read_bytes()

    def leftovers(self):
        """Files that nobody needs after the run, and processes that still hold one of its files. A run that is killed when it is
        done, but for its page and its model's card, may leave one of these half written."""
        temporary = [path for path in self.directory.rglob("*") if ".tmp" in path.name]
        if self.killed_when_done:
            temporary = [path for path in temporary if not path.name.startswith(("report.html.tmp-", "README.md.tmp-"))]
        return [*temporary, *self.swap.rglob("*"), *holders(self.directory), *holders(self.swap)]

    def wait_until_free(self):
        """A process that was killed is gone when the kernel has torn it down."""
        for _ in range(6000):
            if not (held := holders(self.directory)):
                return
            time.sleep(0.01)
        raise AssertionError(f"still there: {held}")


def holders(directory):
    """Processes with an open file or a working directory below `directory`, deleted files included. Not a copy of this process that
    another thread has forked and that has not become its program yet: it shares the files that this process had open."""
    out, prefix = [], str(directory) + "/"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if os.readlink(process / "exe") == os.readlink("/proc/self/exe"):
                continue
            for link in [process / "cwd", *(process / "fd").iterdir()]:
                with contextlib.suppress(OSError):
                    if (target := os.readlink(link)).startswith(prefix):
                        out.append(f"process {process.name}: {target}")
    return out


def wait(process, seconds=300):
    try:
        _, messages = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return process.returncode, messages


def ready(process):
    """Waits until the program's first line has run, which blocks stop signals and then ignores SIGPIPE (what it waits for with
    sigwaitinfo does not show as blocked); from then on it counts signals. False where it has ended before."""
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            ignored = Path(f"/proc/{process.pid}/status").read_text().split("SigIgn:\t")[1].split()[0]
            if int(ignored, 16) & 1 << (signal.SIGPIPE - 1):
                return True
        time.sleep(0.0005)
    return False


def rank_of(process):
    """The CLI's child, not the one that waits for the CLI's end; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().startswith("lmlaunch"):
                return int(child)
    return None


def kill(process, whom="group"):
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        if whom == "group":
            return os.killpg(process.pid, signal.SIGKILL)
        victim = process.pid if whom == "cli" else rank_of(process)
        if victim:
            os.kill(victim, signal.SIGKILL)


def resumed_at(messages):
    """The step that a start went on from; 0: it began."""
    lines = [line for line in messages.splitlines() if "resumes from " in line]
    return int(lines[-1].rsplit(" ", 1)[1]) if lines else 0


AT_ONCE = 4  # shares of a suite


def shared(total, share):
    """Calls share(number, its part of `total`), AT_ONCE of them at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda n: share(n, (total + n) // AT_ONCE), range(AT_ONCE)))


class Undisturbed:
    """What the runs of a method and place give when nobody disturbs them, and how long they take at present."""

    def __init__(self, work):
        self.work, self.known = work, {}

    def __call__(self, method, place="resident"):
        device = "device" if place in EMULATOR_PLACES else "resident"
        if (method, device) not in self.known:
            run = Run(self.work, f"undisturbed_{method}_{device}", method, device)
            run.finish()
            self.known[method, device] = run.result()
            steps = [row["step"] for row in run.rows() if "loss" in row]
            rates = [row["lr"] for row in run.rows() if "lr" in row]
            assert steps == list(range(1, STEPS + 1)) and rates[-1] < max(rates)
        return self.known[method, device]

    def pace(self, method, place):
        run = Run(self.work, f"timed_{method}_{place}", method, place)
        start = time.monotonic()
        process = run.start()
        while process.poll() is None and not run.steps_done():
            time.sleep(0.002)
        first = time.monotonic()
        code, messages = wait(process)
        assert code == 0, messages
        assert run.result() == self(method, place), "another home gives other bits"
        return Pace(first - start, (time.monotonic() - first) / STEPS)


class Pace:
    """How long the next start takes if nothing happens to it: other programs use this machine, too."""

    def __init__(self, start, step):
        self.start, self.step, self.slower = start, step, 1.0

    def left(self, run):
        return self.slower * (self.start + self.step * (STEPS - run.steps_done()))

    def learn(self, expected, taken):
        self.slower *= min(max(taken / expected, 0.5), 2) ** 0.5


class Report:
    """Counts what happened, and writes the suite's row."""

    def __init__(self, suite, failure, how):
        self.suite, self.failure, self.how = suite, failure, how
        self.seed = int(os.environ.get("LM_FAULTS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
        self.begin, self.tries, self.outcomes, self.figures = time.monotonic(), 0, {}, {}
        print(f"LM_FAULTS_SEED={self.seed}")  # pytest shows it where a test fails

    def random(self, *key):
        return random.Random(f"{self.seed} {key}")

    def count(self, outcome, tries=0):
        self.tries += tries
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def most(self, figure, value):
        self.figures[figure] = max(self.figures.get(figure, value), value)

    def write(self):
        row = {"failure": self.failure, "how": self.how, "tries": self.tries, "outcomes": self.outcomes, "figures": self.figures,
               "seed": self.seed, "seconds": round(time.monotonic() - self.begin, 1)}
        write_row(self.suite, row)
