"""What trains the same trains the same bits: losses, norms, held-out losses, weights and generated text of fixed runs against
those recorded for this kind of CPU in same_bits.json. A kind that has none there is skipped, and named.

A change that is meant to change bits records them anew:   PYTHONPATH=tests/support python tests/e2e/test_same_bits.py --record
Two builds against each other, on any CPU:                 PYTHONPATH=tests/support python tests/e2e/test_same_bits.py --other DIRECTORY_OF_BINARIES
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import processor
import pytest
import tokenizers
import torch
import transformers
from counts import FULL
from test_run import BIN, warm_program
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "same_bits.json"
VOCAB = 331

SMALL = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
             max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
MODELS = {
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "untied": LlamaConfig(**{**SMALL, "vocab_size": 17000}, tie_word_embeddings=False),  # two segments and a bit
    "biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=24, tie_word_embeddings=False),
    "mistral": MistralConfig(**SMALL, sliding_window=11, tie_word_embeddings=False),
}
NVME = {name: f"offload.{name}=nvme" for name in ("optimizer", "gradients", "weights", "activations")}
BLOCK = "train.recompute=block"
LORA = ["train.method=lora", "lora.r=4", "lora.dropout=0.1"]
# name -> model, settings
RUNS = {
    "full": ("tied", []),
    "full_two_threads": ("tied", ["run.threads=2"]),
    "full_fp32": ("tied", ["model.dtype=fp32"]),
    "full_untied": ("untied", []),
    "full_fp32_master": ("tied", ["optimizer.master=fp32"]),
    "full_no_master": ("tied", ["optimizer.master=none"]),
    "full_bf16_gradients": ("tied", ["train.gradients=bf16"]),
    "full_recompute": ("untied", [BLOCK]),
    "full_one_micro_batch": ("tied", ["train.micro_batch=4"]),
    "full_clip_block": ("tied", ["optimizer.clip=block"]),
    "full_no_clip": ("tied", ["optimizer.clip=none"]),
    "full_biases": ("biases", []),
    "full_biases_fp32": ("biases", ["model.dtype=fp32"]),
    "full_windows": ("qwen2", []),
    "full_qk_norms": ("qwen3", []),
    "full_qk_norms_fp32": ("qwen3", ["model.dtype=fp32"]),
    "full_mistral": ("mistral", []),
    "lora": ("tied", LORA),
    "lora_fp32": ("tied", [*LORA, "model.dtype=fp32"]),
    "lora_recompute": ("qwen3", [*LORA, BLOCK]),
    "lora_biases": ("biases", LORA[:2]),
    "off_device_optimizer": ("tied", [NVME["optimizer"]]),
    "off_device_gradients": ("tied", [NVME["optimizer"], NVME["gradients"], BLOCK]),
    "off_device_weights": ("tied", [NVME["weights"], BLOCK]),
    "off_device_inputs": ("tied", [NVME["activations"], BLOCK]),
    "off_device_all_cut_head": ("untied", [*NVME.values(), BLOCK]),
    "off_device_lora": ("untied", [*LORA, NVME["weights"], BLOCK]),
}
BASE = """run.device = "cpu"
run.threads = 1
model.dtype = "bf16"
[data]
train = ["train.jsonl"]
eval = ["eval.jsonl"]
max_length = 48
cache_dir = "cache"
[train]
steps = 5
global_batch = 4
micro_batch = 2
recompute = "none"
eval_every = 3
[optimizer]
lr = 5e-3
warmup = 2
"""


def make_tokenizer(directory):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")


def make_work(work):
    for name, config in MODELS.items():
        torch.manual_seed(11)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(work / name)
        make_tokenizer(work / name)
    generator = torch.Generator().manual_seed(12)
    for name, count in [("train", 20), ("eval", 5)]:
        with open(work / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                start, length = (int(torch.randint(*r, (1,), generator=generator)) for r in [(0, VOCAB), (5, 47)])
                file.write(json.dumps({"input_ids": [(start + 7 * i * i) % VOCAB for i in range(length)]}) + "\n")
    (work / "swap").mkdir()
    (work / "c.toml").write_text(BASE)


def lmlaunch(work, binaries, *arguments):
    done = subprocess.run([warm_program(Path(binaries)), *map(str, arguments)], cwd=work, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "XDG_CACHE_HOME": str(work / "user-cache")})
    assert done.returncode == 0, f"{arguments}\n{done.stderr}"
    return done.stdout


def bits(work, binaries, name):
    """What is compared: numbers as the texts that they were written as."""
    model, settings = RUNS[name]
    run = Path("runs") / f"{name}_{abs(hash(str(binaries)))}"
    lmlaunch(work, binaries, "c.toml", f"run.dir={run}", f"model.path={model}", 'offload.paths=["swap"]', *settings)
    rows = [json.loads(line, parse_float=str, parse_int=str) for line in open(work / run / "metrics.jsonl")]
    return {"loss": [row["loss"] for row in rows if "loss" in row], "grad_norm": [row["grad_norm"] for row in rows if "loss" in row],
            "eval_loss": [row["eval_loss"] for row in rows if "eval_loss" in row],
            "weights": json.loads(lmlaunch(work, binaries, "verify", run, "--json"))["weights_hash"],
            "tokens": json.loads(lmlaunch(work, binaries, "generate", run, "--prompt", "w5 w9 w7", "--max-tokens", 6, "--json"))["tokens"]}


def cpu_kind():
    """Libraries and kernels choose their code by these, and their code decides the order of additions."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:(.*)$", text, re.M)[1].strip()
    return f"{model} {processor.best()} torch {torch.__version__} transformers {transformers.__version__}"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("same_bits")
    make_work(work)
    return work


@pytest.mark.parametrize("name", RUNS if FULL else list(RUNS)[::3])
def test_the_bits_are_those_recorded(work, name):
    recorded = json.loads(RECORDED.read_text()).get(cpu_kind())
    if recorded is None:
        pytest.skip(f"no bits are recorded for {cpu_kind()}")
    assert bits(work, BIN, name) == recorded[name]


def main():
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make_work(work)
        ours = {name: bits(work, BIN, name) for name in RUNS}
        if "--record" in sys.argv:
            recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
            recorded[cpu_kind()] = ours
            kinds = [f"{json.dumps(kind)}: {{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items()) + "}"
                     for kind, runs in recorded.items()]
            RECORDED.write_text("{" + ",\n".join(kinds) + "}\n")
        else:
            other = sys.argv[sys.argv.index("--other") + 1]
            differ = [name for name in RUNS if bits(work, other, name) != ours[name]]
            print(f"{len(RUNS) - len(differ)} of {len(RUNS)} runs have the same bits" + "".join(f"\n{name} differs" for name in differ))
            sys.exit(bool(differ))


if __name__ == "__main__":
    main()
