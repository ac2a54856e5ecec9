"""The ratios under the README's "What it reaches" are those of the results that the benchmarks have kept, of the day it names."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.search(r"^## What it reaches\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)[1]
SENTENCES = " ".join(TEXT.split())
# How a row of the README's table begins: the figures of train_step.py that it gives.
TABLE = {"LoRA r = 16": "LoRA, bf16 adapters", "LoRA, peft as it comes": "LoRA, peft's default", "full, bf16": "full, bf16 gradients",
         "full, fp32": "full, fp32 gradients"}


def told():
    """{(benchmark, figure): the ratio as it is written}"""
    out = {}
    for label, speed, memory in re.findall(r"^\| ([^|]+) \| (\S+)x \| (\S+)x \|$", TEXT, re.M):
        figure = next(figure for begin, figure in TABLE.items() if label.startswith(begin))
        out["train_step.py", f"{figure}: tokens/s"], out["train_step.py", f"{figure}: peak RSS"] = speed, memory
    for mode, ratio in zip(("read", "write", "both"), re.search(r"run at (\S+)x, (\S+)x and (\S+)x of fio", SENTENCES).groups()):
        out["io.py", f"{mode}: GB/s"] = ratio
    return out


def test_every_ratio_is_that_of_the_results():
    date = re.search(r"These are of (\d{4}-\d\d-\d\d),", SENTENCES)[1]
    cores, kind = re.search(r"(\d+) cores of an? (.+?) \(", SENTENCES).groups()
    written = told()
    assert len(written) == 2 * len(TABLE) + 3
    results = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))]
    machine, = (r for r in results if r["machine"]["cores"] == int(cores) and r["machine"]["cpu"] == kind)
    kept = {(row["benchmark"], row["figure"]): row for row in machine["rows"]}
    assert written == {name: f"{kept[name]['value']:.2f}" for name in written}
    assert {kept[name]["date"] for name in written} == {date}


# The rows of the table of the GPU, in its order.
GPU_ROWS = [("1b", "bf16"), ("1b", "fp32 master"), ("8b-lora", "bf16 adapters"), ("8b-lora", "fp32 adapters")]


def test_the_gpu_table_has_what_was_kept_of_it():
    first, *rows = map(json.loads, (ROOT / "benchmarks" / "results" / "nvidia-h200.jsonl").read_text().splitlines())
    assert f"{first['gpu']} ({first['measured']}, driver {first['driver']}" in SENTENCES
    peers = {(row["row"], row["setting"]): row for row in rows if row["benchmark"] == "gpu_peers"}
    written = re.findall(r"^\| [^|]+ \| ([\d,]+) \| (\S+)x \| (\S+)x \|$", TEXT, re.M)
    assert len(written) == len(GPU_ROWS)
    for (rate, speed, memory), name in zip(written, GPU_ROWS):
        kept = peers[name]
        assert (speed, memory) == (f"{kept['speed']:.2f}", f"{kept['memory']:.2f}")
        assert int(rate.replace(",", "")) == round(sum(kept["ours_tokens_per_s"]) / 2, -2)
    full = next(row for row in rows if row.get("row") == "8b")
    assert f"| Llama-3.1-8B, full | {round(full['tokens_per_s'] / 50) * 50:,} |" in TEXT
