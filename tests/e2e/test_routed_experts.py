"""Frozen experts on a disk: the bytes that steps read of them, by routing and with whole blocks, against the plan's. The model's router
is even by construction: a token's embedding points at one expert, and tokens are drawn evenly."""

import json

import pytest
import torch
from test_run import config, filled, lmlaunch, rows
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS, HIDDEN, VOCAB, LENGTH, STEPS = 64, 128, 256, 32, 30
LAYERS = 4  # one more than the plan has slots for
# A step of 32 tokens, which meet 40 % of the experts, and one of 128 tokens, which meet 87 %.
ROUTED, WHOLE = (dict(train__micro_batch=count, train__global_batch=count) for count in (1, 4))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("routed"), layers=1)
    torch.manual_seed(7)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        hidden_size=HIDDEN, intermediate_size=64, moe_intermediate_size=384, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, num_experts=EXPERTS, num_experts_per_tok=1, norm_topk_prob=True, vocab_size=VOCAB, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=2, pad_token_id=None, tie_word_embeddings=False))
    with torch.no_grad():
        for token, row in enumerate(model.model.embed_tokens.weight):
            row[token % EXPERTS] = 1
        for layer in model.model.layers:
            layer.mlp.gate.weight.copy_(torch.eye(EXPERTS, HIDDEN))
    model.to(torch.bfloat16).save_pretrained(work / "mixture")
    generator = torch.Generator().manual_seed(3)
    with open(work / "even.jsonl", "w") as file:
        for _ in range(96):
            ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    (work / "few.jsonl").write_text((work / "even.jsonl").read_text().split("\n")[0] + "\n")
    (work / "swap").mkdir()
    return work


def run(work, name, **changes):
    toml = config(work, name, model__path="mixture", model__dtype="bf16", data__train=["even.jsonl"], data__eval=["few.jsonl"],
                  data__max_length=LENGTH, train__method="lora", train__steps=STEPS, train__recompute="none",
                  lora__r=4, lora__targets=["q_proj", "v_proj"], optimizer__lr=1e-4, **changes)
    lmlaunch(toml, cwd=work)
    return [row for row in rows(work, name) if "loss" in row]


OFFLOADED = dict(offload__weights="nvme", offload__paths=["swap"])


def planned(work, name):
    """Bytes that a step reads of the disk."""
    plan = json.loads((work / "runs" / name / "plan.json").read_text())
    return next(link["amount"] for link in plan["links"] if link["name"] == "disk read")


def steps_against_the_plan(work, name, batches):
    """The last rows of a run that reads experts of a disk, and their mean against the plan. The first steps find empty slots, and a block
    that stays in its slot gathers experts."""
    resident = run(work, name + "_resident", **batches)
    steps = run(work, name, **OFFLOADED, **batches)
    assert [(row["loss"], row["grad_norm"]) for row in steps] == [(row["loss"], row["grad_norm"]) for row in resident]
    assert not any("routed_bytes" in row for row in resident)
    steps = steps[8:]
    assert len(steps) >= 20
    return steps, sum(row["read_bytes"] for row in steps) / len(steps) / planned(work, name)


def test_steps_of_few_tokens_read_what_the_plan_expects_of_routers(work):
    steps, share = steps_against_the_plan(work, "routed", ROUTED)
    assert share == pytest.approx(1, abs=0.05)
    assert len({row["read_bytes"] for row in steps}) > 1, "it depends on the tokens"
    for row in steps:
        assert 0 < row["routed_bytes"] < row["read_bytes"]
        # Each forward pass asks its router, and backward where the block has been fetched again.
        assert LAYERS < row["routed_waits"] < 2 * LAYERS


def test_whole_blocks_are_as_many_bytes_as_the_plan_has(work):
    steps, share = steps_against_the_plan(work, "whole", WHOLE)
    assert share == pytest.approx(1, abs=0.01)
    assert not any("routed_bytes" in row for row in steps)
