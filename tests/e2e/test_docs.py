"""Every command of the pages in docs/, run as it stands there, each page in its order and in a folder of its own, with a tiny
model. `my.toml` is a configuration of the tester's, training takes six steps, and /nvme0/swap lies in the folder."""

import re

import pytest
from test_first_hour import ROOT, commands_of, first_hour, model, through_pipes  # noqa: F401

PAGES = sorted((ROOT / "docs").glob("*.md"))
TRAINS = re.compile(r"lmlaunch (--ranks \d+ )?\S+\.toml ")
SHORT = " train.steps=6"


def line_of(work, command):
    command = re.sub(r"/(nvme\d)", rf"{work}/\1", command)
    return f'export PATH="{work}/build/bin:$PATH"\n{command}' + (SHORT if TRAINS.match(command) else "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_the_page_works(model, tmp_path, page):  # noqa: F811
    commands = commands_of(page.read_text())
    assert commands or page.name == "README.md"
    first_hour(tmp_path, model)
    for command in commands:
        code, said = through_pipes(tmp_path, line_of(tmp_path, command))
        assert code == 0, f"{page.name}: {command}\n{said}"


def test_the_first_page_names_every_other_and_every_link_leads_somewhere():
    linked = {name for page in PAGES for name in re.findall(r"\]\(([^)]+)\)", page.read_text())}
    assert {page.name for page in PAGES} - {"README.md"} <= linked
    assert [name for name in linked if not (ROOT / "docs" / name).exists()] == []


def test_a_command_that_does_not_work_is_found(model, tmp_path):  # noqa: F811
    first_hour(tmp_path, model)
    assert through_pipes(tmp_path, line_of(tmp_path, "lmlaunch my.toml train.stepz=1"))[0] == 10
