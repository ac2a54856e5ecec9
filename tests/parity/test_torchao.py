"""adamw_4bit and adamw_fp8, a tensor at a time, against torchao's own on the CPU: 20 steps, the same gradients, the state too."""

import numpy as np
import pytest
import torch
from rule_runs import apart, check_state, data, ours, run
from torchao.optim import AdamW4bit, AdamWFp8
from torchao.optim.subclass_4bit import get_qmap_signed, get_qmap_unsigned

LR = 1e-3
# name -> theirs, elements of a scale, codes in a byte
RULES = {"adamw_4bit": (AdamW4bit, 128, 2), "adamw_fp8": (AdamWFp8, 256, 1)}


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    """Their step compiles itself; what it computes is the same without, and takes no compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


class Theirs:
    def __init__(self, rule, weights, lr, weight_decay):
        self.parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
        self.optimizer = RULES[rule][0]([self.parameter], lr=lr, weight_decay=weight_decay)
        # Their count of steps is in fp32, in which 1 - 0.999^t is up to 5e-5 off; in fp64 it is not. The rest is as they begin.
        self.optimizer.state[self.parameter].update(
            step=torch.tensor(0.0, dtype=torch.float64), exp_avg=self.optimizer._new_buffer(self.parameter, True),
            exp_avg_sq=self.optimizer._new_buffer(self.parameter, False))

    def step(self, gradient):
        self.parameter.grad = torch.from_numpy(gradient.copy())
        self.optimizer.step()

    def weights(self):
        return self.parameter.detach().numpy().copy()

    def states(self):
        """As `ours` has them; none before the first step."""
        state = self.optimizer.state[self.parameter]
        return [] if state["step"] == 0 else [(s.codes.view(torch.uint8).numpy().copy(), s.scale.numpy().copy()) if hasattr(s, "codes") else (s.numpy().copy(),)
                for s in (state["exp_avg"], state["exp_avg_sq"])]


def each_code(rule, state):
    """What is packed, one by one; of floats, their place in the order of their values."""
    codes = state[0]
    if rule == "adamw_4bit":
        codes = np.stack([codes >> 4, codes & 15], -1).ravel()
    else:
        codes = np.where(codes < 128, codes.astype(int), 128 - codes.astype(int)).astype(np.int16)
    return codes, state[1]


def check(rule, mine, their, coded):
    if not coded:
        return check_state(mine, their, False)
    assert apart(mine[1], their[1]) <= 1e-6
    steps = np.abs(each_code(rule, mine)[0].astype(int) - each_code(rule, their)[0].astype(int))
    assert (steps == 0).mean() >= 0.999, np.bincount(steps)
    assert steps.max() <= 1


def our_run(work, rule, weights, gradients, weight_decay, coded, done=0, before=()):
    return ours(work, rule, weights, gradients, LR, weight_decay, 2, coded, done, before, *RULES[rule][1:])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("elements", [300, 4096, 256 * 400])
@pytest.mark.parametrize("rule", RULES)
def test_each_step_from_their_state(tmp_path, rule, elements, weight_decay):
    weights, gradients = data(elements)
    coded = elements >= 4096
    theirs = Theirs(rule, weights, LR, weight_decay)
    for done, gradient in enumerate(gradients):
        weights, before = theirs.weights(), theirs.states()
        theirs.step(gradient)
        after, states = our_run(tmp_path, rule, weights, [gradient], weight_decay, coded, done, before)
        assert apart(after, theirs.weights()) <= 1e-6
        for mine, their in zip(states, theirs.states(), strict=True):
            check(rule, mine, their, coded)


@pytest.mark.parametrize("rule", RULES)
def test_twenty_steps(tmp_path, rule):
    weights, gradients = data(256 * 400)
    theirs = Theirs(rule, weights, LR, 0.1)
    for gradient in gradients:
        theirs.step(gradient)
    after, states = our_run(tmp_path, rule, weights, gradients, 0.1, True)
    assert apart(after, theirs.weights()) <= 1e-6
    for mine, their in zip(states, theirs.states(), strict=True):
        check(rule, mine, their, True)


def test_every_entry_of_the_maps_is_theirs(tmp_path):
    run("maps", "adamw_4bit", tmp_path / "maps")
    assert (tmp_path / "maps").read_bytes() == np.array([*get_qmap_signed(), *get_qmap_unsigned()], np.float32).tobytes()
    run("maps", "adamw_fp8", tmp_path / "maps")
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    mine = np.fromfile(tmp_path / "maps", np.float32).reshape(2, 256)
    numbers = ~np.isnan(values)
    assert numbers.sum() == 254
    for state in mine:
        assert state[numbers].tobytes() == values[numbers].tobytes()
