"""The program as a user starts it, on the GPU and on the CPU: bin/lmlaunch trains a tiny fresh model, all of it and LoRA, in fp32
and bf16, and the losses must agree. In well under a minute, before anything else is tried on a machine. Needs only what torch
brings: the model is a config.json whose weights lmlaunch draws, the data is token ids.

  python smoke.py BIN [PAIR...]      exit status 0 if everything agreed; PAIR: only these, e.g. lora-bf16
"""

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, VOCAB, LENGTH = 5, 320, 64
# Relative, of the loss; bf16 rounds at different places where the order of sums differs.
BOUNDS = {"fp32": 1e-4, "bf16": 5e-3}
TIMEOUT_S = 60

MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
         "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
         "bos_token_id": 1, "eos_token_id": 2}
CONFIG = f"""
[run]
threads = 2
[model]
path = "model"
init = "random"
[data]
train = ["train.jsonl"]
max_length = {LENGTH}
packing = true
cache_dir = "cache"
[train]
steps = {STEPS}
global_batch = 4
micro_batch = 2
[optimizer]
lr = 3e-3
schedule = "constant"
eps = 1e-5
"""
METHODS = {"full": [], "lora": ['train.method="lora"', "lora.r=8", "lora.alpha=16", "lora.dropout=0.1", "optimizer.lr=2e-2"]}


def make_work(work):
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps(MODEL))
    (work / "c.toml").write_text(CONFIG)
    draw = random.Random(5)
    with open(work / "train.jsonl", "w") as file:
        for _ in range(64):  # of few tokens: there is something to learn
            cycle = [draw.randrange(4, 12) for _ in range(draw.randrange(2, 5))]
            file.write(json.dumps({"input_ids": (cycle * LENGTH)[: draw.randrange(8, LENGTH)]}) + "\n")


def start(program, work, name, device, changes):
    return subprocess.Popen([program, "c.toml", f'run.device="{device}"', f'run.dir="runs/{name}"', *changes], cwd=work,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def losses_of(work, name):
    rows = [json.loads(line) for line in open(work / "runs" / name / "metrics.jsonl")]
    rows = [row for row in rows if "loss" in row]
    return [row["loss"] for row in rows], [row.get("device_bytes", 0) for row in rows]


def size(text):
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def problems_of_memory(err, device_bytes):
    """What the metrics and the last lines say of the GPU's memory."""
    out = []
    if not device_bytes or min(device_bytes) <= 0:
        out.append(f"metrics: device_bytes {device_bytes}")
    peak = re.search(r"of the GPU's (.+?) \(planned (.+?)\)", err)
    if not peak:
        out.append("no line tells what was used of the GPU's memory")
    elif size(peak[1]) > size(peak[2]):
        out.append(f"{peak[1]} of the GPU's memory were used, and {peak[2]} planned")
    return out


def compare(work, name, dtype, runs):
    """Problems of one pair of runs, as sentences, and a line of figures."""
    out = [f"{device}: exit status {code}\n{err}" for device, (code, err) in runs.items() if code != 0]
    if out:
        return out, ""
    (gpu, device_bytes), (cpu, _) = losses_of(work, name + "-cuda"), losses_of(work, name + "-cpu")
    if len(gpu) != STEPS or len(cpu) != STEPS:
        return [f"{len(gpu)} and {len(cpu)} losses instead of {STEPS}"], ""
    worst = max(abs(a - b) / abs(b) if a == a and b == b else float("inf") for a, b in zip(gpu, cpu))
    if worst > BOUNDS[dtype]:
        out.append(f"losses differ by {worst:.2g}, allowed {BOUNDS[dtype]:.2g}: GPU {gpu}, CPU {cpu}")
    if not cpu[-1] < cpu[0] - 0.05:
        out.append(f"nothing was learnt: {cpu}")
    out += problems_of_memory(runs["cuda"][1], device_bytes)
    return out, f"loss {gpu[0]:.4f} to {gpu[-1]:.4f}, at most {worst:.1e} from the CPU's, {max(device_bytes) / 2**20:.0f} MiB of the GPU"


def main():
    program, wanted = Path(sys.argv[1]).resolve() / "lmlaunch", sys.argv[2:]
    pairs = [(method, dtype) for dtype in BOUNDS for method in METHODS if not wanted or f"{method}-{dtype}" in wanted]
    failed, widest = 0, {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make_work(work)
        said = False
        for method, dtype in pairs:
            name = f"{method}-{dtype}"
            both = {device: start(program, work, f"{name}-{device}", device, [f'model.dtype="{dtype}"', *METHODS[method]])
                    for device in ("cuda", "cpu")}
            try:
                runs = {device: (run.communicate(timeout=TIMEOUT_S)[1], run.returncode) for device, run in both.items()}
            except subprocess.TimeoutExpired:
                for run in both.values():
                    run.kill()
                print(f"smoke: {name}: not over after {TIMEOUT_S} s")
                return 1
            runs = {device: (code, err) for device, (err, code) in runs.items()}
            if not said:  # what lmlaunch itself says about the card and its driver
                said = True
                print("".join(f"  {line}\n" for line in runs["cuda"][1].splitlines() if "computing on" in line or "peak resident" in line), end="")
            problems, figure = compare(work, name, dtype, runs)
            failed += bool(problems)
            print(f"smoke: {name}: {'FAILED: ' + '; '.join(problems) if problems else figure}", flush=True)
    print(f"figure: {len(pairs) - failed} of {len(pairs)} pairs of runs agree")
    return 1 if failed or not pairs else 0


if __name__ == "__main__":
    sys.exit(main())
