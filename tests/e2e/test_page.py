"""The page of a run in a real browser: what it shows is held against the run's files."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_run import BIN, config, eval_losses, lmlaunch, rows, work  # noqa: F401
from test_see_it import seen  # noqa: F401
from test_emulator import lmlaunch as on_the_emulator
from test_emulator import make_deep, make_work

BROWSER = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
MOST_BYTES = 800_000
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: install the package chromium")


def browser(*arguments):
    return subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *arguments], capture_output=True, text=True, timeout=120)


def shown(page):
    """The page, once its script has come to its end, without the script."""
    dom = browser("--dump-dom", page.as_uri()).stdout
    error = re.search(r'data-error="([^"]*)"', dom[:2000])
    assert error is None, error[1]
    assert re.search(r'data-ready="\d+"', dom[:2000]), dom[:2000]
    return re.sub(r"<script.*?</script>", "", dom, flags=re.S)


def card(text, title):
    """The card with this title, as text with marks."""
    found = re.search(rf'<section class="card[^"]*"><h2>{re.escape(title)}</h2>(.*?)</section>', text, re.S)
    assert found, title
    return html.unescape(found[1])


def tiles(text):
    """{label: (value, note)}"""
    found = re.findall(r'<div class="card tile"><span class="dim">(.*?)</span><b>(.*?)</b><span class="dim">(.*?)</span></div>', text)
    return {label: (value, note) for label, value, note in found}


def table_rows(text):
    """Rows of cells of all tables."""
    return [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", text)]


def size(text):
    number, unit = re.search(r"([\d.]+) (B|[KMGT]iB)$", text).groups()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)


def steps_of(work, name):
    return [row for row in rows(work, name) if "loss" in row]


def plan_of(work, name):
    return json.loads((work / "runs" / name / "plan.json").read_text())


def copy_of(work, name, *more, change=lambda row: row):
    """The run "page" under another name with its rows changed and `more` behind them, and its page made anew."""
    run = work / "runs" / name
    shutil.copytree(work / "runs" / "page", run, ignore=shutil.ignore_patterns("model", "checkpoints"))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*map(change, rows(work, "page")), *more]))
    lmlaunch("report", f"runs/{name}", cwd=work)
    return shown(run / "report.html")


def test_the_page_of_a_run_shows_its_curves_settings_and_memory(work, seen):
    page = work / "runs" / "page" / "report.html"
    text = shown(page)
    for part in ("Loss", "Token accuracy (%)", "Gradient norm", "Learning rate", "Tokens per second", "Utilization (%)", "Host memory",
                 "A step as it was planned", "Settings that differ from the defaults", "optimizer.lr", "0.01", "step_00000008", "One example", "12 of 12", ">done<", "64 rows whole, 0 cut"):
        assert part in text, part
    assert text.count("<svg") == 9 and text.count("<polyline") >= 7
    assert f"{eval_losses(work, 'page')[-1]:.4g}" in text
    assert not re.search(r'(?:src|href)="(?!#)', page.read_text()) and "http://www.w3.org/2000/svg" in page.read_text()


# In a frame as wide as a telephone's window (a browser's own has a least width), what does not fit into it.
WRAPPER = """<!doctype html><body><script>
const frame = document.createElement('iframe');
frame.style = 'width:%(width)dpx;height:4000px;border:0';
frame.onload = () => {
  const page = frame.contentDocument, wide = [...page.querySelectorAll('svg, table, .card, pre')].filter(
    part => part.getBoundingClientRect().right > %(width)d || (part.clientWidth && part.scrollWidth > part.clientWidth + 1));
  document.body.dataset.out = JSON.stringify({ width: page.documentElement.scrollWidth, svg: page.querySelectorAll('svg').length,
                                               wide: wide.map(part => part.tagName + ' ' + part.textContent.slice(0, 60)) });
};
frame.srcdoc = %(page)s;
document.body.append(frame);
</script></body>"""


@pytest.mark.parametrize("width", [380, 1280])
def test_the_page_fits_the_window(work, seen, tmp_path, width):
    for name in ("page", "page_off"):
        text = (work / "runs" / name / "report.html").read_text()
        (tmp_path / "frame.html").write_text(WRAPPER % {"width": width, "page": json.dumps(text).replace("</", "<\\/")})
        dom = browser("--dump-dom", "--virtual-time-budget=3000", f"--window-size={width + 40},900", (tmp_path / "frame.html").as_uri()).stdout
        told = json.loads(html.unescape(re.search(r'data-out="([^"]*)"', dom)[1]))
        assert told["width"] <= width and told["svg"] >= 8 and told["wide"] == [], told


def test_the_tile_of_memory_has_the_plans_and_the_measured(work, seen):
    value, note = tiles(shown(work / "runs" / "page" / "report.html"))["peak memory"]
    assert size(value) == pytest.approx(max(row["host_bytes"] for row in rows(work, "page") if "loss" in row), rel=0.01)
    assert note.startswith("planned ") and size(note) == pytest.approx(plan_of(work, "page")["peak"]["host_bytes"], rel=0.01)
    steps = steps_of(work, "page")
    assert size(tiles(shown(work / "runs" / "page" / "report.html"))["mean memory"][0]) == pytest.approx(
        sum(row["host_bytes"] for row in steps) / len(steps), rel=0.01)


def test_the_tile_of_time_has_the_share_that_waited_for_data(work, seen):
    _, note = tiles(shown(work / "runs" / "page" / "report.html"))["time in steps"]
    steps = steps_of(work, "page")
    share = 100 * sum(row["data_ms"] for row in steps) / sum(row["step_ms"] for row in steps)
    assert note.endswith(" % waiting for data") and float(note.split()[0]) == pytest.approx(share, rel=0.02)


TIERS = {"host": "Host memory", "device": "GPU memory", "nvme": "Disk"}
MEASURED = {"host": "host_bytes", "device": "device_bytes", "nvme": "disk_bytes"}


def check_tiers(work, name, expected):
    """Each tier's planned bytes, in all and of each class, as in plan.json; its measured ones are the most of the rows."""
    text = card(shown(work / "runs" / name / "report.html"), "Memory of each tier, against the plan")
    drawn = re.findall(r"<div><b>(.*?)</b>: planned (.*?)(?: of (.*?) that may be used)?(?:; measured (.*?))?</div>.*?<table>(.*?)</table>", text, re.S)
    planned = plan_of(work, name)["tiers"]
    assert [tier["name"] for tier in planned] == expected and [title for title, *_ in drawn] == [TIERS[tier] for tier in expected]
    for tier, (_, bytes_, usable, measured, classes) in zip(planned, drawn, strict=True):
        assert size(bytes_) == pytest.approx(tier["bytes"], rel=0.01)
        assert bool(usable) == bool(tier["usable_bytes"]) and (not usable or size(usable) == pytest.approx(tier["usable_bytes"], rel=0.01))
        assert size(measured) == pytest.approx(max(row[MEASURED[tier["name"]]] for row in steps_of(work, name)), rel=0.01)
        cells = {cell[0]: size(cell[1]) for cell in table_rows(classes)}
        assert cells == {c["name"]: pytest.approx(c["bytes"], rel=0.01) for c in tier["classes"] if c["bytes"] > 0}
    return {tier["name"]: (tier["bytes"], size(measured)) for tier, (_, _, _, measured, _) in zip(planned, drawn, strict=True)}


def test_each_tier_of_memory_has_the_plans_and_the_measured(work, seen):
    check_tiers(work, "page", ["host"])
    planned, measured = check_tiers(work, "page_off", ["host", "nvme"])["nvme"]
    assert 0.5 * planned < measured <= planned


def curve(text, title, number=0):
    """(step, value) of each point of a chart's line, read off its axes."""
    chart = card(text, title)

    def axis(pattern, shift):
        marks = [(float(at) - shift, float(value)) for at, value in re.findall(pattern, chart)]
        (low, a), (high, b) = marks[0], marks[-1]
        return lambda at: a + (at - low) * (b - a) / (high - low)

    x = axis(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([\d.]+)</text>', 0)
    y = axis(r'<text x="[\d.]+" y="([\d.]+)" text-anchor="end">([\d.e-]+)</text>', 4)
    line = re.findall(r'<polyline points="([^"]*)"', chart)[number]
    return [(x(float(at)), y(float(high))) for at, high in (point.split(",") for point in line.split())]


def test_the_points_of_a_curve_lie_where_the_rows_say(work, seen):
    text, steps = shown(work / "runs" / "page" / "report.html"), steps_of(work, "page")
    held_out = [(row["step"], row["eval_loss"]) for row in rows(work, "page") if "eval_loss" in row]
    for title, expected in {"Gradient norm": [(row["step"], row["grad_norm"]) for row in steps],
                            "Tokens per second": [(row["step"], row["tokens_per_s"]) for row in steps],
                            "Loss": [(row["step"], row["loss"]) for row in steps], "Loss, eval": held_out}.items():
        name, _, second = title.partition(", ")
        points = curve(text, name, number=1 if second else 0)
        a_pixel = (max(value for _, value in expected) + 1) / 100  # the least a chart is high: 250 of them
        assert [step for step, _ in points] == pytest.approx([step for step, _ in expected], abs=0.05), title
        assert [value for _, value in points] == pytest.approx([value for _, value in expected], abs=a_pixel), title


def test_the_share_of_hidden_transfers_is_that_of_the_rows(work, seen):
    shares = table_rows(card(shown(work / "runs" / "page_off" / "report.html"), "A step as it was planned"))
    moved = [(row["read_bytes"] + row["written_bytes"], row["hidden_pct"]) for row in steps_of(work, "page_off")]
    expected = sum(count * share for count, share in moved) / sum(count for count, _ in moved)
    told = next(row[1] for row in shares if row[0] == "hidden behind compute")
    assert float(told.removesuffix(" %")) == pytest.approx(expected, rel=0.01, abs=0.1)


@pytest.mark.skipif(not (BIN.parent / "emulator" / "bin" / "lmlaunch-cuda").exists(), reason="this build has no emulator")
def test_the_page_of_a_run_on_a_gpu_shows_its_memory_and_its_link(tmp_path):
    work = make_work(tmp_path, "llama_three_heads_per_key_tied_with_pad_token")
    make_deep(work)
    on_the_emulator("c.toml", "--gpus", "1", "run.dir=runs/gpu", "model.path=deep", "train.recompute=block", "offload.weights=host", cwd=work)
    page, steps, plan = work / "runs" / "gpu" / "report.html", steps_of(work, "gpu"), plan_of(work, "gpu")
    text = shown(page)
    value, note = tiles(text)["peak memory"]
    assert size(value) == pytest.approx(max(row["device_bytes"] for row in steps), rel=0.01)
    assert size(note) == pytest.approx(plan["peak"]["device_bytes"], rel=0.01)
    check_tiers(work, "gpu", ["device", "host"])
    planned, measured = link_row(text, "GPU link")
    assert planned == pytest.approx(next(link["amount"] for link in plan["links"] if link["name"] == "GPU link"), rel=0.01)
    assert measured == pytest.approx(sum(row["to_device_bytes"] + row["from_device_bytes"] for row in steps[1:]) / len(steps[1:]), rel=0.01)
    whole = {cells[0]: cells[1] for cells in table_rows(card(text, "A step as it was planned"))}
    for name, key in {"copied to the GPU": "to_device_bytes", "copied from the GPU": "from_device_bytes"}.items():
        assert size(whole[name]) == pytest.approx(sum(row[key] for row in steps), rel=0.01)
    assert "Bytes per step to and from the GPU" in text and "hidden behind compute" in text


def lanes(text):
    """{lane: [title of each box]}"""
    found = re.findall(r'<g data-lane="([^"]*)">(.*?)</g>', text, re.S)
    return {lane: re.findall(r"<rect .*?><title>(.*?)</title></rect>", boxes) for lane, boxes in found}


def test_a_steps_timeline_has_a_lane_for_all_that_is_busy(work, seen):
    for name, expected in {"page": {"compute"}, "page_off": {"compute", "disk read", "disk write"}}.items():
        planned = {lane["lane"]: lane["spans"] for lane in plan_of(work, name)["timeline"]}
        drawn = lanes(shown(work / "runs" / name / "report.html"))
        assert set(drawn) == set(planned) == expected
        for lane, spans in planned.items():
            assert [title.rsplit(",", 1)[0] for title in drawn[lane]] == [name for _, _, name, _ in spans]
        if name == "page":  # with state off the device updates come under the next step's forward
            names = [name for _, _, name, _ in planned["compute"]]
            assert names.index("forward block 0, micro-batch 0") < names.index("forward block 1, micro-batch 1") < names.index("update block 0")
        assert max(end for _, end, _, _ in planned["compute"]) == pytest.approx(plan_of(work, name)["step_seconds"], rel=1e-3)


def link_row(text, name):
    """Bytes per step as planned and as measured."""
    row = next(row for row in table_rows(card(text, "A step as it was planned")) if row[0] == name)
    return size(row[2]), size(row[3])


def test_the_page_of_an_offloaded_run_shows_what_passed_its_links(work, seen):
    text = shown(work / "runs" / "page_off" / "report.html")
    for part in ("Bytes per step to and from disks", "hidden behind compute", "first moment", "read planned"):
        assert part in text, part
    for link, key in {"disk read": "read_bytes", "disk write": "written_bytes"}.items():
        planned, measured = link_row(text, link)
        steps = [row[key] for row in rows(work, "page_off") if "loss" in row][1:]
        assert planned == pytest.approx(next(entry["amount"] for entry in plan_of(work, "page_off")["links"] if entry["name"] == link), rel=0.01)
        assert measured == pytest.approx(sum(steps) / len(steps), rel=0.01)


def test_the_page_of_ranks_shows_what_they_sent(work):
    lmlaunch(config(work, "page_ranks", train__micro_batch=2), "--ranks", "2", "zero.stage=2", cwd=work)
    text = shown(work / "runs" / "page_ranks" / "report.html")
    assert "Bytes per step to other ranks" in text
    traffic = plan_of(work, "page_ranks")["traffic"]
    sent = [row["sent_bytes"] for row in rows(work, "page_ranks") if "loss" in row][1:]
    planned, measured = link_row(text, "all sent to other ranks")
    assert planned == pytest.approx(traffic["gradient_bytes"] + traffic["weight_bytes"] + traffic["vote_bytes"], rel=0.01)
    assert measured == pytest.approx(sum(sent) / len(sent), rel=0.01)
    assert measured == pytest.approx(planned, rel=0.25)  # the first rank's, whose shard is the longest


def test_a_run_made_from_a_preset_is_held_against_it(work):
    preset = lmlaunch("presets", "smollm2-135m-lora", cwd=work).stdout
    assert preset.startswith("# preset: smollm2-135m-lora\n") and json.loads(lmlaunch("presets", "smollm2-135m-lora", "--json", cwd=work).stdout)["toml"] == preset
    (work / "mine.toml").write_text("# of mine\n" + preset)
    lmlaunch("mine.toml", "model.path=model", 'data.train=["train.jsonl"]', "data.max_length=32", "data.cache_dir=cache", "train.steps=2", "train.epochs=\"auto\"",
             "run.device=cpu", "run.threads=1", cwd=work)
    assert (work / "runs" / "mine" / "config.toml").read_text().startswith("# preset: smollm2-135m-lora\n")
    text = shown(work / "runs" / "mine" / "report.html")
    differences = {key: values for key, *values in table_rows(card(text, "Settings that differ from the preset smollm2-135m-lora"))}
    assert differences["model.path"] == ['"HuggingFaceTB/SmolLM2-135M-Instruct"', '"model"'] and differences["data.max_length"] == ["1024", "32"]
    assert "optimizer.lr" not in differences and "lora.dropout" not in differences  # as in the preset, though not the defaults


def test_answers_to_prompts_stand_in_their_card(work, seen):
    text = copy_of(work, "answers", {"step": 4, "prompt": "Which?", "answer": "the first"}, {"step": 12, "prompt": "Which?", "answer": "<b>the last</b>"})
    assert "after step 4: Which?\n→ the first\n\nafter step 12: Which?\n→ <b>the last</b>" in card(text, "Answers to train.sample_prompts")


def test_skipped_steps_are_counted_in_a_tile(work, seen):
    assert tiles(shown(work / "runs" / "page" / "report.html"))["loss"][1] == "&nbsp;"
    text = copy_of(work, "skips", change=lambda row: {**row, "skipped": True} if "loss" in row and row["step"] in (3, 5) else row)
    assert tiles(text)["loss"][1] == "2 steps skipped"


def test_several_runs_stand_on_one_page(work, seen):
    said = lmlaunch("report", "runs/page", "runs/page_off/model", "-o", "both.html", "--json", cwd=work).stdout
    assert json.loads(said) == {"page": "both.html", "runs": 2}
    text = shown(work / "both.html")
    for part in ("page training", "page_off eval", "Settings that differ between the runs", "offload.optimizer"):
        assert part in text, part
    assert "optimizer.lr" not in text  # the same in both


def long_run(work):
    """10,000 steps and 200 evaluations, as a run of days leaves them: no two rows have equal values."""
    run = work / "runs" / "long"
    shutil.copytree(work / "runs" / "page", run, ignore=shutil.ignore_patterns("model", "checkpoints"))
    row = next(row for row in rows(work, "page") if "loss" in row)
    varying = ("grad_norm", "lr", "tokens_per_s", "sol_pct", "step_ms", "data_ms", "host_bytes", "device_bytes", "read_bytes", "written_bytes", "to_device_bytes",
               "from_device_bytes", "sent_bytes", "hidden_pct")
    assert set(varying) <= set(row)
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 10001):
            wave = {key: (1 + (step * 104729 + 7919 * i) % 9973 / 9973) * (3e9 if key.endswith("_bytes") else 33) for i, key in enumerate(varying)}
            file.write(json.dumps({**row, **wave, "step": step, "loss": 2 / step**0.3 + 0.001 * (step * 7919 % 101)}) + "\n")
            if step % 50 == 0:
                file.write(json.dumps({"step": step, "eval_loss": 2 / step**0.3, "target_tokens": 9}) + "\n")
    return run


def test_the_page_of_ten_thousand_steps_is_small(work, seen):
    run = long_run(work)
    lmlaunch("report", "runs/long", cwd=work)
    assert (run / "report.html").stat().st_size < MOST_BYTES
    assert "10000" in shown(run / "report.html")


if __name__ == "__main__":  # a picture for the docs: test_page.py PAGE OUT.png [HEIGHT]
    height = sys.argv[3] if len(sys.argv) > 3 else "2000"
    browser(f"--screenshot={sys.argv[2]}", f"--window-size=1280,{height}", "--hide-scrollbars", Path(sys.argv[1]).resolve().as_uri())
