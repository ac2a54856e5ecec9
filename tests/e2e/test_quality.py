"""What less state costs: SmolLM2-135M on the quickstart's data, equal steps, by the held-out loss at the end."""

import json
import subprocess

import pytest
from test_run import BIN
from test_smollm2 import ROOT, work  # noqa: F401: the quickstart's model and text

# Settings against settings, and by how much the loss may be greater.
LORA_RATE = "optimizer.lr=1e-3"
CASES = {
    "adamw_8bit": ([], ["optimizer.name=adamw_8bit"], 1.01),
    "adamw_4bit": ([], ["optimizer.name=adamw_4bit"], 1.01),
    "adamw_fp8": ([], ["optimizer.name=adamw_fp8"], 1.01),
    "adafactor": ([], ["optimizer.name=adafactor"], 1.01),
    "no master": ([], ["optimizer.master=none"], 1.01),
    "qlora": (["train.method=lora", LORA_RATE], ["train.method=qlora", LORA_RATE], 1.02),
}
losses = {}


def held_out(work, settings):
    """Before training and after it."""
    key = " ".join(settings)
    if key not in losses:
        directory = f"runs/{len(losses)}"
        subprocess.run([BIN / "lmlaunch", ROOT / "configs" / "quickstart.toml", f"run.dir={directory}", "data.cache_dir=cache", *settings],
                       cwd=work, check=True, capture_output=True, timeout=1200)
        rows = [json.loads(line) for line in open(work / directory / "metrics.jsonl")]
        losses[key] = [row["eval_loss"] for row in rows if "eval_loss" in row]
    return losses[key][0], losses[key][-1]


# nf4 costs a model so small 0.34 nats before the first step (its codes are bitsandbytes' own): 1.039 was reached, and 1.027
# (2.4452 / 2.3814) with train.epochs = 3.
MISSED = pytest.mark.xfail(strict=True, reason="qlora misses 1.02 on a model of 135M")


@pytest.mark.parametrize("case", [pytest.param(case, marks=MISSED) if case == "qlora" else case for case in CASES])
def test_the_held_out_loss_is_nearly_as_low(work, case, capsys):  # noqa: F811
    theirs, ours, most = CASES[case]
    (before, wanted), (_, reached) = held_out(work, theirs), held_out(work, ours)
    with capsys.disabled():
        print(f"\n{case}: held-out loss {before:.4f} -> {reached:.4f}, {reached / wanted:.4f} x {wanted:.4f}")
    assert wanted < before - 0.1  # the baseline itself learns
    assert reached <= most * wanted
