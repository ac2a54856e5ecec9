"""Rows of data files: JSONL, JSON, Parquet, Arrow, CSV and text, plain or as .gz and .zst, each row with its place for messages.
Lines of JSON are passed on unparsed: parsing is parallel work, reading is not."""

import csv
import gzip
import io
import json
import os
import zlib
from dataclasses import dataclass

from errors import InputError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt", ".text", ".md")
PACKED = (".gz", ".zst")
ROWS_PER_CHUNK, BYTES_PER_CHUNK = 128, 1 << 18


@dataclass
class Rows:
    """Some rows of one file, in order. A row is a dict, or bytes (a line of JSON), or its InputError; anything else is an invalid
    row."""

    file: int      # its number in Inputs.files
    name: str      # "data.jsonl:{}", formatted with a row's number
    rows: list     # (number, row)
    end: list      # [file, number of the last row, byte after it or 0]: where reading resumes

    def place(self, number):
        return self.name.format(number)


def parsed(row, place):
    """Converts a row of Rows to its dict."""
    if isinstance(row, InputError):
        raise row
    if isinstance(row, bytes):
        path, line = place.rsplit(":", 1)
        row = parse_json(row, path, int(line))
    if not isinstance(row, dict):
        raise InputError(f"a row is {_kind(row)} instead of an object", place, "write one JSON object per example")
    return row


class Inputs:
    """All files in order; `done_bytes` is the progress of reading, `total_bytes` the size, both as stored. `streams`: a file whose
    rows are not read one after another is refused."""

    def __init__(self, files, streams=False):
        self.files, self.streams = files, streams
        self.sizes = [os.path.getsize(f) for f in files]
        self.total_bytes, self.done_bytes = sum(self.sizes), 0

    def chunks(self, start=(0, 0, 0)):
        """Yields Rows, starting after the row of `start` (a Rows.end)."""
        for index, path in enumerate(self.files):
            before = sum(self.sizes[:index])
            if index < start[0]:
                continue
            reader = _Reader(path, *(start[1:] if index == start[0] else (0, 0)), self.streams)
            rows, size = [], 0
            try:
                for number, row in reader.rows():
                    rows.append((number, row))
                    size += len(row) if isinstance(row, bytes) else 0
                    if len(rows) == ROWS_PER_CHUNK or size >= BYTES_PER_CHUNK:
                        self.done_bytes = before + reader.done()
                        yield Rows(index, reader.name, rows, [index, number, reader.offset])
                        rows, size = [], 0
            except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
                if not reader.packed or getattr(error, "errno", None) is not None:
                    raise
                raise InputError(f"damaged {reader.packed} file: {error}", path, "write or download it again") from None
            self.done_bytes = before + self.sizes[index]
            if rows:
                yield Rows(index, reader.name, rows, [index, rows[-1][0], reader.offset])


class _Reader:
    """One file. `skip`: the number of the last row to skip, `offset`: the byte after it, 0: unknown."""

    def __init__(self, path, skip, offset, streams=False):
        self.path, self.skip, self.offset, self.streams = path, skip, offset, streams
        # Escapes braces in the path for str.format.
        self.name = path.replace("{", "{{").replace("}", "}}") + ":{}"
        stem, suffix = os.path.splitext(path)
        self.packed = suffix.lower() if suffix.lower() in PACKED else ""
        self.suffix = os.path.splitext(stem)[1].lower() if self.packed else suffix.lower()
        if self.suffix not in SUFFIXES:
            raise InputError(f"unknown kind of file {suffix!r}", path,
                             "use one of " + " ".join(SUFFIXES) + ", or one of these as " + " or ".join(PACKED))
        if self.packed and self.suffix in (".parquet", ".arrow"):
            raise InputError(f"a {self.suffix} file cannot be read out of a {self.packed} file", path, "unpack it")
        self.stored = None  # the file as stored
        self.table_done = 0  # bytes of a table that has been read, by its rows

    def done(self):
        return self.table_done if self.stored is None else self.stored.tell()

    def rows(self):
        for number, row in self._kind_of_rows():
            if number > self.skip:
                yield number, row

    def _kind_of_rows(self):
        if self.suffix in (".jsonl", ".ndjson"):
            return self._json_lines()
        if self.suffix == ".json":
            return self._json()
        if self.suffix in (".parquet", ".arrow"):
            self.name = self.name[:-3] + " row {}"
            return self._tables()
        if self.suffix in (".csv", ".tsv"):
            return self._csv("\t" if self.suffix == ".tsv" else ",")
        return self._text()

    def _open(self):
        self.stored = open(self.path, "rb")
        if self.packed == ".gz":
            return io.BufferedReader(gzip.GzipFile(fileobj=self.stored))
        if self.packed == ".zst":
            import pyarrow

            return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(self.stored, mode="r"), "zstd"))
        return self.stored

    def _json_lines(self):
        with self._open() as file:
            number = 0
            if self.offset and not self.packed:
                file.seek(self.offset)
                number = self.skip
            self.offset = 0 if self.packed else self.offset
            for number, line in enumerate(file, number + 1):
                self.offset += 0 if self.packed else len(line)
                if line.strip():
                    # Without its line break, so that truncated JSON is reported at this line, not the next one.
                    yield number, line.rstrip(b"\r\n")

    def _json(self):
        """One array of rows; a file that begins with an object is read as one object per line."""
        with self._open() as file:
            if file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
                yield from self._json_lines()
                return
            if self.streams:
                raise InputError("data.streaming reads row by row, and this file is one list of rows", self.path,
                                 "write one object per line, or leave data.streaming out")
            rows = parse_json(file.read(), self.path, 1)
            if not isinstance(rows, list):
                raise InputError(f"the file holds {_kind(rows)} instead of a list of examples", self.path,
                                 "write a list of objects, or one object per line")
            self.name = self.name[:-3] + " item {}"
            yield from enumerate(rows, 1)  # the file stays open for done()

    def _csv(self, delimiter):
        csv.field_size_limit(1 << 30)
        try:
            with io.TextIOWrapper(self._open(), encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, delimiter=delimiter, strict=True)
                while True:
                    # A quoted field may span lines: the row's place is its first line.
                    number = reader.line_num + 1 if reader.line_num else 2
                    try:
                        row = next(reader)
                    except StopIteration:
                        return
                    except csv.Error as error:
                        row = InputError(f"not CSV: {error}", self.name.format(number), "quote the field, or correct the row")
                        if "end of data" in str(error):  # an unclosed quote has swallowed all following rows
                            raise row from None
                    if isinstance(row, dict) and (None in row or None in row.values()):
                        row = InputError(f"a row does not have the header's {len(reader.fieldnames)} fields",
                                         self.name.format(number), "quote fields that hold the delimiter")
                    yield number, row
        except UnicodeDecodeError:
            raise InputError("not UTF-8", self.path, "convert the file to UTF-8") from None

    def _tables(self):
        import pyarrow

        parquet = self.suffix == ".parquet"
        try:
            number, batches, total = (_parquet if parquet else _arrow)(self.path, self.skip)
            size = os.path.getsize(self.path)
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    self.table_done = size * number // total if total else 0
                    yield number, {key: _without_nulls(value) for key, value in row.items()}
        except (pyarrow.ArrowException, OSError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"not a readable {'Parquet' if parquet else 'Arrow'} file: {first}", self.path, "write the file again") from None

    def _text(self):
        """A text file is one document."""
        try:
            with io.TextIOWrapper(self._open(), encoding="utf-8-sig", newline="") as file:
                yield 1, {"text": file.read()}
        except UnicodeDecodeError:
            raise InputError("not UTF-8", self.path, "convert the file to UTF-8") from None


def parse_json(text, path, line):
    """`line`: the first line of the text in the file."""
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
    except ValueError:  # Python refuses numbers with thousands of digits
        raise InputError("a number has too many digits", f"{path}:{line}", "correct or remove this row") from None


def _parquet(path, skip):
    """(number of rows before the first batch, batches, rows of the file). Row groups that are skipped whole are not read."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    groups, before = list(range(file.num_row_groups)), 0
    while groups and before + file.metadata.row_group(groups[0]).num_rows <= skip:
        before += file.metadata.row_group(groups.pop(0)).num_rows
    return before, file.iter_batches(batch_size=256, row_groups=groups) if groups else (), file.metadata.num_rows


def _arrow(path, _):
    return 0, _arrow_batches(path), 0


def _arrow_batches(path):
    """The datasets library's forms: a stream of batches, or the file format."""
    import pyarrow

    with pyarrow.memory_map(path) as file:
        try:
            reader = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            whole = pyarrow.ipc.open_file(file)
            reader = (whole.get_batch(i) for i in range(whole.num_record_batches))
        for batch in reader:
            for first in range(0, len(batch), 256):
                yield batch.slice(first, 256)


def _without_nulls(value):
    """A column has one type in Parquet, so objects have every key of any row: drops the empty ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _kind(value):
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
