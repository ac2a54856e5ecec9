"""Steps whose numbers are not finite, through the whole program: a token of the model's input is infinite, so every step that meets
it is. Such a step is skipped and named; six in a row, or more than one in a hundred, end the run with 50, and so does the first
where no step can be skipped. The checkpoint before it stays what it was."""

import json
import re
import shutil
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


# ---- fp16 -----------------------------------------------------------------------------------------------------------

SCALE, INTERVAL, SCALED_STEPS = 2.0 ** 34, 3, 36
FP16 = dict(model__dtype="fp16", train__loss_scale=SCALE, train__loss_scale_interval=INTERVAL, train__steps=SCALED_STEPS, checkpoint__every=6,
            checkpoint__keep=20)


def expect_scales_of_torch(curve):
    """The scale of each step is GradScaler's, given which steps had gradients that are not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for row in curve:
        assert row["loss_scale"] == scaler.get_scale(), row
        parameter.grad = torch.tensor([float("inf") if row.get("overflow") else 1.0])
        scaler.scale(torch.zeros(1))
        scaler.step(optimizer)
        scaler.update()


def scaled(work, name):
    return [row for row in rows(work, name) if "loss" in row]


def numbers(curve):
    return [(row["loss"], row["grad_norm"], row["loss_scale"], row.get("overflow")) for row in curve]


@pytest.fixture(scope="module")
def fp16(work):
    """The messages of a run that begins with a scale far too large, and grows it too soon."""
    examples(work, "fp16", range(6, 6 + STEPS), [])
    return lmlaunch(prepared(work, "fp16", **FP16), cwd=work).stderr


def test_the_loss_scale_is_gradscalers_and_overflows_end_no_run(work, fp16):
    curve = scaled(work, "fp16")
    assert len(curve) == SCALED_STEPS
    expect_scales_of_torch(curve)
    overflows = [row["step"] for row in curve if row.get("overflow")]
    assert overflows[:12] == list(range(1, 13)) and overflows[-1] - len(overflows) > 0 and len(overflows) < SCALED_STEPS
    assert skipped(work, "fp16") == [] and "NUM-12" not in fp16
    assert fp16.count("step skipped, no weight has changed; the next scale is") == len(overflows)
    assert shard(work, "fp16", 6) == shard(work, "fp16", 12) != shard(work, "fp16", 36)
    state = json.loads((work / "runs" / "fp16" / "checkpoints" / "step_00000012" / "MANIFEST.json").read_text())
    assert '"overflows": 12' in json.dumps(state)


def test_a_resumed_run_has_the_same_scales_and_bits(work, fp16):
    run = work / "runs" / "fp16"
    curve, last = scaled(work, "fp16"), shard(work, "fp16", 36)
    for step in (24, 30, 36):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08}")
    shutil.rmtree(run / "model")
    (run / "status.json").unlink()  # as after a kill
    again = lmlaunch("fp16.toml", cwd=work).stderr
    assert "resumes from runs/fp16/checkpoints/step_00000018" in again, again
    assert numbers(scaled(work, "fp16")) == numbers(curve) and shard(work, "fp16", 36) == last


@pytest.mark.parametrize("place", [PLACES["on_disk"], dict(train__update="in_backward")], ids=["on_disk", "in_backward"])
def test_fp16_has_the_same_bits_in_every_place(work, fp16, place):
    lmlaunch(prepared(work, "placed", **{**FP16, "checkpoint__every": 0, "data__train": ["fp16.jsonl"]}, **place), cwd=work)
    assert numbers(scaled(work, "placed")) == numbers(scaled(work, "fp16"))
    shutil.rmtree(work / "runs" / "placed")


def test_ranks_and_an_unclipped_run_agree_on_overflows(work, fp16):
    toml = prepared(work, "ranks", **{**FP16, "checkpoint__every": 0, "data__train": ["fp16.jsonl"]}, train__global_batch=2,
                    optimizer__clip="none", optimizer__master="none")
    lmlaunch("--ranks", "2", toml, cwd=work)
    curve = scaled(work, "ranks")
    expect_scales_of_torch(curve)
    assert sum(row.get("overflow", False) for row in curve) >= 12 and skipped(work, "ranks") == []


def test_a_loss_that_is_not_finite_is_a_bad_step_in_fp16_too(work, order):
    bad = [*range(4, 9)]
    messages = run(work, "fp16_bad", order, bad, 0, model__dtype="fp16", train__loss_scale=1024.0)
    assert skipped(work, "fp16_bad") == bad and messages.count("warning NUM-12") == len(bad)
    assert [row["loss_scale"] for row in scaled(work, "fp16_bad")][3:9] == [2.0 ** k for k in range(10, 4, -1)]


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
