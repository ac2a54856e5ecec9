"""Updates inside backward, from outside: the rows of the run with updates after it, in the memory that the plan names, which is less by
the gradients of all blocks but one."""

import json
import random
import signal
import subprocess
import time
import unittest.mock

import pytest
from counts import some_of
from limits import memory_counts
from test_run import BIN
from transformers import LlamaConfig

STEPS = 4
FIELDS = ("step", "loss", "grad_norm", "lr", "target_tokens")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("in_backward")
    LlamaConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
                vocab_size=2048, max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
                architectures=["LlamaForCausalLM"]).save_pretrained(work / "model")
    drawn = random.Random(3)
    with open(work / "rows.jsonl", "w") as file:
        for _ in range(32):
            ids = [drawn.randrange(2048) for _ in range(drawn.randint(20, 60))]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    (work / "c.toml").write_text(f"""
[run]
device = "cpu"
threads = 2
[model]
path = "model"
init = "random"
[data]
train = ["rows.jsonl"]
max_length = 64
cache_dir = "cache"
[train]
steps = {STEPS}
global_batch = 4
micro_batch = 2
recompute = "block"
""")
    return work


def lmlaunch(work, *command, code=0):
    done = subprocess.run([BIN / "lmlaunch", *command], cwd=work, capture_output=True, text=True)
    assert done.returncode == code, done.stderr[-2000:]
    return done


def run(work, name, *settings):
    lmlaunch(work, "c.toml", f"run.dir=runs/{name}", *settings)
    rows = [json.loads(line) for line in open(work / "runs" / name / "metrics.jsonl")]
    rows = [row for row in rows if "loss" in row]
    plan = json.loads((work / "runs" / name / "plan.json").read_text())
    verified = json.loads(lmlaunch(work, "verify", f"runs/{name}", "--json").stdout)["weights_hash"]
    return {"told": [{field: row[field] for field in FIELDS} for row in rows], "weights": verified,
            "host_bytes": max(row["host_bytes"] for row in rows), "plan": plan}


def planned_bytes(plan, name):
    return sum(row["bytes"] for tier in plan["tiers"] for row in tier["classes"] if row["name"] == name)


@memory_counts
@pytest.mark.parametrize("clip", some_of("global", "block", "none", short=2))
def test_the_run_is_the_same_in_the_memory_of_one_blocks_gradient(work, clip):
    after = run(work, f"after_{clip}", f"optimizer.clip={clip}", "train.update=after")
    inside = run(work, f"inside_{clip}", f"optimizer.clip={clip}", "train.update=in_backward")
    assert len(after["told"]) == STEPS and inside["told"] == after["told"]
    assert inside["weights"] == after["weights"]
    assert (after["plan"]["placement"]["update"], inside["plan"]["placement"]["update"]) == ("after", "in_backward")
    gradients = {name: planned_bytes(made["plan"], "gradients") for name, made in (("after", after), ("inside", inside))}
    saved = gradients["after"] - gradients["inside"]
    assert gradients["inside"] < gradients["after"] / 10
    assert after["host_bytes"] - inside["host_bytes"] > 0.9 * saved
    for one in (after, inside):
        assert one["host_bytes"] <= 1.03 * one["plan"]["peak"]["host_bytes"]


def test_auto_does_it_where_memory_is_short_and_says_so(work):
    def planned(*settings, code=0):
        return json.loads(lmlaunch(work, "plan", "c.toml", *settings, "--json", code=code).stdout)

    inside = planned("train.update=in_backward")
    # Where there is room the GEMM library keeps more of its code, on processors that it makes any for.
    spare = 60 << 20 if planned_bytes(inside, "GEMM code") else 0
    limit = f"offload.host_memory={inside['peak']['host_bytes'] - spare}B"
    assert planned()["placement"]["update"] == "after"
    assert planned("train.update=after", limit, code=12)["fits"] is False
    short = planned(limit)
    assert short["placement"]["update"] == "in_backward" and short["fits"]
    told = {choice["key"]: choice["reason"] for choice in short["choices"]}
    assert "gradients of all blocks do not fit" in told["train.update"] and "optimizer.clip" in told["backward for the norm"]
    assert run(work, "short", limit)["weights"] == run(work, "free")["weights"]


def test_a_run_goes_on_with_the_other_one(work):
    whole = run(work, "whole", "optimizer.clip=block", "train.steps=12")
    parts = ["c.toml", "run.dir=runs/parts", "optimizer.clip=block", "train.steps=12"]
    curve = work / "runs" / "parts" / "metrics.jsonl"
    process = subprocess.Popen([BIN / "lmlaunch", *parts, "train.update=in_backward"], cwd=work, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (curve.exists() and curve.read_text().count('"loss"') >= 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75, process.stderr.read()
    assert run(work, "parts", *parts[2:], "train.update=after") == {**whole, "host_bytes": unittest.mock.ANY, "plan": unittest.mock.ANY}


def test_gradients_with_a_tier_of_their_own_are_of_updates_after(work):
    done = lmlaunch(work, "plan", "c.toml", "train.update=in_backward", "offload.gradients=nvme", 'offload.paths=["."]', code=10)
    assert "offload.gradients" in done.stderr and "has at most one block's" in done.stderr
