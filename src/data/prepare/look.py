"""Looks at the first rows of training data, as prepare.py reads them, before anything is tokenised: so that what could not be trained
is said when a configuration is written. Needs no model. Reads one JSON request from stdin:

  {"files": [...]}  ->  {"rows": how many were looked at, "formats": ["chat", ...], of each file}

Errors as prepare.py prints them, with exit code 11."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter leaves it out

import formats  # noqa: E402
import kinds  # noqa: E402
from errors import InputError  # noqa: E402
from sources import Inputs, parsed  # noqa: E402

MOST_ROWS = 100  # of a file


def look(files):
    found, rows = [], 0
    for path in files:
        name, seen = None, 0
        for chunk in Inputs([path]).chunks():
            for number, row in chunk.rows[:MOST_ROWS - seen]:
                place = chunk.place(number)
                row = parsed(row, place)
                name = name or kinds.detect(row, place)
                kinds.check_row(row, name, True, place)
                formats.example(name, row, place)
                seen += 1
            if seen >= MOST_ROWS:
                break
        rows += seen
        if name is not None:
            found.append(name)
    if rows == 0:
        raise InputError("the data is empty", ", ".join(files[:3]), "name files that hold examples")
    return {"rows": rows, "formats": found}


def main():
    try:
        print(json.dumps(look(json.load(sys.stdin)["files"])))
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
