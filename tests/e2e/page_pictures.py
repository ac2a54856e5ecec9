"""Takes the pictures of a run's page that README.md and docs/see.md show, anew: SmolLM2-135M-Instruct learns the Python language reference
(the model and the text of `./dev demo`), once more at a lower learning rate. On a machine without other work, whose pauses the
curves would show:

    python tests/e2e/page_pictures.py [WORK]        (some six minutes; needs build/bin and chromium; WORK keeps the runs)
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parents[2]
LMLAUNCH = Path(os.environ.get("LM_BIN", ROOT / "build" / "bin")) / "lmlaunch"
MODEL = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmlaunch" / "models" / "smollm2-135m-instruct"
QUICKSTART = ROOT / "configs" / "quickstart"
QUESTION = "What does `str.isupper()` do in Python?"  # held out: its answer is in eval.jsonl
RUN = ["configs/quickstart.toml", "train.epochs=1", "train.eval_every=5", f'train.sample_prompts=["{QUESTION}"]', "train.sample_tokens=48",
       "checkpoint.every=20", "checkpoint.keep_best=true"]


def prepare(work):
    made = work / "build" / "quickstart"
    made.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, QUICKSTART / "make_model.py", MODEL], check=True)
    for link, target in ((made / "model", MODEL), (work / "configs", ROOT / "configs")):
        if not link.exists():
            link.symlink_to(target)
    subprocess.run([sys.executable, QUICKSTART / "make_data.py", made / "model", made], check=True)


def lmlaunch(work, *arguments):
    subprocess.run([LMLAUNCH, *arguments], cwd=work, check=True, env=os.environ | {"LMLAUNCH_PYTHON": sys.executable})


def picture(page, out):
    """The whole page: a window higher than any, without the empty rows below."""
    subprocess.run([sys.executable, Path(__file__).with_name("test_page.py"), page, out, "5000"],
                   check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")})
    image = Image.open(out).convert("RGB")
    ground = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    bottom = ImageChops.difference(image, ground).getbbox()[3]
    image.crop((0, 0, image.width, min(bottom + 24, image.height))).quantize(64).save(out, optimize=True)


def take(work):
    prepare(work)
    for name, rate in (("quickstart", "3e-4"), ("lower_rate", "1e-4")):
        if not (work / "runs" / name / "model").exists():
            lmlaunch(work, *RUN, f"run.dir=runs/{name}", f"optimizer.lr={rate}")
    lmlaunch(work, "report", "runs/quickstart", "runs/lower_rate", "-o", "both.html")
    picture(work / "runs" / "quickstart" / "report.html", ROOT / "docs" / "report.png")
    picture(work / "both.html", ROOT / "docs" / "report-compare.png")


def main():
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        return take(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as directory:
        take(Path(directory))


if __name__ == "__main__":
    main()
