"""Memory of the GPU program as its users see it, on the emulator: what metrics say it takes, what it says where host memory
cannot be locked, and that a model passes through the GPU unchanged."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

BIN = Path(os.environ["LM_EMULATOR_BIN"])
LIB = Path(os.environ.get("LM_EMULATOR_LIB", BIN.parent / "lib"))  # the cards that the CLI process finds
pytestmark = pytest.mark.skipif(not (LIB / "libemulator_devices.so").exists(), reason="no cards for the CLI process: libemulator_devices.so")
VOCAB = 97


def lmlaunch(*arguments, cwd, environment=None):
    return subprocess.run([BIN / "lmlaunch", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "LD_PRELOAD": str(LIB / "libemulator_devices.so"), "LD_LIBRARY_PATH": str(LIB), **(environment or {})})


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("emulator_memory")
    torch.manual_seed(1)
    for name, layers in [("model", 2), ("deep", 7)]:
        LlamaForCausalLM(LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        )).save_pretrained(work / name)
    with open(work / "train.jsonl", "w") as file:
        for i in range(32):
            file.write(json.dumps({"input_ids": [(i + 3 * j) % VOCAB for j in range(12)]}) + "\n")
    return work


def config(work, name, offload=""):
    (work / f"{name}.toml").write_text(f"""
[model]
path = "model"
[data]
train = ["train.jsonl"]
max_length = 16
cache_dir = "cache"
[train]
steps = 3
global_batch = 4
micro_batch = 4
[offload]
{offload}
""")
    return f"{name}.toml"


def test_metrics_and_the_last_lines_say_what_the_gpu_holds(work):
    done = lmlaunch("--gpus", 1, config(work, "near"), cwd=work)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in open(work / "runs/near/metrics.jsonl")]
    device = [row["device_bytes"] for row in rows]
    planned = json.load(open(work / "runs/near/plan.json"))["peak"]["device_bytes"]
    parameters = sum(t.numel() for t in load_file(work / "model/model.safetensors").values())
    assert all(parameters * (2 + 4 + 2 + 8) < bytes <= planned for bytes in device), (device, planned)
    assert device == sorted(device)
    assert ", of the GPU's " in done.stderr


def test_memory_that_cannot_be_locked_is_said_before_the_model_is_loaded(work):
    name = config(work, "optimizer", 'optimizer = "host"')
    done = lmlaunch("--gpus", 1, name, cwd=work, environment={"EMULATOR_NO_PIN": "1"})
    assert done.returncode == 0, done.stderr
    warning = [line for line in done.stderr.splitlines() if "warning MEM-17" in line and "for transfers" in line]
    assert len(warning) == 1 and "ulimit -l" in warning[0] and "out of memory" in warning[0], done.stderr
    assert lmlaunch("--gpus", 1, name, "run.dir=runs/pinned", cwd=work).stderr.count("MEM-17") == 0


def test_what_the_gpu_must_reach_in_place_is_refused_where_it_cannot_be_locked(work):
    name = config(work, "weights", 'weights = "host"')
    done = lmlaunch("--gpus", 1, name, cwd=work, environment={"EMULATOR_NO_PIN": "1"})
    assert done.returncode == 31 and "MEM-17" in done.stderr, done.stderr
    assert not (work / "runs/weights/metrics.jsonl").exists()


def test_a_model_goes_into_the_gpu_and_out_of_it_unchanged(work):
    done = lmlaunch("--gpus", 1, config(work, "still"), "optimizer.lr=1e-30", cwd=work)  # too little to move a weight
    assert done.returncode == 0, done.stderr
    given, taken = load_file(work / "model/model.safetensors"), load_file(work / "runs/still/model/model.safetensors")
    assert given.keys() == taken.keys()
    assert all(torch.equal(given[name].bfloat16(), taken[name]) for name in given)


def spans(path):
    events = json.load(open(path))["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return [(rows[e["tid"]], e["name"], e["dur"]) for e in events if e["ph"] == "X"]


def test_a_trace_shows_what_the_gpu_did_and_hidden_pct_counts_copies_and_waits_by_its_clock(work):
    name = config(work, "moved", 'optimizer = "host"\nweights = "host"')
    done = lmlaunch("--gpus", 1, name, "model.path=deep", "train.steps=5", "--trace", "trace.json", cwd=work)  # more layers than slots
    assert done.returncode == 0, done.stderr
    seen = spans(work / "trace.json")
    for row, what in [("GPU compute", "forward block 0"), ("GPU compute", "backward block 1"), ("to GPU", "weights of block 0"),
                      ("from GPU", "weights of block 0"), ("GPU kernels", "gemm "), ("GPU kernels", "rms_norm_backward")]:
        assert any(r == row and n.startswith(what) and d > 0 for r, n, d in seen), (row, what, sorted(set(seen)))
    hidden = [json.loads(line)["hidden_pct"] for line in open(work / "runs/moved/metrics.jsonl")]
    assert all(0 <= h <= 100 for h in hidden) and min(hidden[1:]) < 100, hidden


def test_a_trace_of_a_resident_run_has_every_step_whole_and_rows_come_in_order(work):
    done = lmlaunch("--gpus", 1, config(work, "timeline"), "train.steps=6", "--trace", "timeline.json", cwd=work)
    assert done.returncode == 0, done.stderr
    seen = spans(work / "timeline.json")
    of_steps = [name for row, name, _ in seen if row == "GPU compute" and name.startswith("backward block 1")]
    assert of_steps and len(of_steps) % 3 == 0  # steps 2 to 4
    rows = [json.loads(line) for line in open(work / "runs/timeline/metrics.jsonl")]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(steps) == list(range(1, 7))


def test_tf32_products_reach_a_run_by_their_key(work):
    name, losses = config(work, "products"), {}
    for products in ("fp32", "tf32"):
        done = lmlaunch("--gpus", 1, name, "model.dtype=fp32", f"model.products={products}", f"run.dir=runs/{products}", cwd=work)
        assert done.returncode == 0, done.stderr
        run = work / "runs" / products
        losses[products] = [json.loads(line)["loss"] for line in open(run / "metrics.jsonl")]
        assert json.loads((run / "numerics.json").read_text())["products"] == products
        assert ("fp32 products as TF32" in (run / "plan.txt").read_text()) == (products == "tf32")
    assert losses["tf32"] != losses["fp32"] and losses["tf32"] == pytest.approx(losses["fp32"], rel=1e-2)


def test_who_runs_on_the_emulator_is_told_so_once(work):
    name = config(work, "told")
    assert lmlaunch("--gpus", 1, name, cwd=work).stderr.count("on the emulator: no GPU is here") == 1
    assert "on the emulator" not in lmlaunch("--gpus", 1, name, "run.dir=runs/quiet", cwd=work, environment={"EMULATOR_QUIET": "1"}).stderr
