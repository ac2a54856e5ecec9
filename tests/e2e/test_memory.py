"""Memory stays what was planned, with rows of every length: for each new shape the GEMM library keeps code and buffers, so
that a run that is not careful grows with every step."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from limits import memory_limit

BIN = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin"))
VOCAB, STEPS = 1024, 150


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
    "full_bf16_gradients": ["train.gradients=bf16", "train.micro_batch=2"],
    "full_on_disk": [*DISK, *[f"offload.{name}=nvme" for name in ("optimizer", "gradients", "weights", "activations")]],
    # More lengths than the library has room for: it replaces what it keeps all the time.
    "full_wide": ['data.train=["wide.jsonl"]', "data.max_length=2048", "train.global_batch=2", "train.micro_batch=1"],
    "lora": ["train.method=lora"],
    "lora_on_disk": ["train.method=lora", *DISK, "offload.weights=nvme"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_lives_in_the_memory_that_was_planned(work, name):
    (work / f"{name}.toml").write_text((work / "c.toml").read_text())
    command = [BIN / "lmlaunch", f"{name}.toml", *SETTINGS[name]]
    planned = json.loads(subprocess.run([BIN / "lmlaunch", "plan", *command[1:], "--json"], cwd=work, check=True, capture_output=True,
                                        text=True).stdout)["peak"]["host_bytes"]
    limit = planned * 105 // 100
    with memory_limit(limit) as enter:
        done = subprocess.run([*command, f"offload.host_memory={limit}B"], cwd=work, capture_output=True, text=True, preexec_fn=enter)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in open(work / "runs" / name / "metrics.jsonl")]
    taken = [row["host_bytes"] for row in rows if "loss" in row]
    assert len(taken) == STEPS and len({row["tokens"] for row in rows if "loss" in row}) > STEPS // 2
    assert 0.65 * planned < max(taken) <= 1.03 * planned, (max(taken), planned)
    peak = int(done.stderr.split("peak resident memory ")[1].split(" MiB")[0]) << 20
    assert peak <= 1.03 * planned, "the probes and the start count, too"
