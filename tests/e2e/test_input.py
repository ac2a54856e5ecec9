"""What a run says of its data: what data.max_length does to rows, and where a mistake stands."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time

import jinja2
import pytest
from test_run import BIN, VOCAB, config, lmlaunch, losses, save_tokenizer, work  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def words(work):  # noqa: F811
    """The model gets a tokenizer of 90 words."""
    save_tokenizer(work / "model", [*(f"w{i}" for i in range(90)), "<eos>"], special=["<eos>"])
    (work / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    for name, count in [("a", 100), ("b", 20), ("c", 60)]:
        (work / f"{name}.txt").write_text(" ".join(f"w{i % 90}" for i in range(count)))
    return work


def data_line(work, name):
    log = (work / "runs" / name / "log.txt").read_text()
    return re.search(r"data: train: (.*)", log)[1]


def test_plain_text_is_split_and_the_log_says_so(words):
    files = {"data__train": ["a.txt", "b.txt", "c.txt"], "data__eval": [], "train__steps": 1}
    lmlaunch(config(words, "text", **files), cwd=words)
    # 31 new tokens in each piece of 32 after the first.
    assert data_line(words, "text") == ("3 rows, 183 tokens, at data.max_length 32: 1 row whole, 0 cut, 2 split into 6, 0 dropped; "
                                        "183 tokens used, 0 not")
    lmlaunch(config(words, "text_cut", data__too_long="cut", **files), cwd=words)
    assert data_line(words, "text_cut").endswith("1 row whole, 2 cut, 0 split into 0, 0 dropped; 85 tokens used, 98 not")
    lmlaunch(config(words, "text_drop", data__too_long="drop", **files), cwd=words)
    assert data_line(words, "text_drop").endswith("1 row whole, 0 cut, 0 split into 0, 2 dropped; 21 tokens used, 162 not")


def test_other_rows_are_cut_and_counted_in_evaluation_too(words):
    (words / "long.jsonl").write_text("".join(json.dumps({"input_ids": list(range(n))}) + "\n" for n in (10, 40)))
    done = lmlaunch(config(words, "rows", data__train=["long.jsonl"], data__eval=["long.jsonl"], train__steps=1), cwd=words)
    for which in ("train", "eval"):
        assert (f"data: {which}: 2 rows, 50 tokens, at data.max_length 32: 1 row whole, 1 cut, 0 split into 0, 0 dropped; 42 tokens "
                "used, 8 not") in done.stderr


def test_what_is_held_out_is_counted_beside_what_is_trained(words):
    lmlaunch(config(words, "held_out", data__eval=[], data__eval_fraction=0.25, train__steps=1), cwd=words)
    lines = dict(re.findall(r"data: (train|eval): (\d+ rows, \d+) tokens", (words / "runs" / "held_out" / "log.txt").read_text()))
    lengths = [len(json.loads(line)["input_ids"]) for line in open(words / "train.jsonl")]
    counts = {which: [int(n) for n in re.findall(r"\d+", line)] for which, line in lines.items()}
    assert (counts["train"][0], counts["eval"][0]) == (48, 16) and len(lengths) == 64
    assert counts["train"][1] + counts["eval"][1] == sum(lengths)


def refused_at(work, name, place, **changes):
    done = lmlaunch(config(work, name, **changes), cwd=work, check=False)
    assert done.returncode == 11, done.stderr
    assert len(re.findall(r"^lmlaunch: error ", done.stderr, re.M)) == 1, done.stderr
    assert len(re.findall(re.escape(place), done.stderr)) == 1, done.stderr
    return done.stderr


def test_a_file_that_breaks_off_is_named_with_its_last_line(words):
    rows = [json.dumps({"text": "w1 w2 w3"})] * 3
    (words / "broken.jsonl").write_text("\n".join(rows)[:-9])
    refused_at(words, "broken", "broken.jsonl:3:", data__train=["broken.jsonl"])


def test_an_id_outside_the_vocabulary_is_named_with_file_and_row_once(words):
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, VOCAB, 5]}]
    (words / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = refused_at(words, "ids", "ids.jsonl:2", data__train=["ids.jsonl"])
    assert f"token id {VOCAB} is outside the model's vocabulary of {VOCAB}" in told and ".tokens" not in told
    assert told.count(f"token id {VOCAB}") == 1, told


def test_a_cache_made_for_another_model_is_not_taken_for_a_smaller_one(work):
    """Without a tokenizer nothing but the vocabulary tells the models apart."""
    smaller = work / "smaller"
    smaller.mkdir()
    LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)).save_pretrained(smaller)
    larger = work / "larger"
    shutil.copytree(work / "model", larger, ignore=shutil.ignore_patterns("tokenizer*"))
    (larger / "chat_template.jinja").unlink()
    (work / "both.jsonl").write_text(json.dumps({"input_ids": [1, 2, 60]}) + "\n")
    lmlaunch(config(work, "large", model__path="larger", data__train=["both.jsonl"], data__eval=[], train__steps=1), cwd=work)
    refused_at(work, "small", "both.jsonl:1", model__path="smaller", data__train=["both.jsonl"], data__eval=[])


def test_a_data_error_names_the_users_file_once(words):
    """And never a file of the cache."""
    (words / "learnt.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    (words / "unlearnt.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100] * 3}) + "\n")
    (words / "late.jsonl").write_text(json.dumps({"input_ids": list(range(1, 41)), "labels": [-100] * 35 + list(range(36, 41))}) + "\n")
    for name, train, eval in [("unlearnt", "unlearnt.jsonl", []), ("late", "late.jsonl", []), ("unlearnt", "learnt.jsonl", ["unlearnt.jsonl"]),
                              ("late", "learnt.jsonl", ["late.jsonl"])]:
        told = refused_at(words, "names", f"{name}.jsonl", data__train=[train], data__eval=eval, run__dir=f"runs/names_{name}_{len(eval)}")
        assert told.count("not one token is a training target") == 1 and ".tokens" not in told, told


# ---- the words of the configuration ---------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}{{ m.content + ' ' }}{% if m.role == 'assistant' %}{{ '<eos> ' }}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def chats(words):
    """The same conversations as JSONL and, packed, under other names of columns; a data set by that name in a hub's cache."""
    rows = [[{"role": "user", "content": f"w{n % 90} w5"}, {"role": "assistant", "content": f"w{(n + 1) % 90} w6 w7"}] for n in range(40)]
    (words / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    packed = "".join(json.dumps({"dialog": row, "messages": 5}) + "\n" for row in rows) + "not json\n"
    (words / "packed.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    snapshot = words / "hub" / "datasets--org--chats" / "snapshots" / "0a"
    (snapshot / "data").mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0a")
    (snapshot / "data" / "train.jsonl").write_text((words / "chats.jsonl").read_text())
    (words / "own.jinja").write_text(TEMPLATE)
    return words


def with_table(work, name, text, **changes):
    """`text` goes into [data]; config() writes values of JSON alone."""
    path = work / config(work, name, **changes)
    path.write_text(path.read_text().replace("[data]\n", "[data]\n" + text + "\n"))
    return path.name


def test_the_same_conversations_train_the_same_from_every_place(chats):
    common = {"data__eval": [], "data__chat_template": "own.jinja", "train__steps": 4}
    lmlaunch(config(chats, "plain", data__train=["chats.jsonl"], **common), cwd=chats)
    options = with_table(chats, "packed", 'columns = {messages = "dialog"}\nbad_rows = "skip"', data__train=["packed.jsonl.gz"], **common)
    told = lmlaunch(options, cwd=chats).stderr
    assert "1 of 41 rows cannot be used and are left out" in told and "packed.jsonl.gz:41:" in told
    environment = {**os.environ, "HF_HUB_CACHE": str(chats / "hub")}
    lmlaunch(config(chats, "by_name", data__train=["org/chats"], **common), cwd=chats, env=environment)
    assert losses(chats, "plain") == losses(chats, "packed") == losses(chats, "by_name")
    done = lmlaunch(config(chats, "absent", data__train=["org/none"], **common), cwd=chats, env=environment, check=False)
    assert done.returncode == 11 and str(chats / "hub" / "datasets--org--none") in done.stderr
    lmlaunch("plain.toml", "run.dir=runs/other", 'data.columns={messages="dialog"}', cwd=chats, check=False)
    assert (chats / "runs" / "plain" / "config.toml").read_text().count('chat_template = "own.jinja"') == 1


def test_the_result_has_the_template_that_was_used(chats):
    for name, method in [("own_full", "full"), ("own_lora", "lora")]:
        lmlaunch(config(chats, name, data__train=["chats.jsonl"], data__eval=[], data__chat_template="own.jinja", train__steps=2,
                        train__method=method), cwd=chats)
        assert (chats / "runs" / name / "model" / "chat_template.jinja").read_text() == TEMPLATE
    lmlaunch("export", "runs/own_lora", "--merge", "-o", "own_merged", cwd=chats)
    assert (chats / "own_merged" / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_model_without_a_template_says_so_and_the_result_has_the_one_that_was_used(chats, method):
    if not (chats / "bare").exists():
        shutil.copytree(chats / "model", chats / "bare", ignore=shutil.ignore_patterns("chat_template*"))
    name = f"bare_{method}"
    lmlaunch(config(chats, name, model__path="bare", data__train=["chats.jsonl"], data__eval=[], train__steps=1, train__method=method), cwd=chats)
    assert "the model has no chat template: conversations are formatted in Alpaca style" in (chats / "runs" / name / "log.txt").read_text()
    template = jinja2.Environment().from_string((chats / "runs" / name / "model" / "chat_template.jinja").read_text())
    text = template.render(messages=[{"role": "user", "content": "w0 w5"}, {"role": "assistant", "content": "w1 w6 w7"}], eos_token="<eos>")
    assert text.endswith("### Instruction:\nw0 w5\n\n### Response:w1 w6 w7<eos>") and text.startswith("Below is an instruction")


FORMATS = {
    "text": {"text": "w1 w2 w3"}, "tokens": {"input_ids": [1, 2, 3]}, "prompt-completion": {"prompt": "w1", "completion": "w2 w3"},
    "alpaca": {"instruction": "w1", "output": "w2"}, "chat": {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
    "choices": {"context": "w1", "endings": ["w2", "w3"], "label": 0}}


def test_every_word_of_data_format_is_one_that_rows_can_have(chats):
    done = lmlaunch(config(chats, "no_format", data__format="prompt_completion"), cwd=chats, check=False)
    known = re.search(r"data\.format.*|format.*", done.stderr)[0]
    assert done.returncode == 10 and set(re.findall(r'"([\w-]+)"', known)) >= {"auto", *FORMATS}, done.stderr
    for word, row in FORMATS.items():
        (chats / f"{word}.jsonl").write_text(json.dumps(row) + "\n")
        lmlaunch(config(chats, f"as_{word}", data__train=[f"{word}.jsonl"], data__eval=[], data__format=word, data__chat_template="own.jinja",
                        train__steps=1, train__global_batch=1, train__micro_batch=1), cwd=chats)
    done = lmlaunch("as_prompt-completion.toml", "run.dir=runs/other_rows", 'data.train=["text.jsonl"]', cwd=chats, check=False)
    assert done.returncode == 11 and "every row of a prompt-completion file needs prompt and completion" in done.stderr, done.stderr


# The interpreter of a start that is killed: it saves after each piece of the data, and after the second waits for that.
WAITS = """import os, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[-1]))
sys.argv = sys.argv[-1:]
import prepare
from token_file import TokenFileWriter
prepare.SAVE_SECONDS, kept = 0, TokenFileWriter.save

def save(self, state):
    kept(self, state)
    if self.examples > 128:
        with open("saved.new", "w") as file:
            file.write(str(self.examples))
        os.rename("saved.new", "saved")
        time.sleep(600)

TokenFileWriter.save = save
sys.exit(prepare.main())
"""


def test_a_start_that_is_killed_goes_on_tokenising_and_trains_the_same(words):
    (words / "many.jsonl").write_text("".join(json.dumps({"text": " ".join(f"w{i % 90}" for i in range(n, n + 9))}) + "\n" for n in range(400)))
    common = {"data__train": ["many.jsonl"], "data__eval": [], "train__steps": 4}
    lmlaunch(config(words, "unkilled", data__cache_dir="cache_whole", **common), cwd=words)
    (words / "waits.py").write_text(WAITS)
    (words / "python").write_text(f'#!/bin/sh\nexec {os.environ.get("LMLAUNCH_PYTHON", sys.executable)} -I -B "{words}/waits.py" "$@"\n')
    (words / "python").chmod(0o755)
    toml = config(words, "killed", data__cache_dir="cache_killed", **common)
    process = subprocess.Popen([BIN / "lmlaunch", toml], cwd=words, env={**os.environ, "LMLAUNCH_PYTHON": str(words / "python")},
                               stderr=subprocess.PIPE, text=True)
    while not (words / "saved").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)  # its rank and the interpreter go with it, and their ends of the pipe
    examples = int((words / "saved").read_text())
    done = lmlaunch(toml, cwd=words)
    assert 128 < examples < 400 and f"tokenising resumes after {examples} examples" in done.stderr, done.stderr
    assert losses(words, "killed") == losses(words, "unkilled") and len(losses(words, "killed")) == 4


def test_weights_say_how_many_steps_an_epoch_has(chats):
    rows = (chats / "chats.jsonl").read_text().splitlines(keepends=True)
    (chats / "first.jsonl").write_text("".join(rows[:16]))
    (chats / "second.jsonl").write_text("".join(rows[16:]))
    lmlaunch(config(chats, "weighted", data__train=["first.jsonl", "second.jsonl"], data__weights=[2, 0.5], data__eval=[],
                    data__chat_template="own.jinja", train__steps="auto", train__epochs=1), cwd=chats)
    assert len(losses(chats, "weighted")) == -(-(32 + 12) // 8)
    done = lmlaunch("weighted.toml", "data.weights=[1]", cwd=chats, check=False)
    assert done.returncode == 10 and "data.weights has 1 numbers and data.train 2 entries" in done.stderr


def test_what_is_cut_is_not_shown_and_its_loss_is_counted(chats):
    long = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": " ".join(f"w{n}" for n in range(40, 89))}]}
    (chats / "cut.jsonl").write_text(40 * (json.dumps(long) + "\n"))
    told = lmlaunch(config(chats, "cut", data__train=["cut.jsonl"], data__eval=[], data__chat_template="own.jinja", train__steps=1), cwd=chats).stderr
    assert "40 of 40 examples in cut.jsonl are cut at data.max_length 32 before their last answer ends, and lose 760 trained tokens" in told
    shown = told.split("one example, ")[1].split("\n")[1]
    assert "w70" in shown and "w71" not in shown and "<eos>" not in shown and "cut here, at data.max_length 32: 19 more tokens" in shown, shown


DATED = TEMPLATE + "{{ 'w' + strftime_now('%d') }}"


def test_a_template_is_told_the_day_on_which_the_run_was_begun(chats):
    """It is recorded where the template asks, and taken from there by all that comes after."""
    (chats / "dated.jinja").write_text(DATED)
    common = {"data__train": ["chats.jsonl"], "data__eval": [], "data__eval_fraction": 0.1, "data__chat_template": "dated.jinja", "train__steps": 2}
    told = lmlaunch(config(chats, "dated", **common), cwd=chats).stderr
    day = (chats / "runs" / "dated" / "date.txt").read_text().strip()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)
    assert f"the chat template dated.jinja uses the date: it gets {day}, the day of this run's first start" in told
    # A start of a year ago, that did not come to its first step.
    (chats / "runs" / "past").mkdir()
    (chats / "runs" / "past" / "date.txt").write_text("2019-01-23\n")
    told = lmlaunch(config(chats, "past", **common), cwd=chats).stderr
    assert "it gets 2019-01-23" in told and (chats / "runs" / "past" / "date.txt").read_text() == "2019-01-23\n"
    assert "w23" in told.split("one example, ")[1].split("\n")[1]
    cache = set((chats / "cache").glob("*.tokens"))
    lmlaunch("eval", "runs/past", cwd=chats)  # of the same tokens
    assert cache and cache == set((chats / "cache").glob("*.tokens"))
    (chats / "runs" / "past" / "date.txt").write_text("yesterday\n")
    done = lmlaunch("eval", "runs/past", cwd=chats, check=False)
    assert done.returncode == 14 and "date.txt" in done.stderr
    assert not (chats / "runs" / "plain" / "date.txt").exists()
