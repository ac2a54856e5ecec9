"""The rows of a guide's table: what of a plan is compared with it, and that a row without a plan is a missed one."""

import json
import random
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import published  # noqa: E402
from figures import Figures  # noqa: E402
from lowmem import ANIMALS, PLACES, SEEN, UNSEEN, choices  # noqa: E402
from published import GIB, LLAMA_1B, Plan, Way, allocated, classes, compare_plans, device, memory  # noqa: E402

CLASSES = {"weights": 5 * GIB, "gradients": 2 * GIB, "context": 1 * GIB}
PLANNED = {"peak": {"device_bytes": 8 * GIB}, "tiers": [{"classes": [{"name": name, "bytes": size} for name, size in CLASSES.items()]}]}


def compared(monkeypatch, found, row):
    """The figure of a row whose plan is `found`."""
    monkeypatch.setattr(published, "plan", lambda options, row: found)
    figures = Figures(Namespace(smoke=False, impossible=False), [row.figure])
    compare_plans(Namespace(), figures, [row])
    return figures.rows()[0]


def test_a_part_of_a_plan_is_what_it_is_called():
    assert device(PLANNED) == 8 * GIB and allocated(PLANNED) == 7 * GIB
    assert classes("weights", "gradients")(PLANNED) == 7 * GIB and classes("master")(PLANNED) == 0


@pytest.mark.parametrize("size, met", [(8, True), (7.9, False)])
def test_a_plan_over_the_published_size_misses(monkeypatch, size, met):
    row = compared(monkeypatch, PLANNED, Plan("a row", size * GIB, LLAMA_1B, []))
    assert (row["value"], row["met"]) == (pytest.approx(8 / size), met)
    assert row["ceiling"] == f"published, {size:.2f} GiB"


def test_a_row_that_no_plan_fits_misses(monkeypatch):
    assert not compared(monkeypatch, None, Plan("a row", 100 * GIB, LLAMA_1B, []))["met"]


def test_a_plan_is_asked_for_the_row_model_and_card(tmp_path):
    program = tmp_path / "lmlaunch"
    program.write_text("#!/bin/sh\nprintf '{\"words\": \"%s\"}' \"$*\"\n")
    program.chmod(0o755)
    words = published.plan(Namespace(bin_dir=tmp_path), Plan("a row", GIB, LLAMA_1B, ["train.method=lora"], card="L40S"))["words"]
    assert f"model.path={LLAMA_1B} " in words and " train.method=lora " in words and " --gpu L40S " in words
    program.write_text("#!/bin/sh\necho '{}'\nexit 12\n")
    assert published.plan(Namespace(bin_dir=tmp_path), Plan("a row", GIB, LLAMA_1B, [])) is None


def test_a_way_is_compared_without_the_libraries():
    class Ran:
        rows = [{"planned": {"libraries": 3}}]

        def peak(self):
            return 10

    assert memory(Ran()) == 7
    names = [figure.name for figure in Way("LoRA", "lora", "bf16", [], 0.5, 1.0).figures("all weights")]
    assert names == ["LoRA: memory", "LoRA: step time"]


def test_rows_of_choices_have_one_right_place_for_each_animal():
    rows = [json.loads(line) for line in choices(SEEN, 200, random.Random(1))]
    homes = {}
    for row in rows:
        animal, = (animal for animal in ANIMALS if animal in row["context"])
        homes.setdefault(animal, set()).add(row["endings"][row["label"]])
        assert sorted(row["endings"]) == sorted(PLACES)
    assert set(homes) == set(ANIMALS) and all(len(home) == 1 for home in homes.values())
    assert {row["label"] for row in rows} == {0, 1, 2, 3} and not {*SEEN} & {*UNSEEN}
