"""The same text as everyone's: what greedy decoding with the key-value cache gives, against transformers with its own."""

import json

import pytest
import reference
import tiny_models
import tool
import torch
from counts import FULL, some_of

TOKENS = 64
LENGTHS = [1, 2, 3, 7, 20, 33, 64, 150]  # of the prompts
# What each reads at one position after another: windows of some layers, caps, scales by position, learned positions, a pair of sublayers
# beside each other, values that are keys, pairs of neighbours, keys of another layer.
FAMILIES = ["gemma2", "gemma3_text", "ministral3", "gpt2", "cohere2", "gemma4_text", "glm4", "olmo3_odd", "granite", "nemotron", "phi3", "exaone4",
            "gemma4_text_inputs_and_borrowed_keys", "mixtral", "qwen3_moe_one_dense_layer",
            "gpt_oss_odd_without_biases", "olmoe", "gpt_oss"]


def prompts(vocab, lengths=LENGTHS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [reference.Document(torch.randint(4, vocab, (n,), generator=generator), torch.full((n,), -1)) for n in lengths]


def theirs(model, documents, tokens=TOKENS):
    """All of them have so many tokens: no end-of-sequence token ends one."""
    settings = dict(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True)
    model.generation_config.eos_token_id = None
    return torch.stack([model.generate(d.token[None].long(), attention_mask=torch.ones(1, len(d.token)), **settings)[0, len(d.token):]
                        for d in documents])


@pytest.mark.parametrize("name", list(tiny_models.MODELS)[:: 1 if FULL else 3])
def test_fp32_greedy_text_is_theirs(name, tmp_path):
    model = tiny_models.make(name, tmp_path)
    documents = prompts(model.config.vocab_size)
    ours = tool.run(tmp_path, documents, tmp_path / "run", dtype="fp32", threads=2, generate=TOKENS)
    assert ours.tolist() == theirs(model, documents).tolist()
    assert len({tuple(row) for row in ours.tolist()}) > 1  # the prompts matter


@pytest.mark.parametrize("name", FAMILIES[:: 1 if FULL else 2])
def test_fp32_greedy_text_of_the_other_families_is_theirs(name, tmp_path):
    model = tiny_models.make(name, tmp_path, tie_word_embeddings=False)  # tied heads mostly repeat the last token
    documents = prompts(model.config.vocab_size, [1, 7, 20])
    ours = tool.run(tmp_path, documents, tmp_path / "run", dtype="fp32", threads=2, generate=32)
    assert ours.tolist() == theirs(model, documents, 32).tolist()
    assert len({tuple(row) for row in ours.tolist()}) > 1 and len(set(ours.flatten().tolist())) > 5


@pytest.mark.parametrize("name", FAMILIES[:: 1 if FULL else 4])
def test_texts_that_are_continued_together_are_theirs(name, tmp_path):
    """A token of each text in one pass, in which each has a cache, positions and a window of its own."""
    model = tiny_models.make(name, tmp_path, tie_word_embeddings=False)
    documents = prompts(model.config.vocab_size, [1, 7, 20, 2, 33])
    ours = tool.run(tmp_path, documents, tmp_path / "run", dtype="fp32", threads=2, generate=24, together="yes")
    assert ours.tolist() == theirs(model, documents, 24).tolist()
    assert len({tuple(row) for row in ours.tolist()}) > 2


@pytest.mark.parametrize("name", ["llama_three_heads_per_key_tied_with_pad_token", "mistral_window_shorter_than_documents"])
def test_a_prompt_that_passes_in_parts_is_theirs(name, tmp_path):
    """512 tokens pass the model at once: prompts of a token more or less, and of three parts."""
    model = tiny_models.make(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    documents = prompts(model.config.vocab_size, [511, 512, 513, 1200])
    ours = tool.run(tmp_path, documents, tmp_path / "run", dtype="fp32", generate=TOKENS)
    assert ours.tolist() == theirs(model, documents).tolist()


def test_an_adapter_speaks(tmp_path):
    """The adapter's part of each product, of one row and of many."""
    import peft
    model = tiny_models.make("llama_three_heads_per_key_tied_with_pad_token", tmp_path)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    documents = prompts(model.config.vocab_size)
    ours = tool.run(tmp_path, documents, tmp_path / "run", dtype="fp32", generate=TOKENS, adapter=tmp_path / "adapter")
    assert ours.tolist() == theirs(adapted, documents).tolist()


@pytest.mark.parametrize("how", some_of({"off_device": "disk"}, {"threads": 1}, {"off_device": "host"}, short=2))
def test_where_weights_live_and_how_many_threads_work_changes_no_token(how, tmp_path):
    model = tiny_models.make("llama_tied_llama3_rope_sharded", tmp_path)
    documents = prompts(model.config.vocab_size)[3:6]
    settings = dict(dtype="bf16", threads=2, generate=16)
    near = tool.run(tmp_path, documents, tmp_path / "run", **settings)
    assert tool.run(tmp_path, documents, tmp_path / "run", **{**settings, **how}).tolist() == near.tolist()
