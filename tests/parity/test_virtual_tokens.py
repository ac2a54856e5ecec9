"""Prefix, prompt and P-tuning against peft: virtual tokens before every document."""

from types import SimpleNamespace

import peft
import pytest
import reference
import tiny_models
import tool
import torch
from bounds import check_changes
from safetensors.torch import save_file
from test_models import LR, STEPS, WEIGHT_DECAY, check, check_all

PREFIX, PROMPT, ENCODED = peft.PrefixTuningConfig, peft.PromptTuningConfig, peft.PromptEncoderConfig
# name -> (model, configuration, virtual tokens, further arguments of tool.run). A prefix has neither the norm nor the RoPE of keys; a
# window leaves a part of it behind; two of these models multiply the embedding, and one of the two a prompt as well.
CASES = {
    "prefix": ("llama_three_heads_per_key_tied_with_pad_token", PREFIX, 5, {}),
    "prefix_recomputed": ("qwen3_untied", PREFIX, 4, dict(recompute="block")),
    "prefix_under_a_window": ("mistral_window_shorter_than_documents", PREFIX, 4, {}),
    "prefix_of_micro_batches": ("llama_every_head_its_own_keys_odd_sizes", PREFIX, 3, dict(micro_batches=3, recompute="attention")),
    "prefix_of_gpt2": ("gpt2_odd_own_width", PREFIX, 5, {}),
    "prompt": ("llama_three_heads_per_key_tied_with_pad_token", PROMPT, 5, dict(micro_batches=2)),
    "prompt_untied": ("qwen3_untied", PROMPT, 4, dict(recompute="block")),
    "prompt_beside_positions": ("gpt2_odd_own_width", PROMPT, 3, {}),
    "prompt_is_scaled": (next(name for name in tiny_models.ALL if name.startswith("granite_")), PROMPT, 3, {}),
    "prompt_is_not_scaled": (next(name for name in tiny_models.ALL if name.startswith("gemma_")), PROMPT, 3, {}),
}
# P-tuning: the encoder has the model's size, or one of its own.
ENCODERS = {
    "plain": ("llama_three_heads_per_key_tied_with_pad_token", 5, None, {}),
    "untied_of_micro_batches": ("qwen3_untied", 4, 24, dict(recompute="block", micro_batches=3)),
    "beside_positions": ("gpt2_odd_own_width", 3, 40, dict(recompute="attention")),
    "scaled": (next(name for name in tiny_models.ALL if name.startswith("granite_")), 3, 7, dict(micro_batches=2)),
    "of_one_token": ("mistral_window_shorter_than_documents", 1, 16, {}),
}


class OfTheText(torch.nn.Module):
    """peft's model, whose logits are those of a document's own tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.model(input_ids=input_ids).logits[:, -input_ids.shape[1]:])


def adapted(base, directory, make, count, dtype=torch.float32):
    model = tiny_models.make(base, directory / "base", dtype)
    model = peft.get_peft_model(model, make(task_type="CAUSAL_LM", num_virtual_tokens=count))
    values, = [p for p in model.parameters() if p.requires_grad]
    # As large as what they stand among: a prefix of standard deviation 1 leaves no weight to other keys.
    values.data.copy_(0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(11)))
    model.save_pretrained(directory / "adapter")
    return model


def encoded(base, directory, count, hidden, dtype=torch.float32):
    """peft's model with an encoder, and beside what it saves the encoder's own tensors, as our checkpoints name them."""
    torch.manual_seed(11)
    model = tiny_models.make(base, directory / "base", dtype)
    model = peft.get_peft_model(model, ENCODED(task_type="CAUSAL_LM", num_virtual_tokens=count, encoder_hidden_size=hidden))
    encoder = model.prompt_encoder["default"]
    for name, value in encoder.named_parameters():
        # Outputs as large as a token's embedding, and no inner output that is 0 for every token.
        value.data.mul_(2 if name.endswith("weight") and "mlp_head" in name else 1)
    model.save_pretrained(directory / "saved")
    (directory / "adapter").mkdir(exist_ok=True)
    (directory / "adapter/adapter_config.json").write_text((directory / "saved/adapter_config.json").read_text())
    save_file({f"prompt_encoder.{name}": value.data.contiguous() for name, value in encoder.named_parameters()}, directory / "adapter/adapter_model.safetensors")
    return model, hidden or encoder.hidden_size


def as_here(tensors):
    """peft's names of an encoder's tensors, which have the adapter's name in them."""
    return {"prompt_encoder." + name.partition("prompt_encoder.default.")[2]: value for name, value in tensors.items()}


def with_virtual_tokens(documents, count):
    before = [torch.full((count,), value) for value in (0, -1)]
    return [reference.Document(torch.cat([before[0], d.token]), torch.cat([before[1], d.target])) for d in documents]


def of_the_text(logits, documents, count):
    """Rows of logits without those of virtual tokens."""
    parts = logits.split([count + len(d.token) for d in documents])
    return torch.cat([part[count:] for part in parts])


def as_in_the_file(tensors):
    """A prefix has its own tensor in every layer here, and one in the files."""
    parts = sorted(tensors, key=lambda name: int(name.rpartition(".")[2]) if "." in name else 0)
    return {"prompt_embeddings": torch.cat([tensors[name] for name in parts], dim=1)}


def documents_of(base, model):
    return [d for d in tiny_models.documents(base, model.base_model) if len(d.token) < 60]


def run_encoded(base, directory, documents, count, hidden, name="run", **options):
    return tool.run(directory / "base", with_virtual_tokens(documents, count), directory / name, adapter=directory / "adapter",
                    encoder=hidden, **tiny_models.options(base), **options)


def run(base, directory, documents, count, name="run", **options):
    ours = tool.run(directory / "base", with_virtual_tokens(documents, count), directory / name, adapter=directory / "adapter",
                    **tiny_models.options(base), **options)
    for what in ("gradients", "weights", "masters"):
        ours[what] = as_in_the_file(ours[what]) if ours[what] else ours[what]
    return ours


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_virtual_tokens_are_trained_as_pefts(tmp_path, name):
    base, make, count, options = CASES[name]
    model = adapted(base, tmp_path, make, count)
    documents = documents_of(base, model)
    theirs = reference.train(OfTheText(model), documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = {"prompt_embeddings": value for value in theirs[what].values()}
    ours = run(base, tmp_path, documents, count, steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY, **options)
    check("fp32", of_the_text(ours["logits"], documents, count), theirs["logits"])
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-5)
    assert reference.relative(ours["gradients"]["prompt_embeddings"], theirs["gradients"]["prompt_embeddings"]) <= 1e-5
    check_all("fp32", ours["weights"], theirs["weights"])
    check_changes("fp32", ours["masters"], theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [PREFIX, PROMPT], ids=["prefix", "prompt"])
def test_virtual_tokens_in_fp32_are_of_a_bf16_model(tmp_path, make):
    base = "llama_three_heads_per_key_tied_with_pad_token"
    model = adapted(base, tmp_path, make, 5, torch.bfloat16)
    documents = documents_of(base, model)
    theirs = reference.train(OfTheText(model), documents, STEPS, LR, WEIGHT_DECAY)
    ours = run(base, tmp_path, documents, 5, dtype="bf16", adapter_dtype="fp32", steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY)
    check("bf16", of_the_text(ours["logits"], documents, 5), theirs["logits"])
    check_all("bf16", ours["gradients"], {"prompt_embeddings": value for value in theirs["gradients"].values()})


@pytest.mark.parametrize("make", [PREFIX, PROMPT], ids=["prefix", "prompt"])
def test_documents_of_a_row_do_not_see_each_others_virtual_tokens(tmp_path, make):
    """Every document alone in its micro-batch, or all in one."""
    base = "qwen3_untied"
    model = adapted(base, tmp_path, make, 4)
    documents = documents_of(base, model)
    packed, alone = (run(base, tmp_path, documents, 4, name=str(count), micro_batches=count) for count in (1, len(documents)))
    assert reference.relative(packed["logits"], alone["logits"]) <= 1e-6
    check_all("fp32", packed["gradients"], alone["gradients"])


@pytest.mark.parametrize("make", [PREFIX, PROMPT], ids=["prefix", "prompt"])
def test_where_the_base_lives_does_not_change_virtual_tokens(tmp_path, make):
    base = "llama_three_heads_per_key_tied_with_pad_token"
    model = adapted(base, tmp_path, make, 5)
    documents = documents_of(base, model)
    here, away = (run(base, tmp_path, documents, 5, name=home, steps=STEPS, lr=LR, off_device=home) for home in ("none", "disk"))
    assert torch.equal(here["weights"]["prompt_embeddings"], away["weights"]["prompt_embeddings"])
    assert torch.equal(here["losses"], away["losses"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [PREFIX, PROMPT], ids=["prefix", "prompt"])
@pytest.mark.parametrize("base", ["llama_three_heads_per_key_tied_with_pad_token", "mistral_window_shorter_than_documents"])
def test_a_text_continues_behind_virtual_tokens(tmp_path, base, make):
    """The likeliest tokens, from the cache here and each from the whole text there; several texts in one pass, too."""
    model = adapted(base, tmp_path, make, 4)
    documents = [d for d in documents_of(base, model) if len(d.token) > 2]
    of_text = OfTheText(model.eval())
    expected = []
    for document in documents:
        text = document.token
        for _ in range(6):
            text = torch.cat([text, of_text(text[None]).logits[0, -1].argmax()[None]])
        expected.append(text[-6:])
    for together in ({}, {"together": "yes"}):
        found = tool.run(tmp_path / "base", documents, tmp_path / "run", adapter=tmp_path / "adapter", generate=6, **tiny_models.options(base), **together)
        assert torch.equal(found, torch.stack(expected))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_trained_as_pefts(tmp_path, name):
    base, count, hidden, options = ENCODERS[name]
    model, hidden = encoded(base, tmp_path, count, hidden)
    documents = documents_of(base, model)
    theirs = reference.train(OfTheText(model), documents, STEPS, LR, WEIGHT_DECAY)
    for what in ("gradients", "weights", "first_weights"):
        theirs[what] = as_here(theirs[what])
    assert len(theirs["gradients"]) == 7 and all(value.abs().max() > 0 for value in theirs["gradients"].values())
    ours = run_encoded(base, tmp_path, documents, count, hidden, steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY, **options)
    assert reference.relative(of_the_text(ours["logits"], documents, count), theirs["logits"]) <= 1e-5
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-5)
    errors = reference.worst(ours["gradients"], theirs["gradients"], reference.relative)
    assert errors[0][0] <= 1e-5, errors
    check_all("fp32", ours["weights"], theirs["weights"])
    check_changes("fp32", ours["masters"], theirs)


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_in_fp32_is_of_a_bf16_model(tmp_path):
    base = "llama_three_heads_per_key_tied_with_pad_token"
    model, hidden = encoded(base, tmp_path, 5, None, torch.bfloat16)
    documents = documents_of(base, model)
    theirs = reference.train(OfTheText(model), documents, STEPS, LR, WEIGHT_DECAY)
    ours = run_encoded(base, tmp_path, documents, 5, hidden, dtype="bf16", adapter_dtype="fp32", steps=STEPS, lr=LR, weight_decay=WEIGHT_DECAY)
    check("bf16", of_the_text(ours["logits"], documents, 5), theirs["logits"])
    check_all("bf16", ours["gradients"], as_here(theirs["gradients"]))


def test_documents_of_a_row_share_an_encoder_and_not_their_virtual_tokens(tmp_path):
    base = "qwen3_untied"
    model, hidden = encoded(base, tmp_path, 4, 24)
    documents = documents_of(base, model)
    packed, alone = (run_encoded(base, tmp_path, documents, 4, hidden, name=str(count), micro_batches=count) for count in (1, len(documents)))
    assert reference.relative(packed["logits"], alone["logits"]) <= 1e-6
    check_all("fp32", packed["gradients"], alone["gradients"])


def test_where_state_lives_does_not_change_an_encoder(tmp_path):
    base = "llama_three_heads_per_key_tied_with_pad_token"
    model, hidden = encoded(base, tmp_path, 5, None)
    documents = documents_of(base, model)
    here, away = (run_encoded(base, tmp_path, documents, 5, hidden, name=home, steps=STEPS, lr=LR, off_device=home) for home in ("none", "disk"))
    assert all(torch.equal(here["weights"][name], away["weights"][name]) for name in here["weights"])
    assert torch.equal(here["losses"], away["losses"])


@pytest.mark.filterwarnings("ignore")
def test_a_text_continues_behind_what_an_encoder_makes(tmp_path):
    """The same answers from the encoder and from the embeddings that peft saves of it."""
    base = "llama_three_heads_per_key_tied_with_pad_token"
    model, hidden = encoded(base, tmp_path, 4, None)
    documents = [d for d in documents_of(base, model) if len(d.token) > 2]
    of_text = OfTheText(model.eval())
    expected = []
    for document in documents:
        text = document.token
        for _ in range(6):
            text = torch.cat([text, of_text(text[None]).logits[0, -1].argmax()[None]])
        expected.append(text[-6:])
    for what in (dict(adapter=tmp_path / "adapter", encoder=hidden), dict(adapter=tmp_path / "saved"), dict(adapter=tmp_path / "adapter", encoder=hidden, together="yes")):
        found = tool.run(tmp_path / "base", documents, tmp_path / "run", generate=6, **tiny_models.options(base), **what)
        assert torch.equal(found, torch.stack(expected)), what
