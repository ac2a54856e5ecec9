"""Does a run on rows of every length stay within its plan, and cost no more per token?

A Llama of 4 layers of 256, 4 rows of 50 to 500 tokens per step: 500 steps, its peak against the plan; and turns of 100 steps
with drawn and with equal lengths, one thread, tokens per second of each pair of neighbours. Then 150 steps inside a control
group of 1.05 times the plan: everything in memory, everything on disk, and LoRA on SmolLM2-135M's shape (2 x 20 to 400
tokens). At last the quickstart, as ./dev demo trains it. --smoke: 10 steps, a turn of 5, no SmolLM2 and no quickstart.

Usage: varying_lengths.py BIN_DIR [--pairs 5] [--smoke] [--impossible]
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure, Figures, common_options
from train_step import SHAPE

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "e2e"))
from limits import memory_limit  # noqa: E402

SMALL = {**SHAPE, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 1024}
ROWS = 2000
DISK = ["train.recompute=block", "offload.paths=[\".\"]",
        *[f"offload.{name}=nvme" for name in ("optimizer", "gradients", "weights", "activations")]]


def prepare(work):
    drawn = random.Random(1)
    for name, shape in (("small", SMALL), ("smollm2", SHAPE)):
        (work / name).mkdir()
        (work / name / "config.json").write_text(json.dumps(shape))
        (work / name / "chat_template.jinja").write_text("{{ messages[0].content }}")
    lengths = {"drawn": lambda: drawn.randint(50, 500), "equal": lambda: 275, "short": lambda: drawn.randint(20, 400)}
    for name, length in lengths.items():
        with open(work / f"{name}.jsonl", "w") as file:
            for _ in range(ROWS):
                ids = [drawn.randrange(2000) for _ in range(length())]
                file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


class Runs:
    def __init__(self, bin_dir, work):
        self.program, self.work, self.count = bin_dir.resolve() / "lmlaunch", work, 0

    def train(self, data, steps, *settings, model="small", rows=4, limited=False):
        """Its step rows, peak and plan, in bytes; None where it did not live."""
        self.count += 1
        name = f"run{self.count}"
        (self.work / f"{name}.toml").write_text(f"""
[run]
device = "cpu"
[model]
path = "{model}"
init = "random"
[data]
train = ["{data}.jsonl"]
max_length = 512
cache_dir = "cache"
[train]
steps = {steps}
global_batch = {rows}
micro_batch = {rows}
""")
        command = [self.program, f"{name}.toml", *settings]
        if not limited:
            return self.result(self.start(command, None), name)
        plan = subprocess.run([self.program, "plan", *command[1:], "--json"], cwd=self.work, check=True, capture_output=True, text=True)
        limit = json.loads(plan.stdout)["peak"]["host_bytes"] * 105 // 100
        with memory_limit(limit) as enter:
            return self.result(self.start([*command, f"offload.host_memory={limit}B"], enter), name)

    def start(self, command, enter):
        return subprocess.run(command, cwd=self.work, capture_output=True, text=True, preexec_fn=enter)

    def result(self, done, name):
        if done.returncode != 0:
            print(done.stderr[-2000:])
            return None
        return read_run(self.work / "runs" / name, done.stderr)


def size_of(text):
    """Bytes of "2.54 GiB ..."."""
    number, unit = text.split()[:2]
    return float(number) * 2 ** {"MiB": 20, "GiB": 30}[unit]


def read_run(directory, log):
    rows = [json.loads(line) for line in open(directory / "metrics.jsonl")]
    return {"rows": [row for row in rows if "loss" in row],
            "peak": size_of(log.split("peak resident memory ")[1]),
            "planned": json.loads((directory / "plan.json").read_text())["peak"]["host_bytes"]}


def of_plan(run):
    return run and run["peak"] / run["planned"]


def tokens_per_s(run):
    rows = run["rows"][len(run["rows"]) // 5:]
    return 1e3 * sum(row["tokens"] for row in rows) / sum(row["step_ms"] for row in rows)


def quickstart(bin_dir, work):
    """Its run. The model and the text are made as configs/quickstart/demo.sh makes them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    model, data = cache / "lmlaunch" / "models" / "smollm2-135m-instruct", ROOT / "build" / "quickstart"
    data.mkdir(exist_ok=True)
    for script, *arguments in (("make_model.py", model), ("make_data.py", data / "model", data)):
        if script == "make_data.py":
            (data / "model").unlink(missing_ok=True)
            (data / "model").symlink_to(model)
        subprocess.run([sys.executable, f"configs/quickstart/{script}", *map(str, arguments)], cwd=ROOT, check=True)
    done = subprocess.run([bin_dir.resolve() / "lmlaunch", "configs/quickstart.toml", f"run.dir={work / 'quickstart'}"], cwd=ROOT,
                          capture_output=True, text=True, env=os.environ | {"LMLAUNCH_PYTHON": sys.executable})
    return read_run(work / "quickstart", done.stderr) if done.returncode == 0 else None


def main():
    parser = common_options(__doc__)
    parser.add_argument("--pairs", type=int)
    options = parser.parse_args()
    steps, turn, lived = (10, 5, 5) if options.smoke else (500, 100, 150)
    plan = "the plan's peak"
    figures = [Figure(f"peak of {steps} steps", "x", plan, at_most=1.03),
               Figure("tokens/s of drawn lengths", "x", "equal lengths", at_least=0.95),
               Figure(f"peak of {lived} steps in a limit, in memory", "x", plan, at_most=1.03),
               Figure(f"peak of {lived} steps in a limit, on disk", "x", plan, at_most=1.03)]
    if not options.smoke:
        figures += [Figure("peak of SmolLM2 with LoRA in a limit", "x", plan, at_most=1.03),
                    Figure("peak of the quickstart", "x", plan, at_most=1.03),
                    Figure("plan of the quickstart", "x", "its peak", at_most=1.03)]
    found = Figures(options, figures)
    with tempfile.TemporaryDirectory(prefix="lmlaunch-lengths-") as directory:
        work = Path(directory)
        prepare(work)
        runs = Runs(options.bin_dir, work)
        found.set(f"peak of {steps} steps", of_plan(runs.train("drawn", steps)))
        pairs = []
        for _ in range(options.pairs or (1 if options.smoke else 5)):
            drawn, equal = (runs.train(data, turn, "run.threads=1") for data in ("drawn", "equal"))
            pairs.append(tokens_per_s(drawn) / tokens_per_s(equal))
        found.set("tokens/s of drawn lengths", statistics.median(pairs))
        found.set(f"peak of {lived} steps in a limit, in memory", of_plan(runs.train("drawn", lived, limited=True)))
        found.set(f"peak of {lived} steps in a limit, on disk", of_plan(runs.train("drawn", lived, *DISK, limited=True)))
        if not options.smoke:
            lora = runs.train("short", lived, "train.method=lora", model="smollm2", rows=2, limited=True)
            found.set("peak of SmolLM2 with LoRA in a limit", of_plan(lora))
            run = quickstart(options.bin_dir, work)
            found.set("peak of the quickstart", of_plan(run))
            found.set("plan of the quickstart", run and 1 / of_plan(run))
    found.finish()


if __name__ == "__main__":
    main()
