"""Every place of a model is taken wherever a model is named: a run and its model/, of full training and of an adapter, and an
adapter's directory. Each means the same to plan, init, training, lora.init, eval and export."""

import json
import os
import re
import shutil
import tomllib

import pytest
from test_run import config, eval_losses, filled, lmlaunch

FULL = ["runs/full", "runs/full/", "runs/full/model"]
ADAPTERS = ["runs/lora", "runs/lora/model", "adapter"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("places"), layers=1)
    lmlaunch(config(work, "full", train__steps=2), cwd=work)
    lmlaunch(config(work, "lora", train__steps=2, train__method="lora", lora__r=4, lora__alpha=12), cwd=work)
    shutil.copytree(work / "runs" / "lora" / "model", work / "adapter")
    return work


def named(place):
    return re.sub(r"\W+", "_", place)


def recorded(work, name):
    return tomllib.loads((work / "runs" / name / "config.toml").read_text())


def planned(work, *arguments):
    """On a machine that nothing else changes: of so much memory, and without rates that another run may measure meanwhile."""
    return lmlaunch("plan", *arguments, "--host-memory", "8GiB", cwd=work, env={**os.environ, "XDG_CACHE_HOME": str(work / "no_rates")}).stdout


def hash_of(work, directory):
    return json.loads(lmlaunch("verify", directory, "--json", cwd=work).stdout)["weights_hash"]


@pytest.mark.parametrize("place", FULL)
def test_training_starts_from_a_run(work, place):
    name = f"on_{named(place)}"
    toml = config(work, name, model__path=place, train__steps=1)
    assert json.loads(lmlaunch("plan", toml, "--json", cwd=work).stdout)["fits"] is True
    lmlaunch(toml, cwd=work)
    assert eval_losses(work, name)[0] == eval_losses(work, "full")[-1]
    assert recorded(work, name)["model"]["path"] == "runs/full/model"
    # What is recorded is what was asked for, however it was spelled.
    assert "finished after step 1" in lmlaunch(toml, cwd=work, check=False).stderr


def test_a_tilde_is_the_users_home(work, tmp_path):
    """In the file and on the command line, where no shell expands it behind a `=`."""
    (tmp_path / "home").symlink_to(work)
    env = {**os.environ, "HOME": str(tmp_path / "home")}
    toml = config(work, "tilde", model__path="~/model", run__dir="~/runs/tilde", data__train=["~/train.jsonl"], data__cache_dir="~/cache",
                  train__steps=1)
    assert json.loads(lmlaunch("plan", toml, "--json", cwd=work, env=env).stdout)["fits"] is True
    lmlaunch(toml, "data.eval=[\"~/eval.jsonl\"]", cwd=work, env=env)
    assert json.loads((work / "runs" / "tilde" / "status.json").read_text())["state"] == "done"
    assert recorded(work, "tilde")["model"]["path"] == f"{tmp_path}/home/model" and not (work / "~").exists()


def test_from_another_folder_a_relative_path_is_said_to_begin_there(work, tmp_path):
    toml = config(work, "elsewhere", train__steps=1)
    done = lmlaunch(work / toml, cwd=tmp_path, check=False)
    assert done.returncode == 11 and f"relative paths begin in the folder in which lmlaunch is started, {tmp_path}" in done.stderr, done.stderr
    done = lmlaunch(work / toml, f"model.path={work}/model", cwd=tmp_path, check=False)
    assert done.returncode == 11 and "train.jsonl" in done.stderr and f"lmlaunch is started, {tmp_path}" in done.stderr, done.stderr
    done = lmlaunch(toml, "model.path=/no/such/model", cwd=work, check=False)
    assert "relative paths" not in done.stderr


@pytest.mark.parametrize("place", ADAPTERS)
def test_training_goes_on_with_an_adapter(work, place):
    name, adapter = f"with_{named(place)}", "adapter" if place == "adapter" else "runs/lora/model"
    toml = config(work, name, model__path=place, train__method="lora", train__steps=1)
    assert planned(work, toml) == planned(work, toml, "model.path=model", "lora.init=adapter")
    assert json.loads(lmlaunch("eval", toml, "--json", cwd=work).stdout)["eval_loss"] == eval_losses(work, "lora")[-1]
    lmlaunch(toml, cwd=work)
    assert eval_losses(work, name)[0] == eval_losses(work, "lora")[-1]
    found = recorded(work, name)
    assert (found["model"]["path"], found["lora"]["init"], found["lora"]["r"], found["lora"]["alpha"]) == ("model", adapter, 4, 12)
    # lora.init takes the same places.
    lmlaunch(config(work, f"init_{name}", train__method="lora", train__steps=1, lora__init=place), cwd=work)
    assert recorded(work, f"init_{name}")["lora"] == found["lora"]
    assert eval_losses(work, f"init_{name}") == eval_losses(work, name)


def test_the_base_of_an_adapter_may_be_quantized(work):
    lmlaunch(config(work, "quantized", model__path="runs/lora", model__dtype="bf16", train__method="qlora", train__steps=1), cwd=work)
    assert recorded(work, "quantized")["model"]["quantize"] == "nf4" and recorded(work, "quantized")["lora"]["init"] == "runs/lora/model"


def test_all_weights_of_an_adapter_are_refused_with_the_command_that_helps(work):
    for place in ADAPTERS:
        toml = config(work, "whole", model__path=place, train__steps=1)
        for command in ([toml], ["plan", toml], ["init", place, "train.jsonl", "--method", "full", "-o", "whole_init.toml"]):
            done = lmlaunch(*command, cwd=work, check=False)
            assert done.returncode == 11 and 'an adapter of "model"' in done.stderr, done.stderr
            assert f"lmlaunch export {place} --merge -o DIR" in done.stderr and 'train.method = "lora"' in done.stderr
    assert not (work / "runs" / "whole").exists() and not (work / "whole_init.toml").exists()
    lmlaunch("export", "runs/lora", "--merge", "-o", "merged", cwd=work)
    lmlaunch(config(work, "whole", model__path="merged", train__steps=1), cwd=work)
    assert eval_losses(work, "whole")[0] == pytest.approx(eval_losses(work, "lora")[-1], rel=1e-5)


def test_a_base_of_another_architecture_is_refused_though_its_weights_fit(work):
    """What names and shapes do not tell: both are Llama's."""
    changes = {"mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
               "turned": {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "same": {}}
    for name, keys in changes.items():
        shutil.copytree(work / "model", work / f"base_{name}")
        file = work / f"base_{name}" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    merge = lambda adapter, base: lmlaunch("export", adapter, "--merge", "--base", f"base_{base}", "-o", f"into_{base}", cwd=work, check=False)  # noqa: E731
    for adapter in ("runs/lora", "adapter"):
        for base, said in (("mistral", 'model_type is "mistral", not "llama"'), ("turned", "rope_theta is 500000, not 10000")):
            done = merge(adapter, base)
            assert done.returncode == 11 and said in done.stderr and not (work / f"into_{base}").exists(), done.stderr
    done = merge("runs/lora", "same")
    assert done.returncode == 0 and "logits differ by at most" in done.stderr, done.stderr
    # Where the adapter's model has gone, by what its files say of it.
    shutil.copytree(work / "runs" / "lora" / "model", work / "orphan")
    file = work / "orphan" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "gone/model"}))
    done = merge("orphan", "mistral")
    assert done.returncode == 11 and "it is a MistralForCausalLM, not a LlamaForCausalLM" in done.stderr, done.stderr
    (work / "gone").mkdir()
    lost = lmlaunch("generate", "orphan", "--prompt", "x", cwd=work, check=False)
    assert lost.returncode == 11 and "orphan/adapter_config.json" in lost.stderr and "lmlaunch fetch" not in lost.stderr, lost.stderr


def test_two_adapters_are_one_too_many(work):
    done = lmlaunch(config(work, "two", model__path="runs/lora", train__method="lora", lora__init="runs/quantized"), cwd=work, check=False)
    assert done.returncode == 10 and 'set model.path = "model"' in done.stderr, done.stderr


@pytest.mark.parametrize("place", ["runs/full", "runs/full/model"])
def test_init_begins_with_a_run(work, place):
    toml = f"begin_{named(place)}.toml"
    lmlaunch("init", place, "train.jsonl", "--gpus", "0", "-o", toml, cwd=work)
    assert tomllib.loads((work / toml).read_text())["model"]["path"] == "runs/full/model"
    lmlaunch(toml, "train.steps=1", "train.epochs=auto", cwd=work)


@pytest.mark.parametrize("method", [None, "lora", "qlora"])
@pytest.mark.parametrize("place", ["runs/lora", "adapter"])
def test_init_goes_on_with_an_adapter(work, place, method):
    toml = f"go_on_{named(place)}_{method}.toml"
    lmlaunch("init", place, "train.jsonl", "--gpus", "0", "-o", toml, *(["--method", method] if method else []), cwd=work)
    keys = tomllib.loads((work / toml).read_text())
    assert keys["model"]["path"] == "model" and keys["lora"] == {"init": "adapter" if place == "adapter" else "runs/lora/model"}
    assert keys["train"]["method"] in ([method] if method else ["lora", "qlora"])
    assert json.loads(lmlaunch("plan", toml, "--json", cwd=work).stdout)["fits"] is True


def test_an_adapter_is_added_to_a_runs_model(work):
    hashes = set()
    for place in FULL:
        out = f"added_{len(hashes)}_{named(place)}"
        lmlaunch("export", "runs/lora", "--merge", "--base", place, "-o", out, cwd=work)
        hashes.add(hash_of(work, out))
    lmlaunch("export", "runs/lora", "--merge", "-o", "added_to_its_own", cwd=work)
    assert len(hashes) == 1 and hashes != {hash_of(work, "added_to_its_own")}
    for place in ADAPTERS:
        done = lmlaunch("export", "runs/lora", "--merge", "--base", place, "-o", "no", cwd=work, check=False)
        assert done.returncode == 11 and f"lmlaunch export {place} --merge -o DIR" in done.stderr
