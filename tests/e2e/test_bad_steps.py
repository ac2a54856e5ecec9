"""Steps whose numbers are not finite, through the whole program: a token of the model's input is infinite, so every step that meets
it is. Such a step is skipped and named; six in a row, or more than one in a hundred, end the run with 50, and so does the first
where no step can be skipped. The checkpoint before it stays what it was."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from test_run import config, lmlaunch, rows

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
import tiny_models  # noqa: E402

BAD = 300  # the token
STEPS = 14


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The head is not tied to the input: only who reads the token meets it."""
    work = tmp_path_factory.mktemp("bad_steps")
    tiny_models.make("llama_one_key_head_llama3_rope", work / "model")
    file = work / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][BAD] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    return work


def examples(work, name, lengths, bad):
    """One of each length; those in `bad` have the token."""
    generator = torch.Generator().manual_seed(5)
    with open(work / f"{name}.jsonl", "w") as file:
        for i, length in enumerate(lengths):
            ids = torch.randint(4, 200, (length,), generator=generator).tolist()
            if i in bad:
                ids[2] = BAD
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def prepared(work, name, **changes):
    settings = {"data__train": [f"{name}.jsonl"], "data__eval": [], "model__dtype": "bf16", "train__steps": STEPS, "train__global_batch": 1,
                "train__micro_batch": 1, "checkpoint__every": 0, **changes}
    return config(work, name, **settings)


@pytest.fixture(scope="module")
def order(work):
    """The example of each step: all have another length."""
    lengths = list(range(6, 6 + STEPS))
    examples(work, "order", lengths, [])
    lmlaunch(prepared(work, "order"), cwd=work)
    out = [lengths.index(row["target_tokens"] + 1) for row in rows(work, "order") if "loss" in row]
    assert sorted(out) == list(range(STEPS))
    return out


def run(work, name, order, bad_steps, code, **changes):
    """A run whose `bad_steps` meet the token; its messages."""
    examples(work, name, range(6, 6 + STEPS), [order[step - 1] for step in bad_steps])
    ended = lmlaunch(prepared(work, name, **changes), cwd=work, check=False)
    assert ended.returncode == code, ended.stderr
    return ended.stderr


def skipped(work, name):
    return [row["step"] for row in rows(work, name) if row.get("skipped")]


def shard(work, name, step):
    return (work / "runs" / name / "checkpoints" / f"step_{step:08}" / "rank00000.safetensors").read_bytes()


PLACES = {"resident": {}, "on_disk": {f"offload__{name}": "nvme" for name in ("optimizer", "weights", "gradients")} | {"offload__paths": ["."]}}


@pytest.mark.parametrize("place", PLACES)
def test_five_bad_steps_in_a_row_are_skipped_and_named(work, order, place):
    name = f"five_{place}"
    bad = [*range(4, 9), 10]  # a good one begins a new count
    messages = run(work, name, order, bad, 0, checkpoint__every=1, checkpoint__keep=20, **PLACES[place])
    assert skipped(work, name) == bad
    named = re.findall(r"warning NUM-12: step (\d+): the gradient of tensor (\S+) is (?:nan|inf) \(rank 0\): step skipped, no weight has changed", messages)
    assert [int(step) for step, _ in named] == bad and len({tensor for _, tensor in named}) == 1, messages
    # Not a byte of the state has changed in them; it has in the steps around them.
    assert all(shard(work, name, step) == shard(work, name, 3) for step in range(4, 9))
    assert shard(work, name, 2) != shard(work, name, 3) != shard(work, name, 9)
    assert json.loads((work / "runs" / name / "checkpoints" / "step_00000009" / "MANIFEST.json").read_text())["numbers"]["optimizer.t"] == 4


def test_the_sixth_in_a_row_ends_the_run_and_a_resumed_run_counts_on(work, order):
    messages = run(work, "six", order, range(4, 10), 50, checkpoint__every=1, checkpoint__keep=20)
    assert re.search(r"error NUM-12 \(exit 50\): step 9: the gradient of tensor \S+ is (nan|inf) \(rank 0\): 6 steps were skipped, 6 in a row", messages), messages
    assert "stop code=50 reason=error:numerics step=9" in messages and not (work / "runs" / "six" / "model").exists()
    assert json.loads(lmlaunch("verify", "runs/six/checkpoints/step_00000008", "--json", cwd=work).stdout)["ok"]
    before = shard(work, "six", 8)
    again = lmlaunch("six.toml", cwd=work, check=False)
    assert again.returncode == 50 and "resumes from runs/six/checkpoints/step_00000008" in again.stderr, again.stderr
    assert "6 steps were skipped, 6 in a row" in again.stderr and shard(work, "six", 8) == before == shard(work, "six", 3)


def test_the_last_checkpoint_is_the_one_before_the_bad_steps(work, order):
    run(work, "before", order, [], 0, checkpoint__every=3, checkpoint__keep=20)
    run(work, "after", order, range(5, 14), 50, checkpoint__every=3, checkpoint__keep=20)
    assert shard(work, "after", 3) == shard(work, "before", 3)


@pytest.mark.parametrize("clip", ["block", "none"])
def test_where_no_step_can_be_skipped_the_first_ends_the_run(work, order, clip):
    name = f"clip_{clip}"
    messages = run(work, name, order, [5], 50, optimizer__clip=clip, checkpoint__every=2)
    assert re.search(r"error NUM-12 \(exit 50\): step 5: the gradient of tensor \S+ is (nan|inf) \(rank 0\); the weights of other layers may", messages), messages
    assert json.loads(lmlaunch("verify", f"runs/{name}/checkpoints/step_00000004", "--json", cwd=work).stdout)["ok"]
    run(work, f"sound_{clip}", order, [], 0, optimizer__clip=clip, checkpoint__every=2, checkpoint__keep=20)
    assert shard(work, name, 4) == shard(work, f"sound_{clip}", 4) and not (work / "runs" / name / "model").exists()


@pytest.mark.parametrize("count, steps, code", [(100, 200, 50), (300, 400, 0)])
def test_more_than_one_in_a_hundred_ends_the_run(work, count, steps, code):
    """One of `count` examples is bad: it comes once in each epoch, never twice in a row."""
    name = f"one_of_{count}"
    examples(work, name, [8] * count, [17])
    ended = lmlaunch(prepared(work, name, train__steps=steps, log__every=100), cwd=work, check=False)
    assert ended.returncode == code, ended.stderr
    bad = skipped(work, name)
    assert len(bad) == 2 and (bad[1] > count and bad[1] - bad[0] > 1)
    if code == 50:
        assert f"step {bad[1]}: the gradient" in ended.stderr and "2 steps were skipped, 1 in a row" in ended.stderr
