"""What a run says of its data: what data.max_length does to rows, and where a mistake stands."""

import json
import re
import shutil

import pytest
import tokenizers
from test_run import VOCAB, config, lmlaunch, work  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def words(work):  # noqa: F811
    """The model gets a tokenizer of 90 words."""
    known = {f"w{i}": i for i in range(90)} | {"<eos>": 90}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(work / "model" / "tokenizer.json"))
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
