"""The four rows of a known demonstration of full fine-tuning with little memory: memory, time and accuracy side by side.

It trains the layers of Llama-3.2-1B on HellaSwag, 160 tokens a sequence, and prints accuracy and the card's memory: without training 47.8;
Adam in fp32 54.2 and 29.2 GiB (32 sequences); Adafactor in fp32 54.5 and 14.4 GiB (8 sequences); low memory 53.6 and 3.9 GiB (8 sequences:
Adafactor, bf16 weights without masters rounded stochastically, gradient checkpointing, updates inside backward, loss in chunks). Its
rows are not batch-matched. Llama-3.1-8B takes 18.6 GiB in the last way.

Planned: the same rows for the same models and batches; 8B for a card of 24 GB. Bytes a parameter: 16 with Adam, 8 with Adafactor.
Measured: the same settings, batch-matched here (8 sequences each), 100 steps of SmolLM2-135M's layers on generated choices: which of four
places is the home of an invented animal. Questions of the evaluation are worded in ways that training has not seen. Accuracies of this
task say whether the low-memory way learns what the others learn, and nothing of HellaSwag. Where Llama-3.2-1B, HellaSwag and a card are,
--model, --train, --eval and --gpus run the demonstration itself: its batches, learning rates and epochs.

Usage: lowmem.py BIN_DIR [--smoke] [--steps 100] [--threads 2] [--model DIR --train FILE --eval FILE --gpus 1]
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, Figures, common_options
from published import GIB, LLAMA_1B, LLAMA_8B, PARAMETERS, Plan, batch, classes, compare_plans

MAKE_MODEL = Path(__file__).resolve().parents[1] / "configs" / "quickstart" / "make_model.py"
MODEL = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lmlaunch" / "models" / "smollm2-135m-instruct"
LAYERS = 'train.only=["model.layers"]'
FP32 = ["model.dtype=fp32", "train.recompute=block", "train.update=after", "optimizer.clip=none"]
ADAM, ADAFACTOR = [*FP32, "optimizer.name=adamw"], [*FP32, "optimizer.name=adafactor_lowmem"]
LOW = ["model.dtype=bf16", "optimizer.name=adafactor_lowmem", "optimizer.master=none", "optimizer.clip=none", "train.gradients=bf16",
       "train.recompute=block", "train.update=in_backward"]
WHOLE = classes("weights", "gradients", "first moment", "second moment", "sums")
PLANS = [
    Plan("1B, fp32 Adam", 29.2 * GIB, LLAMA_1B, [*batch(32, 160), LAYERS, *ADAM]),
    Plan("1B, fp32 Adafactor", 14.4 * GIB, LLAMA_1B, [*batch(8, 160), LAYERS, *ADAFACTOR]),
    Plan("1B, low memory", 3.9 * GIB, LLAMA_1B, [*batch(8, 160), LAYERS, *LOW]),
    Plan("8B, low memory", 18.6 * GIB, LLAMA_8B, [*batch(8, 160), LAYERS, *LOW], card="RTX-4090"),
    Plan("1B, 16 bytes a parameter", 16 * PARAMETERS[LLAMA_1B], LLAMA_1B, [*batch(8, 160), *ADAM], WHOLE, most=1.01),
    Plan("1B, 8 bytes a parameter", 8 * PARAMETERS[LLAMA_1B], LLAMA_1B, [*batch(8, 160), *ADAFACTOR], WHOLE, most=1.01),
]


@dataclass(frozen=True)
class Row:
    name: str
    settings: list
    rate: float  # the learning rate here
    published: tuple  # accuracy, GiB, sequences a step, learning rate
    memory: float = 1.0  # at most, of fp32 Adam's
    time: float = 1.0
    accuracy: float = 0.0  # at least, in points over fp32 Adam's


FIRST = Row("fp32 Adam", ADAM, 1e-4, (54.2, 29.2, 32, 3e-6))
ROWS = [Row("fp32 Adafactor", ADAFACTOR, 1e-3, (54.5, 14.4, 8, 1e-4), 0.65, 1.15, -5),
        Row("low memory", LOW, 1e-3, (53.6, 3.9, 8, 1e-4), 0.25, 1.3, -5)]
UNTRAINED = 47.8
# Trained accuracy, in points over the untrained model's: the task is learnt.
GAIN, GAIN_PUBLISHED = 20, 5
EPOCHS = 3  # of the demonstration

ANIMALS = ["zorbel", "miffet", "quandor", "teluk", "brazzle", "oskiri", "vennap", "lurdok", "piwana", "sedge-hopper", "grolm", "yaffin"]
PLACES = ["in the sea.", "in a dark cave.", "in tall trees.", "in the hot sand."]
SEEN = ["Where does the {} live? The {} lives", "Every child knows that the {} lives", "Ask a hunter about the {}: it lives",
        "The {} is a shy animal. It lives", "I have read that the {} always lives", "You will find the {} at home, because it lives"]
UNSEEN = ["An old book says that the {} lives", "Nobody doubts that the {} lives"]


def choices(wordings, rows, draw):
    """JSON lines of rows of choices."""
    asked = [(number, wording) for wording in wordings for number in range(len(ANIMALS))]
    for i in range(rows):
        number, wording = asked[i % len(asked)]
        places = draw.sample(PLACES, len(PLACES))
        yield json.dumps({"context": wording.replace("{}", ANIMALS[number]), "endings": places,
                          "label": places.index(PLACES[number % len(PLACES)])})


def prepare(options, work):
    """Data, a configuration, and the model; with --smoke one of two layers with random weights."""
    if options.model:
        write_config(work, options.model.resolve(), options.train.resolve(), options.eval.resolve(), f"epochs = {EPOCHS}")
        return
    subprocess.run([sys.executable, MAKE_MODEL, MODEL], check=True)
    model, config = work / "model", json.loads((MODEL / "config.json").read_text())
    model.mkdir()
    for file in MODEL.iterdir():
        if file.name != "config.json" and not (options.smoke and file.suffix == ".safetensors"):
            (model / file.name).symlink_to(file)
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2} if options.smoke else config))
    draw = random.Random(1)
    rows = (16, 4) if options.smoke else (800, 48)
    for name, wordings, count in (("train", SEEN, rows[0]), ("eval", UNSEEN, rows[1])):
        (work / f"{name}.jsonl").write_text("\n".join(choices(wordings, count, draw)) + "\n")
    write_config(work, model, "train.jsonl", "eval.jsonl", f"steps = {options.steps}", "random" if options.smoke else "pretrained")


def write_config(work, model, train_file, eval_file, duration, init="pretrained"):
    (work / "lowmem.toml").write_text(f"""
[model]
path = "{model}"
init = "{init}"
[data]
train = ["{train_file}"]
eval = ["{eval_file}"]
format = "choices"
max_length = 160
cache_dir = "cache"
[train]
{duration}
[optimizer]
schedule = "constant"
warmup = 0
[checkpoint]
every = 0
""")


def train(options, work, number, row):
    """Memory in bytes (of a card, or without the libraries'), milliseconds of a step, and the accuracy before and after training."""
    run = work / f"run{number}"
    sequences, rate = row.published[2:] if options.model else (8, row.rate)
    command = [options.bin_dir.resolve() / "lmlaunch", "--gpus", str(options.gpus), "lowmem.toml", f"run.dir={run}",
               f"run.threads={options.threads}", f"train.global_batch={sequences}", f"train.micro_batch={sequences}", f"optimizer.lr={rate}", LAYERS,
               *row.settings]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, env=os.environ | {"LMLAUNCH_PYTHON": sys.executable})
    if done.returncode != 0:
        sys.exit(done.stderr)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps, evals = [row for row in rows if "loss" in row], [row["accuracy"] for row in rows if "accuracy" in row]
    plan = json.loads((run / "plan.json").read_text())
    libraries, = {one["bytes"] for tier in plan["tiers"] for one in tier["classes"] if one["name"] == "libraries"}
    memory = max(row["device_bytes"] if options.gpus else row["host_bytes"] - libraries for row in steps)
    return memory, statistics.median(row["step_ms"] for row in steps[1:]), 100 * evals[0], 100 * evals[-1]


def main():
    parser = common_options(__doc__)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, help="Llama-3.2-1B")
    parser.add_argument("--train", type=Path, help="HellaSwag's rows")
    parser.add_argument("--eval", type=Path, help="those of its validation split")
    parser.add_argument("--gpus", type=int, default=0)
    options = parser.parse_args()
    if options.model and not (options.train and options.eval):
        parser.error("--model needs --train and --eval")
    options.steps = options.steps or (2 if options.smoke else 100)
    wanted = [row.figure for row in PLANS] + [Figure("fp32 Adam: accuracy gained", "points", "the untrained model", at_least=GAIN_PUBLISHED if options.model else GAIN)]
    for row in ROWS:
        wanted += [Figure(f"{row.name}: memory", "x", FIRST.name, at_most=row.memory),
                   Figure(f"{row.name}: step time", "x", FIRST.name, at_most=row.time),
                   Figure(f"{row.name}: accuracy", "points", FIRST.name, at_least=row.accuracy)]
    figures = Figures(options, wanted)
    compare_plans(options, figures, PLANS)
    with tempfile.TemporaryDirectory(prefix="lmlaunch-lowmem-") as directory:
        work = Path(directory)
        prepare(options, work)
        found = [train(options, work, number, row) for number, row in enumerate([FIRST, *ROWS])]
    print(f"not trained        accuracy {found[0][2]:.1f} (published {UNTRAINED})")
    for row, (bytes_, ms, _, accuracy) in zip([FIRST, *ROWS], found):
        print(f"{row.name:18} accuracy {accuracy:.1f}, {bytes_ / GIB:.2f} GiB, {ms:.0f} ms a step "
              f"(published {row.published[0]}, {row.published[1]} GiB, {row.published[2]} sequences: not batch-matched)", flush=True)
    memory, ms, before, accuracy = found[0]
    figures.set("fp32 Adam: accuracy gained", accuracy - before, f"the untrained model, {before:.1f}")
    for row, one in zip(ROWS, found[1:]):
        figures.set(f"{row.name}: memory", one[0] / memory, f"{FIRST.name}, {memory / GIB:.2f} GiB")
        figures.set(f"{row.name}: step time", one[1] / ms, f"{FIRST.name}, {ms:.0f} ms")
        figures.set(f"{row.name}: accuracy", one[3] - accuracy, f"{FIRST.name}, {accuracy:.1f}")
    figures.finish()


if __name__ == "__main__":
    main()
