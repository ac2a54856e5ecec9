"""Samples the first rows of training data, as prepare.py reads them, so that unusable data is reported when a configuration is
written. Reads one JSON request from stdin:

  {"files": [...], "model_dir": ""}  ->  {"rows": how many were looked at, "formats": ["chat", ...], of each file,
                                          "examples": how many of them became tokens, "length": tokens that 99.5 % of
                                          those have at most, "longest": tokens of the longest, "texts": of plain text}

Without a model, or where its directory has no tokenizer for text, nothing becomes tokens. Errors as prepare.py prints them, with exit code 11."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter leaves it out

import formats  # noqa: E402
import kinds  # noqa: E402
from errors import InputError  # noqa: E402
from sources import Inputs, parsed  # noqa: E402

MOST_ROWS = 1000          # of a file
MOST_EXAMPLES = 5000      # tokenised in all: about a second
MOST_BYTES = 8 << 20      # of their tokens, 4 each: about two seconds
SHARE = 995               # of 1000 examples that are not cut


class Lengths:
    """The lengths of examples, as in training."""

    def __init__(self, model_dir):
        self.directory, self.model, self.found, self.bytes, self.texts = model_dir, None, [], 0, 0

    def of(self, name, rows):
        """`rows`: a Rows with usable rows."""
        if not self.directory or len(self.found) >= MOST_EXAMPLES or self.bytes >= MOST_BYTES:
            return
        if self.model is None:
            from tokenise import IdsOnly, Model, Options

            tokenizer = os.path.isfile(os.path.join(self.directory, "tokenizer.json"))
            self.model = Model(self.directory, "completion", options=Options()) if tokenizer else IdsOnly("completion")
        from tokenise import IdsOnly

        if isinstance(self.model, IdsOnly) and name != "tokens":
            return
        chunk = self.model.chunk(name, rows, False)
        self.found += chunk.lengths
        self.bytes += len(chunk.tokens)
        self.texts += sum(chunk.texts)

    def told(self):
        ordered = sorted(self.found)
        least = -(-len(ordered) * SHARE // 1000)  # nearest-rank quantile, rounded up
        return {"examples": len(ordered), "length": ordered[least - 1] if ordered else 0,
                "longest": ordered[-1] if ordered else 0, "texts": self.texts}


def look(files, model_dir=""):
    found, rows, lengths = [], 0, Lengths(model_dir)
    for path in files:
        name, seen = None, 0
        for chunk in Inputs([path]).chunks():
            chunk.rows = chunk.rows[:MOST_ROWS - seen]
            for number, row in chunk.rows:
                place = chunk.place(number)
                row = parsed(row, place)
                name = name or kinds.detect(row, place)
                kinds.check_row(row, name, True, place)
                formats.example(name, row, place)
                seen += 1
            if chunk.rows:
                lengths.of(name, chunk)
            if seen >= MOST_ROWS:
                break
        rows += seen
        if name is not None:
            found.append(name)
    if rows == 0:
        raise InputError("the data is empty", ", ".join(files[:3]), "name files that hold examples")
    return {"rows": rows, "formats": found, **lengths.told()}


def main():
    try:
        request = json.load(sys.stdin)
        print(json.dumps(look(request["files"], request.get("model_dir", ""))))
        return 0
    except InputError as error:
        print(json.dumps(error.as_json()))
    except ModuleNotFoundError as error:
        print(json.dumps(InputError(f"this Python has no module {error.name!r}", sys.executable,
                                    "set LMLAUNCH_PYTHON to an interpreter with requirements.txt installed").as_json()))
    except OSError as error:
        print(json.dumps(InputError(error.strerror or str(error), error.filename or "", "check the path").as_json()))
    return 11


if __name__ == "__main__":
    sys.exit(main())
