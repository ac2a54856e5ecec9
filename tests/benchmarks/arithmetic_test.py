"""The arithmetic of GPU steps: it explains the measured rows, its counts are the emulated GPU's, and the docs have its figures."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_arithmetic as arithmetic  # noqa: E402


def counted(method):
    """Times of each operation per block and micro-batch, from tests/emulator/counters.txt."""
    times = {}
    for line in (ROOT / "tests/emulator/counters.txt").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if cells[0] == method:
            times[cells[1].split("<")[0].strip()] = int(cells[2].split()[0])
    return times


@pytest.mark.parametrize("row", arithmetic.MEASURED, ids=lambda row: row.name)
def test_a_measured_row_is_explained_within_four_percent(row):
    measured = arithmetic.measured_seconds()[row.name]
    assert arithmetic.step_seconds(row) == pytest.approx(measured, rel=0.04), arithmetic.parts_text(row)


def test_the_fitted_rate_is_the_best_one(monkeypatch):
    measured = arithmetic.measured_seconds()
    fitted = arithmetic.RATES["narrow_gbps"]["value"]

    def squares(gbps):
        monkeypatch.setitem(arithmetic.RATES, "narrow_gbps", {"value": gbps})
        return sum((arithmetic.step_seconds(row) / measured[row.name] - 1) ** 2 for row in arithmetic.MEASURED if row.lora)

    assert squares(fitted) < min(squares(fitted - 100), squares(fitted + 100))


def test_attention_of_few_pairs_leaves_multiprocessors_idle():
    row = arithmetic.Row("", arithmetic.LLAMA_8B)
    fills = [arithmetic.flash_fill(row.shape.heads * sequences, 2048, True) for sequences in (8, 4, 2, 1)]
    assert fills == pytest.approx([256 / 264, 256 / 264, 192 / 264, 160 / 264])
    two = arithmetic.attention_tflops(replace(row, sequences=2))
    eight = arithmetic.attention_tflops(row)
    assert two[0] == eight[0] and two[1] == pytest.approx(0.75 * eight[1])


def test_there_are_ten_measured_rows():
    assert len({row.name for row in arithmetic.MEASURED}) == 10


def test_every_rate_has_a_source():
    def sources(value, name):
        if isinstance(value, dict):
            if {"value", "tflops", "peak_tflops"} & set(value):
                assert value.get("source"), f"{name} has no source"
            for key, inner in value.items():
                sources(inner, key)

    sources(arithmetic.RATES, "rates")


def test_loras_products_are_those_that_the_counters_test_counts():
    row = arithmetic.Row("", arithmetic.LLAMA_8B, lora=True)
    before, products, scales = arithmetic.lora_passes(replace(row, measured_program=True))
    assert (products, scales) == (50, 14)
    after, products, scales = arithmetic.lora_passes(row)
    assert (products, scales) == (41, 0)
    unit = row.tokens * row.shape.hidden * arithmetic.BF16
    assert before / unit == pytest.approx(80)
    assert after / unit == pytest.approx(52)  # the attention output's adapter adds to the residual


def test_the_elementwise_passes_are_those_of_the_emulated_gpu():
    full = counted("full")
    assert full["rms_norm.cu forward"] == counted("lora")["rms_norm.cu forward"] == 2  # their outputs are kept
    assert full["rms_norm.cu backward"] == 2
    assert full["rope.cu rotate"] == 2
    assert full["gated.cu forward"] == full["gated.cu backward"] == 1
    assert full["copy_"] == counted("lora")["copy_"] == 5  # out, its gradient's parts, and q, k and v as the attention takes them
    row = arithmetic.Row("", arithmetic.LLAMA_8B)
    residual = arithmetic.elementwise_units(replace(row, measured_program=True))[0] - arithmetic.elementwise_units(row)[0]
    assert residual == 2  # its copy, before a product was added to it
    assert full["gemm"] == 12
    assert counted("lora")["gemm"] == 50  # with dropout each A has its own input


def test_what_a_norm_and_the_heads_sum_read_is_what_the_emulated_gpu_counts():
    lines = (ROOT / "tests/emulator/counters.txt").read_text().splitlines()
    norm = next(line for line in lines if line.startswith("lora | rms_norm.cu backward"))
    of_block = int(norm.split("|")[3].split()[0])
    array = 64 * 64 * arithmetic.BF16  # of the model of counters_test.cpp
    # Two norms: dy, x, the residual's gradient and dx once, the weight twice for each row, and rstd for each of 32 lanes.
    assert of_block == 2 * (4 + 2 + 1) * array
    # No pass adds a part of dX in the model's type to fp32.
    assert not any("add_arrays<float, Bf16" in line for line in lines)
    full, lora = (arithmetic.Row("", arithmetic.LLAMA_8B, lora=lora) for lora in (False, True))
    before = arithmetic.elementwise_units(replace(lora, measured_program=True))[1] - arithmetic.elementwise_units(lora)[1]
    assert before == pytest.approx(4 + 4 + 3 * 3.5)  # and both norms and the activation once more
    head = lambda row: arithmetic.seconds_of(row)["head"]
    assert 0 < head(replace(full, measured_program=True)) - head(full) < 2e-3


def test_a_change_of_a_rate_moves_the_rows_that_have_it(monkeypatch):
    lora = next(row for row in arithmetic.MEASURED if row.name == "8b-lora")
    full = next(row for row in arithmetic.MEASURED if row.name == "8b")
    before = arithmetic.step_seconds(lora), arithmetic.step_seconds(full)
    monkeypatch.setitem(arithmetic.RATES, "narrow_gbps", {"value": arithmetic.RATES["narrow_gbps"]["value"] / 2})
    assert arithmetic.step_seconds(lora) == pytest.approx(before[0] + arithmetic.seconds_of(lora)["adapters"] / 2)
    assert arithmetic.step_seconds(full) == before[1]


def test_predictions_and_where_the_targets_stand(monkeypatch):
    print(arithmetic.table())
    reached = [target.figure() <= target.value if target.what == "s" else target.figure() >= target.value for target in arithmetic.TARGETS]
    assert reached == [True, True, False, True, False, False, False, True, True]
    # The CPU's share of updates, which begins behind the step's check, while the link carries state all step long.
    offloaded = next(target for target in arithmetic.TARGETS if target.what == "s")
    assert 0.1 < arithmetic.balanced_share(offloaded.row) < 0.25
    assert offloaded.figure() == pytest.approx(0.305, abs=0.005)
    monkeypatch.setattr(arithmetic, "balanced_share", lambda row: 0)
    assert offloaded.figure() == pytest.approx(0.34, abs=0.005)
    monkeypatch.undo()
    # What the program's own changes have given, by the same sums.
    now = arithmetic.LORA_H100
    assert arithmetic.tokens_per_second(now) > 1.06 * arithmetic.tokens_per_second(replace(now, measured_program=True))


def test_seven_billion_is_nearer_its_peak_at_8192_tokens_for_its_products_alone():
    many, few = (arithmetic.seconds_of(row) for row in (arithmetic.FULL_7B, arithmetic.PLANNED_7B))
    tokens = arithmetic.FULL_7B.tokens * arithmetic.FULL_7B.micro_batches
    assert arithmetic.PLANNED_7B.tokens * arithmetic.PLANNED_7B.micro_batches == tokens
    assert {name for name in many if many[name] != pytest.approx(few[name])} == {"products"}
    output = {rows: arithmetic.gemm_rates()["7b", "o", rows][0] for rows in (8192, 16384)}
    assert output[8192] > 1.15 * output[16384]


def test_the_update_of_more_tokens_is_a_smaller_part_of_the_step():
    per_token = [arithmetic.seconds_of(row)["update"] / row.micro_batches for row in (arithmetic.FULL_8B, arithmetic.PLANNED_8B)]
    assert per_token[0] == pytest.approx(4 * per_token[1])


def test_the_page_has_the_figures():
    page = (ROOT / "docs/performance.md").read_text()
    for line in arithmetic.target_rows():
        assert line in page, f"docs/performance.md lacks: {line}"
    assert "No card has run these yet" in page
