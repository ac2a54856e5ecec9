"""Takes the pictures of a run's page that docs/see.md shows, anew: a small model learns sums in words, with its state on disk, and once
more at two learning rates. On a machine without other work, whose pauses the curves would show:

    python tests/e2e/page_pictures.py        (some three minutes; needs build/bin and chromium)
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
LMLAUNCH = ROOT / "build" / "bin" / "lmlaunch"
ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
        "nineteen").split()
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy"]
CHANGED = {"HuggingFaceTB/SmolLM2-135M-Instruct": "tiny", '"train.jsonl"': '"sums.jsonl"', "eval_fraction = 0.02": "eval_fraction = 0.05",
           "max_length = 1024": "max_length = 64", "epochs = 1": "epochs = 4", "lr = 5e-5": "lr = 2e-3"}
ALL = ["--gpus", "0", "run.threads=2", "model.dtype=fp32", "train.micro_batch=16", "train.eval_every=40", "optimizer.master=fp32"]
FIRST = ['train.sample_prompts=["What is seven plus five?", "What is thirty-one plus eight?"]', "train.sample_tokens=16",
         "offload.optimizer=nvme", "offload.weights=nvme", 'offload.paths=["swap"]', "io.tile=256KiB", "checkpoint.every=150"]


def word(number):
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + ("-" + ONES[number % 10] if number % 10 else "")


def prepare(work):
    drawn = random.Random(3)
    pairs = [(drawn.randrange(40), drawn.randrange(40)) for _ in range(1600)]
    rows = [{"prompt": f"What is {word(a)} plus {word(b)}?", "completion": f" {word(a + b)}."} for a, b in pairs]
    (work / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tokenizers.Tokenizer(tokenizers.models.BPE())
    text.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = tokenizers.decoders.ByteLevel()
    text.train_from_iterator([row["prompt"] + row["completion"] for row in rows], tokenizers.trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<s>", "</s>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=3, vocab_size=384,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)).save_pretrained(work / "tiny")
    text.save(str(work / "tiny" / "tokenizer.json"))
    (work / "tiny" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (work / "swap").mkdir()
    preset = subprocess.run([LMLAUNCH, "presets", "smollm2-135m-full"], check=True, capture_output=True, text=True).stdout
    for before, after in CHANGED.items():
        assert before in preset, before
        preset = preset.replace(before, after)
    (work / "sums.toml").write_text(preset)


def lmlaunch(work, *arguments):
    subprocess.run([LMLAUNCH, *arguments], cwd=work, check=True, env=os.environ | {"LMLAUNCH_PYTHON": sys.executable})


def picture(page, out, height):
    subprocess.run([sys.executable, Path(__file__).with_name("test_page.py"), page, out, str(height)], check=True)


def main():
    docs = ROOT / "docs"
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        lmlaunch(work, "sums.toml", *ALL, *FIRST, "run.dir=runs/first")
        for name, rate in (("slow", "3e-4"), ("fast", "2e-3")):
            lmlaunch(work, "sums.toml", *ALL, f"run.dir=runs/{name}", "train.steps=150", "train.epochs=auto", f"optimizer.lr={rate}")
        lmlaunch(work, "report", "runs/slow", "runs/fast", "-o", "both.html")
        picture(work / "runs" / "first" / "report.html", docs / "report.png", 2531)
        picture(work / "both.html", docs / "report-compare.png", 1414)


if __name__ == "__main__":
    main()
