"""The training whose results are compared with transformers', and how near they must be: for every dtype the project has."""

import torch
from reference import changes, cosine, is_decayed, relative, worst

STEPS, LR, WEIGHT_DECAY = 5, 2e-4, 0.1  # a larger rate shows how Adam amplifies the sign of a gradient of 1e-9
LOSS = {"fp32": 1e-5, "bf16": 5e-3}     # relative
LOSSES = {"fp32": 1e-4, "bf16": 1e-2}   # after each step


def check(dtype, ours, theirs):
    if dtype == "fp32":
        assert relative(ours, theirs) <= 1e-4, f"relative error {relative(ours, theirs):.2g}"
    else:
        assert cosine(ours, theirs) >= 0.999, f"cosine {cosine(ours, theirs):.5f}"


def check_all(dtype, ours, theirs):
    if dtype == "fp32":
        errors = worst(ours, theirs, relative)
        assert errors[0][0] <= 1e-4, errors[:5]
    else:
        errors = worst(ours, theirs, cosine)
        assert errors[0][0] >= 0.999, errors[:5]


# What five steps make of the masters, w5 - w0: of the weights themselves it is a hundredth, in which a wrong rate drowns. Each
# bound is three times the worst of all models and adapters: in fp32 0.0015 per tensor (signs of gradients of 1e-9); in bf16
# 0.27 per tensor (a key's bias), 0.086 of all together, 0.0032 of their length, 0.11 of what weight decay takes (LoRA).
CHANGE = {"fp32": 5e-3, "bf16": 0.8}  # relative, per tensor; 1 is a tensor that was not updated
CHANGE_OF_ALL = 0.25                  # bf16: relative, of all tensors as one
CHANGE_LENGTH = 0.01                  # bf16: of all tensors as one, along the reference; 0.046 is a rate 5 % too high
DECAY = 0.35                          # bf16: share of the decay that is missing; 1 is none


def determined(tensors, idle):
    """`tensors` without elements whose gradient is nothing but rounding, of which Adam makes steps nevertheless. Each of `idle` is the
    end of a name, a period and a range in it: in GPT-2 a key's bias moves all scores of a query alike, and so it does in columns that
    RoPE does not turn."""
    out = dict(tensors)
    for end, period, first, last in idle:
        for name in [name for name in tensors if name.endswith(end)]:
            place = torch.arange(tensors[name].numel()) % period
            out[name] = tensors[name].flatten()[(place < first) | (place >= last)]
    return out


def check_changes(dtype, ours, theirs):
    """`ours`: masters after STEPS steps; `theirs`: what reference.train gives, by the same names."""
    before = theirs["first_weights"]
    ours, theirs = changes(ours, before), changes(theirs["weights"], before)
    errors = worst(ours, theirs, relative)
    assert errors[0][0] <= CHANGE[dtype], errors[:5]
    if dtype == "fp32":
        return
    dot = lambda a, b: sum((a[name].double() * b[name].double()).sum().item() for name in b)
    difference = {name: ours[name] - theirs[name] for name in theirs}
    decayed = {name: before[name] for name in before if is_decayed(name)}
    of_all = (dot(difference, difference) / dot(theirs, theirs)) ** 0.5
    length = dot(ours, theirs) / dot(theirs, theirs) - 1
    decay = dot(difference, decayed) / dot(decayed, decayed) / (LR * WEIGHT_DECAY * STEPS)
    assert of_all <= CHANGE_OF_ALL and abs(length) <= CHANGE_LENGTH and abs(decay) <= DECAY, (of_all, length, decay)
