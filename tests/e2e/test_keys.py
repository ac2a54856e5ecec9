"""Keys that decide together: every one does what its help says with every other that it is accepted with, or is refused with
both values. Learning rates are torch's."""

import json

import pytest
import torch
from test_run import config, lmlaunch, rows, work  # noqa: F401

LR, STEPS, WARMUP = 0.5, 20, 4


def torch_rates(after, warmup=WARMUP, count=STEPS):
    """The rates of a torch scheduler for the steps after a linear warm-up from 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = after(optimizer)
    rates = [LR * t / warmup for t in range(warmup)]
    while len(rates) < count:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


FALL = STEPS - WARMUP
SCHEDULES = {
    "linear": (0.2, lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.2, FALL)),
    "cosine": (0.2, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, FALL, 0.2 * LR)),
    "cosine_with_restarts": (0.2, lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, FALL, eta_min=0.2 * LR)),
    "polynomial": (0, lambda o: torch.optim.lr_scheduler.PolynomialLR(o, FALL)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_has_the_rates_of_torch(work, schedule):
    floor, after = SCHEDULES[schedule]
    name = f"rate_{schedule}"
    lmlaunch(config(work, name, train__steps=STEPS, train__global_batch=2, train__micro_batch=2, optimizer__schedule=schedule,
                    optimizer__lr=LR, optimizer__warmup=WARMUP, optimizer__min_lr_ratio=floor), cwd=work)
    rates = [row["lr"] for row in rows(work, name) if "loss" in row]
    assert rates == pytest.approx(torch_rates(after), rel=1e-6, abs=1e-6)  # polynomial ends at 1e-7


def test_a_plateau_follows_the_evaluations_after_its_warmup(work):
    name, warmup, steps = "rate_plateau", 3, 40
    lmlaunch(config(work, name, train__steps=steps, train__global_batch=2, train__micro_batch=2, train__eval_every=1,
                    optimizer__schedule="reduce_lr_on_plateau", optimizer__lr=LR, optimizer__warmup=warmup,
                    optimizer__min_lr_ratio=0.3), cwd=work)
    rates = [row["lr"] for row in rows(work, name) if "loss" in row]
    losses = {row["step"]: row["eval_loss"] for row in rows(work, name) if "eval_loss" in row}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=0.3 * LR)
    expected = []
    for step in range(1, steps + 1):
        rate = optimizer.param_groups[0]["lr"]
        expected.append(rate * min(1.0, (step - 1) / warmup))
        if step > warmup:
            plateau.step(losses[step])
    assert rates == pytest.approx(expected, rel=1e-9)
    assert rates[warmup] == LR and min(rates[warmup:]) < LR  # it warmed up, and it fell


def test_a_warmup_that_does_not_end_is_refused(work):
    done = lmlaunch(config(work, "cold", train__steps="auto", train__epochs=1, optimizer__schedule="linear", optimizer__warmup=500),
                    cwd=work, check=False)
    assert done.returncode == 10 and "optimizer.warmup is 500 steps, and the run has 8 in all" in done.stderr
