"""Every method of fine-tuning takes the memory that is planned for it: of a GPU what this program allocates there, as the emulator counts it, and
on the CPU the resident memory of the process, to 3 %. ../plan/arena_test.cpp holds the arena of each against its plan to the byte."""

import json
import subprocess

import pytest
import torch
from counts import FULL
from limits import memory_counts
from test_heads import NAMES
from test_run import BIN, config, save_tokenizer
from test_emulator import EMULATOR
from test_emulator import lmlaunch as on_emulator
from transformers import AutoModelForCausalLM, Qwen2Config

VOCAB, LENGTH = 2048, 64
LORA = dict(train__method="lora", lora__r=32, lora__alpha=32)
METHODS = {
    "full": {},
    "lora": LORA,
    "dora": {**LORA, "lora__dora": True},
    "rslora": {**LORA, "lora__rslora": True},
    "bias": {**LORA, "lora__bias": "all"},
    "lora_plus": {**LORA, "lora__b_lr_ratio": 4.0},
    "also": {**LORA, "lora__also": ["embed_tokens", "norms"]},
    "tokens": {**LORA, "lora__tokens": list(range(5, 500))},
    "pissa": {**LORA, "lora__start": "pissa"},
    "qlora": {**LORA, "train__method": "qlora"},
    "loftq": {**LORA, "train__method": "qlora", "lora__start": "loftq"},
    "ia3": dict(train__method="ia3"),
    "prefix": dict(train__method="prefix", prompt__length=16),
    "norms": dict(train__method="norms"),
    "classify": dict(train__objective="classify", train__labels=NAMES, data__train=["labelled.jsonl"]),
    "prompt": dict(train__method="prompt", prompt__length=16),
    "reward": dict(**LORA, train__objective="reward", data__train=["pairs.jsonl"]),
    "ptuning": dict(train__method="ptuning", prompt__length=16),
}
COMMON = dict(data__train=["rows.jsonl"], data__eval=[], data__max_length=LENGTH, train__global_batch=4, train__micro_batch=4, train__recompute="none")


def model(directory, **shape):
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=3,
        **shape)).to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory, [f"w{i}" for i in range(VOCAB)])
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2", "pad_token": "w3"}))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Models with biases: 6 million weights, as the emulator's kernels take their time, and 23 million, beside which what LibTorch takes of the
    host varies by little."""
    work = tmp_path_factory.mktemp("methods_memory")
    model(work / "small", hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2)
    model(work / "model", hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4)
    drawn = torch.randint(4, VOCAB, (12, LENGTH), generator=torch.Generator().manual_seed(2)).tolist()  # as long as they may be
    text = lambda ids: " ".join(f"w{i}" for i in ids)
    for name, rows in {"rows": [{"input_ids": row, "labels": row} for row in drawn],
                       "labelled": [{"text": text(row), "label": NAMES[i % 3]} for i, row in enumerate(drawn)],
                       "pairs": [{"chosen": text(row[2::2]), "rejected": text(row[3::2])} for row in drawn]}.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return work


def taken_of_a_gpu(work, method):
    """What is planned of a GPU for this program's own allocations, and by how much more the emulator has allocated: LibTorch's part."""
    (work / f"peaks_{method}").mkdir()
    toml = config(work, f"gpu_{method}", **{**COMMON, **METHODS[method], "run__device": "auto", "model__path": "small", "model__dtype": "bf16",
                                            "train__steps": 2})
    on_emulator("--gpus", 1, toml, "checkpoint.every=0", cwd=work, EMULATOR_PEAK=str(work / f"peaks_{method}"))
    device = json.loads((work / "runs" / f"gpu_{method}" / "plan.json").read_text())["tiers"][0]
    part = {row["name"]: row["bytes"] for row in device["classes"]}
    planned = device["bytes"] - part["context"] - part["LibTorch"]
    (peak,) = (int(path.read_text()) for path in (work / f"peaks_{method}").iterdir())
    assert 0 < peak - planned < part["LibTorch"]
    return planned, peak - planned


@pytest.fixture(scope="module")
def of_torch(work):
    """That LibTorch takes in these steps, whatever is trained: its attention has the same shapes."""
    return taken_of_a_gpu(work, "full")[1]


@pytest.mark.skipif(not (EMULATOR / "bin" / "lmlaunch-cuda").exists(), reason="no emulator here")
@pytest.mark.parametrize("method", [method for method in METHODS if method != "full"])
def test_a_gpu_has_what_is_planned(work, of_torch, method):
    planned, more = taken_of_a_gpu(work, method)
    # Much less than the 3 % that are promised, of which a table could be a part: allocations begin at pages.
    assert abs(more - of_torch) <= 64 << 10 < 0.03 * planned, (more - of_torch, planned)


@memory_counts
@pytest.mark.parametrize("method", METHODS if FULL else list(METHODS)[::3])
def test_a_process_has_what_is_planned(work, method):
    """In fp32, of which the GEMM library keeps no code: what it may keep for other shapes is planned, and not met by rows of one length."""
    toml = config(work, method, **{**COMMON, **METHODS[method], "model__dtype": "fp32", "train__steps": 3, "checkpoint__every": 2})
    ran = subprocess.run([BIN / "lmlaunch", toml], cwd=work, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    # By now it is known what LibTorch takes here.
    told = subprocess.run([BIN / "lmlaunch", "plan", toml, "--json"], cwd=work, capture_output=True, text=True, check=True)
    planned = json.loads(told.stdout)["peak"]["host_bytes"]
    rows = [json.loads(line) for line in open(work / "runs" / method / "metrics.jsonl")]
    peak = int(ran.stderr.split("peak resident memory ")[1].split(" MiB")[0]) << 20
    assert 0.97 * planned <= max([peak, *(row["host_bytes"] for row in rows if "loss" in row)]) <= 1.03 * planned, (peak, planned)
