"""How fast is text made, token by token, beside transformers with its key-value cache, and beside what reading the weights takes?

SmolLM2-135M-Instruct, as the quickstart makes it, goes on from a text with 128 tokens (--smoke: 8), greedily, on the same threads; in
turns, the median of each. No token ends the answer, and no chat template is around the text. A token takes at least as long as reading
all weights once at the rate at which memory can be summed up.

Usage: generate.py BIN_DIR [--rounds 5] [--threads 2] [--smoke] [--impossible]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from figures import Figure, Figures, common_options
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

MAKE_MODEL = Path(__file__).resolve().parents[1] / "configs" / "quickstart" / "make_model.py"
MODEL = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lmlaunch" / "models" / "smollm2-135m-instruct"
TOKENS, TOKENS_SMOKE = 128, 8
PROMPT = "The old lighthouse stood at the end of the long stone pier, and every evening its keeper climbed the narrow stairs to light the lamp."
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def prepare(work):
    """The model without what would end an answer; returns the prompt's tokens."""
    subprocess.run([sys.executable, MAKE_MODEL, MODEL], check=True)
    for name in ("model.safetensors", "tokenizer.json"):
        (work / name).symlink_to(MODEL / name)
    config = json.loads((MODEL / "config.json").read_text())
    (work / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (work / "generation_config.json").write_text("{}")
    return Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(PROMPT).ids


def ours(options, work, dtype, prompt):
    """Tokens per second behind the first, and the tokens."""
    command = [options.bin_dir.resolve() / "lmlaunch", "generate", work, "--gpus", "0", "--prompt", PROMPT, "--max-tokens", str(options.tokens),
               "--json", f"model.dtype={dtype}", f"run.threads={options.threads}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LMLAUNCH_PYTHON": sys.executable})
    if done.returncode != 0:
        sys.exit(done.stderr)
    answer = json.loads(done.stdout)
    assert len(answer["tokens"]) == options.tokens and answer["prompt_tokens"] == len(prompt)
    return (options.tokens - 1) / answer["seconds"], answer["tokens"]


def theirs(model, prompt, most):
    ids = torch.tensor([prompt])
    settings = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0)
    seconds = []
    for tokens in (1, most):
        start = time.perf_counter()
        text = model.generate(ids, max_new_tokens=tokens, **settings)
        seconds.append(time.perf_counter() - start)
    return (most - 1) / (seconds[1] - seconds[0]), text[0, len(prompt):].tolist()


def reading_rate():
    """Bytes per second; torch's own sum runs at a part of it."""
    memory = torch.ones(1 << 28, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        torch.mv(memory.view(-1, 1 << 14), memory[:1 << 14])
        best = max(best, memory.nbytes / (time.perf_counter() - start))
    return best


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.tokens = TOKENS_SMOKE if options.smoke else TOKENS
    figures = [Figure(f"tokens/s of {options.tokens} tokens, {dtype}", "x", "transformers with its cache", at_least=1.0) for dtype in TYPES]
    figures += [Figure(f"time of a token, {dtype}", "x", "reading the weights", at_most=1.7) for dtype in TYPES]
    found = Figures(options, figures)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="lmlaunch-generate-") as directory:
        work = Path(directory)
        prompt = prepare(work)
        rate = reading_rate()
        for dtype, torch_type in TYPES.items():
            model = LlamaForCausalLM.from_pretrained(work, dtype=torch_type)
            model.generation_config.eos_token_id = None
            rates = {"ours": [], "theirs": []}
            for _ in range(options.rounds or (1 if options.smoke else 5)):
                our_rate, our_text = ours(options, work, dtype, prompt)
                their_rate, their_text = theirs(model, prompt, options.tokens)
                rates["ours"].append(our_rate), rates["theirs"].append(their_rate)
                assert dtype == "bf16" or our_text == their_text
            us, them = (statistics.median(rates[side]) for side in ("ours", "theirs"))
            weights = sum(parameter.nbytes for parameter in model.parameters())
            print(f"{dtype}: {us:.1f} tokens/s, transformers {them:.1f}; weights of {weights / 1e6:.0f} MB at {rate / 1e9:.1f} GB/s "
                  f"give at most {rate / weights:.1f}")
            found.set(f"tokens/s of {options.tokens} tokens, {dtype}", us / them)
            found.set(f"time of a token, {dtype}", rate / weights / us)
    found.finish()


if __name__ == "__main__":
    main()
