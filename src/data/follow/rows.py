"""Reads the rows of a metrics.jsonl as it grows, and is truncated when a resumed run repeats steps."""

import json
import re

MOST_READ = 8 << 20  # bytes at once

# Transformers' names, and a name of that kind for the token accuracy; every other number of a row is under run/.
TAGS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate", "epoch": "train/epoch",
        "token_accuracy": "train/token_accuracy", "tokens_per_s": "train/train_tokens_per_second"}


class Row:
    """`part`: distinguishes the rows of a step. Step and part stay the same when a resumed run repeats the step."""

    def __init__(self, values, part):
        self.step, self.values, self.part = values["step"], values, part

    def is_sample(self):
        return "prompt" in self.values

    def scalars(self):
        """{tag: number} for a tracker; a non-finite number is null in the file, and omitted."""
        evaluation = any(key.startswith("eval_loss") for key in self.values)
        out = {}
        for key, value in self.values.items():
            if key in ("step", "time") or not isinstance(value, (int, float)):
                continue
            metric, _, set_name = (re.sub(r"[^\w.-]", "_", part) for part in key.partition("/"))
            if evaluation:
                tag = f"eval/{set_name + '_' if set_name else ''}{metric.removeprefix('eval_')}"
            else:
                tag = TAGS.get(key) or "run/" + re.sub(r"[^\w.-]", "_", key)
            out[tag] = float(value)
        return out


class Tail:
    def __init__(self, path):
        self.path = path
        self._start()

    def _start(self):
        self.offset, self.last, self.step, self.samples = 0, b"", None, 0

    def new(self):
        """The new rows. After a truncation all rows are returned again."""
        try:
            with open(self.path, "rb") as file:
                # Compares the last line read: the file may have been truncated and have grown past this offset since.
                if self.last:
                    file.seek(self.offset - len(self.last))
                    if file.read(len(self.last)) != self.last:
                        self._start()
                file.seek(self.offset)
                while data := file.read(MOST_READ):
                    whole = data[:data.rfind(b"\n") + 1]
                    if not whole:
                        return
                    file.seek(self.offset + len(whole))
                    for line in whole.splitlines(keepends=True):
                        self.offset += len(line)
                        self.last = line
                        if (row := self._row(line)) is not None:
                            yield row
        except FileNotFoundError:
            return

    def _row(self, line):
        try:
            values = json.loads(line)
            step = values["step"]
        except (ValueError, KeyError, TypeError):
            return None
        if step != self.step:
            self.step, self.samples = step, 0
        if "prompt" in values:
            self.samples += 1
            return Row(values, f"sample {self.samples}")
        return Row(values, next((key for key in values if key.startswith("eval_loss")), "step"))
