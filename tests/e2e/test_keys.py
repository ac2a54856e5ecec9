"""Keys that decide together: every one does what its help says with every other that it is accepted with, or is refused with
both values. Learning rates are torch's."""

import json
import os
import resource
import shutil
import subprocess
import tomllib

import pytest
import torch
from counts import some_of
from safetensors.torch import load_file
from test_run import BIN, config, eval_losses, filled, lmlaunch, loss_by_transformers, rows, work  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

LR, STEPS, WARMUP = 0.5, 20, 4


def torch_rates(after, warmup=WARMUP, count=STEPS):
    """The rates of a torch scheduler for the steps after a linear warm-up from 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = after(optimizer)
    rates = [LR * t / warmup for t in range(warmup)]
    while len(rates) < count:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


FALL = STEPS - WARMUP
SCHEDULES = {
    "linear": (0.2, lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.2, FALL)),
    "cosine": (0.2, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, FALL, 0.2 * LR)),
    "cosine_with_restarts": (0.2, lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, FALL, eta_min=0.2 * LR)),
    "polynomial": (0, lambda o: torch.optim.lr_scheduler.PolynomialLR(o, FALL)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_has_the_rates_of_torch(work, schedule):
    floor, after = SCHEDULES[schedule]
    name = f"rate_{schedule}"
    lmlaunch(config(work, name, train__steps=STEPS, train__global_batch=2, train__micro_batch=2, optimizer__schedule=schedule,
                    optimizer__lr=LR, optimizer__warmup=WARMUP, optimizer__min_lr_ratio=floor), cwd=work)
    rates = [row["lr"] for row in rows(work, name) if "loss" in row]
    assert rates == pytest.approx(torch_rates(after), rel=1e-6, abs=1e-6)  # polynomial ends at 1e-7


# Their settings, how they are recorded, and what a plan says of them and does not.
RULES = {
    "sgd": ({"momentum": 0.8, "lr": 0.1}, {"momentum": 0.8}, "momentum", "second moment"),
    "sgd_without_state": ({"name": "sgd", "momentum": 0.0, "lr": 0.5}, {"momentum": 0.0}, "low half beside the weight", "momentum"),
    "adamw_bf16": ({"lr": 0.01}, {"betas": [0.9, 0.999], "eps": 1e-8}, "second moment", "low half"),
    "adamw_anyprecision": ({"lr": 0.01}, {"betas": [0.9, 0.999], "eps": 1e-8}, "compensation", "low half"),
    "lion": ({"betas": [0.9, 0.98], "lr": 0.005}, {"betas": [0.9, 0.98]}, "momentum", "second moment"),
    "adamw_8bit": ({"lr": 0.01, "eps": 1e-6}, {"betas": [0.9, 0.999], "eps": 1e-6}, "codes, scales", "momentum"),
    "adamw_4bit": ({"lr": 0.01}, {"betas": [0.9, 0.999], "eps": 1e-8}, "codes, scales", "momentum"),
    "adamw_fp8": ({"lr": 0.01, "master": "none"}, {"betas": [0.9, 0.999], "eps": 1e-8}, "codes, scales", "momentum"),
    "adafactor": ({"lr": 0.3, "scale_parameter": True}, {"eps": [1e-30, 0.001]}, "fp32 of rows, columns and vectors", "first moment"),
    "adafactor_lowmem": ({"lr": 0.1, "master": "none"}, {}, "bf16 of rows, columns and vectors", "first moment"),
    "muon": ({"lr": 0.01, "momentum": 0.9}, {"momentum": 0.9, "betas": [0.9, 0.999], "eps": 1e-8}, "fp32 of vectors, embedding and head", "first moment"),
    "lion_8bit": ({"lr": 0.005, "master": "none"}, {"betas": [0.9, 0.99]}, "codes, scales", "second moment"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_learns_and_its_bits_are_the_same_wherever_its_state_is(work, rule):
    keys, kept, planned, never = RULES[rule]
    (work / "swap").mkdir(exist_ok=True)
    settings = {"model__dtype": "bf16", "optimizer__name": rule, **{f"optimizer__{key}": value for key, value in keys.items()}}
    off_device = {"offload__optimizer": "nvme", "offload__paths": [str(work / "swap")], "io__tile": "64KiB"}
    names = [f"{rule}_resident", f"{rule}_off_device"]
    for name, changes in zip(names, ({}, off_device)):
        lmlaunch(config(work, name, **settings, **changes), cwd=work)
    resident, nvme = ([(row["loss"], row["grad_norm"]) for row in rows(work, name) if "loss" in row] for name in names)
    assert resident == nvme and resident[-1][0] < 0.8 * resident[0][0]
    hashes = [json.loads(lmlaunch("verify", f"runs/{name}/model", "--json", cwd=work).stdout)["weights_hash"] for name in names]
    assert hashes[0] == hashes[1]
    recorded = tomllib.loads((work / f"runs/{names[0]}/config.toml").read_text())["optimizer"]
    assert {key: value for key, value in recorded.items() if key in ("momentum", "betas", "eps")} == kept
    plan = (work / f"runs/{names[0]}/plan.txt").read_text()
    assert planned in plan and never not in plan


def test_a_group_changes_the_run_and_one_that_matches_nothing_is_refused(work):
    path = config(work, "groups", train__steps=2)
    wrong = lmlaunch(path, 'optimizer.groups=[{match = "q_porj", lr_scale = 0.1}]', "run.dir=runs/groups_wrong", cwd=work, check=False)
    assert wrong.returncode == 10 and 'match = "q_porj"' in wrong.stderr and 'did you mean "q_proj"?' in wrong.stderr, wrong.stderr
    assert "nothing was started or written" in wrong.stderr and not (work / "runs/groups_wrong").exists()
    lmlaunch(path, 'optimizer.groups=[{match = "q_proj", lr_scale = 0.1}, {match = "regex:norm", weight_decay = 0.1}]', cwd=work)
    recorded = tomllib.loads((work / "runs/groups/config.toml").read_text())["optimizer"]["groups"]
    assert recorded == [{"match": "q_proj", "lr_scale": 0.1}, {"match": "regex:norm", "lr_scale": 1.0, "weight_decay": 0.1}]
    other = lmlaunch(path, 'optimizer.groups=[{match = "q_proj", lr_scale = 0.2}]', cwd=work, check=False)
    assert other.returncode == 14 and "optimizer.groups" in other.stderr, other.stderr


def test_what_others_call_a_rule_is_said_once(work):
    done = lmlaunch(config(work, "theirs", optimizer__name="paged_adamw_8bit", train__steps=1), cwd=work)
    told = [line for line in done.stderr.splitlines() if "paged_adamw_8bit" in line]
    assert len(told) == 1 and "adamw_8bit" in told[0] and "offload.optimizer" in told[0], done.stderr
    assert tomllib.loads((work / "runs/theirs/config.toml").read_text())["optimizer"]["name"] == "adamw_8bit"


def test_a_plateau_follows_the_evaluations_after_its_warmup(work):
    name, warmup, steps = "rate_plateau", 3, 120
    lmlaunch(config(work, name, train__steps=steps, train__global_batch=2, train__micro_batch=2, train__eval_every=1,
                    optimizer__schedule="reduce_lr_on_plateau", optimizer__lr=LR, optimizer__warmup=warmup,
                    optimizer__min_lr_ratio=0.3), cwd=work)
    rates = [row["lr"] for row in rows(work, name) if "loss" in row]
    losses = {row["step"]: row["eval_loss"] for row in rows(work, name) if "eval_loss" in row}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=0.3 * LR)
    expected = []
    for step in range(1, steps + 1):
        rate = optimizer.param_groups[0]["lr"]
        expected.append(rate * min(1.0, (step - 1) / warmup))
        if step > warmup:
            plateau.step(losses[step])
    assert rates == pytest.approx(expected, rel=1e-9)
    assert rates[warmup] == LR and min(rates[warmup:]) < LR  # it warmed up, and it fell


def test_a_warmup_that_does_not_end_is_refused(work):
    done = lmlaunch(config(work, "cold", train__steps="auto", train__epochs=1, optimizer__schedule="linear", optimizer__warmup=500),
                    cwd=work, check=False)
    assert done.returncode == 10 and "optimizer.warmup is 500 steps, but the run has 8 in all" in done.stderr


@pytest.fixture(scope="module")
def adapter(work):
    changes = {"lora__r": 4, "lora__alpha": 12, "lora__targets": ["q_proj", "v_proj"], "lora__rslora": True}
    lmlaunch(config(work, "adapter", train__method="lora", train__steps=2, **changes), cwd=work)
    return "runs/adapter/model"


def continue_it(work, adapter, name, check=True, **changes):
    return lmlaunch(config(work, name, train__method="lora", train__steps=1, lora__init=adapter, **changes), cwd=work, check=check)


def resolved(work, name):
    return tomllib.loads((work / "runs" / name / "config.toml").read_text())


def test_an_adapter_decides_what_is_not_written(work, adapter):
    continue_it(work, adapter, "as_it_is", lora__dropout=0.25)
    lora = resolved(work, "as_it_is")["lora"]
    assert (lora["r"], lora["targets"], lora["dropout"]) == (4, ["q_proj", "v_proj"], 0.25)
    assert lora["alpha"] / (lora["r"] ** (0.5 if lora["rslora"] else 1)) == pytest.approx(12 / 2)  # the same scale
    # The recorded configuration is the same run's: it continues the adapter, too.
    (work / "again.toml").write_text((work / "runs" / "as_it_is" / "config.toml").read_text())
    lmlaunch("again.toml", "run.dir=runs/again", cwd=work)
    assert [row["loss"] for row in rows(work, "again") if "loss" in row] == [r["loss"] for r in rows(work, "as_it_is") if "loss" in r]


def test_written_keys_that_agree_with_the_adapter_are_accepted(work, adapter):
    continue_it(work, adapter, "agrees", lora__r=4, lora__alpha=12, lora__rslora=True, lora__targets=["v_proj", "q_proj"])
    lora = resolved(work, "agrees")["lora"]
    assert (lora["alpha"], lora["rslora"]) == (12, True)


@pytest.mark.parametrize("changes, words", [
    ({"lora__r": 8}, ["lora.r = 8", "r = 4"]),
    ({"lora__alpha": 16, "lora__rslora": True}, ["lora.alpha = 16", "alpha = 12"]),
    ({"lora__targets": ["all-linear"]}, ["lora.targets = ", "gate_proj", '["q_proj", "v_proj"]']),
], ids=["r", "alpha", "targets"])
def test_written_keys_that_disagree_are_refused_with_both_values(work, adapter, changes, words):
    name = "other_" + "_".join(changes)
    done = continue_it(work, adapter, name, check=False, **changes)
    assert done.returncode == 10 and all(word in done.stderr for word in [*words, "runs/adapter/model"]), done.stderr
    planned = lmlaunch("plan", f"{name}.toml", cwd=work, check=False)
    assert planned.returncode == 10 and words[0] in planned.stderr


def test_modules_of_their_own_ranks_and_alphas_are_trained_and_exported(work):
    """By peft the plain export, the patterns and the merged model are one model."""
    from peft import PeftModel
    keys = ["lora.r=4", "lora.exclude=k_proj", "lora.layers=[1]", 'lora.ranks={q_proj=2, "regex:mlp"=6}', 'lora.alphas={"mlp.up_proj"=3}']
    name = config(work, "sites", train__method="lora", train__steps=3, optimizer__lr=0.05)
    lmlaunch(name, *keys, cwd=work)
    lora = resolved(work, "sites")["lora"]
    assert (lora["layers"], lora["exclude"]) == ([1], [])
    assert lora["targets"] == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert lora["ranks"] == {"q_proj": 2, "gate_proj": 6, "up_proj": 6, "down_proj": 6} and lora["alphas"] == {"up_proj": 3.0}
    tensors = load_file(work / "runs/sites/model/adapter_model.safetensors")
    assert {n.split(".")[-3]: len(t) for n, t in tensors.items() if "lora_A" in n} == {"v_proj": 4, "o_proj": 4, **lora["ranks"]}
    other = lmlaunch(name, *keys[:2], "lora.layers=[0]", *keys[3:], cwd=work, check=False)
    assert other.returncode == 14 and "lora.layers" in other.stderr, other.stderr
    lmlaunch(name, *keys, "train.steps=4", cwd=work)  # the same modules: it resumes
    for out, options in {"sites_plain": [], "sites_own": ["--patterns"]}.items():
        lmlaunch("export", "runs/sites", *options, "-o", out, cwd=work)
    merged = json.loads(lmlaunch("export", "runs/sites", "--merge", "--json", "-o", "sites_merged", cwd=work).stdout)
    assert merged["logits_differ_by"] < 1e-4
    read = lambda out: json.loads((work / out / "adapter_config.json").read_text())
    assert read("sites_own")["rank_pattern"] == lora["ranks"] and read("sites_own")["layers_to_transform"] == [1]
    assert (read("sites_plain")["r"], read("sites_plain")["rank_pattern"], read("sites_plain")["alpha_pattern"]) == (6, {}, {})
    ids = torch.arange(3, 40)[None]
    logits = [PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(work / "model"), work / out)(ids).logits for out in ("sites_own", "sites_plain")]
    logits.append(LlamaForCausalLM.from_pretrained(work / "sites_merged")(ids).logits)
    for theirs in logits[1:]:
        torch.testing.assert_close(theirs, logits[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[0], LlamaForCausalLM.from_pretrained(work / "model")(ids).logits, atol=1e-3)


def test_dora_begins_as_the_base_and_is_merged_and_continued_with_its_lengths(work):
    """lora.dora and lora.b_lr_ratio."""
    from peft import PeftModel

    changes = {"train__method": "lora", "lora__r": 4, "lora__alpha": 8, "optimizer__lr": 1e-2}
    lmlaunch(config(work, "not_dora", **changes, train__steps=1), cwd=work)
    lmlaunch(config(work, "dora", **changes, lora__dora=True, lora__b_lr_ratio=2.0), cwd=work)
    first = [[row["loss"] for row in rows(work, name) if "loss" in row][0] for name in ("dora", "not_dora")]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    lengths = {k: v for k, v in load_file(work / "runs/dora/model/adapter_model.safetensors").items() if k.endswith(".lora_magnitude_vector")}
    base = LlamaForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    assert len(lengths) == 7 * len(base.model.layers)
    own = base.model.layers[0].mlp.up_proj.weight.norm(dim=1)
    trained = lengths["base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"]
    assert 0 < (trained - own).abs().max() < 12.5 * 2e-2  # of twelve steps of Adam at twice the rate
    adapted = PeftModel.from_pretrained(base, work / "runs/dora/model")
    assert loss_by_transformers(adapted, work) == pytest.approx(eval_losses(work, "dora")[-1], rel=1e-4)
    lmlaunch("export", "runs/dora", "-o", "merged_dora", "--merge", cwd=work)
    merged = LlamaForCausalLM.from_pretrained(work / "merged_dora", dtype=torch.float32)
    for (name, ours), theirs in zip(merged.named_parameters(), adapted.merge_and_unload().parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    continue_it(work, "runs/dora/model", "more_dora")
    assert resolved(work, "more_dora")["lora"]["dora"] is True
    assert eval_losses(work, "more_dora")[0] == pytest.approx(eval_losses(work, "dora")[-1], rel=1e-6)
    refused = continue_it(work, "runs/dora/model", "less_dora", check=False, lora__dora=False)
    assert refused.returncode == 10 and "lora.dora = false is written, and the adapter has magnitudes" in refused.stderr


@pytest.mark.parametrize("method, keys", [("ia3", ".ia3_l"), ("norms", ".ln_tuning_layers.weight")])
def test_factors_and_norms_begin_as_the_base_and_are_pefts_and_merged_and_continued(work, adapter, method, keys):
    """train.method = "ia3" and "norms"."""
    from peft import PeftModel

    changes = {"train__method": method, "optimizer__lr": 1e-2}
    lmlaunch(config(work, method, **changes), cwd=work)
    first = [[row["loss"] for row in rows(work, name) if "loss" in row][0] for name in (method, "adapter")]
    assert first[0] == pytest.approx(first[1], rel=1e-5)  # a fresh LoRA adapter changes nothing either
    assert eval_losses(work, method)[-1] < eval_losses(work, method)[0]
    tensors = load_file(work / f"runs/{method}/model/adapter_model.safetensors")
    base = LlamaForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    layers = len(base.model.layers)
    assert len(tensors) == (3 * layers if method == "ia3" else 2 * layers + 1) and all(name.endswith(keys) for name in tensors)
    adapted = PeftModel.from_pretrained(base, work / f"runs/{method}/model")
    assert loss_by_transformers(adapted, work) == pytest.approx(eval_losses(work, method)[-1], rel=1e-4)
    evaluated = json.loads(lmlaunch("eval", f"runs/{method}", "--json", cwd=work).stdout)
    assert evaluated["eval_loss"] == pytest.approx(eval_losses(work, method)[-1], rel=1e-6)
    lmlaunch("export", f"runs/{method}", "-o", f"merged_{method}", "--merge", cwd=work)
    merged = LlamaForCausalLM.from_pretrained(work / f"merged_{method}", dtype=torch.float32)
    for (name, ours), theirs in zip(merged.named_parameters(), adapted.merge_and_unload().parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    lmlaunch(config(work, f"{method}_half", **changes, train__steps=6), cwd=work)  # resumed: the same bits
    lmlaunch(f"{method}_half.toml", "train.steps=12", cwd=work)
    resumed = load_file(work / f"runs/{method}_half/model/adapter_model.safetensors")
    assert all(torch.equal(resumed[name], tensors[name]) for name in tensors)
    init = {"lora__init": f"runs/{method}/model", "train__steps": 1}
    lmlaunch(config(work, f"more_{method}", **changes, **init), cwd=work)
    assert eval_losses(work, f"more_{method}")[0] == pytest.approx(eval_losses(work, method)[-1], rel=1e-6)
    refused = continue_it(work, f"runs/{method}/model", f"other_{method}", check=False)
    assert refused.returncode == 10 and f'set train.method = "{method}"' in refused.stderr, refused.stderr
    quantized = config(work, f"nf4_{method}", **changes, model__quantize="nf4", train__steps=2)
    lmlaunch(quantized, cwd=work)
    assert len(load_file(work / f"runs/nf4_{method}/model/adapter_model.safetensors")) == len(tensors)


def test_an_adapter_to_continue_needs_lora(work, adapter):
    done = lmlaunch(config(work, "full_init", lora__init=adapter), cwd=work, check=False)
    assert done.returncode == 10 and "lora.init" in done.stderr and 'train.method = "lora"' in done.stderr


def test_gradients_of_an_adapter_stay_and_the_plan_says_so(work):
    (work / "swap").mkdir(exist_ok=True)
    changes = {"train__method": "lora", "offload__gradients": "nvme", "offload__paths": [str(work / "swap")]}
    planned = lmlaunch("plan", config(work, "lora_gradients", **changes), cwd=work).stdout
    assert "offload.gradients" in planned and "an adapter's gradients stay on the device" in planned


def test_the_recorded_configuration_has_what_the_plan_chose(work):
    (work / "auto.toml").write_text('model.path = "model"\n[data]\ntrain = ["train.jsonl"]\ncache_dir = "cache"\nmax_length = 32\n'
                                    '[train]\nmethod = "lora"\nsteps = 1\n')
    lmlaunch("--gpus", "0", "auto.toml", cwd=work)
    recorded = resolved(work, "auto")
    decided = {"run.device": "cpu", "model.dtype": "bf16", "train.micro_batch": 8, "train.recompute": "none", "train.update": "after",
               "train.gradients": "fp32", "optimizer.master": "split", "lora.r": 8, "lora.alpha": 16.0}
    assert {key: recorded[key.split(".")[0]][key.split(".")[1]] for key in decided} == decided
    assert recorded["lora"]["targets"] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    open_keys = [f"{t}.{k}" for t, keys in recorded.items() for k, value in keys.items() if value == "auto"]
    # What remains is placement, excluded by another key, decided row by row, or about how a run ends and goes on.
    assert set(open_keys) <= {"train.epochs", "train.problem", "train.router_aux_loss", "prompt.hidden", "data.format", "data.render", "data.too_long", "run.time_limit", "checkpoint.resume"} | {k for k in open_keys if k.split(".")[0] in ("offload", "io")}, open_keys


def test_a_length_beyond_the_models_positions_is_said(work):
    """The model was made for 64 positions. Drawn weights know none."""
    said = "MODEL-24: data.max_length = 65 is more than the 64 positions that model was trained for"
    name = config(work, "too_long", data__max_length=65, train__steps=1)
    assert said in lmlaunch("plan", name, cwd=work).stderr
    assert said in lmlaunch(name, cwd=work).stderr
    for settled in ("data.max_length=64", "model.init=random"):
        assert "MODEL-24" not in lmlaunch("plan", name, settled, cwd=work).stderr


def tokens_of_an_epoch(work, longest=32):
    return sum(min(len(json.loads(line)["input_ids"]), longest) for line in open(work / "train.jsonl"))


def test_a_plan_takes_the_lengths_of_data_that_were_tokenised_before(work):
    """64 rows of which most are shorter than data.max_length: known once a run has begun with them, whatever the run; else rows are full."""
    def planned(*keys):
        plan = json.loads(lmlaunch("plan", name, "--json", *keys, cwd=work).stdout)
        return plan["sequence_tokens"], plan["step_seconds"] * plan["tokens_per_s"]

    name = config(work, "lengths", data__cache_dir="cache_of_lengths", train__steps=1)
    assert planned() == (0, pytest.approx(8 * 32))
    done = lmlaunch(name, "run.dir=runs/before", cwd=work)
    mean = tokens_of_an_epoch(work) / 64
    assert planned() == (pytest.approx(mean), pytest.approx(8 * mean))
    assert f"step: {mean:.0f} tokens a sequence on average, " in done.stderr
    written = json.loads((work / "runs" / "before" / "plan.json").read_text())
    assert written["sequence_tokens"] == pytest.approx(mean)
    assert planned("data.max_length=16") == (pytest.approx(tokens_of_an_epoch(work, 16) / 64), pytest.approx(tokens_of_an_epoch(work, 16) / 8))
    packed, _ = planned("data.packing=true")
    assert mean < packed <= 32
    # Other data are not known; those that are not there are no error of a plan.
    assert planned('data.train=["eval.jsonl", "train.jsonl"]')[0] == planned('data.train=["nothing.jsonl"]')[0] == 0


def test_a_global_batch_beyond_the_data_is_said_and_planned_for_the_rows_there_are(work):
    name = config(work, "large_batch", train__global_batch=256, train__steps=2)
    done = lmlaunch(name, cwd=work)
    assert "DATA-24: train.global_batch = 256 is more than the 64 sequences of an epoch: each step is a whole epoch of 64" in done.stderr
    written = json.loads((work / "runs" / "large_batch" / "plan.json").read_text())
    assert written["step_seconds"] * written["tokens_per_s"] == pytest.approx(tokens_of_an_epoch(work))
    assert "16 x 4 sequences" in (work / "runs" / "large_batch" / "plan.txt").read_text()
    assert "DATA-24" not in lmlaunch(config(work, "whole_batch", train__global_batch=64, train__steps=1), cwd=work).stderr


@pytest.mark.parametrize("keys", [["train.global_batch=1000000"], ["train.global_batch=1000000000"], ["data.max_length=16777216"],
                                  ["train.micro_batch=1000000", "train.global_batch=1000000", "data.max_length=2048", "data.packing=true"]])
def test_a_plan_of_large_numbers_takes_no_memory(work, keys):
    """It is made, or refused in words."""
    name = config(work, "large", train__micro_batch="auto")
    least = int(200e6)  # of what it maps for itself: who starts it may be larger than it is
    done = subprocess.run([BIN / "lmlaunch", "plan", name, *keys], cwd=work, capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (least, least)))
    assert done.returncode in (0, 10, 12), done.stdout + done.stderr


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Four layers, and a head of its own with more rows than a segment has."""
    work = filled(tmp_path_factory.mktemp("untied"), layers=4)
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=8300,
        max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2))
    model.to(torch.bfloat16).save_pretrained(work / "model")
    (work / "swap").mkdir()
    return work


ONLY = {
    "layers": (["model.layers"], lambda name: ".layers." in name),
    "upper": (["regex:layers[.][23][.]", "lm_head"], lambda name: ".layers.2." in name or ".layers.3." in name or name.startswith("lm_head")),
    "head": (["lm_head"], lambda name: name.startswith("lm_head")),
    "norm": (["model.norm", "layers.1.mlp"], lambda name: name.startswith("model.norm") or ".layers.1.mlp." in name),
}


IN_BLOCKS = {"train__update": "in_backward", "optimizer__clip": "block"}
ON_DISK = {f"offload__{what}": "nvme" for what in ("weights", "gradients", "optimizer")} | {"offload__paths": ["swap"], "io__tile": "64KiB"}
# A way to make the steps, and the one that has the same bits: ranks, settings.
WAYS = {
    "on_disk": (1, {"train__recompute": "block", "offload__activations": "nvme", **ON_DISK}, "resident"),
    "in_backward": (1, {"train__update": "in_backward"}, "resident"),
    "blocks_on_disk": (1, {"optimizer__clip": "block", **ON_DISK}, "blocks"),
    "in_shards": (2, {"zero__stage": 3, "train__recompute": "block"}, "two_ranks"),
    "resident": (1, {}, None),
    "blocks": (1, IN_BLOCKS, None),
    "two_ranks": (2, {}, None),
}


def frozen_run(untied, case, way):
    """Losses and norms of its steps, and the hash of its model."""
    name = f"{case}_{way}"
    if not (untied / "runs" / name).exists():
        ranks, changes, _ = WAYS[way]
        settings = {"train__only": ONLY[case][0], "train__steps": 4, "model__dtype": "bf16", "checkpoint__every": 2, **changes}
        lmlaunch("--ranks", ranks, config(untied, name, **settings), cwd=untied)
    steps = [(row["loss"], row["grad_norm"]) for row in rows(untied, name) if "loss" in row]
    return steps, json.loads(lmlaunch("verify", f"runs/{name}/model", "--json", cwd=untied).stdout)["weights_hash"]


@pytest.mark.parametrize("case, way", some_of(
    ("layers", "on_disk"), ("layers", "in_shards"), ("head", "blocks_on_disk"), ("upper", "on_disk"), ("norm", "in_shards"), ("upper", "in_backward"),
    ("norm", "on_disk"), ("head", "in_backward"), ("head", "in_shards"), ("layers", "in_backward"), ("upper", "in_shards"), ("norm", "blocks_on_disk"),
    short=3))
def test_frozen_tensors_do_not_change_wherever_they_are(untied, case, way):
    like = WAYS[way][2]
    assert frozen_run(untied, case, way) == frozen_run(untied, case, like)
    before, after = (load_file(untied / path / "model.safetensors") for path in ("model", f"runs/{case}_{like}/model"))
    assert set(before) == set(after)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if ONLY[case][1](name)}


def test_a_run_that_freezes_tensors_goes_on_from_its_checkpoint(untied):
    before, run = frozen_run(untied, "upper", "resident"), untied / "runs" / "upper_resident"
    newest = json.loads(lmlaunch("verify", "runs/upper_resident/checkpoints/step_00000004", "--json", cwd=untied).stdout)
    assert newest["weights_hash"] == before[1]
    shutil.rmtree(run / "model")
    lost = [row["eval_loss"] for row in rows(untied, "upper_resident") if "eval_loss" in row][-1]
    again = json.loads(lmlaunch("eval", "runs/upper_resident", "--json", cwd=untied).stdout)["eval_loss"]
    assert again == pytest.approx(lost, rel=1e-3)
    lmlaunch(config(untied, "upper_resumed", train__only=ONLY["upper"][0], train__steps=2, model__dtype="bf16"), cwd=untied)
    lmlaunch("upper_resumed.toml", "train.steps=4", "--override", "train.steps", cwd=untied)
    assert frozen_run(untied, "upper", "resumed") == before


@pytest.mark.parametrize("only, method, told", [
    (["model.layer"], "full", 'did you mean "model.layers"?'),
    (["k_proj"], "full", "which are one parameter here"),
    (["model.layers"], "lora", "train.only chooses tensors of full fine-tuning"),
    (["regex:("], "full", "is no regular expression")])
def test_what_cannot_be_trained_alone_is_refused(untied, only, method, told):
    done = lmlaunch(config(untied, "refused", train__only=only, train__method=method), cwd=untied, check=False)
    assert done.returncode == 10 and told in done.stderr, done.stderr
    assert not (untied / "runs/refused").exists()
