"""adafactor, a tensor at a time, against transformers' own, and adafactor_lowmem against its formulas in fp64: five steps, the
same gradients, the statistics too."""

import numpy as np
import pytest
import torch
from rule_runs import apart, data, run
from transformers.optimization import Adafactor

STEPS = 5
SHAPES = [(300,), (1, 70), (24, 64), (70, 3), (130, 300), (5000, 16)]


def ours(work, rule, weights, gradients, lr, weight_decay, dtype, **keys):
    """The weights, and the statistics: (rows, columns) or (v,)."""
    source, target = work / "input", work / "output"
    source.write_bytes(b"".join(a.tobytes() for a in (weights, *gradients)))
    shape = "x".join(str(n) for n in weights.shape)
    run(rule, shape, 0, len(gradients), lr, weight_decay, source, target, *(f"{k}={float(v)}" for k, v in keys.items()))
    after = np.fromfile(target, np.float32, count=weights.size)
    rest, parts = np.fromfile(target, dtype, offset=weights.nbytes), []
    for n in weights.shape:
        parts.append(rest[:n])
        rest = rest[n:]
    assert not rest.size
    return after.reshape(weights.shape), parts


def tensors(shape):
    weights, gradients = data(int(np.prod(shape)))
    return weights.reshape(shape), [g.reshape(shape) for g in gradients[:STEPS]]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("keys", [{}, {"scale_parameter": True}, {"relative_step": True}, {"clip_threshold": 0.3, "decay_rate": -0.5},
                                  {"relative_step": True, "warmup_init": True, "scale_parameter": True}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_five_steps_are_transformerss(tmp_path, shape, keys, weight_decay):
    weights, gradients = tensors(shape)
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    relative = keys.get("relative_step", False)
    theirs = Adafactor([parameter], lr=None if relative else 1e-2, weight_decay=weight_decay,
                       **{"scale_parameter": False, "relative_step": False} | keys)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        theirs.step()
    after, mine = ours(tmp_path, "adafactor", weights, gradients, 1 if relative else 1e-2, weight_decay, np.float32, **keys)
    assert apart(after, parameter.detach().numpy()) <= 1e-6
    # What has moved; with warmup_init that is a few units in the last place.
    assert apart(after - weights, parameter.detach().numpy() - weights) <= (0.1 if "warmup_init" in keys else 1e-5)
    state = theirs.state[parameter]
    theirs_state = [state[name].numpy().ravel() for name in ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq") if name in state]
    for a, b in zip(mine, theirs_state, strict=True):
        assert apart(a, b) <= 1e-6


def bf16(x):
    return torch.from_numpy(np.asarray(x)).bfloat16().double().numpy()


def lowmem(weights, gradients, lr, weight_decay, beta2=0.99):
    p = weights.astype(np.float64)
    state = [np.zeros(n) for n in p.shape]
    for gradient in gradients:
        g = gradient.astype(np.float64)
        if p.ndim == 1:
            state[0] = bf16(beta2 * state[0] + (1 - beta2) * g * g)
            u = g / (np.sqrt(state[0]) + 1e-30)
        else:
            state = [bf16(beta2 * s + (1 - beta2) * (g * g).mean(1 - d)) for d, s in enumerate(state)]
            u = g / (np.sqrt(np.outer(*state) / state[0].mean()) + 1e-30)
        size = max(np.linalg.norm(p), 1e-3 * np.sqrt(p.size))
        p = p * (1 - lr * weight_decay) - lr * size * u / (np.linalg.norm(u) + 1e-20)
    return p, state


@pytest.mark.parametrize("start", [1, 0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_five_steps_of_lowmem_are_its_formulas(tmp_path, shape, start):
    weights, gradients = tensors(shape)
    weights *= start
    after, mine = ours(tmp_path, "adafactor_lowmem", weights, gradients, 1e-2, 0.1, np.uint16)
    want, state = lowmem(weights, gradients, 1e-2, 0.1)
    # A statistic next to the middle of two bf16 numbers may become either.
    equal = [(m.astype(np.uint32) << 16).view(np.float32) == s for m, s in zip(mine, state, strict=True)]
    assert np.concatenate(equal).mean() >= 0.99
    assert apart(after, want) <= (1e-6 if np.concatenate(equal).all() else 1e-4)


def test_what_is_a_percent_off_is_seen(tmp_path):
    weights, gradients = tensors((24, 64))
    after, _ = ours(tmp_path, "adafactor_lowmem", weights, gradients, 1e-2, 0.1, np.uint16)
    assert apart(after, lowmem(weights, gradients, 1.01e-2, 0.1)[0]) > 5e-5
