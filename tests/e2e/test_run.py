"""The program as its users start it: a tiny model, a TOML file, `lmlaunch`. Data is already tokenised, so that no
tokenizer is needed. What comes out is held against transformers and peft."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

BIN = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin"))
WARM = BIN.parent / "warm" / "bin"
VOCAB = 97


def warm_program(binaries=BIN):
    """The program whose rank may have loaded LibTorch already (support/warm). Who kills it, or asks what it takes, starts BIN's."""
    return WARM / "lmlaunch" if binaries == BIN and (WARM / "lmlaunch").exists() else binaries / "lmlaunch"


def lmlaunch(*arguments, cwd, check=True, env=None):
    done = subprocess.run([warm_program(), *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("e2e"), layers=2)


def filled(work, layers):
    """A small model, and examples in which the next token is usually the present one plus three."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(work / "model")
    (work / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    generator = torch.Generator().manual_seed(2)
    for name, count in [("train", 64), ("eval", 12)]:
        with open(work / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                start, length = (int(torch.randint(*r, (1,), generator=generator)) for r in [(0, VOCAB), (5, 30)])
                ids = [(start + 3 * i) % VOCAB for i in range(length)]
                file.write(json.dumps({"input_ids": ids, "labels": [-100] * 2 + ids[2:]}) + "\n")
    return work


def save_tokenizer(directory, words, special=()):
    """tokenizer.json of these words, which stand between blanks; the first is in an unknown one's place."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))


def config(work, name, **changes):
    """Writes <name>.toml; `changes` are table__key=value."""
    tables = {
        "run": {"device": "cpu", "threads": 1},
        "model": {"path": "model", "dtype": "fp32"},
        "data": {"train": ["train.jsonl"], "eval": ["eval.jsonl"], "max_length": 32, "cache_dir": "cache"},
        "train": {"steps": 12, "global_batch": 8, "micro_batch": 4},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
    }
    for key, value in changes.items():
        table, name_of_key = key.split("__")
        tables.setdefault(table, {})[name_of_key] = value
    text = "".join(f"[{table}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()) for table, keys in tables.items())
    (work / f"{name}.toml").write_text(text)
    return f"{name}.toml"


def rows(work, name):
    return [json.loads(line) for line in open(work / "runs" / name / "metrics.jsonl")]


def losses(work, name):
    return [(r["loss"], r["grad_norm"], r["lr"]) for r in rows(work, name) if "loss" in r]


def eval_losses(work, name):
    return [r["eval_loss"] for r in rows(work, name) if "eval_loss" in r]


def expect_resumed_bits(work, **changes):
    """A run of 200 steps that is stopped on its way goes on as if it had not been."""
    lmlaunch(config(work, "long", **changes, train__steps=200), cwd=work)
    toml = config(work, "stopped", **changes, train__steps=200)
    process = subprocess.Popen([BIN / "lmlaunch", toml], cwd=work, stderr=subprocess.PIPE, text=True)
    status = work / "runs" / "stopped" / "status.json"
    while process.poll() is None and not (status.exists() and json.loads(status.read_text())["step"] >= 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert len(losses(work, "stopped")) < 200
    lmlaunch(toml, cwd=work)
    assert losses(work, "stopped") == losses(work, "long")


def loss_by_transformers(model, work):
    return scores_by_transformers(model, work)[0]


def scores_by_transformers(model, work):
    """(loss, token accuracy) of the evaluation set."""
    model.eval()
    nll, right, targets = 0.0, 0, 0
    for line in open(work / "eval.jsonl"):
        row = json.loads(line)
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        labels = torch.tensor(row["labels"])[1:]
        kept = labels != -100
        nll += torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="sum").item()
        right += int((logits[kept].argmax(-1) == labels[kept]).sum())
        targets += int(kept.sum())
    return nll / targets, right / targets


@pytest.fixture(scope="module")
def full(work):
    done = lmlaunch(config(work, "full"), cwd=work)
    return done.stderr


def test_the_loss_falls_and_every_file_is_there(work, full):
    run = work / "runs" / "full"
    assert {"config.toml", "plan.json", "plan.txt", "log.txt", "metrics.jsonl", "status.json", "model"} <= {p.name for p in run.iterdir()}
    curve = losses(work, "full")
    assert len(curve) == 12 and curve[-1][0] < 0.7 * curve[0][0]
    before, after = eval_losses(work, "full")
    assert after < before
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 12)
    assert full.rstrip().splitlines()[-1].startswith("lmlaunch: stop code=0")
    assert json.loads((run / "plan.json").read_text())["fits"] is True


def test_the_model_has_the_permissions_that_the_umask_gives(work, full):
    umask = os.umask(0)
    os.umask(umask)
    model = work / "runs" / "full" / "model"
    assert model.stat().st_mode & 0o777 == 0o777 & ~umask
    assert all(path.stat().st_mode & 0o777 == 0o666 & ~umask for path in model.iterdir())


def test_a_row_of_metrics_has_every_field(work, full):
    fields = {"step", "epoch", "loss", "token_accuracy", "grad_norm", "lr", "target_tokens", "tokens", "step_ms", "data_ms", "tokens_per_s", "sol_pct", "time",
              "device_bytes", "host_bytes", "disk_bytes", "read_bytes", "written_bytes", "to_device_bytes", "from_device_bytes", "sent_bytes", "hidden_pct"}
    steps = [row for row in rows(work, "full") if "loss" in row]
    assert all(fields <= set(row) and 0 < row["sol_pct"] <= 100 for row in steps)
    assert all(0 < row["data_ms"] <= row["step_ms"] for row in steps)
    mean = re.search(r"mean resident memory ([\d.]+) ([MG])iB", full)
    assert float(mean[1]) * 1024 ** " KMG".index(mean[2]) == pytest.approx(sum(row["host_bytes"] for row in steps) / len(steps), rel=0.01)


def test_transformers_loads_the_result_and_agrees_on_its_loss(work, full):
    model = AutoModelForCausalLM.from_pretrained(work / "runs" / "full" / "model", dtype=torch.float32)
    loss, accuracy = scores_by_transformers(model, work)
    last = [row for row in rows(work, "full") if "eval_loss" in row][-1]
    assert loss == pytest.approx(last["eval_loss"], rel=1e-3)
    assert accuracy > 0 and accuracy == pytest.approx(last["token_accuracy"], abs=2.5 / last["target_tokens"])  # of near ties
    base = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    assert loss_by_transformers(base, work) == pytest.approx(eval_losses(work, "full")[0], rel=1e-5)


def test_eval_and_verify_read_the_run(work, full):
    result = json.loads(lmlaunch("eval", "runs/full", "--json", cwd=work).stdout)
    assert result["eval_loss"] == eval_losses(work, "full")[-1]
    assert result["token_accuracy"] == [row["token_accuracy"] for row in rows(work, "full") if "eval_loss" in row][-1]
    verified = json.loads(lmlaunch("verify", "runs/full", "--json", cwd=work).stdout)
    assert verified["ok"] and len(verified["weights_hash"]) == 32


def test_an_adapter_is_verified_with_its_base(work):
    lmlaunch(config(work, "adapter", train__method="lora", train__steps=1), cwd=work)
    for what in ("runs/adapter", "runs/adapter/model"):
        assert json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["ok"]
    file = work / "runs" / "adapter" / "model" / "adapter_config.json"
    LlamaConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB,
                architectures=["LlamaForCausalLM"]).save_pretrained(work / "wider")
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "wider"}))
    for what in ("runs/adapter", "runs/adapter/model"):
        done = lmlaunch("verify", what, cwd=work, check=False)
        assert done.returncode == 11 and "self_attn.q_proj.lora_A.weight is [8, 32], the model needs [8, 48]" in done.stderr
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "nowhere"}))
    done = lmlaunch("verify", "runs/adapter", "--json", cwd=work)
    assert json.loads(done.stdout)["ok"] and 'not compared with its base model, which was not found: "nowhere"' in done.stderr


def test_a_home_that_cannot_be_written_costs_one_note(work, full):
    (work / "tmp").mkdir()
    env = {**os.environ, "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/.cache", "TMPDIR": str(work / "tmp")}
    toml = config(work, "homeless", data__cache_dir="")
    done = lmlaunch(toml, cwd=work, env=env)
    assert losses(work, "homeless") == losses(work, "full")
    assert re.findall(r"note \S+: the cache (\S+) cannot be written", done.stderr) == ["/dev/null/.cache/lmlaunch/tokens"], done.stderr
    assert list((work / "runs" / "homeless" / "tokens").glob("*.tokens"))
    # Without a run there is a place until the end.
    told = lmlaunch("eval", toml, "--json", cwd=work, env=env)
    assert json.loads(told.stdout)["eval_loss"] == eval_losses(work, "full")[0] and told.stderr.count("cannot be written") == 1, told.stderr
    assert not list((work / "tmp").iterdir())
    refused = lmlaunch(toml, "data.cache_dir=/dev/null/x", "run.dir=runs/asked", cwd=work, env=env, check=False)
    assert refused.returncode == 21 and "/dev/null/x" in refused.stderr  # that was asked for


@pytest.mark.parametrize("master", ["split", "fp32", "none"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_is_written_is_what_was_trained_to_the_bit(work, method, master):
    """In bf16, where an adapter is written as fp32 and rounded when it is read: with that many numbers some lie halfway."""
    name = f"bits_{method}_{master}"
    lmlaunch(config(work, name, model__dtype="bf16", train__method=method, lora__r=256, lora__alpha=256, optimizer__master=master,
                    optimizer__lr=3e-2), cwd=work)
    again = json.loads(lmlaunch("eval", f"runs/{name}", "--json", cwd=work).stdout)
    assert again["eval_loss"] == eval_losses(work, name)[-1]


def test_a_run_repeats_bit_for_bit_with_other_placements(work, full):
    hashes = []
    for name, changes in [("again", {}), ("threads", {"optimizer__threads": 2})]:
        lmlaunch(config(work, name, **changes), cwd=work)
        assert losses(work, name) == losses(work, "full")
        hashes.append(json.loads(lmlaunch("verify", f"runs/{name}", "--json", cwd=work).stdout)["weights_hash"])
    assert len({*hashes, json.loads(lmlaunch("verify", "runs/full", "--json", cwd=work).stdout)["weights_hash"]}) == 1


@pytest.mark.parametrize("changes", [{"train__micro_batch": 8}, {"train__micro_batch": 1}, {"train__recompute": "block"},
                                     {"train__recompute": "attention"}], ids=["1x8", "8x1", "recompute", "attention"])
def test_slicing_the_batch_changes_the_loss_by_less_than_a_millionth(work, full, changes):
    lmlaunch(config(work, "sliced", **changes), "run.dir=runs/sliced_" + str(list(changes.values())[0]), cwd=work)
    name = "sliced_" + str(list(changes.values())[0])
    first, reference = losses(work, name)[0], losses(work, "full")[0]
    assert first[0] == pytest.approx(reference[0], rel=1e-6)
    for (loss, _, _), (expected, _, _) in zip(losses(work, name), losses(work, "full")):
        assert loss == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def lora(work):
    lmlaunch(config(work, "lora", train__method="lora", lora__r=4, lora__alpha=8, optimizer__lr=3e-2, lora__dropout=0.1), cwd=work)


def test_peft_loads_the_adapter_and_agrees_on_its_loss(work, lora):
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, work / "runs" / "lora" / "model")
    assert (work / "runs" / "lora" / "model" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    before, after = eval_losses(work, "lora")
    assert after < before
    assert loss_by_transformers(adapted, work) == pytest.approx(after, rel=1e-3)


def test_peft_loads_the_exported_adapter_and_gives_the_same_logits(work, lora):
    from peft import PeftModel

    lmlaunch("export", "runs/lora", "--adapter", "-o", "exported_adapter", cwd=work)
    ids = torch.tensor([[1, 4, 7, 10, 13, 16]])
    logits = []
    for directory in (work / "runs" / "lora" / "model", work / "exported_adapter", None):
        model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        if directory is not None:
            model = PeftModel.from_pretrained(model, directory)
        with torch.no_grad():
            logits.append(model.eval()(ids).logits)
    assert torch.equal(logits[0], logits[1]) and not torch.allclose(logits[1], logits[2], rtol=1e-2)


def test_the_merged_export_is_the_adapted_model(work, lora):
    lmlaunch("export", "runs/lora", "-o", "merged", "--merge", cwd=work)
    merged = AutoModelForCausalLM.from_pretrained(work / "merged", dtype=torch.float32)
    assert loss_by_transformers(merged, work) == pytest.approx(eval_losses(work, "lora")[-1], rel=1e-3)


def test_an_adapter_can_be_continued(work, lora):
    lmlaunch(config(work, "continued", train__method="lora", train__steps=2, lora__init="runs/lora/model"), cwd=work)
    assert eval_losses(work, "continued")[0] == pytest.approx(eval_losses(work, "lora")[-1], rel=1e-6)


def test_packing_learns_the_same_tokens(work, full):
    lmlaunch(config(work, "packed", data__packing=True, train__steps=4), cwd=work)
    assert losses(work, "packed")[-1][0] < losses(work, "packed")[0][0]
    assert eval_losses(work, "packed")[0] == pytest.approx(eval_losses(work, "full")[0], rel=1e-6)


@pytest.mark.parametrize("changes", [{"train__gradients": "bf16"}, {"optimizer__master": "fp32"}, {"optimizer__master": "none"},
                                     {"optimizer__clip": "block"}, {"optimizer__clip": "none"}],
                         ids=["bf16-gradients", "fp32-master", "stochastic", "clip-block", "clip-none"])
def test_bf16_learns_with_every_setting(work, changes):
    name = "bf16_" + "_".join(f"{key}_{value}" for key, value in changes.items())
    lmlaunch(config(work, name, model__dtype="bf16", **changes), cwd=work)
    curve = losses(work, name)
    assert curve[-1][0] < 0.75 * curve[0][0]


def test_split_and_fp32_master_are_the_same_bits(work):
    for master in ["split", "fp32"]:
        lmlaunch(config(work, "master_" + master, model__dtype="bf16", optimizer__master=master), cwd=work)
    assert losses(work, "master_split") == losses(work, "master_fp32")


def test_a_stop_signal_finishes_the_step_and_exits_75(work):
    name = config(work, "stopped", train__steps=100000)
    process = subprocess.Popen([BIN / "lmlaunch", name], cwd=work, stderr=subprocess.PIPE, text=True)
    status = work / "runs" / "stopped" / "status.json"
    while process.poll() is None and not (status.exists() and json.loads(status.read_text())["step"] >= 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "reason=signal:SIGINT" in stderr.rstrip().splitlines()[-1]
    assert json.loads(status.read_text())["state"] == "stopped"


def test_a_directory_of_another_config_is_refused(work, full):
    done = lmlaunch(config(work, "full", optimizer__lr=1e-3), cwd=work, check=False)
    config(work, "full")
    assert done.returncode == 14 and "optimizer.lr" in done.stderr


def test_a_finished_run_is_not_overwritten(work, full):
    before = {path: path.stat().st_mtime_ns for path in (work / "runs" / "full").rglob("*")}
    done = lmlaunch("full.toml", cwd=work, check=False)
    assert done.returncode == 14 and "finished after step 12 at 20" in done.stderr and "rm -r runs/full" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in (work / "runs" / "full").rglob("*")} == before


def refused(work, name, code, *words, **changes):
    done = lmlaunch(config(work, name, **changes), cwd=work, check=False)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr
    assert not (work / "runs" / name / "model").exists()


def test_bad_input_gets_a_clear_answer(work):
    refused(work, "typo", 10, "typo.toml:", "global_batch", train__globalbatch=8)
    assert not (work / "runs" / "typo").exists()
    refused(work, "quantized", 10, "model.quantize", "qlora", model__quantize="nf4")
    refused(work, "nomodel", 11, "nowhere", model__path="nowhere")
    refused(work, "nodata", 11, "missing.jsonl", data__train=["missing.jsonl"])
    (work / "empty.jsonl").write_text("")
    refused(work, "empty", 11, "empty.jsonl", data__train=["empty.jsonl"])
    (work / "wide.jsonl").write_text(json.dumps({"input_ids": [1, 2, VOCAB], "labels": [1, 2, VOCAB]}) + "\n")
    refused(work, "wide", 11, str(VOCAB), data__train=["wide.jsonl"])
    refused(work, "masked", 11, data__train=["masked.jsonl"], **mask_all(work))


def mask_all(work):
    (work / "masked.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}) + "\n")
    return {}


def test_an_unsupported_architecture_is_refused_by_name(work):
    directory = work / "deepseek"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}))
    refused(work, "unsupported", 11, "deepseek_v3", model__path="deepseek")


def test_damaged_weights_are_refused(work):
    directory = work / "damaged"
    directory.mkdir()
    for file in (work / "model").iterdir():
        data = file.read_bytes()
        (directory / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    refused(work, "damage", 11, "model.safetensors", model__path="damaged")
    assert lmlaunch("verify", "damaged", cwd=work, check=False).returncode == 11
