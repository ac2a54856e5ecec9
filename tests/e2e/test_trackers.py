"""log.to with the real libraries in their offline forms (which `./dev test --full` installs once): wandb's offline files, mlflow's file
store and trackio's database have the curves of metrics.jsonl, of a run that was killed and resumed too, each row once."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_resume import interrupt, kill
from test_run import config, lmlaunch, rows, work  # noqa: F401

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lmlaunch"
TRACKED = Path(__file__).resolve().parents[1] / "support" / "tracked.py"
TAGS = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/learning_rate": "lr", "eval/loss": "eval_loss"}
found = sorted(glob.glob(str(CACHE / "trackers-*" / ".complete")))
if not found:
    pytest.skip("no trackers here: ./dev test --full installs them", allow_module_level=True)


@pytest.fixture
def offline(work, monkeypatch):
    for name, value in {"PYTHONPATH": str(Path(found[-1]).parent), "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"file:{work}/mlruns",
                        "MLFLOW_ALLOW_FILE_STORE": "true", "TRACKIO_DIR": str(work / "trackio"), "HF_HUB_OFFLINE": "1",
                        "LMLAUNCH_FOLLOW": "300"}.items():
        monkeypatch.setenv(name, value)


def stored(work, name):
    """{library: {tag: [(step, value), ...]}}."""
    follow = work / "runs" / name / "follow"
    ids = {library: json.loads((follow / f"{library}.json").read_text())["id"] for library in ("mlflow", "trackio")}
    told = json.loads(subprocess.run([sys.executable, "-B", TRACKED, follow, ids["trackio"]], stdout=subprocess.PIPE, text=True, check=True).stdout)
    out = {library: {tag: [(step, values[tag]) for step, values in told[library] if tag in values] for tag in TAGS} for library in told}
    metrics = next((work / "mlruns").glob(f"*/{ids['mlflow']}/metrics"))
    lines = {tag: [line.split() for line in (metrics / tag).read_text().splitlines()] for tag in TAGS}
    out["mlflow"] = {tag: [(int(step), float(value)) for _, value, step in lines[tag]] for tag in TAGS}
    return out


def test_they_store_the_curves_of_metrics(work, offline):
    toml = config(work, "tracked", log__to=["wandb", "mlflow", "trackio"], train__steps=400, train__eval_every=100, checkpoint__every=10)
    interrupt(work, "tracked", 150, kill)
    done = lmlaunch(toml, cwd=work)
    assert "LOG-38" not in done.stderr, (work / "runs" / "tracked" / "follow" / "log.txt").read_text()
    metrics = rows(work, "tracked")
    for library, curves in stored(work, "tracked").items():
        for tag, key in TAGS.items():
            expected = [(row["step"], row[key]) for row in metrics if key in row]
            assert [step for step, _ in curves[tag]] == [step for step, _ in expected], (library, tag)
            assert [value for _, value in curves[tag]] == pytest.approx([value for _, value in expected], rel=1e-12), (library, tag)
