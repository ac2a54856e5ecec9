"""Each of four ranks takes the memory that was planned, whatever the stage, and what is in shards falls as one by their number."""

import contextlib
import json
import os
import random
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BIN = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin"))
RANKS, VOCAB, MIB = 4, 8192, 1 << 20


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """45 million weights: 0.8 GB of state."""
    work = tmp_path_factory.mktemp("ranks_memory")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4, vocab_size=VOCAB,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2))
    model.to(torch.bfloat16).save_pretrained(work / "model")
    drawn = random.Random(5)
    with open(work / "rows.jsonl", "w") as file:
        for _ in range(64):
            ids = [drawn.randrange(VOCAB) for _ in range(256)]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    (work / "c.toml").write_text("""
[run]
device = "cpu"
[model]
path = "model"
[data]
train = ["rows.jsonl"]
max_length = 256
cache_dir = "cache"
[train]
steps = 4
global_batch = 8
micro_batch = 2
recompute = "block"
[checkpoint]
every = 2
""")
    return work


def peaks_of(process):
    """Of the ranks' resident memory, as the kernel counts it until each ends."""
    peaks = {}
    while process.poll() is None:
        for pid in subprocess.run(["pgrep", "-P", str(process.pid), "lmlaunch"], capture_output=True, text=True).stdout.split():
            with contextlib.suppress(OSError, TypeError):  # it has just ended
                peaks[pid] = int(re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024
        time.sleep(0.05)
    return list(peaks.values())


def run(work, stage):
    """What was planned for each rank, and what each took."""
    words = ["c.toml", "--ranks", str(RANKS), f"zero.stage={stage}", f"run.dir=runs/stage{stage}"]
    planned = json.loads(subprocess.run([BIN / "lmlaunch", "plan", *words[:-1], "--json"], cwd=work, check=True, capture_output=True,
                                        text=True).stdout)["peak"]["host_bytes"]
    with open(work / f"stage{stage}.err", "w") as err, subprocess.Popen([BIN / "lmlaunch", *words], cwd=work, stderr=err) as process:
        peaks = peaks_of(process)
    assert process.returncode == 0, (work / f"stage{stage}.err").read_text()[-2000:]
    assert len(peaks) == RANKS
    return planned, peaks


def test_each_rank_takes_what_was_planned_and_shards_fall_with_their_number(work):
    taken = {}
    for stage in (0, 1, 2, 3):
        planned, peaks = run(work, stage)
        for peak in peaks:
            assert 0.95 * planned < peak < 1.05 * planned, (stage, [p / MIB for p in peaks], planned / MIB)
        taken[stage] = max(peaks)
    weights = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(work / "model").parameters())
    rest = 1 - 1 / RANKS
    # fp32 moments and the low halves of masters; then gradients beside three slots of a block; then weights.
    assert taken[0] - taken[1] == pytest.approx(rest * weights * 10, rel=0.05)
    assert 0.6 * rest * weights * 4 < taken[1] - taken[2] < rest * weights * 4
    assert 0.4 * rest * weights * 2 < taken[2] - taken[3] < rest * weights * 2
