"""Writes the tables of README.md and docs/performance.md from benchmarks/results: what stands between `<!-- table NAME -->` and
`<!-- end -->` is replaced. tests/benchmarks/pages_test.py compares.

Usage: performance_page.py [--check]"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
GIB = 1 << 30
ZEN5, ZEN4 = "amd-epyc-family-26-2-cores", "amd-epyc-family-25-zen-4-2-cores"
# Figures of train_step.py: what is trained, and what the other side does.
STEPS = {"LoRA, bf16 adapters": ("LoRA, adapters in bf16", "peft, adapters in bf16"),
         "LoRA, peft's default": ("LoRA, adapters in bf16", "peft, adapters in fp32 (its default)"),
         "full, bf16 gradients": ("full, bf16 gradients", "transformers, fused AdamW, all in bf16"),
         "full, fp32 gradients": ("full, fp32 gradients", "transformers, fused AdamW, all in bf16")}
PEERS = {("1b", "bf16"): ("Llama-3.2-1B, full", "transformers, all in bf16, no master weights"),
         ("1b", "fp32 master"): ("Llama-3.2-1B, full", "transformers, fp32 master weights"),
         ("8b-lora", "bf16 adapters"): ("Llama-3.1-8B, LoRA r = 16", "peft, adapters in bf16"),
         ("8b-lora", "fp32 adapters"): ("Llama-3.1-8B, LoRA r = 16", "peft, adapters in fp32 (its default); needs activation checkpointing")}
GPU_STEPS = {"1b": "Llama-3.2-1B, full", "1b-host": "the same, optimizer state in host memory", "8b": "Llama-3.1-8B, full",
             "8b-lora": "Llama-3.1-8B, LoRA r = 16", "7b-lora": "Llama-2-7B, LoRA r = 16", "8b-slice": "3 layers of Llama-3.1-8B, full",
             "8b-slice-host": "the same, optimizer state in host memory", "1b-slice": "4 layers of Llama-3.2-1B, full",
             "1b-slice-host-by-gpu": "the same, optimizer state in host memory, GPU updates",
             "1b-slice-host-by-cpu": "the same, optimizer state in host memory, CPU updates"}
LARGE = ["1B, full, adafactor_lowmem", "1B, full, adamw_8bit", "8B, QLoRA", "8B, QLoRA, base on disk", "8B, full, adamw_8bit, all on disk"]


def cpu(name):
    """{(benchmark, figure): row} of a machine, and its rows' dates."""
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    return {(row["benchmark"], row["figure"]): row for row in kept["rows"]}


def gpu():
    return list(map(json.loads, (RESULTS / "nvidia-h200.jsonl").read_text().splitlines()))


def peers():
    return {(row["row"], row["setting"]): row for row in gpu() if row.get("benchmark") == "gpu_peers"}


def gpu_steps():
    return {row["row"]: row for row in gpu() if row.get("benchmark") == "gpu_steps"}


def number_of(ceiling, unit):
    """Of "transformers + ..., 483 tokens/s" the number."""
    return float(re.search(rf"([\d.]+) {re.escape(unit)}", ceiling)[1])


def step_row(rows, figure):
    """(tokens/s of ours, its ratio, GiB of ours, its ratio)"""
    speed, memory = rows["train_step.py", f"{figure}: tokens/s"], rows["train_step.py", f"{figure}: peak RSS"]
    return (speed["value"] * number_of(speed["ceiling"], "tokens/s"), speed["value"], memory["value"] * number_of(memory["ceiling"], "GiB"),
            memory["value"])


def rounded(rate):
    """Three digits: 15,600."""
    digits = 10 ** max(0, len(str(int(rate))) - 3)
    return f"{round(rate / digits) * digits:,}"


def table(heads, rows):
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def readme():
    """Model x method x memory x tokens/s: what was measured."""
    steps, ranked, zen5, zen4 = gpu_steps(), peers(), cpu(ZEN5), cpu(ZEN4)
    ours = lambda row: sum(row["ours_tokens_per_s"]) / len(row["ours_tokens_per_s"])  # noqa: E731
    h200 = "H200"
    rows = [["Llama-3.2-1B", "full", h200, f"{ranked['1b', 'bf16']['ours_device_bytes'][0] / GIB:.0f} GiB", rounded(ours(ranked["1b", "bf16"])),
             f"{ranked['1b', 'bf16']['speed']:.2f}x"],
            ["Llama-3.1-8B", "full", h200, f"{steps['8b']['device_bytes'] / GIB:.0f} GiB", rounded(steps["8b"]["tokens_per_s"]), "not compared"],
            ["Llama-3.1-8B", "LoRA", h200, f"{ranked['8b-lora', 'bf16 adapters']['ours_device_bytes'][0] / GIB:.0f} GiB",
             rounded(ours(ranked["8b-lora", "bf16 adapters"])), f"{ranked['8b-lora', 'bf16 adapters']['speed']:.2f}x"]]
    for method, figure in (("full", "full, bf16 gradients"), ("LoRA", "LoRA, bf16 adapters")):
        rate, speed, memory, _ = step_row(zen5, figure)
        rows.append(["SmolLM2-135M", method, "2 CPU cores", f"{memory:.1f} GiB", rounded(rate), f"{speed:.2f}x"])
    small = zen4["large_models.py", LARGE[0]]["value"]
    rows.append(["Llama-3.2-1B", "full, Adafactor, updates in backward", "2 CPU cores", f"{small:.2f} GiB", "not timed", "not compared"])
    for figure, method in (("8B, QLoRA", "QLoRA"), ("8B, QLoRA, base on disk", "QLoRA, base on disk"),
                           ("8B, full, adamw_8bit, all on disk", "full, 8-bit AdamW, state on disk")):
        rows.append(["Llama-3.1-8B", method, "2 CPU cores", f"{zen4['large_models.py', figure]['value']:.1f} GiB", "not timed", "not compared"])
    return table(["model", "method", "on", "memory", "tokens/s", "against transformers / peft"], rows)


def cpu_peers(name):
    rows = []
    for figure, (ours, theirs) in STEPS.items():
        rate, speed, memory, share = step_row(cpu(name), figure)
        rows.append([ours, theirs, rounded(rate), f"{speed:.2f}x", f"{memory:.2f} GiB", f"{share:.2f}x"])
    return table(["trained", "compared with", "tokens/s", "speed", "peak memory", "memory"], rows)


def gpu_peers():
    rows = []
    for name, (ours, theirs) in PEERS.items():
        row = peers()[name]
        rows.append([ours, theirs, rounded(sum(row["ours_tokens_per_s"]) / 2), f"{row['speed']:.2f}x",
                     f"{row['ours_device_bytes'][0] / GIB:.1f} GiB", f"{row['memory']:.2f}x"])
    return table(["trained", "compared with", "tokens/s", "speed", "GPU memory", "memory"], rows)


def plan_of_the_gpu():
    rows = []
    for name, what in GPU_STEPS.items():
        row = gpu_steps()[name]
        rows.append([what, rounded(row["tokens_per_s"]), f"{row['step_s']:.3f} s", f"{row['planned_step_s']:.3f} s",
                     f"{row['device_bytes'] / GIB:.1f} GiB", f"{row['planned_device_bytes'] / GIB:.1f} GiB"])
    return table(["trained", "tokens/s", "step", "planned", "GPU memory", "planned"], rows)


def low_memory():
    kept = cpu(ZEN4)
    rows = []
    for figure in LARGE:
        off = kept["large_models.py", f"{figure}: plan"]
        rows.append([figure, f"{kept['large_models.py', figure]['value']:.2f} GiB", f"{off['value']:.1f} %"])
    return table(["trained", "peak memory", "off the plan"], rows)


def ceilings():
    """Of both machines: each row is one question."""
    heads = {"transfers against fio: read": ("io.py", "read: GB/s"), "transfers against fio: write": ("io.py", "write: GB/s"),
             "transfers against fio: both at once": ("io.py", "both: GB/s"),
             "a step with all state on slow disks, against its list of operations": ("overlap.py", "all"),
             "four ranks, stage 3, links as slow as compute": ("throttled_link.py", "stage 3, 4 ranks"),
             "a QLoRA step against a LoRA step": ("qlora_step.py", "QLoRA step: tokens/s"),
             "generating 128 tokens in bf16, against transformers": ("generate.py", "tokens/s of 128 tokens, bf16")}
    rows = [[what, *(f"{cpu(name)[key]['value']:.2f}x" for name in (ZEN5, ZEN4))] for what, key in heads.items()]
    return table(["question", "Zen 5", "Zen 4"], rows)


TABLES = {"readme": readme, "cpu zen 5": lambda: cpu_peers(ZEN5), "cpu zen 4": lambda: cpu_peers(ZEN4), "gpu": gpu_peers,
          "gpu plan": plan_of_the_gpu, "low memory": low_memory, "ceilings": ceilings}


def filled(text):
    """`text` with each of its tables as the results have it."""
    def one(match):
        return f"<!-- table {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"
    return re.sub(r"<!-- table (.+?) -->\n.*?<!-- end -->", one, text, flags=re.S)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    differ = [page for page in PAGES if filled(page.read_text()) != page.read_text()]
    for page in differ:
        print(f"{page.relative_to(ROOT)}: " + ("differs from benchmarks/results" if check else "written"))
        if not check:
            page.write_text(filled(page.read_text()))
    return 1 if check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
