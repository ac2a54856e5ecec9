"""The tables of README.md and docs/performance.md are those that performance_page.py makes of the kept results."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import performance_page  # noqa: E402


def test_every_table_is_that_of_the_results():
    for page in performance_page.PAGES:
        assert performance_page.filled(page.read_text()) == page.read_text(), f"{page.name}: python benchmarks/performance_page.py"


def test_every_table_stands_on_a_page_once():
    names = [name for page in performance_page.PAGES for name in re.findall(r"<!-- table (.+?) -->\n.*?<!-- end -->", page.read_text(), re.S)]
    assert sorted(names) == sorted(performance_page.TABLES)


def test_a_better_figure_than_was_measured_is_replaced():
    text = (ROOT / "README.md").read_text()
    better = text.replace("| 1.73x |", "| 2.73x |")
    assert better != text and performance_page.filled(better) == text


def test_a_ratio_is_that_of_the_kept_row():
    kept = json.loads((ROOT / "benchmarks" / "results" / "amd-epyc-family-26-2-cores.json").read_text())["rows"]
    row, = (row for row in kept if row["figure"] == "full, bf16 gradients: tokens/s")
    assert re.search(rf"\| SmolLM2-135M \| full \| .* \| {row['value']:.2f}x \|", performance_page.readme())


def test_the_dates_and_the_driver_of_the_page_are_those_of_the_results():
    text = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    first, *_ = performance_page.gpu()
    assert f"{first['gpu']}, {first['measured']}, driver {first['driver']}" in text
    for name, kind in ((performance_page.ZEN5, "Zen 5"), (performance_page.ZEN4, "Zen 4")):
        date, = {row["date"] for (benchmark, _), row in performance_page.cpu(name).items() if benchmark == "train_step.py"}
        assert re.search(rf"\({kind}\), {date}:", text)
