"""What does each method of fine-tuning give, and what does it take: eval loss, accuracy, memory, speed and the size of its result?

A Llama of 4 layers of 256 is trained on letters that ascend by equal steps ("b e h k n ..."), then fine-tuned by each method on letters that
descend, of which it must choose the next one among four. 150 steps of 32 rows of 31 letters, bf16, the same rows and steps for all; LoRA,
DoRA and prefix in turns, the median of each, for the time of a step. --smoke: 3 steps, one turn.

Usage: methods.py BIN_DIR [--turns 3] [--threads 2] [--smoke] [--impossible]
"""

import json
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from figures import Figure, Figures, common_options
from varying_lengths import SMALL, read_run

LETTERS, TERMS, ROWS, EVALS = string.ascii_lowercase, 30, 1000, 200
LORA = ["train.method=lora", "lora.r=8", "lora.alpha=16", "optimizer.lr=3e-3"]
QLORA = ["train.method=qlora", *LORA[1:]]


@dataclass(frozen=True)
class Method:
    name: str
    settings: list
    most: float = 0.5  # of the eval loss before the first step


METHODS = [
    Method("all weights", ["train.method=full", "optimizer.lr=1e-3"]),
    Method("LoRA", LORA),
    Method("rsLoRA", [*LORA, "lora.rslora=true"]),
    Method("LoRA+", [*LORA[:-1], "optimizer.lr=1e-3", "lora.b_lr_ratio=8"]),
    Method("DoRA", [*LORA, "lora.dora=true"]),
    Method("LoRA, biases", [*LORA, "lora.bias=all"]),
    Method("LoRA, ranks by pattern", [*LORA, 'lora.ranks={"q_proj" = 4, "k_proj" = 4, "down_proj" = 16}']),
    Method("LoRA, two layers", [*LORA, "lora.layers=[2, 3]"], 0.9),
    Method("PiSSA", [*LORA[:-1], "optimizer.lr=1e-3", "lora.start=pissa"]),
    Method("QLoRA", QLORA),
    Method("QLoRA, LoftQ", [*QLORA, "lora.start=loftq"]),
    Method("LoRA, embedding", [*LORA, 'lora.also=["embed_tokens"]']),
    Method("LoRA, rows of tokens", [*LORA, f"lora.tokens={[*range(3, 29)]}"]),
    Method("IA3", ["train.method=ia3", "optimizer.lr=3e-2"], 0.95),
    Method("norms", ["train.method=norms", "optimizer.lr=3e-2"], 0.95),
    Method("prefix", ["train.method=prefix", "prompt.length=8", "optimizer.lr=3e-2"], 0.95),
    Method("prompt", ["train.method=prompt", "prompt.length=8", "optimizer.lr=3e-2"], 0.95),
    Method("P-tuning", ["train.method=ptuning", "prompt.length=8", "optimizer.lr=3e-3"], 0.95),
]
TIMED = {"DoRA": 1.25, "prefix": 1.1}  # of LoRA's step


def letters(first, step, count):
    return " ".join(LETTERS[(first + i * step) % len(LETTERS)] for i in range(count))


def prepare(work):
    drawn = random.Random(1)
    model = work / "fresh"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**SMALL, "attention_bias": True, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(["?", "<s>", "<end>", *LETTERS])}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<s>", "<end>"])
    words.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with open(work / "ascending.jsonl", "w") as file:
        for _ in range(ROWS):
            file.write(json.dumps({"text": letters(drawn.randrange(26), drawn.randint(1, 5), TERMS + 1)}) + "\n")
    for name, count in (("train", ROWS), ("eval", EVALS)):
        with open(work / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                first, step, label = drawn.randrange(26), -drawn.randint(1, 5), drawn.randrange(4)
                *context, right = letters(first, step, TERMS + 1).split()
                endings = drawn.sample([letter for letter in LETTERS if letter != right], 4)
                endings[label] = right
                file.write(json.dumps({"context": " ".join(context), "endings": endings, "label": label}) + "\n")


class Runs:
    def __init__(self, options, work):
        self.program, self.work, self.threads, self.count = options.bin_dir.resolve() / "lmlaunch", work, options.threads, 0
        self.steps = 3 if options.smoke else 150

    def train(self, *settings, model="base", data="train"):
        """The run's directory, and what read_run has of it."""
        self.count += 1
        name = f"run{self.count}"
        (self.work / f"{name}.toml").write_text(f"""
[run]
device = "cpu"
threads = {self.threads}
[model]
path = "{model}"
dtype = "bf16"
[data]
train = ["{data}.jsonl"]
max_length = 64
cache_dir = "cache"
[train]
steps = {self.steps}
global_batch = 32
micro_batch = 32
[optimizer]
warmup = 1
""")
        command = [self.program, f"{name}.toml", *settings]
        done = subprocess.run(command, cwd=self.work, capture_output=True, text=True, env=os.environ | {"LMLAUNCH_PYTHON": sys.executable})
        if done.returncode != 0:
            sys.exit(f"{' '.join(settings)}\n{done.stderr}")
        directory = self.work / "runs" / name
        return directory, read_run(directory, done.stderr)

    def tune(self, method):
        """A row of the table, as numbers."""
        directory, run = self.train('data.eval=["eval.jsonl"]', *method.settings)
        evals = [row for row in map(json.loads, open(directory / "metrics.jsonl")) if "eval_loss" in row]
        rows = run["rows"][len(run["rows"]) // 3:]
        return {"before": evals[0]["eval_loss"], "loss": evals[-1]["eval_loss"], "accuracy": evals[-1]["accuracy"], "peak": run["peak"],
                "mean": statistics.mean(row["host_bytes"] for row in rows), "step": statistics.median(row["step_ms"] for row in rows),
                "speed": statistics.median(1e3 * row["tokens"] / row["step_ms"] for row in rows),
                "bytes": sum(file.stat().st_size for file in (directory / "model").glob("*.safetensors"))}


def dora_of_peft(base, threads, rounds):
    """peft's time of a step with DoRA over that of its LoRA: the same model, rows and modules, in turns."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    sides = {}
    for dora in (False, True):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", use_dora=dora, task_type="CAUSAL_LM"))
        sides[dora] = model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, fused=True), []
    tokens = torch.randint(3, 29, (32, TERMS + 1), generator=torch.Generator().manual_seed(1))
    for _ in range(rounds + 1):
        for model, optimizer, seconds in sides.values():
            begun = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begun)
    lora, dora = (statistics.median(seconds[1:]) for _, _, seconds in sides.values())
    return dora / lora


def shown(name, row):
    return [name, f"{row['loss']:.3f}", f"{100 * row['accuracy']:.0f} %", f"{row['peak'] / 2**20:.0f} MiB", f"{row['mean'] / 2**20:.0f} MiB",
            f"{row['speed']:.0f}", f"{row['bytes'] / 2**10:.0f} KiB"]


def markdown(rows):
    head = ["method", "eval loss", "accuracy", "peak memory", "mean memory", "tokens/s", "result"]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def main():
    parser = common_options(__doc__)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    loss = {method.name: f"{method.name}: eval loss" for method in METHODS}
    figures = Figures(options, [*(Figure(loss[method.name], "x", "before the first step", at_most=method.most) for method in METHODS),
                                Figure("LoRA: bytes of the result", "x", "all weights'", at_most=0.25),
                                *(Figure(f"{name}: time of a step", "x", "LoRA's", at_most=most) for name, most in TIMED.items())])
    with tempfile.TemporaryDirectory(prefix="lmlaunch-methods-") as directory:
        work = Path(directory)
        prepare(work)
        runs = Runs(options, work)
        base, _ = runs.train("model.init=random", "train.method=full", "optimizer.lr=1e-3", model="fresh", data="ascending")
        (work / "base").symlink_to(base / "model")
        found = {method.name: runs.tune(method) for method in METHODS}
        print(markdown([shown(name, row) for name, row in found.items()]), flush=True)
        for method in METHODS:
            row = found[method.name]
            figures.set(loss[method.name], row["loss"] / row["before"], f"before the first step, {row['before']:.2f}")
        figures.set("LoRA: bytes of the result", found["LoRA"]["bytes"] / found["all weights"]["bytes"])
        steps = {name: [found[name]["step"]] for name in ("LoRA", *TIMED)}
        for _ in range((options.turns or (1 if options.smoke else 3)) - 1):
            for method in METHODS:
                if method.name in steps:
                    steps[method.name].append(runs.tune(method)["step"])
        lora = statistics.median(steps["LoRA"])
        theirs = {"DoRA": f"; peft's takes {dora_of_peft(work / 'base', options.threads, 1 if options.smoke else 15):.2f} of its LoRA's"}
        for name in TIMED:
            figures.set(f"{name}: time of a step", statistics.median(steps[name]) / lora, f"LoRA's, {lora:.0f} ms{theirs.get(name, '')}")
    figures.finish()


if __name__ == "__main__":
    main()
