"""Which model trains how on which card? Makes docs/what-fits.md of `lmlaunch plan`, of named cards: nothing is measured, and no
rate of this machine is in it.

Usage: what_fits.py LMLAUNCH [--models REGEX]   prints the page, or the tables of those models
"""

import argparse
import json
import os
import re
import subprocess
import sys

MODELS = ["HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM3-3B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B",
          "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-Nemo-Base-2407", "Qwen/Qwen3-14B"]
CARDS = {"RTX 4060": 32, "RTX 3060": 32, "RTX 4060 Ti": 64, "RTX 4090": 64, "L40S": 128, "H100": 256}  # and GB of host memory beside it
METHODS = {"qlora": "QLoRA", "lora": "LoRA", "full": "all weights"}
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
RATED = 2048  # tokens per second are those of this length, or of the longest

HEAD = """# What fits

Plans of `lmlaunch plan` for well-known models and cards. No row was run on its card: plans are compared with runs elsewhere
([performance](performance.md)). A cell has the longest sequence that
fits and that the model was trained for, and tokens per second at {rated} tokens, or at the longest
where that is less; `–`: nothing fits without a disk. *Slanted*: part of the model or of its optimizer is streamed from host memory.

{cards}. Steps of 16 sequences, packed; r = 16 without dropout; bf16; all weights with bf16 gradients and AdamW. One cell:

    lmlaunch plan qwen3-8b-qlora-12gb --gpu RTX-4090 --host-memory 64GB

`docs/what_fits.py` makes this page.
"""


def plan(program, model, method, card, length):
    changes = [f"model.path={model}", f"train.method={method}", f"data.max_length={length}", "run.device=cuda", "train.global_batch=16",
               "data.packing=true", "offload.paths=[]"]
    preset = "smollm2-135m-full" if method == "full" else "smollm2-135m-lora"
    changes += ["train.gradients=bf16"] if method == "full" else ["lora.dropout=0"]
    done = subprocess.run([program, "plan", preset, *changes, "--gpu", card, "--host-memory", f"{CARDS[card]}GB", "--json"],
                          capture_output=True, text=True)
    if done.returncode not in (0, 12):
        sys.exit(done.stderr)
    if "MODEL-24" in done.stderr:  # longer than the model's positions
        return None
    out = json.loads(done.stdout)
    return out if out["fits"] and out["peak"]["disk_bytes"] == 0 else None


def passes_through(out):
    """Whether weights, gradients or optimizer state live in host memory."""
    host = next(tier for tier in out["tiers"] if tier["name"] == "host")
    beside = {"uploads and results", "load buffer", "save buffers", "libraries"}
    return any(row["bytes"] > 0 and row["name"] not in beside for row in host["classes"])


def cell(program, model, method, card):
    fitting = {}

    def fits(length):
        fitting[length] = plan(program, model, method, card, length)
        return fitting[length] is not None

    low, high = -1, len(LENGTHS)  # the longest that fits, the shortest that does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(LENGTHS[middle]) else (low, middle)
    if low < 0:
        return "–"
    rated = min(RATED, LENGTHS[low])
    out = fitting.get(rated) or plan(program, model, method, card, rated)
    text = f"{LENGTHS[low]} · {out['tokens_per_s']:.0f}/s"
    return f"*{text}*" if passes_through(out) else text


def tables(program, models):
    for model in models:
        yield f"## {model}\n"
        yield "| | " + " | ".join(CARDS) + " |"
        yield "|---" * (len(CARDS) + 1) + "|"
        for method, name in METHODS.items():
            yield f"| {name} | " + " | ".join(cell(program, model, method, card) for card in CARDS) + " |"
        yield ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--models", default="")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core: a plan counts this machine's for updates of host memory
    models = [model for model in MODELS if re.search(options.models, model)]
    if not options.models:
        print(HEAD.format(rated=RATED, cards="Host memory: " + ", ".join(f"{host} GB beside the {card}" for card, host in CARDS.items())))
    print("\n".join(tables(options.program, models)).rstrip())


if __name__ == "__main__":
    main()
