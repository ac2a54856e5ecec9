"""Rows that are read while a run trains on them: the same tokens as in a token file, from any position, and nothing on the disk."""

import array
import gzip
import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from prepare_test import PLAIN_CHAT, PREPARE, model_dir, oracle, read_tokens, refused, run, with_template  # noqa: F401

import prepare  # noqa: I001, of PREPARE
import stream
from errors import InputError

TEXTS = [{"text": f"fox {i} " + "dog " * (i % 7)} for i in range(300)]


def request_of(run, files, **options):
    request = run.request(files, "chatml", **options)
    del request["out"], request["key"]
    return request


def taken(rows):
    """(examples, [end, rows] of each chunk, notes) from here to the end of the data."""
    examples, ends, notes = [], [], []
    while True:
        answer, payload = rows.next()
        if "error" in answer:
            raise InputError(**answer["error"])
        notes += answer["notes"]
        if answer.get("last"):
            return examples, ends, notes
        tokens = sum(answer["lengths"])
        assert len(payload) == answer["bytes"] == 5 * tokens
        ids, marks, first = array.array("i", payload[:4 * tokens]), payload[4 * tokens:], 0
        for length in answer["lengths"]:
            examples.append((list(ids[first:first + length]), list(marks[first:first + length])))
            first += length
        ends.append((answer["end"], answer["rows"], len(examples)))


def streamed(run, files, **options):
    return taken(stream.Stream(request_of(run, files, **options)))


def test_the_same_tokens_as_in_a_token_file(run):
    files = [run.write("a.jsonl", TEXTS[:200]), run.write("b.jsonl", [{"messages": PLAIN_CHAT}] * 3), run.write("c.jsonl", TEXTS[200:])]
    summary = prepare.prepare(run.request(files, "chatml"))
    expected = read_tokens(str(run.dir / "out.tokens"))
    os.unlink(run.dir / "out.tokens")
    before = set(os.listdir(run.dir))
    examples, _, notes = streamed(run, files)
    assert [(list(ids), list(marks)) for ids, marks in expected] == examples
    assert notes == summary["notes"] and set(os.listdir(run.dir)) == before


def parquet(run, rows):
    path = str(run.dir / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=70)
    return path


def packed(run, rows):
    path = str(run.dir / "a.jsonl.gz")
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("write", [parquet, packed, lambda run, rows: run.write("a.jsonl", rows),
                                   lambda run, rows: run.write("a.csv", "text\n" + "".join(row["text"] + "\n" for row in rows))])
def test_reading_resumes_behind_every_chunk(run, write):
    files = [write(run, TEXTS), run.write("b.jsonl", [{"prompt": "hello", "completion": " world"}] * 150)]
    rows = stream.Stream(request_of(run, files))
    examples, ends, _ = taken(rows)
    assert len(examples) == 450 and len(ends) >= 4
    for end, number, before in ends:
        assert number == before  # each row is an example here
        rows.start(json.loads(json.dumps(end)), number)
        assert taken(rows)[0] == examples[before:]
    rows.start(prepare.BEGINNING, 0)
    assert taken(rows)[0] == examples


def test_whole_row_groups_in_front_of_a_position_are_not_read(run, monkeypatch):
    path, read = parquet(run, TEXTS), []
    batches = pyarrow.parquet.ParquetFile.iter_batches

    def noted(self, *arguments, row_groups, **options):
        read.append(list(row_groups))
        return batches(self, *arguments, row_groups=row_groups, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", noted)
    rows = stream.Stream(request_of(run, [path]))
    expected, ends, _ = taken(rows)
    rows.start(ends[1][0], ends[1][1])  # 256 rows of groups of 70
    assert taken(rows)[0] == expected[256:] and read == [[0, 1, 2, 3, 4], [3, 4]]


def test_the_first_rows_only(run):
    files = [run.write("a.jsonl", TEXTS[:200]), run.write("b.jsonl", TEXTS[200:])]
    whole, _, _ = streamed(run, files)
    for most in (1, 128, 200, 290):
        rows = stream.Stream(request_of(run, files, max_rows=most))
        examples, ends, notes = taken(rows)
        assert examples == whole[:most] and f"only the first {most} rows" in notes[0]
        rows.start(ends[0][0], ends[0][1])
        assert taken(rows)[0] == whole[:most][ends[0][2]:]


def test_a_bad_row_is_named_when_it_is_met(run):
    path = run.write("a.jsonl", "".join(json.dumps(row) + "\n" for row in TEXTS[:250]) + "{\"text\": 5}\n")
    rows = stream.Stream(request_of(run, [path]))
    assert rows.next()[0]["lengths"]
    for _ in range(2):  # it stays until reading starts elsewhere
        error = rows.next()[0]["error"]
        assert error["place"] == path + ":251" and error["area"] == "DATA-24"
    examples, _, notes = streamed(run, [path], bad_rows="skip")
    assert len(examples) == 250 and len(notes) == 2
    assert path + ":251" in notes[0] and "1 of 251 rows cannot be used" in notes[1]


def test_what_a_run_is_told_before_it_trains(run):
    files = [run.write("a.jsonl", TEXTS), run.write("b.jsonl", [{"messages": PLAIN_CHAT}] * 3)]
    about = stream.Stream(request_of(run, files)).opening()
    assert about["examples"] == 128 + 3 and about["text"] and about["template"] and about["chat_template"] == ""
    assert about["sample"] == prepare.prepare(run.request(files, "chatml"))["sample"]
    assert about["total_bytes"] == sum(map(os.path.getsize, files))


def test_an_array_of_rows_and_empty_files_are_refused(run):
    path = run.write("a.json", json.dumps(TEXTS[:3]))
    error = refused(stream.Stream(request_of(run, [path])).opening)
    assert error.place == path and "one object per line" in error.next
    empty = run.write("b.jsonl", "")
    assert refused(stream.Stream(request_of(run, [empty])).opening).what == "the data is empty"
    assert streamed(run, [run.write("c.json", "".join(json.dumps(row) + "\n" for row in TEXTS[:3]))])[0]


def test_texts_with_labels(run):
    path = run.write("a.jsonl", [{"text": "fox", "label": 1}, {"text": "lazy dog", "label": 0}])
    rows = stream.Stream(request_of(run, [path], objective="classify", labels=["a", "b"], problem="single_label"))
    answer, _ = rows.next()
    assert answer["labels"] == [1, 0]


def test_the_program_goes_on_after_an_error(run):
    path = run.write("a.jsonl", "".join(json.dumps(row) + "\n" for row in TEXTS[:130]) + "oops\n")
    asked = [request_of(run, [path]), {"next": 1}, {"next": 1}, {"start": prepare.BEGINNING, "rows": 0}, {"next": 1}]
    done = subprocess.run([sys.executable, "-I", "-B", f"{PREPARE}/stream.py"], input=b"".join(json.dumps(one).encode() + b"\n" for one in asked),
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    rest, answers = done.stdout, []
    for _ in asked:
        line, rest = rest.split(b"\n", 1)
        answers.append(json.loads(line))
        payload, rest = rest[:answers[-1].get("bytes", 0)], rest[answers[-1].get("bytes", 0):]
        answers[-1]["payload"] = payload
    assert rest == b"" and answers[2]["error"]["place"].startswith(path + ":131")
    assert answers[3] == {"payload": b""} and answers[4]["payload"] == answers[1]["payload"] != b""
