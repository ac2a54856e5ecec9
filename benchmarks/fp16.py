"""Does fp16 with loss scaling learn what bf16 learns?

All weights of SmolLM2-135M on the quickstart's text (2 packed sequences of 256 tokens a step), 300 steps in fp16 and as many in bf16, both
with fp32 masters: the held-out loss after the last step. --smoke: two layers with random weights, 3 steps.

Usage: fp16.py BIN_DIR [--smoke] [--steps 300] [--threads 2]
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure, Figures, common_options
from lowmem import MAKE_MODEL, MODEL

FIGURE = "fp16: held-out loss"


def prepare(options, work):
    subprocess.run([sys.executable, MAKE_MODEL, MODEL], check=True)
    subprocess.run([sys.executable, MAKE_MODEL.with_name("make_data.py"), MODEL, work], check=True)
    model, config = work / "model", json.loads((MODEL / "config.json").read_text())
    model.mkdir()
    for file in MODEL.iterdir():
        if file.name != "config.json" and not (options.smoke and file.suffix == ".safetensors"):
            (model / file.name).symlink_to(file)
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2} if options.smoke else config))
    (work / "fp16.toml").write_text(f"""
[run]
device = "cpu"
[model]
path = "model"
init = "{"random" if options.smoke else "pretrained"}"
[data]
train = ["train.jsonl"]
eval = ["eval.jsonl"]
max_length = 256
packing = true
[train]
steps = {3 if options.smoke else options.steps or 300}
global_batch = 2
micro_batch = 2
[optimizer]
lr = 1e-4
master = "fp32"
[checkpoint]
every = 0
""")


def train(options, work, dtype):
    """The held-out loss before the first step and after the last, and how many steps the scale has skipped."""
    run = work / dtype
    done = subprocess.run([options.bin_dir.resolve() / "lmlaunch", "--gpus", "0", "fp16.toml", f"model.dtype={dtype}", f"run.dir={run}",
                           f"run.threads={options.threads}"], cwd=work, capture_output=True, text=True,
                          env=os.environ | {"LMLAUNCH_PYTHON": sys.executable})
    if done.returncode != 0:
        sys.exit(done.stderr)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return losses[0], losses[-1], sum(1 for row in rows if row.get("overflow"))


def main():
    parser = common_options(__doc__)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    figures = Figures(options, [Figure(FIGURE, "x", "bf16's", at_most=1.01)])
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(options, work)
        (first, bf16, _), (_, fp16, skipped) = (train(options, work, dtype) for dtype in ("bf16", "fp16"))
    figures.set(FIGURE, fp16 / bf16, f"bf16's, {bf16:.4f} (before the first step {first:.4f}; {skipped} steps skipped)")
    figures.finish()


if __name__ == "__main__":
    main()
