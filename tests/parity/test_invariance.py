"""What must not change a result: packing, accumulation, recomputation, threads, and running again."""

import pytest
import tiny_models
import tool
from counts import some_of
from reference import relative, worst

MODELS = ["llama_three_heads_per_key_tied_with_pad_token", "qwen3_tied_biases", "mistral_window_shorter_than_documents",
          "qwen2_tied_last_layer_slides", "gemma4_text_inputs_and_borrowed_keys", "qwen3_moe_one_dense_layer", "gpt_oss",
          *some_of("gemma2", "gemma4_text", "cohere2", "olmo3_odd", "starcoder2")]
TRAIN = dict(steps=3, lr=1e-3, weight_decay=0.1)


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """(model's directory, documents, the result of the plain run)."""
    directory = tmp_path_factory.mktemp("model")
    model = tiny_models.make(request.param, directory)
    documents = tiny_models.documents(request.param, model)
    return directory, documents, tool.run(directory, documents, directory / "plain", **TRAIN)


def test_packed_documents_are_what_they_are_alone(case):
    directory, documents, packed = case
    total = sum((d.target >= 0).sum().item() for d in documents)
    loss, first = 0.0, 0
    gradients = {name: 0.0 for name in packed["gradients"]}
    for i, document in enumerate(documents):
        last, targets = first + len(document.token), (document.target >= 0).sum().item()
        alone = tool.run(directory, [document], directory / f"alone{i}")
        assert relative(packed["logits"][first:last], alone["logits"]) <= 1e-5
        first = last
        if targets:  # else it has no loss to speak of
            loss += alone["loss"].item() * targets / total
            for name, gradient in alone["gradients"].items():
                gradients[name] = gradients[name] + gradient.double() * targets / total
    assert packed["loss"].item() == pytest.approx(loss, rel=1e-6)
    errors = worst(packed["gradients"], gradients, relative)
    assert errors[0][0] <= 1e-5, errors[:5]


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_is_one_batch(case, micro_batches):
    directory, documents, plain = case
    split = tool.run(directory, documents, directory / "split", micro_batches=micro_batches, **TRAIN)
    assert split["losses"].tolist() == pytest.approx(plain["losses"].tolist(), rel=1e-6)
    errors = worst(split["gradients"], plain["gradients"], relative)
    assert errors[0][0] <= 1e-5, errors[:5]
    errors = worst(split["weights"], plain["weights"], relative)
    assert errors[0][0] <= 1e-4, errors[:5]


def test_a_document_without_targets_changes_nothing(case):
    directory, documents, plain = case
    without = tool.run(directory, documents[:3] + documents[4:], directory / "without")
    assert without["loss"].item() == pytest.approx(plain["loss"].item(), rel=1e-6)
    errors = worst(without["gradients"], plain["gradients"], relative)
    assert errors[0][0] <= 1e-5, errors[:5]


def test_two_threads_compute_the_same(case):
    directory, documents, plain = case
    two = tool.run(directory, documents, directory / "two", threads=2, **TRAIN)
    assert two["losses"].tolist() == pytest.approx(plain["losses"].tolist(), rel=1e-6)
    errors = worst(two["gradients"], plain["gradients"], relative)
    assert errors[0][0] <= 1e-5, errors[:5]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputation_and_repetition_change_no_bit(case, dtype):
    directory, documents, _ = case
    plain = tool.run(directory, documents, directory / "again", dtype=dtype, recompute="none", **TRAIN)
    assert tool.run(directory, documents, directory / "again", dtype=dtype, recompute="none", **TRAIN)["bytes"] == plain["bytes"]
    for level in ("attention", "2", "block"):
        assert tool.run(directory, documents, directory / "again", dtype=dtype, recompute=level, **TRAIN)["bytes"] == plain["bytes"], level


def test_bf16_gradients_are_the_rounded_ones(case):
    directory, documents, _ = case
    exact = tool.run(directory, documents, directory / "fp32", dtype="bf16", gradients="fp32")
    rounded = tool.run(directory, documents, directory / "bf16", dtype="bf16", gradients="bf16")
    errors = worst(rounded["gradients"], exact["gradients"], relative)
    assert errors[0][0] <= 2 ** -7, errors[:5]  # one micro-batch: at most a few roundings of 2^-9 each
