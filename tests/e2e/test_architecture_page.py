"""docs/architecture.md against the sources: every file that it names is there, every type and function that it names with a file
occurs in that file, and its table of layers is the table of who may include whom (tests/layering_test.py). Needs no build.

A code span `PATH: NAME, NAME` names types and functions with their file. A span with a slash is a path. A name with `::` has its file."""

import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from layering_test import MAY_INCLUDE, SUFFIXES, blank_comments_and_strings  # noqa: E402

PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST_LINES = 200


def spans(text):
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


@functools.cache
def code_of(path):
    """Without comments and strings: a name that only a comment has is not in the code."""
    text = (ROOT / path).read_text()
    return blank_comments_and_strings(text) if Path(path).suffix in SUFFIXES else text


def has_word(path, name):
    return (ROOT / path).is_file() and re.search(rf"(?<!\w){re.escape(name)}\b", code_of(path)) is not None


def wrong_names(text):
    out = []
    for span in spans(text):
        path, colon, names = span.partition(": ")
        if not colon and "/" not in path:
            out += [f"{span} stands without its file"] if "::" in span else []
        elif not (ROOT / path).exists():
            out.append(f"{path} is not there")
        else:
            out += [f"{path} has no {name}" for name in names.split(", ") if colon and not has_word(path, name)]
    return out


def rows_of(text):
    """(folder, what it may include, as written) of each row of the table of layers."""
    layers = text.partition("\n## Layers\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", layers, re.M)


def folder_of(name):
    """The last column leaves out `src` and `launcher`."""
    return next((folder for folder in (name, f"src/{name}", f"launcher/{name}") if folder in MAY_INCLUDE), name)


def wrong_layers(text):
    out, above = [], []
    for folder, written in rows_of(text):
        may = set(above) if written == "all above" else set() if written == "–" else {folder_of(name) for name in written.split(", ")}
        if folder not in MAY_INCLUDE or folder in above:
            out.append(f"{folder} has no row in MAY_INCLUDE, or two here")
        elif may != MAY_INCLUDE[folder]:
            out.append(f"{folder}: here and in MAY_INCLUDE are not the same: {', '.join(sorted(may ^ MAY_INCLUDE[folder]))}")
        out += [f"{folder} stands above {one}, which it may include" for one in sorted(may - set(above))]
        above.append(folder)
    return out + [f"{folder} has no row here" for folder in MAY_INCLUDE if folder not in above]


def test_every_file_is_there_and_has_the_names():
    assert wrong_names(PAGE) == []
    assert len({span for span in spans(PAGE) if ": " in span}) >= 50  # they were found at all


def test_the_table_of_layers_is_that_of_the_include_rules():
    assert wrong_layers(PAGE) == []


# Question -> files without which the walk does not answer it.
WALKS = {
    "Where is the memory of a step decided?": ["src/plan/plan.h", "src/plan/placement.cpp", "src/plan/sizes.cpp", "src/train/rank.cpp"],
    "What happens when a rank dies?": ["launcher/cli/supervise.cpp", "comm/shared_region.cpp", "launcher/worker/checkpoints.cpp"],
    "How does a weight get from a file to the GPU?": ["src/weights/loader.cpp", "src/base/staging.cpp", "src/train/step.cpp"],
}


@pytest.mark.parametrize("question", WALKS)
def test_a_walk_answers_its_question_in_steps(question):
    walk = PAGE.partition(f"\n## {question}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^(\d+)\. ", walk, re.M)
    assert len(steps) >= 8 and steps == [str(i + 1) for i in range(len(steps))]
    named = {span.partition(": ")[0] for span in spans(walk)}
    assert not set(WALKS[question]) - named


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("text, expected", [
    ("`src/plan/plan.h: Plan,\nmake_plan` and `src/plan` and `offload.paths`", []),
    ("`src/plan/plans.h: Plan`", ["src/plan/plans.h is not there"]),
    ("`src/plans`", ["src/plans is not there"]),
    ("`plan.h: Plan`", ["plan.h is not there"]),
    ("`src/plan/plan.h: Plan, make_plans`", ["src/plan/plan.h has no make_plans"]),
    ("`src/plan/plan.h: make`", ["src/plan/plan.h has no make"]),  # a part of a word
    ("`src/plan/plan.h: decided`", ["src/plan/plan.h has no decided"]),  # a comment has it
    ("`src/plan: make_plan`", ["src/plan has no make_plan"]),
    ("`Rank::restore`", ["Rank::restore stands without its file"]),
])
def test_a_wrong_name_is_found(text, expected):
    assert wrong_names(text) == expected


@pytest.mark.parametrize("old, new, expected", [
    ("| `comm` |", "| `common` |", "common has no row in MAY_INCLUDE, or two here"),
    ("| `comm` |", "| `offload` |", "comm has no row here"),
    ("| base, config, spec |\n| `offload`", "| base, config |\n| `offload`",
     "src/schedule: here and in MAY_INCLUDE are not the same: src/spec"),
    ("| base, offload |", "| base, offload, launcher/worker |", "comm stands above launcher/worker, which it may include"),
])
def test_a_wrong_layer_is_found(old, new, expected):
    assert PAGE.count(old) == 1
    assert expected in wrong_layers(PAGE.replace(old, new))
