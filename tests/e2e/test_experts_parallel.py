"""`zero.experts = "parallel"`: each rank keeps some of a mixture's experts, and a run has the bits of one whose ranks have all of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import mpi
from test_run import VOCAB, config, eval_losses, filled, lmlaunch, losses, rows, save_tokenizer

SETTINGS = dict(model__path="qwen3_moe", lora__r=4, lora__alpha=8, optimizer__lr=3e-2, train__micro_batch=2)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("parallel"), layers=1)
    torch.manual_seed(4)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB, head_dim=8,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[1]))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3 if name.endswith("mlp.gate.weight") else 0.1)
    model.save_pretrained(work / "qwen3_moe")
    return work


def prepared(work, name, experts, **changes):
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    return config(work, name, zero__experts=experts, **{"train__method": "lora", **SETTINGS, **changes})


def run(work, name, ranks, experts, **changes):
    return lmlaunch("--ranks", str(ranks), prepared(work, name, experts, **changes), cwd=work)


def result(work, name):
    return losses(work, name), eval_losses(work, name), (work / "runs" / name / "model" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("ranks, method, stage", [(2, "lora", 0), (4, "lora", 2), (2, "qlora", 1), (4, "qlora", 3)])
def test_the_bits_are_those_of_replicated_experts(work, ranks, method, stage):
    run(work, "replicated", ranks, "replicated", train__method=method, zero__stage=stage)
    before, after = eval_losses(work, "replicated")
    assert after < before
    run(work, "parallel", ranks, "parallel", train__method=method, zero__stage=stage)
    assert result(work, "parallel") == result(work, "replicated")


@pytest.mark.parametrize("ranks, method, stage", [(2, "lora", 2), (4, "qlora", 1)])
def test_pairs_of_experts_learn_as_those_of_replicated_ones(work, ranks, method, stage):
    """Their gradients are added up in another order where a rank has several micro-batches."""
    for experts in "replicated", "parallel":
        run(work, f"pairs_{experts}", ranks, experts, train__method=method, zero__stage=stage, lora__experts=True, lora__dropout=0.0)
    before, after = eval_losses(work, "pairs_replicated")
    assert after < before
    losses_of = [[row["loss"] for row in rows(work, f"pairs_{experts}") if "loss" in row] for experts in ("replicated", "parallel")]
    assert losses_of[1] == pytest.approx(losses_of[0], rel=1e-4)
    saved = [load_file(work / "runs" / f"pairs_{experts}" / "model/adapter_model.safetensors") for experts in ("replicated", "parallel")]
    assert {key: value.shape for key, value in saved[0].items()} == {key: value.shape for key, value in saved[1].items()}


def test_a_ranks_experts_may_lie_on_a_disk(work):
    (work / "disk").mkdir()
    run(work, "resident", 2, "replicated", train__method="qlora", data__max_length=8, train__micro_batch=1)
    run(work, "on_disk", 2, "parallel", train__method="qlora", data__max_length=8, train__micro_batch=1, offload__weights="nvme",
        offload__paths=["disk"])
    assert result(work, "on_disk") == result(work, "resident")
    assert sum(row.get("read_bytes", 0) for row in rows(work, "on_disk")) > 0


def test_a_run_goes_on_with_either(work):
    """From its first checkpoint: what is saved knows nothing of who has which experts."""
    changes = dict(checkpoint__every=3, checkpoint__keep=9)
    run(work, "whole", 2, "parallel", **changes)
    whole = result(work, "whole")
    first, *later = sorted((work / "runs" / "whole" / "checkpoints").iterdir())
    assert later
    for experts in ("replicated", "parallel"):
        shutil.rmtree(work / "runs" / "again", ignore_errors=True)
        shutil.copytree(work / "runs" / "whole", work / "runs" / "again")
        for directory in (*(work / "runs/again/checkpoints" / path.name for path in later), work / "runs/again/model"):
            shutil.rmtree(directory)
        (work / "runs/again/status.json").unlink()
        toml = config(work, "again", zero__experts=experts, train__method="lora", **SETTINGS, **changes)
        assert first.name in lmlaunch("--ranks", "2", toml, cwd=work).stderr
        assert (work / "runs/again/model/adapter_model.safetensors").read_bytes() == whole[2]


def test_an_adapter_is_merged_into_all_experts(work):
    run(work, "adapted", 2, "parallel")
    lmlaunch("export", "runs/adapted", "--merge", "-o", "merged", cwd=work)
    run(work, "plain", 2, "replicated")
    lmlaunch("export", "runs/plain", "--merge", "-o", "merged_plain", cwd=work)
    files = [(work / path / "model.safetensors").read_bytes() for path in ("merged", "merged_plain")]
    assert files[0] == files[1]
    evaluated = json.loads(lmlaunch("eval", "runs/adapted", "--json", cwd=work).stdout)["eval_loss"]
    assert evaluated == pytest.approx(eval_losses(work, "adapted")[-1], rel=1e-6)


def test_all_ranks_answer_prompts_together(work):
    """One token at a time, whose experts may all be another rank's."""
    save_tokenizer(work / "qwen3_moe", [f"w{i}" for i in range(VOCAB)])
    for experts in ("replicated", "parallel"):
        run(work, f"asked_{experts}", 2, experts, train__steps=2, train__eval_every=2, train__sample_prompts=["w5 w8 w11"], train__sample_tokens=6)
    answers = [[(row["step"], row["answer"]) for row in rows(work, f"asked_{experts}") if "prompt" in row] for experts in ("replicated", "parallel")]
    assert answers[0] == answers[1] and answers[0]


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (openmpi-bin)")
def test_rows_pass_between_machines_with_the_same_bits(work):
    run(work, "forked", 2, "parallel")
    prepared(work, "launched", "parallel")
    mpi.run(work, "launched", 2)
    assert result(work, "launched") == result(work, "forked")


@pytest.mark.parametrize("ranks, changes, words", [
    (3, {}, "3 ranks do not divide 8 experts"),
    (2, dict(train__method="full"), "train.method"),
    (2, dict(zero__stage=3, offload__weights="nvme", offload__paths=["."]), "offload.weights"),
])
def test_what_cannot_be_is_refused(work, ranks, changes, words):
    toml = prepared(work, "refused", "parallel", **changes)
    answer = lmlaunch("--ranks", str(ranks), toml, cwd=work, check=False)
    assert answer.returncode == 10, answer.stderr
    assert words in answer.stderr and "zero.experts" in answer.stderr
    assert not Path(work / "runs/refused/checkpoints").exists() or not any((work / "runs/refused/checkpoints").iterdir())


def test_a_plan_says_what_each_rank_keeps_and_sends(work):
    toml = prepared(work, "planned", "parallel")
    plan = json.loads(lmlaunch("plan", "--json", "--ranks", "2", toml, cwd=work).stdout)
    alone = json.loads(lmlaunch("plan", "--json", "--ranks", "2", toml, "zero.experts=replicated", cwd=work).stdout)
    assert plan["traffic"]["expert_bytes"] > 0 == alone["traffic"]["expert_bytes"]
    assert "keeps 4 experts" in json.dumps(plan["choices"])
