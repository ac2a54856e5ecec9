"""adamw_bf16 against torch's fused AdamW on a bf16 parameter, adamw_anyprecision against the formulas of torchdistx's AnyPrecisionAdamW:
weights and state have their bits."""

import numpy as np
import pytest
import torch
from rule_runs import data, run

ELEMENTS, STEPS = 10007, 5  # no multiple of any vector
SETTINGS = [(1e-3, 0.0, (0.9, 0.999)), (2e-2, 0.3, (0.8, 0.95))]  # lr, weight decay, betas


def bf16(values):
    """To nearest even, as fp32."""
    return torch.from_numpy(np.asarray(values, np.float32)).bfloat16().float().numpy()


def bits(values):
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy()


def inputs():
    weights, gradients = data(ELEMENTS)
    return bf16(weights), [bf16(g) for g in gradients[:STEPS]]


def ours(work, rule, weights, gradients, lr, weight_decay, betas, states):
    source, target = work / "input", work / "output"
    source.write_bytes(bits(weights).tobytes() + b"".join(g.tobytes() for g in gradients))
    run(rule, ELEMENTS, 0, len(gradients), lr, weight_decay, source, target, f"betas={betas[0]}:{betas[1]}")
    return np.frombuffer(target.read_bytes(), np.int16).reshape(1 + states, ELEMENTS)


def fused(weights, gradients, lr, weight_decay, betas):
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()).bfloat16())
    optimizer = torch.optim.AdamW([parameter], lr=lr, weight_decay=weight_decay, betas=betas, fused=True)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy()).bfloat16()
        optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == torch.bfloat16
    return [t.detach().view(torch.int16).numpy() for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]


@pytest.mark.parametrize("lr, weight_decay, betas", SETTINGS)
def test_adamw_bf16_has_the_bits_of_torchs_fused_adamw(tmp_path, lr, weight_decay, betas):
    weights, gradients = inputs()
    mine = ours(tmp_path, "adamw_bf16", weights, gradients, lr, weight_decay, betas, 2)
    for a, b in zip(mine, fused(weights, gradients, lr, weight_decay, betas), strict=True):
        assert (a == b).all(), (a != b).sum()


def fma(a, b, c):
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def any_precision(weights, gradients, lr, weight_decay, betas, eps=1e-8):
    """Every operation on tensors is rounded to bf16, with fp32 scalars, as on a GPU."""
    f = np.float32
    p, m, v, c = weights, *(np.zeros_like(weights) for _ in range(3))
    for t, g in enumerate(gradients, 1):
        step_size, root_correction = lr / (1 - betas[0] ** t), f((1 - betas[1] ** t) ** 0.5)
        if weight_decay:
            p = bf16(p * f(1 - lr * weight_decay))
        m = bf16(fma(f(1 - betas[0]), g, bf16(m * f(betas[0]))))
        v = bf16(fma(f(1 - betas[1]) * g, g, bf16(v * f(betas[1]))))
        d = bf16(bf16(bf16(np.sqrt(v)) / root_correction) + f(eps))
        c = bf16(c + f(-step_size) * m / d)
        before, p = p, bf16(p + c)
        c = bf16(c + bf16(before - p))
    return p, m, v, c


def any_precision_in_torch(weights, gradients, lr, weight_decay, betas, eps=1e-8):
    """The same by torch's own operations on bf16 tensors. Its CPU code rounds the factor of a sum to bf16: exact for betas[0] = 0.875."""
    p = torch.from_numpy(weights.copy()).bfloat16()
    m, v, c = (torch.zeros_like(p) for _ in range(3))
    for t, gradient in enumerate(gradients, 1):
        g = torch.from_numpy(gradient.copy()).bfloat16()
        p.mul_(1 - lr * weight_decay)
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        d = (v.sqrt() / (1 - betas[1] ** t) ** 0.5).add_(eps)
        c.addcdiv_(m, d, value=-lr / (1 - betas[0] ** t))
        before = p.clone()
        p.add_(c)
        c.add_(before.sub_(p))
    return [t.view(torch.int16).numpy() for t in (p, m, v, c)]


@pytest.mark.parametrize("lr, weight_decay, betas", SETTINGS)
def test_adamw_anyprecision_has_the_bits_of_its_formulas(tmp_path, lr, weight_decay, betas):
    weights, gradients = inputs()
    mine = ours(tmp_path, "adamw_anyprecision", weights, gradients, lr, weight_decay, betas, 3)
    for a, b in zip(mine, any_precision(weights, gradients, lr, weight_decay, betas), strict=True):
        assert (a == bits(b)).all(), (a != bits(b)).sum()


@pytest.mark.parametrize("lr, weight_decay", [(1e-3, 0.0), (2e-2, 0.3)])
def test_adamw_anyprecision_has_the_bits_of_torchs_operations(tmp_path, lr, weight_decay):
    weights, gradients = inputs()
    mine = ours(tmp_path, "adamw_anyprecision", weights, gradients, lr, weight_decay, (0.875, 0.999), 3)
    for a, b in zip(mine, any_precision_in_torch(weights, gradients, lr, weight_decay, (0.875, 0.999)), strict=True):
        assert (a == b).all(), (a != b).sum()


def test_compensation_keeps_what_the_rounding_loses(tmp_path):
    """Steps of a thousandth of a bf16 number's last place: to nearest they are lost, compensated they add up."""
    weights, gradients = np.ones(ELEMENTS, np.float32), [np.ones(ELEMENTS, np.float32)] * 100
    lost = ours(tmp_path, "adamw_bf16", weights, gradients, 1e-4, 0.0, (0.9, 0.999), 2)
    kept = ours(tmp_path, "adamw_anyprecision", weights, gradients, 1e-4, 0.0, (0.9, 0.999), 3)
    assert (lost[0] == bits(weights)).all()
    moved = torch.from_numpy(kept[0].copy()).view(torch.bfloat16).float().numpy()
    assert np.abs(moved - 0.99).max() <= 2.0**-8
