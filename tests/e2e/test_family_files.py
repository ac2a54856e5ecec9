"""Whole runs of families whose files differ most from Llama's: fused modules, matrices that lie the other way round, a model that holds
the text model, values that nobody trains. transformers and peft load what comes out and compute what this program does; what was
not trained has its bits."""

import json
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_run import config, lmlaunch, losses

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
import test_families as forms  # noqa: E402
import tiny_models  # noqa: E402
import tool  # noqa: E402
from reference import relative  # noqa: E402

# name -> (model, how its files are changed)
FULL = {"glm4_moe_odd_groups_without_renormalisation": None, "minimax_m2": None, "phi3": None, "gpt2": None, "glm4": None, "granitemoehybrid_dense": None, "gemma4_text_in_gemma4": None, "gemma4_text_odd_inputs_in_gemma4": None, "gemma4_text_odd_experts_in_gemma4": None,
        "gemma3_text_in_gemma3": None,
        "mistral_in_mistral3": forms.prefixes_of_5}
LORA = ["phi3", "gpt2", "gemma3_text_in_gemma3", "gemma4_text_odd_inputs_in_gemma4", "gemma4_text_experts"]
SETTINGS = dict(train__steps=12, train__global_batch=4, train__micro_batch=2, optimizer__lr=3e-3, checkpoint__every=12)


def make_work(work, name, form=None):
    model = tiny_models.make(name, work / "model")
    if form is not None:
        form(work / "model")
    (work / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    vocab = tiny_models.text_config(model).vocab_size
    generator = torch.Generator().manual_seed(2)
    for file, count in [("train", 16), ("eval", 4)]:
        lengths = torch.randint(5, 30, (count,), generator=generator).tolist()
        rows = [torch.randint(4, vocab, (length,), generator=generator).tolist() for length in lengths]
        (work / f"{file}.jsonl").write_text("".join(json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in rows))
    return tiny_models.documents(name, model)


def tensors(directory, name="model.safetensors"):
    return load_file(directory / name)


def logits(model, documents):
    with torch.no_grad():
        return torch.cat([model(input_ids=document.token[None]).logits[0] for document in documents])


@pytest.fixture(scope="module", params=FULL)
def full(request, tmp_path_factory):
    work = tmp_path_factory.mktemp(request.param)
    documents = make_work(work, request.param, FULL[request.param])
    lmlaunch(config(work, "full", **SETTINGS), cwd=work)
    return work, documents


def test_transformers_computes_with_the_result_what_this_program_does(full):
    work, documents = full
    directory = work / "runs" / "full" / "model"
    (architecture,) = json.loads((directory / "config.json").read_text())["architectures"]
    found = getattr(transformers, architecture).from_pretrained(directory, output_loading_info=True, attn_implementation="eager")
    assert not any(found[1][key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found[1]
    ours = tool.run(directory, documents, work / "tool")["logits"]
    assert relative(ours, logits(found[0].eval(), documents)) <= 1e-4
    assert relative(ours, tool.run(work / "model", documents, work / "tool")["logits"]) > 1e-3  # it was trained


def test_the_result_has_every_tensor_of_its_source_and_what_is_not_trained_has_its_bits(full):
    work, _ = full
    before, after = tensors(work / "model"), tensors(work / "runs" / "full" / "model")
    assert {key: (t.shape, t.dtype) for key, t in after.items()} == {key: (t.shape, t.dtype) for key, t in before.items()}
    kept = {key for key in before if tiny_models.is_of_tower(key) or key.endswith(("layer_scalar", "e_score_correction_bias"))}
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    idle = {key for key in before.keys() - changed - kept if ".experts." in key}  # no token met them
    assert 3 * len(idle) < 2 * sum(".experts." in key for key in before) + 1 and changed == before.keys() - kept - idle


def test_a_run_of_it_is_resumed_verified_and_trained_further(full):
    work, _ = full
    lmlaunch("export", "runs/full", "-o", "exported", cwd=work)
    (checkpoint,) = (work / "runs" / "full" / "checkpoints").iterdir()
    hashes = {json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["weights_hash"] for what in ("runs/full", "exported", checkpoint)}
    assert len(hashes) == 1
    lmlaunch(config(work, "more", **{**SETTINGS, "model__path": "runs/full", "train__steps": 1}), cwd=work)
    assert losses(work, "more")[0][0] < losses(work, "full")[0][0]


@pytest.fixture(scope="module", params=LORA)
def lora(request, tmp_path_factory):
    work = tmp_path_factory.mktemp(request.param)
    documents = make_work(work, request.param)
    lmlaunch(config(work, "lora", **{**SETTINGS, "optimizer__lr": 3e-2}, train__method="lora", lora__r=4, lora__alpha=8), cwd=work)
    return work, documents


def with_adapter(work):
    return peft.PeftModel.from_pretrained(tiny_models.load(work / "model", torch.float32), work / "runs" / "lora" / "model").eval()


def test_peft_loads_the_adapter_on_the_class_of_the_base(lora):
    work, documents = lora
    model = with_adapter(work)
    stored = tensors(work / "runs" / "lora" / "model", "adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(model)
    assert stored.keys() <= loaded.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in stored.items()) and any(key.endswith("lora_B.weight") for key in stored)
    assert not any(tiny_models.is_of_tower(key) for key in stored)
    ours = tool.run(work / "model", documents, work / "tool", adapter=work / "runs" / "lora" / "model")["logits"]
    assert relative(ours, logits(model, documents)) <= 1e-4
    assert relative(ours, tool.run(work / "model", documents, work / "tool")["logits"]) > 1e-3


def test_a_merged_adapter_is_the_model_with_it(lora):
    work, documents = lora
    lmlaunch("export", "runs/lora", "-o", "merged", "--merge", cwd=work)
    merged = tiny_models.load(work / "merged", torch.float32).eval()
    assert relative(logits(merged, documents), logits(with_adapter(work), documents)) <= 1e-5
    assert tensors(work / "merged").keys() == tensors(work / "model").keys()


def test_the_adapter_is_trained_further(lora):
    work, _ = lora
    lmlaunch(config(work, "more", **SETTINGS, train__method="lora", lora__init="runs/lora"), cwd=work)
    assert losses(work, "more")[0][0] < losses(work, "lora")[0][0]


def test_a_run_of_gpt2_tells_what_it_drops(tmp_path):
    """Its class drops a tenth in three places unless told otherwise. Attention's is left out: the losses are those without."""
    make_work(tmp_path, "gpt2")
    path = tmp_path / "model" / "config.json"
    given = json.loads(path.read_text())
    found = {}
    for name, attention in ("published", 0.1), ("without", 0.0):
        path.write_text(json.dumps({**given, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": attention}))
        run = lmlaunch(config(tmp_path, name, **SETTINGS), cwd=tmp_path)
        found[name] = (run.stderr + run.stdout, losses(tmp_path, name))
    applied, left_out = "training applies embd_pdrop = 0.1, resid_pdrop = 0.1", " and leaves out attn_pdrop = 0.1"
    assert applied + left_out in found["published"][0]
    assert applied + ", of " in found["without"][0]
    assert found["published"][1] == found["without"][1]
