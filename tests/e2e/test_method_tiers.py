"""Each method of fine-tuning, wherever its state lies, over several ranks, with updates inside backward, in fp32 and in bf16 with masters: the same
bits as with all of it resident, also after a stop. Every pair of two factors' values stands in a row; ../train/pairwise_test.cpp has more
factors, without files."""

import itertools
import json

import pytest
import torch
from counts import FULL
from safetensors.torch import load_file
from test_heads import LLAMA, NAMES, saved, texts, write
from test_run import VOCAB, config, filled, lmlaunch, losses
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config

LORA = dict(train__method="lora", lora__r=4, lora__alpha=8, lora__dropout=0.1)
# Settings, and what a TOML value of this kind needs: keys on the command line.
METHODS = {
    "lora": (LORA, []),
    "patterns": (LORA, ['lora.ranks={q_proj=2, "regex:mlp"=6}', "lora.alphas={v_proj=3}", "lora.exclude=k_proj"]),
    "rslora": ({**LORA, "lora__rslora": True}, []),
    "dora": ({**LORA, "lora__dora": True}, []),
    "lora_plus": ({**LORA, "lora__b_lr_ratio": 4.0}, []),
    "ia3": (dict(train__method="ia3"), []),
    "norms": (dict(train__method="norms"), []),
    "loftq": ({**LORA, "train__method": "qlora", "lora__start": "loftq"}, []),
    "pissa": ({**LORA, "lora__start": "pissa"}, []),
    "bias": ({**LORA, "lora__bias": "all"}, []),
    "score_head": ({**LORA, "model__path": "base", "data__train": ["single.jsonl"], "data__eval": ["single.jsonl"], "train__objective": "classify",
                    "train__labels": NAMES}, []),
}
OFF_DEVICE = dict(offload__weights="nvme", offload__optimizer="nvme", offload__activations="nvme", offload__paths=["swap"], train__recompute="block")
PLACEMENTS = {"resident": {}, "nvme": OFF_DEVICE}
RANKS = {"one": [], "two": ["--ranks", "2"]}
UPDATES = {"after": {}, "in_backward": dict(train__update="in_backward")}
TYPES = {"fp32": dict(model__dtype="fp32"), "bf16": dict(model__dtype="bf16", optimizer__master="split")}
FACTORS = (METHODS, PLACEMENTS, RANKS, UPDATES, TYPES)
STEPS = 6
COMMON = dict(train__steps=STEPS, optimizer__clip="block", optimizer__lr=5e-3, train__global_batch=8, train__micro_batch=2)


def pairs_of(row):
    return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(range(len(row)), 2)}


def covering_rows():
    """Of all rows that with the most new pairs, again and again; of several the first one."""
    rows, out = list(itertools.product(*FACTORS)), []
    missing = set().union(*map(pairs_of, rows))
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        out.append(best)
    return out


ROWS = covering_rows()


def rows_of(method):
    """The row with the most values that are not the first of their factor comes first."""
    plain = [next(iter(values)) for values in FACTORS]
    return sorted((row for row in ROWS if row[0] == method), key=lambda row: sum(a == b for a, b in zip(row, plain)))


# In the short tier each method once, and every value of the others.
FIRST = [rows_of(method)[0 if i % 3 else -1] for i, method in enumerate(METHODS)]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("method_tiers"), layers=1)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1 if "norm" in name else 0, std=0.1)
    model.save_pretrained(work / "model")
    (work / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    saved(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)), work / "base")
    write(work, "single", [{"text": text, "label": NAMES[i % 3]} for i, text in enumerate(texts(16))])
    (work / "swap").mkdir()
    return work


@pytest.fixture(scope="module")
def whole(work):
    """The losses and tensors of a run without a stop that has all of its state on the device; each once."""
    known = {}

    def run(method, ranks, dtype):
        name = f"{method}_{ranks}_{dtype}"
        if name not in known:
            settings, arguments = METHODS[method]
            lmlaunch(*RANKS[ranks], config(work, name, **{**COMMON, **settings, **TYPES[dtype]}), *arguments, cwd=work)
            known[name] = result(work, name)
        return known[name]
    return run


def result(work, name):
    return losses(work, name), load_file(work / "runs" / name / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize("row", ROWS if FULL else FIRST, ids="-".join)
def test_placement_ranks_and_stops_change_no_bit(work, whole, row):
    method, placement, ranks, update, dtype = row
    wanted, tensors = whole(method, ranks, dtype)
    settings, arguments = METHODS[method]
    name = "there_" + "_".join(row)
    shards = dict(zero__stage=3) if ranks == "two" and placement == "nvme" else {}
    toml = config(work, name, **{**COMMON, **settings, **TYPES[dtype], **PLACEMENTS[placement], **UPDATES[update], **shards, "train__steps": STEPS // 2})
    lmlaunch(*RANKS[ranks], toml, *arguments, cwd=work)
    assert losses(work, name) == wanted[:STEPS // 2]
    lmlaunch(*RANKS[ranks], toml, *arguments, f"train.steps={STEPS}", cwd=work)
    got, own = result(work, name)
    assert len(wanted) == STEPS and got == wanted
    assert own.keys() == tensors.keys() and all(torch.equal(own[key], tensors[key]) for key in own)
    assert any(not torch.equal(value, torch.zeros_like(value)) for value in own.values())
    plan = json.loads((work / "runs" / name / "plan.json").read_text())
    assert plan["ranks"] == (2 if ranks == "two" else 1) and plan["placement"]["update"] == update
    assert (placement == "nvme") == any(tier["name"] == "nvme" and tier["bytes"] > 0 for tier in plan["tiers"])


def test_every_pair_of_values_stands_in_a_row():
    every = set().union(*map(pairs_of, itertools.product(*FACTORS)))
    assert every == set().union(*map(pairs_of, ROWS)) and len(ROWS) <= 24
    for factor, values in enumerate(FACTORS):
        assert {row[factor] for row in FIRST} == set(values)
