"""The training whose results are compared with transformers', and how near they must be: for every dtype the project has."""

from reference import cosine, relative, worst

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
