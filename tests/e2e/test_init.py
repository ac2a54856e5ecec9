"""`lmlaunch init MODEL DATA`: a configuration that fits this machine, is commented, and trains as it was written."""

import json
import re
import tomllib

import pytest
from test_run import filled, lmlaunch


@pytest.fixture
def fresh(tmp_path):
    return filled(tmp_path, layers=2)


@pytest.mark.parametrize("method", [None, "full", "lora"])
def test_it_trains_as_written(fresh, method):
    chosen = ["--method", method] if method else []
    assert lmlaunch("init", "model", "train.jsonl", "--gpus", "0", *chosen, cwd=fresh).stdout == "model.toml\n"
    text = (fresh / "model.toml").read_text()
    keys = tomllib.loads(text)
    assert (keys["model"]["path"], keys["data"]["train"]) == ("model", ["train.jsonl"])
    assert keys["train"]["method"] == (method or keys["train"]["method"])
    assert text.startswith("# model, for the machine on which `lmlaunch init` was called: ") and "lmlaunch plan model.toml" in text
    assert keys["data"]["max_length"] == 64  # no longer than the model's
    assert json.loads(lmlaunch("plan", "model.toml", "--json", cwd=fresh).stdout)["fits"] is True
    lmlaunch("model.toml", cwd=fresh)
    assert json.loads((fresh / "runs" / "model" / "status.json").read_text())["state"] == "done"


def test_other_ways_are_listed_and_each_is_a_command_line(fresh):
    lmlaunch("init", "model", "train.jsonl", "eval.jsonl", "--gpus", "0", "-o", "a.toml", cwd=fresh)
    text = (fresh / "a.toml").read_text()
    assert tomllib.loads(text)["data"]["train"] == ["train.jsonl", "eval.jsonl"]
    rows = [line for line in text.splitlines() if " tokens/s  " in line]
    assert rows
    for row in rows:
        settings = row.split(" tokens/s  ")[1].split()
        done = json.loads(lmlaunch("plan", "a.toml", "--json", *settings, cwd=fresh).stdout)
        assert done["fits"] is True, row
    assert len({tuple(row.split(" tokens/s  ")[1].split()) for row in rows}) == len(rows)


def test_what_fits_nowhere_is_refused_and_nothing_is_written(fresh):
    shape = json.loads((fresh / "model" / "config.json").read_text())
    (fresh / "huge").mkdir()
    (fresh / "huge" / "config.json").write_text(json.dumps({**shape, "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 60,
                                                            "head_dim": 128, "num_attention_heads": 128, "num_key_value_heads": 128}))
    done = lmlaunch("init", "huge", "train.jsonl", "--gpus", "0", cwd=fresh, check=False)
    assert done.returncode == 12 and "--disk" in done.stderr and not (fresh / "huge.toml").exists(), done.stderr


def test_nothing_is_written_over_or_guessed(fresh):
    (fresh / "model.toml").write_text("mine")
    done = lmlaunch("init", "model", "train.jsonl", cwd=fresh, check=False)
    assert done.returncode == 14 and "model.toml" in done.stderr and (fresh / "model.toml").read_text() == "mine"
    for arguments, code, told in [(("model", "trian.jsonl"), 11, "no such data file"), (("modle", "train.jsonl"), 11, "does not exist"),
                                  (("model",), 2, "init needs MODEL DATA"), (("model", "train.jsonl", "--method", "dora"), 2, "expected full, lora or qlora")]:
        done = lmlaunch("init", *arguments, "-o", "b.toml", cwd=fresh, check=False)
        assert done.returncode == code and told in done.stderr, done.stderr
        assert not (fresh / "b.toml").exists()


def ids(fresh, name, lengths):
    (fresh / name).write_text("".join(json.dumps({"input_ids": [5] * length, "labels": [5] * length}) + "\n" for length in lengths))


def length_line(fresh, data):
    (fresh / "model.toml").unlink(missing_ok=True)
    lmlaunch("init", "model", data, "--gpus", "0", cwd=fresh)
    text = (fresh / "model.toml").read_text()
    return tomllib.loads(text)["data"]["max_length"], next(line for line in text.splitlines() if line.startswith("max_length"))


def test_the_length_is_what_the_data_has_and_the_model_knows(fresh):
    shape = json.loads((fresh / "model" / "config.json").read_text())
    (fresh / "model" / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 4096}))
    ids(fresh, "short.jsonl", [20, 150, 30])  # few: the longest counts
    assert length_line(fresh, "short.jsonl") == (192, "max_length = 192                  # tokens: the longest of 3 examples has 150")
    ids(fresh, "tail.jsonl", [100] * 398 + [3000, 5000])  # one of 200 may be cut
    length, line = length_line(fresh, "tail.jsonl")
    assert length == 128 and "# tokens: of 400 examples 99.5 % have at most 100, the longest 5000; longer conversations are cut" in line
    ids(fresh, "more.jsonl", [2500] * 3)  # more than is taken where nobody knows
    assert length_line(fresh, "more.jsonl")[0] == 2560
    ids(fresh, "long.jsonl", [6000] * 3)
    length, line = length_line(fresh, "long.jsonl")
    assert length == 4096 and "the model's context length: the longest of 3 examples has 6000; longer conversations are cut" in line
    (fresh / "plain.jsonl").write_text(json.dumps({"text": "w1 w2"}) + "\n")  # a model without a tokenizer
    length, line = length_line(fresh, "plain.jsonl")
    assert length == 2048 and line.endswith("# tokens; longer conversations are cut")


def test_the_dtype_is_the_faster_one_of_this_machine(fresh):
    lmlaunch("init", "model", "train.jsonl", "--gpus", "0", cwd=fresh)
    text = (fresh / "model.toml").read_text()
    dtype, line = tomllib.loads(text)["model"]["dtype"], next(line for line in text.splitlines() if line.startswith("dtype"))
    told = re.search(r"# (faster here|half the memory of fp32): about (\d+) tokens/s, with (fp32|bf16) (\d+)$", line)
    speeds = {dtype: int(told[2]), told[3]: int(told[4])}
    assert speeds.keys() == {"bf16", "fp32"} and (told[1] == "faster here") == (dtype == "fp32")
    # bf16 takes half the memory and stays unless fp32 is a tenth faster (the numbers are rounded).
    assert (speeds["fp32"] > 1.1 * speeds["bf16"] - 2) if dtype == "fp32" else (speeds["fp32"] < 1.1 * speeds["bf16"] + 2)


def refused_rows(fresh, name, text, *told):
    (fresh / name).write_text(text)
    done = lmlaunch("init", "model", name, "--gpus", "0", "-o", "c.toml", cwd=fresh, check=False)
    assert done.returncode == 11 and all(word in done.stderr for word in told), done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("lmlaunch: error ")]) == 1, done.stderr
    assert not (fresh / "c.toml").exists()


def test_rows_are_looked_at_before_anything_is_written(fresh):
    good = json.dumps({"prompt": "w1", "completion": "w2"}) + "\n"
    refused_rows(fresh, "empty.jsonl", "", "the data is empty", "empty.jsonl")
    refused_rows(fresh, "blank.jsonl", "\n\n", "the data is empty", "blank.jsonl")
    refused_rows(fresh, "dpo.jsonl", json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}), "preference data", "dpo.jsonl:1", 'completion = "chosen"')
    refused_rows(fresh, "kto.jsonl", good + json.dumps({"prompt": "q", "completion": "a", "label": True}), "preference data", "kto.jsonl:2")
    refused_rows(fresh, "odd.jsonl", json.dumps({"question": "q"}), "unknown columns: found question", "odd.jsonl:1")
    refused_rows(fresh, "two.jsonl", json.dumps({"messages": [{"role": "user", "content": "x"}], "text": "y"}), "in 2 ways", "data.format")
    refused_rows(fresh, "broken.jsonl", good + "{", "not JSON", "broken.jsonl:2")
    (fresh / "good.jsonl").write_text(good)
    (fresh / "empty.jsonl").write_text("")  # a file without rows beside one with some is no mistake
    lmlaunch("init", "model", "good.jsonl", "empty.jsonl", "--gpus", "0", "-o", "c.toml", cwd=fresh)


def test_no_more_than_the_first_rows_are_read(fresh):
    """What stands behind them is training's to find."""
    good = json.dumps({"text": "w1 w2"}) + "\n"
    (fresh / "long.jsonl").write_text(1000 * good + "{\n")
    lmlaunch("init", "model", "long.jsonl", "--gpus", "0", "-o", "d.toml", cwd=fresh)
