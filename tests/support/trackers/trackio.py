"""A stand-in for trackio, as wandb.py here is for wandb."""

from wandb import note


class Markdown:
    def __init__(self, text):
        self.text = text


def init(project, name=None, config=None, resume="never", embed=True, auto_log_gpu=None, auto_log_cpu=None):
    note("trackio", "init", id=name, resume=resume, config=config)


def log(values, step):
    note("trackio", "log", values={key: getattr(value, "text", value) for key, value in values.items()}, step=step)


def finish():
    note("trackio", "finish")
