"""Which tokens temperature, top-k and top-p leave, against transformers' own processors; how often each is drawn."""

import functools
import json
import subprocess

import pytest
import torch
from tool import TOOL
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@functools.cache
def program():
    """One for all questions: loading LibTorch takes longer than they do."""
    return subprocess.Popen([TOOL.with_name("sampling_tool")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(logits, temperature=1.0, top_k=0, top_p=1.0, seed=0, draws=0):
    request = {"logits": logits.tolist(), "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "draws": draws}
    print(json.dumps(request), file=program().stdin, flush=True)
    return json.loads(program().stdout.readline())


def theirs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """token -> probability of what is left."""
    scores = logits[None]
    for warper in [TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else []), *([TopPLogitsWarper(top_p)] if top_p < 1 else [])]:
        scores = warper(None, scores)
    probabilities = scores.double().softmax(-1)[0]
    return {i: probabilities[i].item() for i in range(len(logits)) if scores[0, i] > -float("inf")}


def random_logits(vocab, seed, spread=3.0):
    return spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


SETTINGS = [dict(), dict(temperature=0.3), dict(temperature=2.5), dict(top_k=1), dict(top_k=7), dict(top_k=5000), dict(top_p=0.01), dict(top_p=0.5),
            dict(top_p=0.9), dict(top_p=0.999), dict(temperature=0.7, top_k=40, top_p=0.95), dict(temperature=1.5, top_k=300, top_p=0.6)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [2, 331, 4096])
def test_what_is_left_is_theirs(settings, vocab):
    for seed in range(4):
        logits = random_logits(vocab, seed)
        candidates = ask(logits, **settings)["candidates"]
        expected = theirs(logits, **settings)
        assert {token for token, _ in candidates} == set(expected)
        total = sum(weight for _, weight in candidates)
        for token, weight in candidates:
            assert weight / total == pytest.approx(expected[token], rel=1e-5, abs=1e-12)


def test_equals_of_the_last_stay():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    assert {token for token, _ in ask(logits, top_k=2)["candidates"]} == {1, 2, 3} == set(theirs(logits, top_k=2))


@pytest.mark.parametrize("settings", [dict(), dict(temperature=0.6, top_k=12), dict(top_p=0.8)], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(settings):
    logits, draws = random_logits(24, 5, 1.5), 20000
    drawn = torch.tensor(ask(logits, **settings, seed=11, draws=draws)["drawn"])
    counts = torch.bincount(drawn, minlength=24).double()
    expected = theirs(logits, **settings)
    assert counts.nonzero().flatten().tolist() == sorted(token for token in expected if counts[token] > 0)
    # Tokens that are too rare for the test count together.
    pairs = [(counts[token].item(), draws * p) for token, p in expected.items()]
    common = [pair for pair in pairs if pair[1] >= 5]
    rare = [pair for pair in pairs if pair[1] < 5]
    cells = common + ([tuple(map(sum, zip(*rare)))] if rare else [])
    chi = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5, (chi, freedom)


def test_a_seed_is_a_sequence():
    logits = random_logits(50, 1)
    one, again, other = (ask(logits, seed=seed, draws=100)["drawn"] for seed in (3, 3, 4))
    assert one == again != other
    assert len(set(one)) > 5
    assert set(ask(logits, temperature=1e-4, draws=20)["drawn"]) == {logits.argmax().item()}
