"""The trackers' libraries, each with the few calls that a run needs. Project, server and login come from the library's own
variables (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID, ...). Only the target's library is imported, where it
is used."""

import inspect
import os
import secrets
import tomllib

PROJECT = "lmlaunch"


def settings(request):
    """{"train.steps": 12, ...} of the configuration. The webhook's address is a secret."""
    tables = tomllib.loads(request["config"])
    flat = {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}
    flat.pop("log.webhook", None)
    return flat


def as_text(prompt, answer):
    return f"**{prompt}**\n\n{answer}\n"


class Wandb:
    def __init__(self, request, place):
        # Disables capturing this process's output, code, folder and load: they are not the run's.
        for name, value in {"WANDB_PROJECT": PROJECT, "WANDB_NAME": request["name"], "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true",
                            "WANDB_DISABLE_CODE": "true", "WANDB_X_DISABLE_STATS": "true", "WANDB_X_DISABLE_META": "true",
                            "WANDB_DIR": os.path.join(request["run"], "follow")}.items():
            os.environ.setdefault(name, value)
        import wandb
        self.wandb = wandb
        place.id = place.id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        place.write()
        self.run = wandb.init(id=place.id, resume="allow", config=settings(request))

    def scalars(self, step, values):
        self.run.log(values, step=step)

    def sample(self, step, part, prompt, answer):
        self.run.log({part: self.wandb.Table(columns=["prompt", "answer"], data=[[prompt, answer]])}, step=step)

    def finish(self, state):
        self.run.finish(exit_code=1 if state == "failed" else 0)


class Mlflow:
    STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self, request, place):
        import mlflow
        self.mlflow = mlflow
        if not os.environ.get("MLFLOW_EXPERIMENT_ID"):
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        if place.id:
            mlflow.start_run(run_id=place.id, log_system_metrics=False)
            return
        place.id = mlflow.start_run(run_name=request["name"], log_system_metrics=False).info.run_id
        place.write()
        mlflow.log_params({key: str(value)[:500] for key, value in settings(request).items()})

    def scalars(self, step, values):
        self.mlflow.log_metrics(values, step=step)

    def sample(self, step, part, prompt, answer):
        self.mlflow.log_text(as_text(prompt, answer), f"samples/step_{step:08d}/{part.replace(' ', '_')}.md")

    def finish(self, state):
        self.mlflow.end_run(self.STATES[state])


class Trackio:
    """A run is resumed by its name, which therefore must be unique."""

    def __init__(self, request, place):
        import trackio
        self.trackio = trackio
        place.id = place.id or f"{request['name']}-{secrets.token_hex(3)}"
        place.write()
        wanted = {"name": place.id, "config": settings(request), "resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        known = inspect.signature(trackio.init).parameters  # versions differ in the last three
        trackio.init(os.environ.get("TRACKIO_PROJECT") or PROJECT, **{name: value for name, value in wanted.items() if name in known})

    def scalars(self, step, values):
        self.trackio.log(values, step=step)

    def sample(self, step, part, prompt, answer):
        self.trackio.log({part: self.trackio.Markdown(as_text(prompt, answer))}, step=step)

    def finish(self, state):
        self.trackio.finish()


TRACKERS = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
