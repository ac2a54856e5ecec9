"""Converts YAML on standard input to JSON on standard output: `lmlaunch init --from` reads configurations of other trainers with
it. Only JSON's types pass: tags for Python objects are refused, dates become text, and a file that its aliases expand excessively
is refused. An error is an object {"error": {"what", "place", "next"}}.
"""

import json
import sys

MOST_VALUES = 100_000


class Refused(Exception):
    def __init__(self, what, place="", next="correct the file"):
        super().__init__(what)
        self.told = {"error": {"what": what, "place": place, "next": next}}


def plain(value, count):
    """Converts to JSON's types. Aliases share objects: each use counts."""
    count[0] += 1
    if count[0] > MOST_VALUES:
        raise Refused(f"more than {MOST_VALUES} values, aliases counted", next="write the values out, without aliases")
    if isinstance(value, dict):
        return {str(key): plain(inner, count) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(inner, count) for inner in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def read(text):
    try:
        import yaml
    except ImportError:
        raise Refused("this Python has no PyYAML, which reads YAML", sys.executable, "pip install pyyaml, or give the file as JSON") from None
    try:
        return plain(yaml.safe_load(text), [0])
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise Refused("this is not YAML: " + str(getattr(error, "problem", None) or error), place) from None
    except RecursionError:
        raise Refused("this YAML is nested too deep, or holds itself") from None


def main():
    try:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
        print(json.dumps({"content": read(text)}))
    except Refused as error:
        print(json.dumps(error.told))


if __name__ == "__main__":
    main()
