"""data.streaming: rows that are read while a run trains give the bits of a token cache, resume at any step, and leave no tokens on a disk."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from test_heads import LLAMA, NAMES, saved, texts, write
from test_run import BIN, config, filled, lmlaunch, losses, rows
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 20  # 8 are an epoch
STREAMED = {"data__streaming": True, "data__shuffle": False}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = filled(tmp_path_factory.mktemp("streaming"), layers=2)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "first.jsonl").write_text("".join(lines[:40]))
    with gzip.open(folder / "second.jsonl.gz", "wt") as file:
        file.write("".join(lines[40:]))
    saved(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)), folder / "words")
    write(folder, "labelled", [{"text": text, "label": NAMES[i % 3]} for i, text in enumerate(texts(30))])
    write(folder, "asked", [{"prompt": text, "completion": " w1 w2"} for text in texts(30)])
    write(folder, "told", [{"text": " ".join(texts(30)[i:i + 9])} for i in range(20)])
    return folder


def curve(work, name):
    return [tuple((key, row[key]) for key in ("step", "loss", "grad_norm", "lr", "eval_loss", "target_tokens", "tokens") if key in row)
            for row in rows(work, name)]


def run(work, name, *arguments, **changes):
    """The curve of a fresh run, and its model's bytes."""
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    return resumed(work, name, *arguments, **changes)


def resumed(work, name, *arguments, **changes):
    settings = {"train__steps": STEPS, "train__eval_every": 7, "checkpoint__every": 3, **changes}
    lmlaunch(*arguments, config(work, name, **settings), cwd=work)
    model = work / "runs" / name / "model"
    return curve(work, name), {path.name: path.read_bytes() for path in model.glob("*.safetensors")}


def refused(work, code, *words, **changes):
    shutil.rmtree(work / "runs" / "refused", ignore_errors=True)
    done = lmlaunch(config(work, "refused", **{"train__steps": 3, **changes}), cwd=work, check=False)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize("changes", [{}, {"data__packing": True}, {"data__max_rows": 45}, {"data__max_length": 17, "data__too_long": "split"}])
def test_the_bits_are_those_of_a_token_cache(work, changes):
    files = {"data__train": ["first.jsonl", "second.jsonl.gz"]}
    cached = run(work, "cached", data__shuffle=False, **changes)
    assert run(work, "streamed", **STREAMED, data__shuffle_window=7, **files, **changes) == cached
    # A window of all documents is shuffled as the cache is.
    assert run(work, "streamed", data__streaming=True, **files, **changes) == run(work, "cached", **changes)
    assert run(work, "streamed", data__streaming=True, data__shuffle_window=16, **files, **changes) != cached


def test_no_tokens_of_the_training_data_are_on_a_disk(work):
    shutil.rmtree(work / "other_cache", ignore_errors=True)
    run(work, "unkept", **STREAMED, data__cache_dir="other_cache")
    assert len(list((work / "other_cache").glob("*.tokens*"))) == 1  # of the evaluation set
    log = (work / "runs" / "unkept" / "log.txt").read_text()
    assert "data: streamed; of the first rows 64 examples" in log and "data: train: 64 rows" in log


HANGS = """#!{python}
import os, subprocess, sys, time
if not sys.argv[-1].endswith("stream.py"):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
program, epochs = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE), 0
for line in sys.stdin.buffer:
    epochs += b'"start"' in line
    if epochs == 2:
        time.sleep(1000)
    program.stdin.write(line)
    program.stdin.flush()
program.stdin.close()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_data_program_hangs_ends_in_order_at_a_stop_request(work, ranks):
    """The program answers until the second epoch, of 8 steps each, begins."""
    expected, _ = run(work, "answered", "--ranks", ranks, **STREAMED, train__eval_every=0)
    (work / "hangs.py").write_text(HANGS.format(python=sys.executable))
    (work / "hangs.py").chmod(0o755)
    shutil.rmtree(work / "runs" / "hung", ignore_errors=True)
    toml = config(work, "hung", train__steps=STEPS, checkpoint__every=3, **STREAMED)
    process = subprocess.Popen([BIN / "lmlaunch", "--ranks", str(ranks), toml], cwd=work, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "LMLAUNCH_PYTHON": str(work / "hangs.py")})
    metrics = work / "runs" / "hung" / "metrics.jsonl"
    try:
        while not metrics.exists() or len(losses(work, "hung")) < 8:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        time.sleep(1)  # until it waits for the rows of step 9
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 75, told
    if ranks == 1:  # several cannot save together while one of them waits
        assert "stopped after step 8 of 20" in told
    assert resumed(work, "hung", "--ranks", ranks, **STREAMED, train__eval_every=0)[0] == expected


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_resumes_at_any_step(work, packing):
    settings = {"data__streaming": True, "data__shuffle_window": 10, "data__packing": packing}
    expected = run(work, "whole", **settings)
    for first in (1, 4, 8, 11):
        run(work, "parts", **settings, train__steps=first)
        curve_of_parts, model = resumed(work, "parts", **settings)
        assert [row for row in curve_of_parts if row[1][0] == "loss"] == [row for row in expected[0] if row[1][0] == "loss"], first
        assert model == expected[1]


def test_ranks_read_the_same_rows_and_another_number_of_them_resumes(work):
    settings = {"train__global_batch": 9, "train__micro_batch": 1}
    assert run(work, "two", "--ranks", 2, **STREAMED, **settings) == run(work, "two_cached", "--ranks", 2, data__shuffle=False, **settings)
    for name, data in (("two", STREAMED), ("two_cached", {"data__shuffle": False})):
        run(work, name, "--ranks", 2, **data, **settings, train__steps=5)
        resumed(work, name, **data, **settings)
    assert curve(work, "two") == curve(work, "two_cached")


@pytest.mark.parametrize("data,changes", [("asked", {}), ("told", {"data__max_length": 16}),
                                          ("labelled", {"train__objective": "classify", "train__labels": NAMES})])
def test_text_is_tokenized_as_for_the_cache(work, data, changes):
    settings = {"model__path": "words", "data__train": [f"{data}.jsonl"], "data__eval": [f"{data}.jsonl"], "train__micro_batch": 2, **changes}
    assert run(work, "read", **settings, **STREAMED) == run(work, "kept", **settings, data__shuffle=False)
    done = lmlaunch("eval", "runs/read", "--json", cwd=work)
    assert json.loads(done.stdout)["eval_loss"] == pytest.approx([row["eval_loss"] for row in rows(work, "read") if "eval_loss" in row][-1], rel=1e-5)


def test_a_bad_row_is_named_when_it_is_met(work):
    text = (work / "train.jsonl").read_text()
    (work / "bad.jsonl").write_text(text * 3 + '{"input_ids": "oops"}\n')
    refused(work, 11, "bad.jsonl:193", data__train=["bad.jsonl"], **STREAMED, data__shuffle_window=4, train__steps=40)
    assert len(rows(work, "refused")) > 10  # the rows before it are trained
    left_out = run(work, "skipped", data__train=["bad.jsonl"], **STREAMED, data__bad_rows="skip", train__steps=30)
    assert len(left_out[0]) > 30 and "bad.jsonl:193" in (work / "runs" / "skipped" / "log.txt").read_text()


def test_other_data_is_refused_at_resume(work):
    shutil.copy(work / "train.jsonl", work / "changed.jsonl")
    run(work, "changed", data__train=["changed.jsonl"], **STREAMED, train__steps=3)
    with open(work / "changed.jsonl", "a") as file:
        file.write(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    done = lmlaunch(config(work, "changed", data__train=["changed.jsonl"], **STREAMED, train__steps=9, train__eval_every=7, checkpoint__every=3),
                    cwd=work, check=False)
    assert done.returncode == 11 and "differs from the one this run started with" in done.stderr, done.stderr


def test_what_needs_all_rows_is_refused_by_name(work):
    streaming = {"data__streaming": True}
    refused(work, 10, "data.streaming", "set train.steps", **streaming, train__steps="auto")
    refused(work, 10, "train.epochs = 2", "set train.steps in its place", **streaming, train__steps="auto", train__epochs=2)
    refused(work, 10, "data.eval_fraction = 0.1", "name files in data.eval", **streaming, data__eval=[], data__eval_fraction=0.1)
    refused(work, 10, "data.weights", **streaming, data__weights=[2])
    refused(work, 10, "data.shuffle_window = 5", "leave it out", data__shuffle_window=5)
    (work / "array.json").write_text(json.dumps([{"input_ids": [1, 2, 3]}]))
    refused(work, 11, "array.json", "one object per line", **streaming, data__train=["array.json"])


def test_the_plan_says_what_is_read_and_has_room_for_the_window(work):
    size = sum((work / name).stat().st_size for name in ("first.jsonl", "second.jsonl.gz"))
    name = config(work, "planned", data__train=["first.jsonl", "second.jsonl.gz"], data__streaming=True, data__shuffle_window=1000)
    text = lmlaunch("plan", name, cwd=work).stdout
    assert "data: 2 files" in text and "at most 1000 documents are in memory, shuffled among themselves" in text
    plan = json.loads(lmlaunch("plan", name, "--json", cwd=work).stdout)
    assert plan["data"] == {"streaming": True, "shuffle_window": 1000, "files": 2, "bytes": size}
    found = [row["bytes"] for tier in plan["tiers"] for row in tier["classes"] if row["name"] == "documents"]
    assert found == [5 * 32 * (1000 + 8)]
