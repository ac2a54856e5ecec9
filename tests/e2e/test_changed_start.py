"""The next start of a run with something changed: the configuration, the data, the tokenizer, the base model. It goes on, or is refused
with the reason, and the original command goes on after it."""

import json
import re
import shutil
import signal
import tomllib

import pytest
import tokenizers
from counts import some_of
from test_resume import LONGER, MODEL_FILE, STEPS, checkpoints, done, interrupt, prepared, result, signal_of, undisturbed, work  # noqa: F401
from test_run import config, lmlaunch, rows


def test_a_changed_configuration_is_refused_unless_it_is_named(work):
    name = "changed"
    prepared(work, name)
    code, _ = interrupt(work, name, 4, signal_of(signal.SIGTERM))
    assert code == 75
    refused = lmlaunch(f"{name}.toml", "optimizer.lr=0.5", "optimizer.weight_decay=0.1", cwd=work, check=False)
    assert refused.returncode == 14 and "optimizer.lr: 0.01 there, 0.5 asked for" in refused.stderr and "--override optimizer.lr" in refused.stderr
    refused = lmlaunch(f"{name}.toml", "optimizer.lr=0.5", "optimizer.weight_decay=0.1", "--override", "optimizer.lr", cwd=work, check=False)
    assert refused.returncode == 14 and "optimizer.weight_decay" in refused.stderr
    ended = lmlaunch(f"{name}.toml", "optimizer.lr=0.5", "--override", "optimizer.lr", cwd=work)
    assert "optimizer.lr: 0.01 before, 0.5 from here on" in ended.stderr
    assert [row["lr"] for row in rows(work, name) if "lr" in row][-1] > 0.01


def test_a_start_that_fails_leaves_the_configuration_that_the_run_goes_on_with(work, undisturbed):
    name = "typo"
    prepared(work, name)
    code, _ = interrupt(work, name, 4, signal_of(signal.SIGTERM))
    assert code == 75
    run = work / "runs" / name
    kept = {file: (run / file).read_bytes() for file in ("config.toml", "numerics.json", "plan.json", "plan.txt")}
    failed = lmlaunch(f"{name}.toml", 'data.train=["typo.jsonl"]', "run.threads=2", "--override", "data.train", "--override", "run.threads",
                      cwd=work, check=False)
    assert failed.returncode == 11 and "typo.jsonl" in failed.stderr, failed.stderr
    assert {file: (run / file).read_bytes() for file in kept} == kept
    # Stopped before its first step.
    ended = lmlaunch(f"{name}.toml", "optimizer.lr=0.5", "run.time_limit=1s", "--override", "optimizer.lr", cwd=work, check=False)
    assert ended.returncode == 75, ended.stderr
    assert {file: (run / file).read_bytes() for file in kept} == kept
    lmlaunch(f"{name}.toml", cwd=work)
    assert result(work, name, "full") == undisturbed["full"]


def test_a_start_that_ends_after_a_step_is_the_run_from_then_on(work):
    name = "taken"
    changed = [prepared(work, name, train__steps=100000), "optimizer.lr=0.005", "--override", "optimizer.lr"]
    code, _ = interrupt(work, name, 4, signal_of(signal.SIGTERM))
    assert code == 75
    step = json.loads((work / "runs" / name / "status.json").read_text())["step"]
    code, messages = interrupt(work, name, step + 2, signal_of(signal.SIGTERM), *changed[1:])
    assert code == 75, messages
    assert tomllib.loads((work / "runs" / name / "config.toml").read_text())["optimizer"]["lr"] == 0.005
    refused = lmlaunch(changed[0], cwd=work, check=False)
    assert refused.returncode == 14 and "optimizer.lr: 0.005 there, 0.01 asked for" in refused.stderr, refused.stderr


@pytest.mark.parametrize("method", some_of(*MODEL_FILE, short=1))
def test_a_finished_run_is_extended_by_more_steps(work, method):
    """With a schedule that does not know how long it is: to the run that was as long from the start."""
    same = {"train__eval_every": 0, "optimizer__schedule": "constant"}
    lmlaunch(prepared(work, f"long_{method}", method, train__steps=12, **same), cwd=work)
    name = f"extended_{method}"
    lmlaunch(prepared(work, name, method, **same), cwd=work)
    assert [row["step"] for row in rows(work, name) if "loss" in row][-1] == STEPS
    refused = lmlaunch(f"{name}.toml", cwd=work, check=False)
    assert refused.returncode == 14 and "to train it further give a larger train.steps" in refused.stderr, refused.stderr
    ended = lmlaunch(f"{name}.toml", "train.steps=12", cwd=work)
    assert "note CKPT-26: train.steps: 8 before, 12 from here on" in ended.stderr, ended.stderr
    assert '12 steps instead of 8: optimizer.schedule = "constant" now spans 12 steps' in ended.stderr, ended.stderr
    whole, again = ([row for row in result(work, one, method)[0] if any(key == "loss" for key, _ in row)] for one in (f"long_{method}", name))
    assert whole == again and result(work, f"long_{method}", method)[1] == result(work, name, method)[1]
    assert json.loads((work / "runs" / name / "status.json").read_text())["step"] == 12
    assert tomllib.loads((work / "runs" / name / "config.toml").read_text())["train"]["steps"] == 12


def test_what_an_extension_makes_of_the_schedule_is_said(work):
    name = "slower"
    toml = prepared(work, name, train__eval_every=0, optimizer__schedule="linear", optimizer__lr=0.01)
    lmlaunch(toml, cwd=work)
    ended = lmlaunch(toml, "train.steps=16", cwd=work)
    last = int(re.search(r"resumes from \S*step_0*(\d+): step", ended.stderr)[1])
    rates = {row["step"]: row["lr"] for row in rows(work, name) if "lr" in row}
    said = re.search(r"step (\d+) has a learning rate of (\S+); of the 8, the last had (\S+)", ended.stderr)
    assert said and int(said[1]) == last + 1 and float(said[2]) == pytest.approx(rates[last + 1], rel=1e-2), ended.stderr
    assert float(said[3]) == pytest.approx(0.01 / 8, rel=1e-2)
    assert (f"steps {last + 1} to 8 are repeated: no checkpoint has them" in ended.stderr) == (last < 8)


def test_numerics_may_be_changed_by_name(work):
    """A run goes on with what is asked for, not with what was recorded."""
    name = "numerics"
    prepared(work, name)
    code, _ = interrupt(work, name, 4, signal_of(signal.SIGTERM))
    assert code == 75
    changes = {"train.gradients": "bf16", "run.threads": "1", "train.micro_batch": "1"}
    settings = [f"{key}={value}" for key, value in changes.items()]
    refused = lmlaunch(f"{name}.toml", *settings, cwd=work, check=False)
    assert refused.returncode == 14 and "train.gradients" in refused.stderr, refused.stderr
    lmlaunch(f"{name}.toml", *settings, *(word for key in changes for word in ("--override", key)), cwd=work)
    numerics = json.loads((work / "runs" / name / "numerics.json").read_text())
    assert (numerics["gradients"], numerics["threads"], numerics["micro_batch"]) == ("bf16", 1, 1), numerics


@pytest.mark.parametrize("rules", [("adamw_8bit", "adamw_fp8"), ("adafactor", "adafactor_lowmem")])
def test_state_of_another_rule_is_refused_even_where_it_is_as_long(work, rules):
    name = f"of_{rules[0]}"
    prepared(work, name, optimizer__name=rules[0])
    code, messages = interrupt(work, name, 4, signal_of(signal.SIGTERM))
    assert code == 75, messages
    refused = lmlaunch(f"{name}.toml", f"optimizer.name={rules[1]}", "--override", "optimizer.name", cwd=work, check=False)
    assert refused.returncode == 14 and f"optimizer.name = {rules[0]}, not of {rules[1]}" in refused.stderr, refused.stderr
    lmlaunch(f"{name}.toml", "--override", "optimizer.name", cwd=work)  # nothing is lost


def test_a_changed_tokenizer_is_refused(work):
    """Where the run's text would be other tokens."""
    letters = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    shutil.copytree(work / "model", work / "lettered")
    file = work / "lettered" / "tokenizer.json"
    tokenizer.save(str(file))
    (work / "lettered" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "~"}))
    (work / "letters.jsonl").write_text("".join(json.dumps({"text": f"the quick brown fox no. {i}"}) + "\n" for i in range(20)))
    settings = {"model__path": "lettered", "data__train": ["letters.jsonl"], "data__eval": [], "train__eval_every": 0}
    prepared(work, "kept_tokenizer", **settings)
    lmlaunch("kept_tokenizer.toml", cwd=work)
    prepared(work, "tokenizer", **settings)
    code, _ = interrupt(work, "tokenizer", 4, signal_of(signal.SIGTERM))
    assert code == 75
    before = file.read_text()
    changed = json.loads(before)
    vocabulary = changed["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(changed))
    refused = lmlaunch("tokenizer.toml", cwd=work, check=False)
    assert refused.returncode == 11 and "the tokenizer or the chat template has changed" in refused.stderr, refused.stderr
    file.write_text(before)
    lmlaunch("tokenizer.toml", cwd=work)
    assert result(work, "tokenizer", "full") == result(work, "kept_tokenizer", "full")


def test_an_adapter_of_another_base_is_refused(work):
    shutil.copytree(work / "model", work / "base")
    prepared(work, "base", "lora", model__path="base", **LONGER)
    code, messages = interrupt(work, "base", 35, signal_of(signal.SIGTERM))
    assert code == 75, messages
    file = work / "base" / "model.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    before = checkpoints(work, "base")
    refused = lmlaunch("base.toml", cwd=work, check=False)
    assert refused.returncode == 11 and "error DATA-24 (exit 11): the base model is not the one" in refused.stderr, refused.stderr
    assert checkpoints(work, "base") == before
    file.write_bytes(sound)
    lmlaunch("base.toml", cwd=work)


@pytest.mark.parametrize("change", ["an_example", "one_more"])
def test_changed_data_is_refused(work, change):
    name = f"data_{change}"
    shutil.copy(work / "train.jsonl", work / f"{name}.jsonl")
    prepared(work, name, data__train=[f"{name}.jsonl"], **LONGER)
    code, messages = interrupt(work, name, 35, signal_of(signal.SIGTERM))
    assert code == 75, messages
    lines = (work / f"{name}.jsonl").read_text().splitlines()
    example = json.loads(lines[3])
    example["input_ids"][0] = (example["input_ids"][0] + 1) % 50
    (work / f"{name}.jsonl").write_text("\n".join([*lines[:3], json.dumps(example), *lines[4:]] if change == "an_example" else [*lines, lines[0]]) + "\n")
    before = checkpoints(work, name)
    refused = lmlaunch(f"{name}.toml", cwd=work, check=False)
    assert refused.returncode == 11 and "error DATA-24 (exit 11)" in refused.stderr and "has changed" in refused.stderr, refused.stderr
    assert checkpoints(work, name) == before
    (work / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    lmlaunch(f"{name}.toml", cwd=work)
