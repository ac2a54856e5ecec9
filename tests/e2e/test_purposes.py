"""What a plan is for: generation and export where training has no room, numerics that a later start of a run adopts, and rates that are
measured once."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from limits import memory_counts, memory_limit
from test_run import BIN, config, lmlaunch, work  # noqa: F401  (a fixture)
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """103 million parameters: 196 MiB of weights, 1.6 GiB to train."""
    directory = tmp_path_factory.mktemp("large")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(code): code - 32 for code in range(32, 127)}, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, vocab_size=96,
        max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=95)).to(torch.bfloat16).save_pretrained(directory)
    return directory


@memory_counts
def test_generation_needs_room_for_the_weights_alone(large, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [1, 2, 3]}) + "\n")
    (tmp_path / "c.toml").write_text(f'[run]\ndevice = "cpu"\n[model]\npath = "{large}"\n[data]\ntrain = ["t.jsonl"]\nmax_length = 64\n'
                                     '[train]\nglobal_batch = 1\n')
    limit = 600 << 20
    training = json.loads(lmlaunch("plan", "c.toml", "--host-memory", f"{limit}B", "--json", cwd=tmp_path, check=False).stdout)
    assert not training["fits"] and training["peak"]["host_bytes"] > 2 * limit
    answer = []
    for bound in (limit, None):
        with memory_limit(limit) as enter:
            done = subprocess.run([BIN / "lmlaunch", "generate", large, "--gpus", "0", "--prompt", "abc", "--max-tokens", "4", "--json"],
                                  cwd=tmp_path, capture_output=True, text=True, preexec_fn=enter if bound else None)
        assert done.returncode == 0, done.stderr
        answer.append(json.loads(done.stdout)["tokens"])
    assert answer[0] == answer[1] and len(answer[0]) == 4


@memory_counts
def test_an_export_never_holds_the_model(large, tmp_path):
    with memory_limit(300 << 20) as enter:  # of which libraries take 140; the model takes 196 in bf16 and 392 in fp32
        done = subprocess.run([BIN / "lmlaunch", "export", large, "-o", "out"], cwd=tmp_path, capture_output=True, text=True, preexec_fn=enter)
    assert done.returncode == 0, done.stderr
    hashes = {json.loads(lmlaunch("verify", path, "--json", cwd=tmp_path).stdout)["weights_hash"] for path in (large, "out")}
    assert len(hashes) == 1


def steps_of(directory):
    file = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in open(file)] if file.exists() else []
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def stopped_run(work, settings, **started):  # noqa: F811
    """The first steps of a run that is stopped on request."""
    run = work / "runs" / Path(settings[0]).stem
    (run / "metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    process = subprocess.Popen([BIN / "lmlaunch", *settings], cwd=work, stderr=subprocess.DEVNULL, **started)
    while len(steps_of(run)) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    return steps_of(run)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a later start has fewer cores")
def test_a_later_start_of_a_run_adopts_its_numerics(work):  # noqa: F811
    name = config(work, "adopted", train__steps=100000, train__global_batch=8, data__max_length=512)
    text = (work / name).read_text().replace("threads = 1\n", "").replace("micro_batch = 4\n", "")
    (work / name).write_text(text)
    run = work / "runs" / "adopted"
    first = stopped_run(work, [name])
    recorded = json.loads((run / "numerics.json").read_text())
    assert recorded["threads"] == len(os.sched_getaffinity(0)) and recorded["micro_batch"] == 4  # of 2048 tokens on a CPU
    settled = (run / "config.toml").read_text()
    keys = dict(line.split(" = ", 1) for line in settled.splitlines() if " = " in line and not line.startswith("#"))
    for key in ("device", "threads", "micro_batch", "recompute"):
        assert not keys[key].startswith('"auto"'), key
    # Later: one core, and state on disk.
    one_core = {"preexec_fn": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})}
    later = stopped_run(work, [name, 'offload.paths=["."]', "offload.optimizer=nvme"], **one_core)
    assert json.loads((run / "numerics.json").read_text()) == recorded
    planned = json.loads(subprocess.run([BIN / "lmlaunch", "plan", name, "--json"], cwd=work, capture_output=True, **one_core).stdout)
    assert planned["numerics"] == recorded
    shared = min(len(first), len(later))
    assert shared >= 3 and first[:shared] == later[:shared]
    assert "as this run has recorded" in (run / "plan.txt").read_text()
    # Another configuration that is allowed in, since nothing is lost, adopts nothing.
    other = lmlaunch(name, "run.dir=other", "train.steps=1", "run.threads=1", "train.micro_batch=2", cwd=work)
    assert other.returncode == 0
    assert json.loads((work / "other" / "numerics.json").read_text())["micro_batch"] == 2


def test_rates_are_measured_once_a_week(work, tmp_path):  # noqa: F811
    name = config(work, "rates", train__steps=2)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def peak_share(run):
        done = subprocess.run([BIN / "lmlaunch", name, f"run.dir={run}"], cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return max(row["sol_pct"] for row in map(json.loads, open(work / run / "metrics.jsonl")) if "sol_pct" in row)

    peak_share("rates_1")
    [file] = (tmp_path / "lmlaunch" / "rates").glob("*.json")
    kept = json.loads(file.read_text())
    assert kept["threads"] == 1 and kept["dtype"] == "fp32" and kept["libtorch"] and kept["gemm_flop_per_s"] > 1e8
    # What is kept is believed by the CLI process, and by a run until a step is faster: then it was measured on a busy machine.
    file.write_text(json.dumps({**kept, "gemm_flop_per_s": kept["gemm_flop_per_s"] / 1e6}))
    planned = json.loads(lmlaunch("plan", name, "--json", cwd=work, env=environment).stdout)
    assert planned["sol_pct"] <= 100 and planned["step_seconds"] > 10
    assert 0 < peak_share("rates_2") <= 100
    raised = json.loads(file.read_text())
    assert raised["gemm_flop_per_s"] > kept["gemm_flop_per_s"] / 1e3
    assert raised["measured"] <= time.time() - 6.9 * 24 * 3600  # all that was measured then is measured anew within the hour
    # Not for another number of threads, and not for longer than a week.
    subprocess.run([BIN / "lmlaunch", name, "run.dir=rates_3", "run.threads=2"], cwd=work, env=environment, check=True, capture_output=True)
    assert len(list(file.parent.glob("*.json"))) == 2
    file.write_text(json.dumps({**json.loads(file.read_text()), "measured": int(time.time()) - 8 * 24 * 3600}))
    assert peak_share("rates_4") < 100
    # Evaluation predicts nothing, and measures nothing.
    for found in file.parent.glob("*.json"):
        found.unlink()
    subprocess.run([BIN / "lmlaunch", "eval", "rates_4"], cwd=work, env=environment, check=True, capture_output=True)
    assert not list(file.parent.glob("*.json"))
