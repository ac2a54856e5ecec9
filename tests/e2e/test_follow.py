"""log.to and log.webhook in the whole program, with stand-ins of the trackers' libraries (tests/support/trackers): the same curves as
metrics.jsonl, also of a run that is resumed, and a run that ends the same whatever its tracker does. The program that sends them by
itself: tests/data/follow_test.py."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
from follow_test import STAND_INS, Hook  # noqa: E402
from test_resume import interrupt, kill  # noqa: E402
from test_run import config, lmlaunch, losses, rows, work  # noqa: E402, F401


def environment(work, name, fault=""):
    """The end of a run waits for as long as a busy machine may take; for what hangs it does not wait."""
    return {**os.environ, "LMLAUNCH_FOLLOW": "1" if fault == "hang" else "200", "PYTHONPATH": str(STAND_INS), "STAND_IN": str(work / f"{name}.calls"), "STAND_IN_FAULT": fault, "no_proxy": "*"}


def calls(work, name):
    path = work / f"{name}.calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve(work, name, library, tag):
    return [(call["step"], call["values"][tag]) for call in calls(work, name)
            if call["library"] == library and call["call"] == "log" and tag in call["values"]]


def assert_followed(work, name, library):
    metrics = rows(work, name)
    for tag, key in {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/learning_rate": "lr", "eval/loss": "eval_loss"}.items():
        assert curve(work, name, library, tag) == [(row["step"], row[key]) for row in metrics if key in row], tag


def test_trackers_get_the_rows_of_metrics(work):
    done = lmlaunch(config(work, "sent", log__to=["wandb", "mlflow", "trackio"], train__eval_every=5), cwd=work, env=environment(work, "sent"))
    for library in ("wandb", "mlflow", "trackio"):
        assert_followed(work, "sent", library)
    assert [call for call in calls(work, "sent") if call["call"] == "finish"] and "LOG-38" not in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("lmlaunch: stop code=0")


def test_a_resumed_run_is_one_run_of_its_tracker(work, monkeypatch):
    toml = config(work, "again", log__to=["wandb"], train__steps=400, checkpoint__every=10)
    env = environment(work, "again")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    interrupt(work, "again", 150, kill)
    lmlaunch(toml, cwd=work)
    assert [row["step"] for row in rows(work, "again") if "loss" in row] == list(range(1, 401))
    told = curve(work, "again", "wandb", "train/loss")
    assert [step for step, _ in told] == list(range(1, 401))
    assert told == [(row["step"], row["loss"]) for row in rows(work, "again") if "loss" in row]
    assert len({call["id"] for call in calls(work, "again") if call["call"] == "init"}) == 1


@pytest.fixture(scope="module")
def alone(work):
    lmlaunch(config(work, "alone"), cwd=work)
    return losses(work, "alone")


@pytest.mark.parametrize("fault, said", [("hang", " has not taken the last rows in time"), ("die", "wandb ended by signal 11")])
def test_a_run_ends_the_same_whatever_its_tracker_does(work, alone, fault, said):
    name = f"tracker_{fault}"
    done = lmlaunch(config(work, name, log__to=["wandb"]), cwd=work, env=environment(work, name, fault))
    assert losses(work, name) == alone
    assert done.stderr.count("note LOG-38") == 1 and said in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("lmlaunch: stop code=0")
    model = [(work / "runs" / one / "model" / "model.safetensors").read_bytes() for one in ("alone", name)]
    assert model[0] == model[1]


def test_a_missing_library_is_named_before_anything_is_created(work):
    env = {**environment(work, "missing"), "PYTHONPATH": ""}
    done = lmlaunch(config(work, "missing", log__to=["wandb", "trackio"]), cwd=work, env=env, check=False)
    assert done.returncode == 12 and "-m pip install wandb trackio" in done.stderr, done.stderr
    assert not (work / "runs" / "missing").exists()


def test_nothing_follows_a_run_that_did_not_ask(work, alone):
    assert not (work / "runs" / "alone" / "follow").exists()


def test_a_webhook_hears_how_a_run_ends_and_nobody_reads_its_address(work):
    with Hook() as hook:
        lmlaunch(config(work, "told", log__webhook=hook.address, log__to=["wandb"]), cwd=work, env=environment(work, "told"))
        failed = lmlaunch(config(work, "told_failure", log__webhook=hook.address, optimizer__lr=1e6, optimizer__clip="none", train__steps=60),
                          cwd=work, env=environment(work, "told_failure"), check=False)
    assert [(got["run"], got["event"]) for got in hook.got] == [
        ("told", "start"), ("told", "end"), ("told_failure", "start"), ("told_failure", "failure")]
    assert hook.got[-1]["exit_code"] == failed.returncode != 0 and hook.got[-1]["reason"].startswith("error:")
    assert "SECRET" not in (work / "runs" / "told" / "report.html").read_text() + json.dumps(calls(work, "told"))


def test_a_webhook_hears_of_a_run_whose_lmlaunch_was_killed(work, monkeypatch):
    with Hook() as hook:
        monkeypatch.setenv("no_proxy", "*")
        config(work, "told_kill", log__webhook=hook.address, train__steps=100000)
        interrupt(work, "told_kill", 5, lambda process: (process.kill(), process.wait()), ends_it=False)
        while len(hook.got) < 2:
            time.sleep(0.01)
    assert hook.got[-1]["event"] == "failure" and hook.got[-1]["reason"].startswith("killed")
