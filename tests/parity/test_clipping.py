"""Clipping by the norm of all gradients, against torch's clip_grad_norm_: full and LoRA, with state on the device and off it.

Adam hides how long a gradient is: m and sqrt(v) grow alike. With an eps that outweighs sqrt(v) a step is as long as what clipping
has left of the gradient, so that the change of the weights shows the factor."""

import pytest
import reference
import tiny_models
import tool
from reference import changes, relative, worst
from test_lora import adapted, file_names

OPTIONS = dict(steps=4, lr=0.3, weight_decay=0.0, eps=1.0)
MODEL = "qwen3_tied_biases"
MAX_NORM = {"full": 0.7, "lora": 0.2}  # below the norm of every step, and no power of two


@pytest.fixture(scope="module", params=["full", "lora"])
def case(request, tmp_path_factory):
    """(method, model's directory, documents, the tool's options, what torch makes of it)."""
    directory = tmp_path_factory.mktemp(request.param)
    options = dict(OPTIONS, max_grad_norm=MAX_NORM[request.param])
    if request.param == "lora":
        model = adapted(MODEL, directory, dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
        options["adapter"] = directory / "adapter"
    else:
        model = tiny_models.make(MODEL, directory / "base")
    documents = reference.random_documents(model.config.vocab_size)
    theirs = reference.train(model, documents, OPTIONS["steps"], OPTIONS["lr"], OPTIONS["weight_decay"], MAX_NORM[request.param], OPTIONS["eps"])
    return request.param, directory / "base", documents, options, theirs


@pytest.mark.parametrize("off_device", ["none", "disk", "host"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_are_as_long_as_torchs(case, tmp_path, off_device, micro_batches):
    method, directory, documents, options, theirs = case
    ours = tool.run(directory, documents, tmp_path, off_device=off_device, micro_batches=micro_batches, **options)
    assert min(theirs["norms"]) > 1.5 * MAX_NORM[method], theirs["norms"]
    assert ours["norms"].tolist() == pytest.approx(theirs["norms"], rel=1e-5)
    before, after = (file_names(theirs[what]) for what in ("first_weights", "weights"))
    errors = worst(changes(ours["masters"], before), changes(after, before), relative)
    assert errors[0][0] <= 2e-4, errors[:5]
    if off_device != "none":  # and no bit depends on where it was clipped
        resident = tool.run(directory, documents, tmp_path / "resident", micro_batches=micro_batches, **options)
        assert all((resident[what] == ours[what]).all() for what in ("losses", "norms"))
        assert all((resident["masters"][name] == ours["masters"][name]).all() for name in resident["masters"])
