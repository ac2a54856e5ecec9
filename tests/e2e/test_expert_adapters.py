"""LoRA on the experts of a mixture (lora.experts), on the CPU (test_emulator.py has a GPU's): steps and files against peft's
target_parameters, tiers, ranks, resumption, quantized bases, merging, and what is refused. Some experts are met by no token of a
micro-batch."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_experts import MODELS as PLAIN_MODELS
from test_experts import drawn, hash_of, read, sizes
from test_run import config, eval_losses, expect_resumed_bits, filled, lmlaunch, loss_by_transformers, losses, rows

from transformers import (Gemma4ForCausalLM, Gemma4TextConfig, Glm4MoeConfig, Glm4MoeForCausalLM, GptOssConfig, GptOssForCausalLM, MiniMaxM2Config,
                          MiniMaxM2ForCausalLM)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
from expert_files import all_in_files  # noqa: E402

COUNT, STEPS, LR = 4, 5, 1e-3
NAMES = {"qwen3_moe": "mlp.experts", "mixtral": "mlp.experts", "granitemoe": "block_sparse_moe.experts", "glm4_moe": "mlp.experts",
         "minimax_m2": "mlp.experts", "gemma4_text": "experts", "gpt_oss": "mlp.experts"}
# Sigmoid routers: GLM's chooses among groups and scales its weights, beside a dense layer and shared experts.
MODELS = {
    **PLAIN_MODELS,
    "glm4_moe": lambda vocab: Glm4MoeForCausalLM(Glm4MoeConfig(
        **sizes(vocab), head_dim=8, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        routed_scaling_factor=2.5, first_k_dense_replace=1)),
    "minimax_m2": lambda vocab: MiniMaxM2ForCausalLM(MiniMaxM2Config(
        **{**sizes(vocab), "intermediate_size": 16}, head_dim=8, num_local_experts=6, num_experts_per_tok=2)),
    "gemma4_text": lambda vocab: Gemma4ForCausalLM(Gemma4TextConfig(
        **{**sizes(vocab), "pad_token_id": 0}, head_dim=8, global_head_dim=16, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=6,
        top_k_experts=2, moe_intermediate_size=16)),
    "gpt_oss": lambda vocab: GptOssForCausalLM(GptOssConfig(
        **sizes(vocab), head_dim=8, num_local_experts=6, num_experts_per_tok=2, sliding_window=5, swiglu_limit=1.0)),
}
STACKS = "gate_up_proj", "down_proj"
EXPERTS = dict(train__method="lora", lora__experts=True, lora__r=4, lora__alpha=8, optimizer__lr=3e-2)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("expert_adapters"), layers=1)
    torch.manual_seed(4)
    for name in NAMES:
        drawn(MODELS[name]).save_pretrained(work / name)
    lines = (work / "train.jsonl").read_text().splitlines()
    (work / "few.jsonl").write_text("\n".join(lines[:COUNT]) + "\n")
    (work / "swap").mkdir()
    return work


def tensors(path):
    return load_file(path / "adapter_model.safetensors")


def peft_adapter(work, name, into, stacks=STACKS, modules=("q_proj", "v_proj"), **more):
    """A peft adapter of random pairs in `into`, and the model that has it."""
    made = get_peft_model(read(work / name), LoraConfig(r=4, lora_alpha=8, target_modules=list(modules), task_type="CAUSAL_LM",
                                                        target_parameters=[f"{NAMES[name]}.{stack}" for stack in stacks], **more))
    torch.manual_seed(5)
    for key, parameter in made.named_parameters():
        if "lora_" in key:
            parameter.data.normal_(std=0.1)
    made.save_pretrained(into)
    return made


def stepped(model, work):
    """Losses, and the first gradient's norm, of torch's AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    data = [json.loads(line) for line in open(work / "few.jsonl")]
    found, norms = [], []
    for _ in range(STEPS):
        nll, targets = 0.0, 0
        for row in data:
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row["labels"])[1:]
            nll = nll + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            targets += int((labels != -100).sum())
        optimizer.zero_grad()
        (nll / targets).backward()
        found.append((nll / targets).item())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item())
        optimizer.step()
    return found, norms[0]


@pytest.mark.parametrize("name, stacks", [*((name, STACKS) for name in NAMES), ("qwen3_moe", ("down_proj",))], ids=[*NAMES, "down_alone"])
def test_pefts_adapter_is_trained_further_as_peft_does(work, name, stacks):
    run = f"peft_{name}_{len(stacks)}"
    model = peft_adapter(work, name, work / run, stacks)
    before = tensors(work / run)
    theirs, norm = stepped(model, work)
    model.save_pretrained(work / f"{run}_trained")
    lmlaunch(config(work, run, model__path=name, lora__init=run, train__method="lora", data__train=["few.jsonl"], train__steps=STEPS,
                    train__global_batch=COUNT, train__micro_batch=2, optimizer__lr=LR, optimizer__clip="none", optimizer__weight_decay=0.0), cwd=work)
    steps = [row for row in rows(work, run) if "loss" in row]
    assert steps[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert [row["loss"] for row in steps] == pytest.approx(theirs, rel=1e-4)
    expected, after = tensors(work / f"{run}_trained"), tensors(work / "runs" / run / "model")
    assert {key: value.shape for key, value in after.items()} == {key: value.shape for key, value in expected.items()}
    assert sum(".experts." in key for key in after) == 2 * len(stacks) * len({key.split(".")[4] for key in after if ".experts." in key})
    for key, value in after.items():
        assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), key
        assert not torch.equal(value, before[key]), key
    adapted = PeftModel.from_pretrained(read(work / name), work / "runs" / run / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(eval_losses(work, run)[-1], rel=1e-4)


@pytest.fixture(scope="module")
def plain(work):
    lmlaunch(config(work, "plain", model__path="qwen3_moe", **EXPERTS), cwd=work)
    before, after = eval_losses(work, "plain")
    assert after < before
    return losses(work, "plain")


def test_the_result_is_pefts_and_merges_into_the_experts_alone(work, plain):
    saved = json.loads((work / "runs/plain/model/adapter_config.json").read_text())
    assert saved["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert sorted(saved["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    adapted = PeftModel.from_pretrained(read(work / "qwen3_moe"), work / "runs/plain/model")
    assert loss_by_transformers(adapted, work) == pytest.approx(eval_losses(work, "plain")[-1], rel=1e-4)
    lmlaunch("export", "runs/plain", "--merge", "-o", "merged", cwd=work)
    base, merged = (load_file(work / path / "model.safetensors") for path in ("qwen3_moe", "merged"))
    changed = {key.split(".", 3)[3] for key in base if not torch.equal(base[key], merged[key])}
    assert {key for key in changed if ".experts." in key} == {
        f"mlp.experts.{e}.{matrix}.weight" for e in range(8) for matrix in ("gate_proj", "up_proj", "down_proj")}
    assert "mlp.gate.weight" not in changed and not any(key.startswith("mlp.down_proj") for key in changed)
    theirs = all_in_files("qwen3moe", dict(adapted.merge_and_unload().named_parameters()))
    for key, value in merged.items():
        assert (value - theirs[key]).norm() <= 1e-5 * theirs[key].norm(), key
    assert loss_by_transformers(read(work / "merged"), work) == pytest.approx(eval_losses(work, "plain")[-1], rel=1e-4)


def test_experts_alone_have_no_modules(work):
    lmlaunch(config(work, "alone", model__path="qwen3_moe", train__steps=3, **{**EXPERTS, "lora__experts": False},
                    lora__targets=["experts.gate_up_proj", "experts.down_proj"]), cwd=work)
    saved = json.loads((work / "runs/alone/model/adapter_config.json").read_text())
    assert saved["target_modules"] == []
    assert all(".experts." in key for key in tensors(work / "runs/alone/model"))
    lmlaunch(config(work, "further", model__path="qwen3_moe", train__method="lora", lora__init="runs/alone", train__steps=2, optimizer__lr=1e-3), cwd=work)
    assert losses(work, "further")[0][0] < losses(work, "alone")[0][0]


def test_ranks_that_differ_are_written_for_peft_in_both_forms(work):
    toml = work / config(work, "ranks", model__path="qwen3_moe", train__steps=3, **EXPERTS, lora__layers=[0, 1])
    toml.write_text(toml.read_text() + '[lora.ranks]\n"experts.down_proj" = 2\nq_proj = 3\n')
    lmlaunch(toml.name, cwd=work)
    lmlaunch("export", "runs/ranks", "-o", "one_rank", cwd=work)
    key = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    assert tensors(work / "one_rank")[key].shape == (32, 4 * 8)
    assert not any(".layers.2." in key for key in tensors(work / "one_rank"))
    for path in "runs/ranks/model", "one_rank":
        adapted = PeftModel.from_pretrained(read(work / "qwen3_moe"), work / path)
        assert loss_by_transformers(adapted, work) == pytest.approx(eval_losses(work, "ranks")[-1], rel=1e-4), path


@pytest.mark.parametrize("name", ["glm4_moe", "minimax_m2"])
def test_beside_a_sigmoid_router_experts_learn_and_merge_alone(work, name):
    """The router, its correction and GLM's dense and shared experts have names that end as the experts' do, and stay."""
    run = f"sigmoid_{name}"
    lmlaunch(config(work, run, model__path=name, train__recompute="block", **EXPERTS), cwd=work)
    before, after = eval_losses(work, run)
    assert after < before
    adapted = PeftModel.from_pretrained(read(work / name), work / "runs" / run / "model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-4)
    if name == "minimax_m2":
        lmlaunch("export", f"runs/{run}", "--each-expert", "-o", f"{run}_each", cwd=work)
        each = PeftModel.from_pretrained(read(work / name), work / f"{run}_each")
        assert loss_by_transformers(each, work) == pytest.approx(after, rel=1e-4)
    lmlaunch("export", f"runs/{run}", "--merge", "-o", f"{run}_merged", cwd=work)
    base, merged = (load_file(work / path / "model.safetensors") for path in (name, f"{run}_merged"))
    assert base.keys() == merged.keys()
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    layers = {key.split(".")[2] for key in base if ".experts." in key}
    assert {key.split(".")[2] for key in changed if ".experts." in key} == layers
    assert not any(key.endswith(("gate.weight", "e_score_correction_bias")) for key in changed)
    assert not any(key.startswith("model.layers.0.mlp.") for key in changed)  # dense, of GLM
    assert loss_by_transformers(read(work / f"{run}_merged"), work) == pytest.approx(after, rel=1e-4)


def test_a_checkpoint_has_the_hash_of_the_adapter_that_is_exported(work):
    """Those of all experts are one tensor in the export, and tensors of their own in the checkpoint."""
    lmlaunch(config(work, "hashed", model__path="qwen3_moe", train__steps=2, checkpoint__every=2, **EXPERTS), cwd=work)
    (checkpoint,) = (work / "runs/hashed/checkpoints").iterdir()
    assert hash_of(work, checkpoint) == hash_of(work, "runs/hashed/model")


def test_pairs_of_each_expert_are_pefts_too(work, plain):
    lmlaunch("export", "runs/plain", "--each-expert", "-o", "each", cwd=work)
    found = tensors(work / "each")
    assert found["base_model.model.model.layers.2.mlp.experts.7.up_proj.lora_B.weight"].shape == (16, 4)
    assert sum(".experts." in key for key in found) == 2 * 8 * 3 * 2
    adapted = PeftModel.from_pretrained(read(work / "qwen3_moe"), work / "each")
    assert loss_by_transformers(adapted, work) == pytest.approx(eval_losses(work, "plain")[-1], rel=1e-4)


@pytest.mark.parametrize("changes", [
    dict(offload__optimizer="nvme", offload__gradients="nvme", offload__weights="nvme", offload__paths=["swap"], train__recompute="block"),
    dict(offload__optimizer="host", offload__weights="host", train__recompute="attention"),
], ids=["on_disk", "on_host"])
def test_where_state_lives_changes_no_bit(work, plain, changes):
    name = changes["train__recompute"]
    lmlaunch(config(work, name, model__path="qwen3_moe", **EXPERTS, **changes), cwd=work)
    assert losses(work, name) == plain


def test_two_ranks_agree(work, plain):
    for stage in 0, 3:
        lmlaunch("--ranks", "2", config(work, f"stage{stage}", model__path="qwen3_moe", **EXPERTS, zero__stage=stage, train__micro_batch=2), cwd=work)
    assert losses(work, "stage0")[0][0] == pytest.approx(plain[0][0], rel=1e-6)
    assert losses(work, "stage3") == losses(work, "stage0")


def test_a_stopped_run_resumes_bit_for_bit(work):
    expect_resumed_bits(work, model__path="qwen3_moe", **{**EXPERTS, "optimizer__lr": 1e-3})


def test_pairs_of_fp32_learn_beside_quantized_experts(work):
    settings = dict(EXPERTS, model__path="qwen3_moe", train__method="qlora", model__dtype="bf16", lora__dtype="fp32")
    lmlaunch(config(work, "qlora", **settings), cwd=work)
    before, after = eval_losses(work, "qlora")
    assert after < before
    lmlaunch(config(work, "qlora_on_disk", **settings, offload__weights="nvme", offload__paths=["swap"]), cwd=work)
    assert losses(work, "qlora_on_disk") == losses(work, "qlora")


def refused(work, arguments, code, text):
    done = lmlaunch(*arguments, cwd=work, check=False)
    assert done.returncode == code, (arguments, done.stderr)
    assert text in done.stderr, (arguments, done.stderr)


def test_what_is_not_there_is_refused_by_name(work, plain):
    lora = dict(EXPERTS, model__path="qwen3_moe")
    refused(work, (config(work, "dense", **{**lora, "model__path": "model"}),), 10, "has none")
    refused(work, (config(work, "dropped", **lora, lora__dropout=0.1),), 10, "lora.dropout is set")
    refused(work, (config(work, "dora", **lora, lora__dora=True),), 10, "lora.dora = true")
    refused(work, (config(work, "pissa", **lora, lora__start="pissa"),), 10, 'lora.start = "pissa"')
    refused(work, (config(work, "ia3", **{**lora, "train__method": "ia3"}),), 10, "lora.experts is LoRA's")
    lmlaunch(config(work, "no_experts", **{**lora, "lora__experts": False, "train__steps": 1}), cwd=work)
    refused(work, ("export", "runs/no_experts", "--each-expert", "-o", "none"), 11, "no pairs of experts")
    refused(work, ("merge", "runs/plain", "runs/plain", "-o", "both"), 11, "pairs of experts")


@pytest.mark.parametrize("version", [None, "0.18.1", "0.19.0"])
def test_earlier_layouts_of_peft_are_refused(work, version):
    """gate_up_proj is square here: no shape tells which way its pair lies."""
    path = work / f"old_{version}"
    peft_adapter(work, "qwen3_moe", path)
    saved = json.loads((path / "adapter_config.json").read_text())
    saved["peft_version"] = version
    (path / "adapter_config.json").write_text(json.dumps(saved))
    refused(work, (config(work, f"old_{version}", model__path="qwen3_moe", train__method="lora", lora__init=path.name),), 11, "target_parameters")


def test_a_parameter_that_is_none_of_experts_is_refused(work):
    path = work / "unknown"
    peft_adapter(work, "qwen3_moe", path)
    saved = json.loads((path / "adapter_config.json").read_text())
    saved["target_parameters"].append("mlp.experts.side_proj")
    (path / "adapter_config.json").write_text(json.dumps(saved))
    refused(work, (config(work, "unknown", model__path="qwen3_moe", train__method="lora", lora__init="unknown"),), 11, "side_proj")
    saved["target_parameters"].pop()
    (path / "adapter_config.json").write_text(json.dumps(saved))
    short = tensors(path)
    del short["base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"]
    save_file(short, path / "adapter_model.safetensors", {"format": "pt"})
    refused(work, (config(work, "short", model__path="qwen3_moe", train__method="lora", lora__init="unknown"),), 11, "experts.base_layer.lora_B")


def test_an_adapter_of_gemmas_router_is_refused_by_name(work):
    """peft's "all-linear" has it, since that router is a linear layer."""
    get_peft_model(read(work / "gemma4_text"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).save_pretrained(work / "router")
    assert any("router.proj" in key for key in tensors(work / "router"))
    refused(work, (config(work, "router", model__path="gemma4_text", train__method="lora", lora__init="router"),), 11, "a router has no adapter")
