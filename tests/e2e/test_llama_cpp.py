"""Files of `export --gguf` in llama.cpp itself (llama-cpp-python, which `./dev test --full` builds once): the same tokens of text,
and the same greedy answers as transformers gives with the weights that are in the file."""

import glob
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from test_gguf import FAMILIES, SPECIAL, byte_level, make_model, sentence_piece
from test_run import lmlaunch
from transformers import AutoModelForCausalLM, AutoTokenizer

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lmlaunch"
found = sorted(glob.glob(str(CACHE / "llama-cpp-*" / ".complete")))
if not found:
    pytest.skip("no llama.cpp here: ./dev test --full builds it", allow_module_level=True)
sys.path.append(str(Path(found[-1]).parent))
llama_cpp = pytest.importorskip("llama_cpp")

TEXTS = ["hello world, what is it? I am fine", "The quick brown fox\n\njumps  over 12345 lazy dogs!", "ünï 日本語 \U0001f600 {\"a\": [1, 2]}"]


def greedy(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


def answers(path, prompts, count):
    llama = llama_cpp.Llama(str(path), n_ctx=256, logits_all=False, verbose=False, n_threads=1)
    out = []
    for ids in prompts:
        llama.reset()
        got = []
        for token in llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            got.append(token)
            if len(got) == count:
                break
        out.append(got)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_answers_as_transformers_does(family, tmp_path):
    model = make_model(tmp_path / "model", family)
    lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.half().float())
    prompts = [[(7 * i + k) % 250 + 3 for i in range(12)] for k in range(4)]
    assert answers(tmp_path / "a.gguf", prompts, 24) == [greedy(model, ids, 24) for ids in prompts]


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_llama_cpp_splits_text_as_the_tokenizer_does(family, tmp_path):
    make_model(tmp_path / "model", family)
    lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path)
    llama = llama_cpp.Llama(str(tmp_path / "a.gguf"), vocab_only=True, verbose=False)
    tokenizer = (sentence_piece if family == "mistral" else lambda: byte_level(SPECIAL))()
    for text in TEXTS:
        assert llama.tokenize(text.encode(), add_bos=True, special=True) == tokenizer.encode(text).ids, text


def test_smollm2_answers_the_same_in_llama_cpp(tmp_path):
    directory = CACHE / "models" / "smollm2-135m-instruct"
    if not directory.is_dir():
        pytest.skip("SmolLM2 is not here: ./dev demo makes it")
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    lmlaunch("export", directory, "--gguf", "bf16", "-o", "a.gguf", cwd=tmp_path)
    llama = llama_cpp.Llama(str(tmp_path / "a.gguf"), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == tokenizer(text)["input_ids"], text
    assert json.loads(json.dumps(llama.metadata))["tokenizer.chat_template"] == tokenizer.chat_template
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True)["input_ids"]
    assert answers(tmp_path / "a.gguf", [prompt], 16) == [greedy(model, prompt, 16)]
