"""What systems that look after a run rely on: the command after a commit (checkpoint.on_commit), a log of JSON objects (log.format),
the times of metrics.jsonl, and what Prometheus scrapes (log.prometheus; its text's form: tests/launcher/prometheus_test.cpp),
and the copies of checkpoints in a mirror (checkpoint.mirror; kills while it copies: tests/checkpoint/mirror_test.cpp),
and a run whose rank is killed and started again (--restarts)."""

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from test_run import BIN, config, lmlaunch, losses, rows, warm_program, work  # noqa: F401

SHELL = "/bin/sh"
EMULATOR = BIN.parent / "emulator"


def hooked(work, name, script, **changes):
    """A run of 12 steps that saves after each fourth and gives each checkpoint to a script, as $0."""
    return config(work, name, checkpoint__every=4, checkpoint__keep=3, checkpoint__on_commit=[SHELL, "-c", script, "{}"], **changes)


def status(work, name):
    return json.loads((work / "runs" / name / "status.json").read_text())


def test_a_committed_checkpoint_is_given_to_a_command_once(work):
    script = 'echo "$0" >> calls && rm -rf "copy_$(basename "$0")" && cp -r "$0" "copy_$(basename "$0")"'
    toml = hooked(work, "hooked", script)
    done = lmlaunch(toml, cwd=work)
    calls = (work / "calls").read_text().splitlines()
    assert calls[-1] == str(work / "runs" / "hooked" / "checkpoints" / "step_00000012") and len(set(calls)) == len(calls)
    assert "HOOK-39" not in done.stderr and "on_commit" not in status(work, "hooked")
    lmlaunch("verify", work / "copy_step_00000012", cwd=work)
    # Trained further without another checkpoint: nothing is new.
    lmlaunch(toml, "train.steps=14", "checkpoint.every=0", cwd=work)
    assert (work / "calls").read_text().splitlines() == calls
    # As if the first start had been killed while the command ran.
    (work / "runs" / "hooked" / "on_commit" / "done").unlink()
    lmlaunch(toml, "train.steps=16", "checkpoint.every=0", cwd=work)
    assert (work / "calls").read_text().splitlines() == [*calls, calls[-1]]


@pytest.mark.parametrize("script, limit, why", [("echo no room >&2; exit 3", "1h", "exit code 3"),
                                                ("sleep 3600 & wait", "1s", 'killed after checkpoint.on_commit_limit = "1s"')])
def test_a_command_that_fails_is_reported_and_ends_no_run(work, script, limit, why):
    name = f"unhooked_{limit}"
    done = lmlaunch(hooked(work, name, script, checkpoint__on_commit_limit=limit), cwd=work)
    said = f"{why} for step_00000012"
    assert f"warning HOOK-39: checkpoint.on_commit: {SHELL}: {said}" in done.stderr
    assert said in (work / "runs" / name / "log.txt").read_text()
    assert status(work, name)["on_commit"] == said and status(work, name)["state"] == "done"
    assert limit == "1s" or "no room" in (work / "runs" / name / "on_commit" / "log.txt").read_text()


def test_a_command_that_does_not_exist_is_named_before_anything_is_created(work):
    done = lmlaunch(config(work, "nohook", checkpoint__on_commit=["no-such-program", "{}"]), cwd=work, check=False)
    assert done.returncode == 12 and "HOOK-39" in done.stderr and "no-such-program" in done.stderr
    assert not (work / "runs" / "nohook").exists()


LINE = {"time", "rank", "host", "level", "message"}


def test_each_line_of_a_json_log_is_an_object(work):
    done = lmlaunch(config(work, "logged", log__format="json", checkpoint__every=4, train__eval_every=6), cwd=work)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(LINE <= set(line) and line["rank"] == 0 and line["level"] in ("info", "note", "warning") for line in lines)
    assert all(datetime.datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    metrics = rows(work, "logged")
    assert [(line["step"], line["loss"]) for line in lines if "tokens_per_s" in line] == [(r["step"], r["loss"]) for r in metrics if "loss" in r]
    assert [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line] == [(r["step"], r["eval_loss"]) for r in metrics if "eval_loss" in r]
    saved = [line for line in lines if line["message"].startswith("COMMITTED")]
    assert [line["step"] for line in saved] == [4, 8, 12] and saved[-1]["checkpoint"].endswith("step_00000012")
    assert (lines[-1]["exit_code"], lines[-1]["reason"], lines[-1]["step"]) == (0, "done", 12)
    # For people, as before.
    log = (work / "runs" / "logged" / "log.txt").read_text().splitlines()
    assert sum(line.startswith("COMMITTED step ") for line in log) == 3 and not any(line.startswith("{") for line in log)


def test_an_error_in_a_json_log_names_its_code_and_what_to_do(work):
    done = lmlaunch(config(work, "unlogged", log__format="json", data__train=["none.jsonl"]), cwd=work, check=False)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    error = next(line for line in lines if line["level"] == "error")
    assert LINE <= set(error) and error["exit_code"] == done.returncode == lines[-1]["exit_code"] and error["area"] and error["next"]


def test_each_row_of_metrics_has_its_time(work):
    lmlaunch(config(work, "timed", train__eval_every=6), cwd=work)
    metrics = rows(work, "timed")
    # Seconds since 1970, and no microseconds or text.
    assert metrics and all(1.7e9 < row["time"] < 1e11 for row in metrics)


def samples(text):
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_prometheus_scrapes_a_run_while_it_trains(work):
    toml = config(work, "scraped", log__prometheus="127.0.0.1:0", train__steps=100000)
    with subprocess.Popen([warm_program(), toml], cwd=work, stderr=subprocess.PIPE, text=True) as run:
        try:
            url = next(found[1] for line in run.stderr if (found := re.match(r"prometheus: (http://127\.0\.0\.1:\d+/metrics)$", line)))
            seen = {}
            while int(seen.get("lmlaunch_step", 0)) < 3:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url) as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                    seen = samples(answer.read().decode())
        finally:
            run.send_signal(signal.SIGTERM)
            run.stderr.read()
    assert run.returncode == 75
    row = next(row for row in rows(work, "scraped") if "loss" in row and row["step"] == int(seen["lmlaunch_step"]))
    for name, key in {"loss": "loss", "gradient_norm": "grad_norm", "learning_rate": "lr", "tokens_per_second": "tokens_per_s",
                      'memory_bytes{tier="host"}': "host_bytes"}.items():
        assert float(seen["lmlaunch_" + name]) == row[key], name
    assert seen["lmlaunch_planned_steps"] == "100000" and float(seen["lmlaunch_heartbeat_age_seconds"]) >= 0
    assert any(name.startswith('lmlaunch_run_info{run="scraped"') for name in seen)


NO_ANSWER = """
#include <fcntl.h>
#include <unistd.h>
int nvmlInit_v2(void) {
  if (access("blocked", F_OK) != 0) return 1;
  close(open("asked", O_CREAT | O_WRONLY, 0600));
  while (access("blocked", F_OK) == 0) usleep(1000);
  return 1;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
@pytest.mark.skipif(not EMULATOR.exists(), reason="built without CUDA: no emulated card's driver")
def test_a_scrape_without_an_answer_delays_no_step(work):
    """A driver's library answers when it likes: here after steps that the run does while a scrape waits for it."""
    (work / "nvml.c").write_text(NO_ANSWER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"], cwd=work, check=True)
    metrics, blocked = work / "runs" / "unanswered" / "metrics.jsonl", work / "blocked"
    driver = {**os.environ, "LD_PRELOAD": str(EMULATOR / "lib" / "libemulator_devices.so"), "LD_LIBRARY_PATH": str(work)}
    toml = config(work, "unanswered", log__prometheus="127.0.0.1:0", train__steps=100000)

    def until(reached):
        for _ in range(6000):
            if reached():
                return
            assert run.poll() is None
            time.sleep(0.01)
        raise AssertionError("the run waits for the scrape")

    def rows_written():
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    with subprocess.Popen([BIN / "lmlaunch", toml], cwd=work, env=driver, stderr=subprocess.PIPE, text=True) as run, \
            ThreadPoolExecutor(1) as scraper:
        try:
            url = next(found[1] for line in run.stderr if (found := re.match(r"prometheus: (http://127\.0\.0\.1:\d+/metrics)$", line)))
            blocked.touch()
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            scrape = scraper.submit(lambda: opener.open(url).read().decode())
            until((work / "asked").exists)
            before = rows_written()
            until(lambda: rows_written() >= before + 20)
            assert not scrape.done()
            blocked.unlink()
            assert float(samples(scrape.result())["lmlaunch_planned_steps"]) == 100000
        finally:
            blocked.unlink(missing_ok=True)
            run.send_signal(signal.SIGTERM)
            run.stderr.read()
    assert run.returncode == 75


def test_a_file_for_a_collector_has_the_last_step(work):
    lmlaunch(config(work, "collected", log__prometheus="run.prom", train__eval_every=6, checkpoint__every=4), cwd=work)
    seen, metrics = samples((work / "run.prom").read_text()), rows(work, "collected")
    assert seen["lmlaunch_step"] == "12" and float(seen["lmlaunch_loss"]) == [row["loss"] for row in metrics if "loss" in row][-1]
    assert float(seen['lmlaunch_eval_loss{set=""}']) == [row["eval_loss"] for row in metrics if "eval_loss" in row][-1]
    assert int(float(seen["lmlaunch_tokens_total"])) == sum(row["tokens"] for row in metrics if "loss" in row)
    assert not list(work.glob("run.prom?*"))


def test_a_run_whose_directory_is_gone_resumes_from_its_mirror(work):
    settings = {"checkpoint__every": 4, "checkpoint__keep": 1, "train__steps": 16}
    lmlaunch(config(work, "whole", **settings), cwd=work)
    toml = config(work, "mirrored", checkpoint__mirror="shared", **{**settings, "train__steps": 12})
    done = lmlaunch(toml, cwd=work)
    mirror = work / "shared" / "mirrored"
    assert "MIRRORED step 12" in done.stderr and [path.name for path in (mirror / "checkpoints").iterdir()] == ["step_00000012"]
    lmlaunch("verify", mirror / "checkpoints" / "step_00000012", cwd=work)
    shutil.rmtree(work / "runs" / "mirrored")
    changed = lmlaunch(toml, "optimizer.lr=0.02", cwd=work, check=False)
    assert changed.returncode == 14 and "optimizer.lr" in changed.stderr and not (work / "runs" / "mirrored").exists()
    done = lmlaunch(toml, "train.steps=16", "--override", "train.steps", cwd=work)
    assert "resumes from shared/mirrored/checkpoints/step_00000012: step 12" in done.stderr
    assert losses(work, "mirrored") == losses(work, "whole")[12:]
    assert [path.name for path in (mirror / "checkpoints").iterdir()] == ["step_00000016"]
    one, other = (json.loads(lmlaunch("verify", f"runs/{name}", "--json", cwd=work).stdout)["weights_hash"] for name in ("whole", "mirrored"))
    assert one == other


def test_a_mirror_that_cannot_be_written_ends_no_run(work):
    (work / "full").write_text("a file where a directory would be")
    done = lmlaunch(config(work, "unmirrored", checkpoint__every=4, checkpoint__mirror="full"), cwd=work)
    assert "warning MIRR-41" in done.stderr and status(work, "unmirrored")["state"] == "done"


def test_a_mirror_is_not_the_run_itself(work):
    done = lmlaunch(config(work, "itself", checkpoint__mirror="runs"), cwd=work, check=False)
    assert done.returncode == 10 and "onto themselves" in done.stderr


def rank_of(process):
    """The worker that a CLI process has started: its child of that name; None while there is none."""
    for child in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split():
        with contextlib.suppress(OSError):  # it has just ended
            if "lmlaunch-cpu" in os.readlink(f"/proc/{child}/exe"):
                return int(child)
    return None


def test_a_killed_rank_is_started_again_and_nothing_of_it_remains(work):
    settings = {"train__steps": 300, "checkpoint__every": 10}
    lmlaunch(config(work, "undisturbed", **settings), cwd=work)
    toml = config(work, "restarted", **settings)
    metrics, killed = work / "runs" / "restarted" / "metrics.jsonl", []
    with subprocess.Popen([BIN / "lmlaunch", "--restarts", "2", toml], cwd=work, stderr=subprocess.PIPE, text=True) as run:
        for done in (25, 100):  # rows after which a rank is killed, each once
            while run.poll() is None:
                rank = rank_of(run)
                if rank not in (None, *killed) and metrics.exists() and metrics.read_text().count("\n") >= done:
                    os.kill(rank, signal.SIGKILL)
                    killed.append(rank)
                    break
        messages = run.stderr.read()
    assert run.returncode == 0 and 0 < messages.count("note RUN-42: restart ") <= len(killed), messages
    assert losses(work, "restarted") == losses(work, "undisturbed")
    assert [row["step"] for row in rows(work, "restarted") if "loss" in row] == list(range(1, 301))
    model = [(work / "runs" / name / "model" / "model.safetensors").read_bytes() for name in ("undisturbed", "restarted")]
    assert model[0] == model[1] and status(work, "restarted")["state"] == "done"
