"""lmlaunch plan --compare, from outside: every row's settings give the run that the row describes, without a model, data or GPU here."""

import json
import random
import subprocess

from test_run import BIN

MACHINE = ["--gpu-memory", "24GiB", "--host-memory", "48GiB"]
PRESET = "llama-3.1-8b-full-24gib"


def plan(*arguments, codes=(0,)):
    done = subprocess.run([BIN / "lmlaunch", "plan", *arguments, "--json"], capture_output=True, text=True, env={"HOME": "/nonexistent"})
    assert done.returncode in codes, done.stderr
    return json.loads(done.stdout)


def test_every_row_is_the_plan_with_its_settings():
    rows = plan("--compare", PRESET, *MACHINE)
    assert {"full", "lora", "qlora"} == {row["method"] for row in rows} and rows[0]["fits"]
    for row in random.Random(1).sample(rows, min(len(rows), 12)):
        one = plan(PRESET, *row["settings"], *MACHINE, codes=(0, 12))
        assert (one["fits"], one["peak"], one["step_seconds"]) == (row["fits"], row["peak"], row["step_seconds"]), row["settings"]


def test_nothing_fits_is_exit_12_and_a_table_all_the_same():
    done = subprocess.run([BIN / "lmlaunch", "plan", "--compare", PRESET, "--gpu-memory", "1GiB", "--host-memory", "1GiB"],
                          capture_output=True, text=True, env={"HOME": "/nonexistent"})
    assert done.returncode == 12 and done.stdout.count("\nno ") >= 2, done.stdout


def test_any_machine_answers_for_a_gpu_that_is_not_there():
    """Its host memory is what this machine has."""
    rows = plan("--compare", PRESET, "--gpu-memory", "24GiB", codes=(0, 12))
    assert {"full", "lora", "qlora"} == {row["method"] for row in rows} and any(row["fits"] for row in rows)
