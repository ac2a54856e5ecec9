"""A disk that fills: the trained model's room is held from the first step on, and a model that cannot be written where it
belongs is written somewhere."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

import pytest
from test_run import BIN, config, work  # noqa: F401
from transformers import AutoModelForCausalLM, LlamaConfig

MODEL_BYTES = 2 * 1000 * 256 * 2  # at least: embedding and head of the model below, in bf16


@contextlib.contextmanager
def small_disk(path, **options):
    """A tmpfs; skips where there is no root or no mount."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    path.mkdir()
    settings = ",".join(f"{key}={value}" for key, value in options.items())
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", settings, "tmpfs", path], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr}")
    try:
        yield path
    finally:
        for _ in range(50):  # a killed run's files are closed a moment later
            if subprocess.run(["umount", path], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)


@pytest.fixture(scope="module")
def shape(work):  # noqa: F811
    """A model of some MiB of which only the shape is told."""
    LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=1000, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
                architectures=["LlamaForCausalLM"]).save_pretrained(work / "shape")
    return {"model__path": "shape", "model__init": "random", "model__dtype": "bf16", "data__eval": []}


def used(disk):
    state = os.statvfs(disk)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


@contextlib.contextmanager
def started(work, name, *arguments):
    process = subprocess.Popen([BIN / "lmlaunch", name, *arguments], cwd=work, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "XDG_CACHE_HOME": str(work / "user-cache")})
    try:
        yield process
    finally:
        process.kill()  # of a test that failed; its rank goes with it
        process.communicate()


def wait_for_step(run, step, process):
    status = run / "status.json"
    while process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(status.read_text())["step"] >= step:
                return
        time.sleep(0.02)
    raise AssertionError("no step: " + process.communicate()[1])


def ended(process, code):
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == code, stderr
    assert stderr.rstrip().splitlines()[-1].startswith(f"lmlaunch: stop code={code} "), stderr
    return stderr


def test_too_small_a_disk_is_refused_before_the_first_step(work, shape):
    with small_disk(work / "small", size="2m") as disk:
        with started(work, config(work, "small_disk", train__steps=2, **shape), f"run.dir={disk}/run") as process:
            stderr = ended(process, 12)
        assert re.search(r"the trained model will take \S+ MiB, and \S+ MiB are free at", stderr), stderr
        assert not (disk / "run" / "metrics.jsonl").exists() and "run.dir" in stderr
        assert used(disk) < 256 << 10


def test_an_adapter_with_the_pairs_that_it_began_with_has_room_for_both(work, shape):
    taken = {}
    for start in ("zero", "pissa"):
        with small_disk(work / f"small_{start}", size="2m") as disk:
            toml = config(work, f"small_{start}", train__steps=2, train__method="lora", lora__r=128, lora__start=start, **shape)
            with started(work, toml, f"run.dir={disk}/run") as process:
                taken[start] = float(re.search(r"the trained model will take (\S+) MiB", ended(process, 12))[1])
    assert taken["zero"] > 4 and 1.9 < taken["pissa"] / taken["zero"] < 2


def test_the_models_room_is_held_and_leaves_nothing_when_the_run_is_killed(work, shape):
    with small_disk(work / "held", size="16m") as disk:
        with started(work, config(work, "held_disk", train__steps=100000, **shape), f"run.dir={disk}/run") as process:
            wait_for_step(disk / "run", 1, process)
            assert used(disk) > MODEL_BYTES
            children = subprocess.run(["pgrep", "-P", str(process.pid), "lmlaunch"], capture_output=True, text=True).stdout.split()
            os.kill(int(children[0]), signal.SIGKILL)
            ended(process, 40)
            assert used(disk) < 256 << 10
            # (A file that was being replaced may be there twice; the next start clears that.)
            assert {path.name.split(".tmp-")[0] for path in (disk / "run").iterdir()} <= {".lock", "config.toml", "numerics.json", "plan.txt", "plan.json", "log.txt",
                                                                        "metrics.jsonl", "status.json", "report.html"}


def test_a_disk_that_fills_during_the_run_leaves_the_model_in_its_place(work, shape):
    with small_disk(work / "filling", size="16m") as disk:
        with started(work, config(work, "filling_disk", train__steps=100000, **shape), f"run.dir={disk}/run") as process:
            wait_for_step(disk / "run", 2, process)
            with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            stderr = ended(process, 20)
            step = re.search(r"kept: the model after step (\d+), in (\S+)", stderr)
            assert step and step[2] == f"{disk}/run/model", stderr
            AutoModelForCausalLM.from_pretrained(step[2])


def test_a_model_that_cannot_be_written_in_its_place_goes_to_another(work, shape):
    swap = work / "rescue"
    swap.mkdir()
    with small_disk(work / "inodes", size="64m", nr_inodes=40) as disk:
        name = config(work, "no_inodes", train__steps=100000, offload__paths=[str(swap)], offload__optimizer="none",
                      offload__gradients="none", offload__weights="none", offload__activations="none", **shape)
        with started(work, name, f"run.dir={disk}/run") as process:
            wait_for_step(disk / "run", 2, process)
            with contextlib.suppress(OSError):
                for number in range(1000):
                    (disk / f"filler{number}").touch()
            stderr = ended(process, 20)
            found = re.search(r"kept: the model after step \d+, in (\S+)", stderr)
            assert found and found[1].startswith(f"{swap}/lmlaunch-model-"), stderr
            assert f"mv {found[1]} {disk}/run/model" in stderr
            AutoModelForCausalLM.from_pretrained(found[1])
            assert os.stat(os.path.dirname(found[1])).st_mode & 0o077 == 0
            assert not (disk / "run" / "model").exists()


def test_a_model_that_fails_at_the_very_end_goes_to_another_place(work, shape):
    """Whatever the reason: here a file of that name."""
    with started(work, config(work, "taken", train__steps=400, **shape)) as process:
        wait_for_step(work / "runs" / "taken", 1, process)
        (work / "runs" / "taken" / "model").write_text("in the way")
        stderr = ended(process, 14)
        found = re.search(r"kept: the model after step \d+, in (\S+)", stderr)
        assert found and found[1].startswith(f"{work}/user-cache/lmlaunch/lmlaunch-model-"), stderr
        AutoModelForCausalLM.from_pretrained(found[1])
