"""A stand-in for mlflow, as wandb.py here is for wandb."""

from types import SimpleNamespace

from wandb import note


def set_experiment(name):
    note("mlflow", "experiment", name=name)


def start_run(run_id=None, run_name=None, log_system_metrics=None):
    note("mlflow", "init", id=run_id or "run-1", resume=run_id is not None, name=run_name)
    return SimpleNamespace(info=SimpleNamespace(run_id="run-1"))


def log_params(params):
    note("mlflow", "params", config=params)


def log_metrics(values, step):
    note("mlflow", "log", values=values, step=step)


def log_text(text, artifact_file):
    note("mlflow", "text", text=text, file=artifact_file)


def end_run(status):
    note("mlflow", "finish", status=status)
