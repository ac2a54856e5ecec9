"""Mixtures of experts as their users start them, on the CPU: a small Qwen3-MoE with a dense layer and more experts than a batch always
needs. Losses, weights and files are held against transformers and peft, and tiers, ranks and resumption against the plain run."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_run import VOCAB, config, eval_losses, expect_resumed_bits, filled, lmlaunch, loss_by_transformers, losses, rows, save_tokenizer
from transformers import (AutoModelForCausalLM, GraniteMoeConfig, GraniteMoeForCausalLM, MixtralConfig, MixtralForCausalLM, OlmoeConfig,
                          OlmoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

sys.path.append(str(Path(__file__).resolve().parents[1] / "parity"))  # behind this folder: both have a test_ranks
from expert_files import all_in_files  # noqa: E402

COUNT, STEPS, LR = 4, 5, 1e-3
ADAPTER = dict(lora__r=4, lora__alpha=8, optimizer__lr=3e-2)


def sizes(vocab):
    return dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=vocab,
                max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None)


MODELS = {
    "qwen3_moe": lambda vocab: Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **sizes(vocab), head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1])),
    "olmoe": lambda vocab: OlmoeForCausalLM(OlmoeConfig(**{**sizes(vocab), "intermediate_size": 16}, num_experts=6, num_experts_per_tok=2)),
    "qwen2_moe": lambda vocab: Qwen2MoeForCausalLM(Qwen2MoeConfig(
        **sizes(vocab), num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24, mlp_only_layers=[1])),
    "granitemoe": lambda vocab: GraniteMoeForCausalLM(GraniteMoeConfig(
        **{**sizes(vocab), "intermediate_size": 16}, num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=3.0, logits_scaling=2.0,
        residual_multiplier=0.5, attention_multiplier=0.3)),
    "mixtral": lambda vocab: MixtralForCausalLM(MixtralConfig(**{**sizes(vocab), "intermediate_size": 16}, num_local_experts=4)),
}


def drawn(make):
    """A model of random weights, whose routers choose as decidedly as trained ones."""
    model = make(VOCAB)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3 if name.endswith(("mlp.gate.weight", "router.weight", "router.proj.weight")) else 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("experts"), layers=1)
    torch.manual_seed(4)
    for name, make in MODELS.items():
        drawn(make).save_pretrained(work / name)
    lines = (work / "train.jsonl").read_text().splitlines()
    (work / "few.jsonl").write_text("\n".join(lines[:COUNT]) + "\n")
    (work / "swap").mkdir()
    return work


def read(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")


def settings(name, **changes):
    return dict(model__path=name, data__train=["few.jsonl"], train__steps=STEPS, train__global_batch=COUNT, train__micro_batch=2,
                optimizer__lr=LR, optimizer__clip="none", optimizer__weight_decay=0.0, **changes)


def balance(model, router_logits):
    """transformers' loss of the logits of several texts, of each a list by layer."""
    config = model.config
    by_layer = tuple(torch.cat(parts) for parts in zip(*router_logits))
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    return load_balancing_loss_func(by_layer, experts, config.num_experts_per_tok)


def trained(work, name, coefficient=0.0, balances=None):
    """Losses, the first gradient's norm, and the model after torch's AdamW. `coefficient`: of the loss that balances experts, whose values
    `balances` receives."""
    model = read(work / name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    data = [json.loads(line) for line in open(work / "few.jsonl")]
    found, norms = [], []
    for _ in range(STEPS):
        nll, targets, routers = 0.0, 0, []
        for row in data:
            out = model(torch.tensor([row["input_ids"]]), output_router_logits=True)
            routers.append(out.router_logits)
            logits = out.logits[0, :-1]
            labels = torch.tensor(row["labels"])[1:]
            nll = nll + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            targets += int((labels != -100).sum())
        optimizer.zero_grad()
        balanced = balance(model, routers)
        (nll / targets + coefficient * balanced).backward()
        if balances is not None:
            balances.append(balanced.item())
        found.append((nll / targets).item())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        optimizer.step()
    return found, norms[0], model


@pytest.mark.parametrize("name", MODELS)
def test_all_weights_are_trained_as_with_transformers_and_written_as_they_were_read(work, name):
    theirs, norm, reference = trained(work, name)
    lmlaunch(config(work, name, **settings(name)), cwd=work)
    steps = [row for row in rows(work, name) if "loss" in row]
    assert steps[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert [row["loss"] for row in steps] == pytest.approx(theirs, rel=1e-4)
    before, after = (load_file(path / "model.safetensors") for path in (work / name, work / "runs" / name / "model"))
    assert {key: value.shape for key, value in after.items()} == {key: value.shape for key, value in before.items()}
    assert sum(".experts." in key for key in after) > 10 or sum("_linear." in key for key in after) == 6
    expected = all_in_files(name.replace("_", ""), dict(reference.named_parameters()))
    for key, value in after.items():
        assert (value - expected[key]).norm() <= 1e-4 * expected[key].norm(), key
    model = read(work / "runs" / name / "model")
    assert loss_by_transformers(model, work) == pytest.approx(eval_losses(work, name)[-1], rel=1e-4)
    assert json.loads(lmlaunch("eval", f"runs/{name}", "--json", cwd=work).stdout)["eval_loss"] == pytest.approx(eval_losses(work, name)[-1], rel=1e-6)


@pytest.fixture(scope="module")
def plain(work):
    lmlaunch(config(work, "plain", model__path="qwen3_moe"), cwd=work)
    before, after = eval_losses(work, "plain")
    assert after < before
    return losses(work, "plain")


@pytest.mark.parametrize("changes", [
    dict(offload__optimizer="nvme", offload__gradients="nvme", offload__weights="nvme", offload__paths=["swap"], train__recompute="block"),
    dict(offload__optimizer="host", train__recompute="attention", train__update="in_backward", optimizer__clip="none"),
], ids=["on_disk", "in_backward"])
def test_where_state_lives_changes_no_bit(work, plain, changes):
    expected = plain
    if "train__update" in changes:
        lmlaunch(config(work, "unclipped", model__path="qwen3_moe", optimizer__clip="none"), cwd=work)
        expected = losses(work, "unclipped")
    name = changes["train__recompute"]
    lmlaunch(config(work, name, model__path="qwen3_moe", **changes), cwd=work)
    assert losses(work, name) == expected


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_agree(work, plain, stage):
    name = f"ranks{stage}"
    lmlaunch("--ranks", "2", config(work, name, model__path="qwen3_moe", zero__stage=stage, train__micro_batch=2), cwd=work)
    assert losses(work, name)[0][0] == pytest.approx(plain[0][0], rel=1e-6)
    assert [loss for loss, _, _ in losses(work, name)[:5]] == pytest.approx([loss for loss, _, _ in plain[:5]], rel=1e-4)
    if stage == 3:
        assert losses(work, "ranks3") == losses(work, "ranks0")


def test_a_stopped_run_resumes_bit_for_bit(work):
    expect_resumed_bits(work, model__path="qwen3_moe", optimizer__lr=1e-3, optimizer__name="adamw_8bit")


def test_an_adapter_is_on_the_attention_and_pefts(work):
    lmlaunch(config(work, "lora", model__path="qwen3_moe", train__method="lora", **ADAPTER), cwd=work)
    before, after = eval_losses(work, "lora")
    assert after < before
    saved = json.loads((work / "runs/lora/model/adapter_config.json").read_text())
    assert sorted(saved["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    adapted = PeftModel.from_pretrained(read(work / "qwen3_moe"), work / "runs/lora/model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-4)
    lmlaunch("export", "runs/lora", "--merge", "-o", "merged", cwd=work)
    base, merged = (load_file(work / path / "model.safetensors") for path in ("qwen3_moe", "merged"))
    changed = {key.split(".")[-2] for key in base if not torch.equal(base[key], merged[key])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert loss_by_transformers(read(work / "merged"), work) == pytest.approx(after, rel=1e-4)


def test_an_adapter_is_on_the_shared_expert_too_and_pefts(work):
    lmlaunch(config(work, "shared", model__path="qwen2_moe", train__method="lora", **ADAPTER), cwd=work)
    before, after = eval_losses(work, "shared")
    assert after < before
    adapted = PeftModel.from_pretrained(read(work / "qwen2_moe"), work / "runs/shared/model")
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-4)
    lmlaunch("export", "runs/shared", "--merge", "-o", "merged_shared", cwd=work)
    base, merged = (load_file(work / path / "model.safetensors") for path in ("qwen2_moe", "merged_shared"))
    changed = {key.split(".", 3)[3] for key in base if not torch.equal(base[key], merged[key])}
    assert changed == {f"{path}.weight" for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                                     "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")}
    assert loss_by_transformers(read(work / "merged_shared"), work) == pytest.approx(after, rel=1e-4)


def test_of_one_tensor_for_all_experts_one_is_trained(work):
    """Its matrices come before the frozen ones in memory, and go back to their place in the file."""
    lmlaunch(config(work, "one_expert", model__path="granitemoe", train__only=["layers.1.block_sparse_moe.input_linear.3"]), cwd=work)
    before, after = (load_file(path / "model.safetensors") for path in (work / "granitemoe", work / "runs/one_expert/model"))
    changed = {(key, e) for key, value in before.items() for e in range(len(value)) if not torch.equal(value[e], after[key][e])}
    assert changed == {("model.layers.1.block_sparse_moe.input_linear.weight", 3)}


def hash_of(work, what):
    return json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["weights_hash"]


def test_a_checkpoint_has_the_hash_of_its_export_where_experts_share_a_tensor(work):
    lmlaunch(config(work, "shared_hash", model__path="granitemoe", train__steps=2, checkpoint__every=2), cwd=work)
    (checkpoint,) = (work / "runs/shared_hash/checkpoints").iterdir()
    assert hash_of(work, "runs/shared_hash/model") == hash_of(work, checkpoint)


def test_a_frozen_tensor_of_all_experts_keeps_its_type_and_its_bits(work):
    shutil.copytree(work / "granitemoe", work / "granitemoe_mixed")
    before = {key: value.half() if "output_linear" in key else value.bfloat16() for key, value in load_file(work / "granitemoe/model.safetensors").items()}
    save_file(before, work / "granitemoe_mixed/model.safetensors", {"format": "pt"})
    for dtype in "bf16", "fp32":
        run = f"mixed_{dtype}"
        lmlaunch(config(work, run, model__path="granitemoe_mixed", model__dtype=dtype, train__steps=2, checkpoint__every=2, optimizer__lr=1e-2,
                        train__only=["layers.1.block_sparse_moe.input_linear.3"]), cwd=work)
        after = load_file(work / "runs" / run / "model/model.safetensors")
        assert {key for key in before if not torch.equal(before[key].float(), after[key].float())} == {"model.layers.1.block_sparse_moe.input_linear.weight"}
        assert all((value.dtype == torch.float16) == ("output_linear" in key) for key, value in after.items())
        (checkpoint,) = (work / "runs" / run / "checkpoints").iterdir()
        assert hash_of(work, f"runs/{run}/model") == hash_of(work, checkpoint)


def test_a_quantized_base_learns_with_its_router_as_it_is(work):
    lmlaunch(config(work, "qlora", model__path="qwen3_moe", train__method="qlora", **ADAPTER), cwd=work)
    before, after = eval_losses(work, "qlora")
    assert after < before
    lmlaunch(config(work, "qlora_on_disk", model__path="qwen3_moe", train__method="qlora", offload__weights="nvme", offload__paths=["swap"], **ADAPTER),
             cwd=work)
    assert losses(work, "qlora_on_disk") == losses(work, "qlora")


def test_several_texts_are_continued_at_once_as_transformers_continues_each(work):
    save_tokenizer(work / "qwen3_moe", [f"w{i}" for i in range(VOCAB)])
    prompts = [[5, 8, 11, 14], [3], [20, 23, 26, 29, 32, 35]]
    (work / "prompts.txt").write_text("".join(" ".join(f"w{i}" for i in ids) + "\n" for ids in prompts))
    model = read(work / "qwen3_moe")
    model.generation_config.eos_token_id = None
    done = lmlaunch("generate", "qwen3_moe", "--prompts", "prompts.txt", "--batch", "3", "--max-tokens", "10", "model.dtype=fp32", "run.device=cpu", cwd=work)
    answers = [json.loads(line)["tokens"] for line in done.stdout.splitlines()]
    assert len(answers) == len(prompts)
    for ids, ours in zip(prompts, answers, strict=True):
        theirs = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False, pad_token_id=0)[0, len(ids):].tolist()
        assert [token for token in ours if token != 2] == (theirs[:theirs.index(2)] if 2 in theirs else theirs)


@pytest.mark.parametrize(("model", "text"), [("qwen3_moe", "2 of 8 for each token"), ("qwen2_moe", "2 of 6 for each token")])
def test_a_gpu_is_planned_for(work, model, text):
    done = lmlaunch("plan", config(work, "gpu", model__path=model, run__device="auto"), "--gpus", "1", "--gpu-memory", "24GiB", cwd=work)
    assert text in done.stdout


def test_what_is_not_there_yet_is_refused_by_name(work, plain):
    for arguments, code, text in [
            ((config(work, "gate", model__path="mixtral", train__method="lora", lora__targets=["gate"]),), 10, "a router has no adapter"),
            ((config(work, "w1", model__path="mixtral", train__method="lora", lora__targets=["w1"]),), 10, "a router has no adapter"),
            (("export", "qwen2_moe", "--gguf", "f16", "-o", "plain.gguf"), 11, "is not written as GGUF yet"),
            (("export", "runs/plain", "--gguf", "f16", "-o", "plain.gguf"), 11, "layers without experts")]:
        done = lmlaunch(*arguments, cwd=work, check=False)
        assert done.returncode == code, (arguments, done.stderr)
        assert text in done.stderr, (arguments, done.stderr)
