"""Rows of data files: JSONL, JSON, Parquet, CSV and text, one dict per row, each with its place for messages."""

import csv
import json
import os

from errors import InputError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".text", ".md")


class Inputs:
    """All files in order; `done_bytes` says how far reading is, `total_bytes` how much there is."""

    def __init__(self, files):
        self.files = files
        self.total_bytes = sum(os.path.getsize(f) for f in files)
        self.done_bytes = 0

    def rows(self):
        """Yields (file, place, row)."""
        for path in self.files:
            before = self.done_bytes
            for place, row in self._rows_of(path):
                if not isinstance(row, dict):
                    raise InputError(f"a row is {_kind(row)} instead of an object", place,
                                     "write one JSON object per example")
                yield path, place, row
            self.done_bytes = before + os.path.getsize(path)

    def _rows_of(self, path):
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in SUFFIXES:
            raise InputError(f"unknown kind of file {suffix!r}", path, "use one of " + " ".join(SUFFIXES))
        if suffix in (".jsonl", ".ndjson"):
            return self._json_lines(path)
        if suffix == ".json":
            return self._json(path)
        if suffix == ".parquet":
            return _parquet(path)
        if suffix in (".csv", ".tsv"):
            return _csv(path, "\t" if suffix == ".tsv" else ",")
        return _text(path)

    def _json_lines(self, path):
        before = self.done_bytes
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    # Without its line break: what breaks off there is this line's mistake, not the next one's.
                    yield f"{path}:{number}", parse_json(line.rstrip(b"\r\n"), path, number)
                self.done_bytes = before + file.tell() if number % 256 == 0 else self.done_bytes

    def _json(self, path):
        """One array of rows; a file of that name that begins with an object is taken as one object per line."""
        with open(path, "rb") as file:
            head = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
            if head.startswith(b"{"):
                yield from self._json_lines(path)
                return
            file.seek(0)
            rows = parse_json(file.read(), path, 1)
        if not isinstance(rows, list):
            raise InputError(f"the file holds {_kind(rows)} instead of a list of examples", path,
                             "write a list of objects, or one object per line")
        for number, row in enumerate(rows, 1):
            yield f"{path} item {number}", row


def parse_json(text, path, line):
    """`line` is where the text begins in the file."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg}", f"{path}:{line + error.lineno - 1}:{error.colno}",
                         "correct or remove this row") from None
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")
        raise InputError("not UTF-8", f"{path}:{line}", "convert the file to UTF-8") from None
    except RecursionError:
        raise InputError("nested too deeply", f"{path}:{line}", "correct or remove this row") from None


def _parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", {key: _without_nulls(value) for key, value in row.items()}
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"not a readable Parquet file: {first}", path, "write the file again") from None


def _without_nulls(value):
    """A column has one type in Parquet, so objects carry every key that occurs in any row: drop the empty ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _csv(path, delimiter):
    csv.field_size_limit(1 << 30)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            while True:
                # A quoted field may span lines: the row's place is where it begins.
                place = f"{path}:{reader.line_num + 1 if reader.line_num else 2}"
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    raise InputError(f"not CSV: {error}", place, "quote the field, or correct the row") from None
                if None in row or None in row.values():
                    raise InputError(f"a row does not have the header's {len(reader.fieldnames)} fields", place,
                                     "quote fields that hold the delimiter")
                yield place, row
    except UnicodeDecodeError:
        raise InputError("not UTF-8", path, "convert the file to UTF-8") from None


def _text(path):
    """A text file is one document."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield f"{path}:1", {"text": file.read()}
    except UnicodeDecodeError:
        raise InputError("not UTF-8", path, "convert the file to UTF-8") from None


def _kind(value):
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
