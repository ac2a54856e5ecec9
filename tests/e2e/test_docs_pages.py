"""README.md and docs/ against what they speak of: the size of README, every link, the families, the keys of the configuration, the exit codes, and the
messages that troubleshooting explains."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("LM_BIN", ROOT / "build" / "bin"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
MOST_README_BYTES = 8192
# The sources that print messages.
SOURCES = [path for folder in ("launcher", "src", "offload", "comm") for kind in ("*.cpp", "*.h", "*.py") for path in (ROOT / folder).rglob(kind)]


def said(*arguments):
    return subprocess.run([BIN / "lmlaunch", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def links_of(text):
    """The targets of links and pictures, but for addresses elsewhere."""
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    return [target for target in found if not re.match(r"\w+:", target)]


def anchors_of(page):
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.M)}


def broken_links(page, text):
    out = []
    for target in links_of(text):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or anchor and anchor not in anchors_of(file):
            out.append(target)
    return out


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= MOST_README_BYTES


@pytest.mark.parametrize("page", [*FRONT, *PAGES], ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found():
    page = ROOT / "docs" / "README.md"
    assert broken_links(page, "[a](resume.md) [b](no-such-page.md) [c](configuration.md#no-such-table)") == \
        ["no-such-page.md", "configuration.md#no-such-table"]


def test_the_first_page_names_every_other():
    linked = links_of((ROOT / "docs" / "README.md").read_text())
    assert sorted(page.name for page in PAGES if page.name != "README.md") == sorted(linked)


def test_the_page_of_models_has_every_family_and_no_other():
    families = re.findall(r"^LM_FAMILY\((\w+)\)", (ROOT / "src" / "spec" / "families" / "table.inc").read_text(), re.M)
    assert sorted(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "models.md").read_text(), re.M)) == sorted(families)


def test_the_page_of_all_keys_is_what_the_program_prints():
    assert (ROOT / "docs" / "configuration.md").read_text() == said("help", "--markdown"), \
        "write it anew: build/bin/lmlaunch help --markdown > docs/configuration.md"


def trouble():
    return (ROOT / "docs" / "troubleshooting.md").read_text()


def test_every_exit_code_is_explained():
    codes = re.findall(r"^ *(\d+)  (.+)$", said("--help").split("Exit codes:\n")[1], re.M)
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| *([^|]*) *\|$", trouble().split("## Exit codes")[1], re.M)
    assert [row[:2] for row in rows] == codes
    assert [code for code, _, advice in rows if not advice.strip()] == ["0"]


def messages():
    return re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", trouble().split("## Common messages")[1], re.M)


def test_every_message_that_is_explained_is_still_printed():
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))
    assert len(messages()) >= 20
    assert [message for message in messages() if message.strip() not in text] == []


def coverage():
    """(technique, where it is here, its test, its benchmark) of each row of coverage.md."""
    lines = [line for line in (ROOT / "docs" / "coverage.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[1:]]  # without the titles
    assert {len(row) for row in cells} == {5}
    return [(technique, here, test, benchmark) for technique, _, here, test, benchmark in cells]


def keys_and_values():
    """{key: the values that its row in configuration.md names}; a key of two optimizers has both rows' values."""
    out = {}
    for key, accepts in re.findall(r"^\| `(\w+(?:\.\w+)+)` \| (.+) \|", (ROOT / "docs" / "configuration.md").read_text(), re.M):
        out.setdefault(key, set()).update(re.findall(r'"(\w+)"', accepts))
    return out


def missing_of_coverage(row):
    """What a row names and does not have: a key, a value, a file, or a test that does not speak of the key."""
    technique, here, test, benchmark = row
    known, out = keys_and_values(), []
    words = re.findall(r"`([^`]+)`", here)
    if here.startswith("not yet"):
        values = set().union(*known.values(), (part for key in known for part in key.split(".")))
        return [word for word in words if word in values] + ([] if words and not test else ["a word, and no test"])
    files = re.findall(r"`([^`]+)`", test) + re.findall(r"`([^`]+)`", benchmark)
    out += [file for file in files if not (ROOT / file).is_file()] + ([] if re.findall("`", test) and benchmark else ["a test and a benchmark"])
    text = "\n".join((ROOT / file).read_text() for file in re.findall(r"`([^`]+)`", test) if (ROOT / file).is_file())
    for word in words:
        key, _, value = word.replace(" ", "").partition("=")
        if word.startswith("lmlaunch "):
            continue
        if key not in known or value and value.strip('"') not in known[key]:
            out.append(word)
        elif not re.search(rf"\b\w*{key.split('.')[-1]}\b", text) and (not value or value.strip('"') not in text):
            out.append(f"{word} in {test}")
    return out


def test_what_other_guides_advise_is_where_the_page_says():
    rows = coverage()
    assert len(rows) >= 30
    assert {row[0]: missing_of_coverage(row) for row in rows if missing_of_coverage(row)} == {}


def test_a_row_of_coverage_that_is_not_true_is_found():
    good = ("x", '`train.recompute = "block"`', "`tests/parity/test_invariance.py`", "`benchmarks/plan_honest.py`")
    assert missing_of_coverage(good) == []
    for i, wrong in ((1, "`train.recomputed`"), (1, '`train.recompute = "blocks"`'), (1, "`lora.rslora`"), (1, "not yet: `qlora`"), (2, "`tests/none.py`"),
                     (2, ""), (3, "`benchmarks/none.py`"), (3, "")):
        assert missing_of_coverage((*good[:i], wrong, *good[i + 1:])) != [], wrong


def test_security_says_what_listens_under_mpirun():
    assert "all network interfaces, even on one machine" in " ".join((ROOT / "SECURITY.md").read_text().split())


def test_the_wheel_describes_itself_to_who_installs_it():
    """What pip's users read has no commands of a checkout, and no links into one."""
    text = (ROOT / "packaging" / "description.md").read_text()
    assert links_of(text) == [] and "./dev" not in text
    assert '"description.md"' in (ROOT / "cmake" / "package.py").read_text()
    words = {command.split()[1] for command in re.findall(r"^(lmlaunch .+)$", text, re.M)}
    known = {*re.findall(r"^  (\w+) ", said("--help"), re.M), "help", "--help", "my.toml"}
    assert words <= known, words - known
