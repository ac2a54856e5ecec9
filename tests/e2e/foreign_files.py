"""Configurations of other projects, read by `lmlaunch init --from`: python tests/e2e/foreign_files.py PROGRAM FILE...

Of each file: translated, refused with a reason (another task), or a fault. A translated file's keys must all be in what was written, as a
setting's origin or as dropped with a reason, and what was written must plan for a model that is known (whether it fits is not asked);
"family": its adapters are on layers that models of that kind do not have.
The files are others' and are not kept here; test_init_from.py has some of our own."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

MODEL = "HuggingFaceTB/SmolLM2-135M"  # whose shape is built in
REFUSED = "does not support"


def leaves(value, path=""):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path


def unnamed(content, text):
    """The keys of which neither they nor a table that they are in are named as a whole."""
    words = set(text.replace(",", " ").replace(":", " ").replace("#", " ").replace("(", " ").replace(")", " ").split())

    def named(leaf):
        parts = leaf.split(".")
        return any(".".join(parts[:n]) in words or ".".join(parts[:n]) + ".*" in words for n in range(1, len(parts) + 1))

    return [leaf for leaf in leaves(content) if not named(leaf)]


def tried(program, path, work):
    """(verdict, what is to say)"""
    content = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())
    out = work / "out.toml"
    out.unlink(missing_ok=True)

    def init(*words):
        return subprocess.run([program, "init", "--from", path.resolve(), *words, "-o", out], cwd=work, capture_output=True, text=True)

    done = init()
    if done.returncode == 2 and "nothing names" in done.stderr:  # a file that goes beside a recipe, or a model that is no name
        done = init(MODEL, "rows.jsonl")
    if done.returncode == 10 and REFUSED in done.stderr:
        return "refused", done.stderr.splitlines()[0]
    if done.returncode != 0:
        return "FAULT", done.stderr
    text = out.read_text()
    if "Unknown, left out" in text:
        return "UNKNOWN", "\n".join(line for line in text[text.index("Unknown, left out"):].splitlines()[:6])
    if missing := unnamed(content, text):
        return "UNNAMED", ", ".join(missing)
    planned = subprocess.run([program, "plan", out, f'model.path="{MODEL}"', "--gpus", "1", "--gpu-memory", "1000GiB", "--host-memory", "1000GiB", "--json"],
                             cwd=work, capture_output=True, text=True)
    if planned.returncode == 10 and "is not a linear layer of the model" in planned.stderr:
        return "family", planned.stderr.splitlines()[0]
    return ("translated", "") if planned.returncode in (0, 12) else ("NO PLAN", planned.stderr)


def main():
    counts = {}
    with tempfile.TemporaryDirectory() as work:
        for name in sys.argv[2:]:
            verdict, why = tried(Path(sys.argv[1]).resolve(), Path(name), Path(work))
            counts[verdict] = counts.get(verdict, 0) + 1
            print(f"{verdict:10} {name}" + (f"\n    {why.strip()}" if why else ""))
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return 0 if set(counts) <= {"translated", "refused", "family"} else 1


if __name__ == "__main__":
    sys.exit(main())
