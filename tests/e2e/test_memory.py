"""Memory stays what was planned, with rows of every length: for each new shape the GEMM library keeps code and buffers, so
that a run that is not careful grows with every step."""

import json
import os
import random
import subprocess
from pathlib import Path

import processor
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from counts import FULL, some_of
from limits import memory_counts, memory_limit

BIN = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin"))
VOCAB = 1024
pytestmark = memory_counts
# Without bf16 instructions products of bf16 are not the GEMM library's, which then keeps nothing of them.
OWN_PRODUCTS = not processor.library_multiplies_bf16()
STEPS = 150 if FULL else 60


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("memory")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2))
    model.to(torch.bfloat16).save_pretrained(work / "model")
    (work / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    drawn = random.Random(5)
    for name, length in [("rows", lambda: drawn.randint(20, 200)), ("wide", lambda: int(2 ** drawn.uniform(5, 11)))]:
        with open(work / f"{name}.jsonl", "w") as file:
            for _ in range(4 * STEPS):
                ids = [drawn.randrange(VOCAB) for _ in range(length())]
                # Targets begin anywhere, as in chats.
                masked = drawn.randrange(10)
                file.write(json.dumps({"input_ids": ids, "labels": [-100] * masked + ids[masked:]}) + "\n")
    (work / "c.toml").write_text(f"""
[run]
device = "cpu"
threads = 1
[model]
path = "model"
[data]
train = ["rows.jsonl"]
max_length = 256
cache_dir = "cache"
[train]
steps = {STEPS}
global_batch = 4
micro_batch = 4
""")
    return work


DISK = ['offload.paths=["."]', "train.recompute=block"]
SETTINGS = {
    "full": [],
    "full_on_disk": [*DISK, *[f"offload.{name}=nvme" for name in ("optimizer", "gradients", "weights", "activations")]],
    # More lengths than the library has room for: it replaces what it keeps all the time.
    "full_wide": ['data.train=["wide.jsonl"]', "data.max_length=2048", "train.global_batch=2", "train.micro_batch=1"],
    "lora_fp32": ["train.method=lora", "lora.dtype=fp32"],
    "full_bf16_gradients": ["train.gradients=bf16", "train.micro_batch=2"],
    "full_fp32": ["model.dtype=fp32"],
    "lora": ["train.method=lora"],
    "lora_on_disk": ["train.method=lora", *DISK, "offload.weights=nvme"],
}


@pytest.mark.parametrize("name", some_of(*SETTINGS, short=5))
def test_a_run_lives_in_the_memory_that_was_planned(work, name):
    (work / f"{name}.toml").write_text((work / "c.toml").read_text())
    command = [BIN / "lmlaunch", f"{name}.toml", *SETTINGS[name]]
    # As on a first day: nothing is kept of the machine, so that this run measures it, and does not know what LibTorch takes.
    first_day = {**os.environ, "XDG_CACHE_HOME": str(work / "user-caches" / name)}

    def plan(environment):
        return json.loads(subprocess.run([BIN / "lmlaunch", "plan", *command[1:], "--json"], cwd=work, check=True, capture_output=True,
                                         text=True, env=environment).stdout)["peak"]["host_bytes"]
    planned = limit = plan(os.environ)
    if OWN_PRODUCTS:  # so little is planned that what is not known yet of LibTorch is more than 5 % of it
        limit = plan({**os.environ, "XDG_CACHE_HOME": str(work / "no-cache" / name)})
    limit = limit * 105 // 100
    with memory_limit(limit) as enter:
        done = subprocess.run([*command, f"offload.host_memory={limit}B"], cwd=work, capture_output=True, text=True, preexec_fn=enter,
                              env=first_day)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in open(work / "runs" / name / "metrics.jsonl")]
    taken = [row["host_bytes"] for row in rows if "loss" in row]
    assert len(taken) == STEPS and len({row["tokens"] for row in rows if "loss" in row}) > STEPS // 2
    assert 0.65 * planned < max(taken) <= 1.03 * planned, (max(taken), planned)
    assert list((work / "user-caches" / name).glob("lmlaunch/rates/*")), "the run has measured no rates"
    peak = int(done.stderr.split("peak resident memory ")[1].split(" MiB")[0]) << 20
    assert peak <= 1.03 * planned, "the probes and the start count, too"


TELLS = """
#include <stdlib.h>
__attribute__((constructor)) static void tell(void) { setenv("ONEDNN_VERBOSE", "profile_create", 1); }
"""


def products_made(work, steps, *settings):
    """How often the GEMM library has made code in a run of that many steps: it prints a line each time, told by what is preloaded,
    for a rank gets no such variable from outside."""
    (work / "tells.c").write_text(TELLS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "tells.so", "tells.c"], cwd=work, check=True)
    (work / f"{steps}_steps.toml").write_text((work / "c.toml").read_text())
    done = subprocess.run([BIN / "lmlaunch", f"{steps}_steps.toml", *settings, f"train.steps={steps}"], cwd=work, capture_output=True, text=True,
                          env={**os.environ, "LD_PRELOAD": str(work / "tells.so")})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.count("create:cache_miss,cpu,matmul")


def test_the_library_forgets_what_is_beyond_its_bound(work):
    """Rows of 32 to 2,048 tokens are four times the shapes that are planned for: in a second pass over them, in another order, most
    code is made again. (What it costs in memory is too small for the bounds of memory to show.)"""
    lengths = [int(32 * 2 ** (eighth / 8)) for eighth in range(48)]
    (work / "lengths.jsonl").write_text("".join(json.dumps({"input_ids": [length % VOCAB] * length}) + "\n" for length in lengths))
    settings = ['data.train=["lengths.jsonl"]', "data.max_length=2048", "train.global_batch=1", "train.micro_batch=1"]
    if OWN_PRODUCTS:
        pytest.skip("no bf16 products of oneDNN here")
    once, twice = (products_made(work, passes * len(lengths), *settings) for passes in (1, 2))
    assert twice > 1.5 * once, (once, twice)
