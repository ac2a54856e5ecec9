"""Files of `export --gguf` in llama.cpp itself (llama-cpp-python, which `./dev test --full` builds once): the same tokens of text,
and the same greedy answers as transformers gives with the weights that are in the file. SmolLM2, as the quickstart has it, a full run and
a merged LoRA run of it, in each type; all families in f16, one in bf16 and q8_0.

With weights in bf16 and q8_0 llama.cpp rounds what it multiplies with them to that type, too, as transformers does not. So logits
differ a little, and the answers must agree wherever the likeliest token is further ahead of the next than that."""

import glob
import os
import sys
from pathlib import Path

import gguf
import gguf_families
import pytest
import torch
from test_gguf import FAMILIES, SPECIAL, byte_level, make_model, name_of, sentence_piece
from test_run import lmlaunch
from test_smollm2 import train
from test_smollm2 import work as smollm2  # noqa: F401
from tiny_families import LONGROPE
from transformers import AutoModelForCausalLM, AutoTokenizer

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lmlaunch"
found = sorted(glob.glob(str(CACHE / "llama-cpp-*" / ".complete")))
if not found:
    pytest.skip("no llama.cpp here: ./dev test --full builds it", allow_module_level=True)
sys.path.append(str(Path(found[-1]).parent))
llama_cpp = pytest.importorskip("llama_cpp")

TEXTS = ["hello world, what is it? I am fine", "The quick brown fox\n\njumps  over 12345 lazy dogs!", "ünï 日本語 \U0001f600 {\"a\": [1, 2]}"]


def greedy(model, ids, count):
    return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(ids):].tolist()


def check_decided(model, prompts, answered, bound):
    """Each token is the likeliest by `model` behind what was said before it, wherever that is ahead by more than `bound`: so most are."""
    decided = []
    for ids, tokens in zip(prompts, answered, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1:-1]
        values, likeliest = logits.topk(2)
        decided += [(said, best) for said, best, ahead in zip(tokens, likeliest[:, 0].tolist(), (values[:, 0] - values[:, 1]).tolist()) if ahead > bound]
    assert [said for said, _ in decided] == [best for _, best in decided]
    assert len(decided) >= 0.6 * sum(map(len, answered))


def answers(path, prompts, count, context=256):
    llama = llama_cpp.Llama(str(path), n_ctx=context, logits_all=False, verbose=False, n_threads=2)
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


# Windows that llama.cpp does not slide are longer than the texts. It takes longrope's factors by its context, of 256 tokens at least:
# the model's texts are short up to there.
SHORT_UP_TO = {"original_max_position_embeddings": 256}
OTHERS = {
    "phi3_odd_window": {"sliding_window": 100}, "starcoder2": {"sliding_window": 100}, "mixtral": {"sliding_window": 100},
    "ministral3_odd_window_factor": {"sliding_window": 100},
    "phi3_partial_longrope_short_texts":
        {**SHORT_UP_TO, "max_position_embeddings": 1024, "rope_parameters": {**LONGROPE["rope_parameters"], **SHORT_UP_TO}},
}
LENGTHS = {"phi3_partial_longrope_long_texts": (40, 24, 128)}  # tokens of a prompt, of an answer, of llama.cpp's context


@pytest.mark.parametrize("name", gguf_families.SUPPORTED)
def test_llama_cpp_answers_as_transformers_does_for_the_other_families(name, tmp_path):
    """Not to the last bit: its GELU is a table of fp16, and so are its keys and values."""
    model = gguf_families.make(name, tmp_path / "model", **OTHERS.get(name, {}))
    lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path)
    with torch.no_grad():
        for parameter, weights in model.named_parameters():
            if weights.dim() > 1 and not parameter.endswith(("wpe.weight", "norm.weight", "mlp.gate.weight")):
                weights.copy_(weights.half().float())
    length, count, context = LENGTHS.get(name, (12, 24, 256))
    prompts = [[(7 * i + k) % 120 + 3 for i in range(length)] for k in range(4)]
    with torch.no_grad():
        spread = model(torch.tensor(prompts)).logits.std().item()
    check_decided(model, prompts, answers(tmp_path / "a.gguf", prompts, count, context), 0.03 * spread)


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_a_family_answers_alike_in_the_other_types(kind, tmp_path):
    make_model(tmp_path / "model", "qwen3")
    lmlaunch("export", "model", "--gguf", kind, "-o", "a.gguf", cwd=tmp_path)
    prompts = [[(7 * i + k) % 250 + 3 for i in range(12)] for k in range(4)]
    said = answers(tmp_path / "a.gguf", prompts, 24)
    check_decided(with_weights_of(tmp_path / "a.gguf", tmp_path / "model"), prompts, said, 0.05)  # 0.024 seen; logits spread by 0.8


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_llama_cpp_splits_text_as_the_tokenizer_does(family, tmp_path):
    make_model(tmp_path / "model", family)
    lmlaunch("export", "model", "--gguf", "f16", "-o", "a.gguf", cwd=tmp_path)
    llama = llama_cpp.Llama(str(tmp_path / "a.gguf"), vocab_only=True, verbose=False)
    tokenizer = (sentence_piece if family == "mistral" else lambda: byte_level(SPECIAL))()
    for text in TEXTS:
        assert llama.tokenize(text.encode(), add_bos=True, special=True) == tokenizer.encode(text).ids, text


PROMPTS = ["What is the capital of France?", "Write a short poem about the sea."]


@pytest.fixture(scope="module")
def models(smollm2):  # noqa: F811
    """SmolLM2, and what two runs make of it, as transformers loads them: name -> (what to export, how, directory)."""
    for method in ("full", "lora"):
        done = train(smollm2, method, f"train.method={method}", "data.max_length=256", "train.global_batch=2")
        assert done.returncode == 0, done.stderr
    lmlaunch("export", "runs/lora", "--merge", "-o", "merged", cwd=smollm2)
    return {"itself": ("build/quickstart/model", [], "build/quickstart/model"), "full": ("runs/full", [], "runs/full/model"),
            "merged": ("runs/lora", ["--merge"], "merged")}


def with_weights_of(path, directory):
    """The model of `directory` with the weights that the file has, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors[name_of(name)]
            weights = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
            if model.config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):  # llama.cpp has the halves of a head's rows in turns
                heads = model.config.num_attention_heads if ".q_proj." in name else model.config.num_key_value_heads
                weights = weights.reshape(heads, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
            parameter.copy_(torch.from_numpy(weights.copy()))
    return model


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", ["itself", "full", "merged"])
def test_smollm2_answers_the_same_in_llama_cpp(name, kind, models, smollm2, tmp_path):  # noqa: F811
    what, how, directory = models[name]
    file = tmp_path / "a.gguf"
    lmlaunch("export", what, *how, "--gguf", kind, "-o", file, cwd=smollm2)
    tokenizer, model = AutoTokenizer.from_pretrained(smollm2 / directory), with_weights_of(file, smollm2 / directory)
    llama = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == tokenizer(text)["input_ids"], text
    assert llama.metadata["tokenizer.chat_template"] == tokenizer.chat_template
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"] for text in PROMPTS]
    said = answers(file, prompts, 16)
    if kind == "q8_0":
        check_decided(model, prompts, said, 0.25)  # 0.12 seen; logits span tens
    else:
        assert said == [greedy(model, prompt, 16) for prompt in prompts]
