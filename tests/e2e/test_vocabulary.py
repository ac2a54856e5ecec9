"""Vocabulary matrices beside adapters, end to end: lora.also and lora.tokens against PEFT, on a tied, an untied and a scaled model."""

import copy
import json
import re
import tomllib
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file
from test_run import VOCAB, config, expect_resumed_bits, filled, lmlaunch, losses, loss_by_transformers, rows, save_tokenizer
from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config, LlamaConfig, Qwen3Config

warnings.filterwarnings("ignore", module="peft")
COUNT, STEPS, LR = 6, 5, 1e-3
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB,
             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=3)
MODELS = {"tied": LlamaConfig(tie_word_embeddings=True, **SIZES), "untied": Qwen3Config(tie_word_embeddings=False, **SIZES), "scaled": GemmaConfig(**SIZES)}
TARGETS = ["q_proj", "down_proj"]
TOKENS = [10, 11, 40, 3]
# name -> (model, LoraConfig's arguments)
CASES = {
    "tied_whole": ("tied", dict(modules_to_save=["embed_tokens", "norm"], ensure_weight_tying=True)),
    "untied_whole": ("untied", dict(modules_to_save=["embed_tokens", "lm_head", "norm"])),
    "scaled_whole_dora": ("scaled", dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True, use_dora=True)),
    "tied_tokens": ("tied", dict(trainable_token_indices=TOKENS)),
    "untied_tokens": ("untied", dict(trainable_token_indices=TOKENS, modules_to_save=["lm_head"])),
    "scaled_tokens": ("scaled", dict(trainable_token_indices=TOKENS, modules_to_save=["norm"])),
}
CASES["untied_head"] = ("untied", dict(target_modules=["q_proj", "lm_head"]))
CASES["untied_embedding"] = ("untied", dict(target_modules=["q_proj", "embed_tokens"]))
CASES["both_matrices"] = ("untied", dict(target_modules=["q_proj", "embed_tokens", "lm_head"], rank_pattern={"embed_tokens": 6}, use_rslora=True))
LORA = dict(train__method="lora", lora__r=4, lora__alpha=8, lora__targets=TARGETS)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = filled(tmp_path_factory.mktemp("vocabulary"), layers=1)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:COUNT]))
    for name, settings in MODELS.items():
        torch.manual_seed(4)
        AutoModelForCausalLM.from_config(settings).save_pretrained(folder / name)
        save_tokenizer(folder / name, [f"w{i}" for i in range(VOCAB - 1)], special=["<think>"])
    return folder


def base(work, name):
    return AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.float32)


def adapted(work, case):
    """A model with a random adapter, which is saved."""
    name, arguments = CASES[case]
    made = peft.get_peft_model(base(work, name), peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **{"target_modules": TARGETS, **copy.deepcopy(arguments)}))
    generator = torch.Generator().manual_seed(5)
    for key, parameter in made.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.mul_(1 + 0.1 * noise) if "magnitude" in key else parameter.data.add_(0.05 * noise)
    made.save_pretrained(work / case)
    return made


def trained(model, data):
    """Losses, the first step's gradient norm, after STEPS of torch's AdamW over all rows of the data."""
    live = [p for p in model.parameters() if p.requires_grad]
    optimizer, found, norm = torch.optim.AdamW(live, lr=LR, weight_decay=0.0), [], None
    for _ in range(STEPS):
        nll, targets = 0, 0
        for row in data:
            labels = torch.tensor(row["labels"][1:])
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
            nll = nll + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            targets += int((labels != -100).sum())
        optimizer.zero_grad()
        (nll / targets).backward()
        norm = norm or torch.stack([p.grad.norm() for p in live]).norm().item()
        found.append((nll / targets).item())
        optimizer.step()
    return found, norm


def settings(model, **changes):
    return {**dict(model__path=model, data__train=["few.jsonl"], train__steps=STEPS, train__global_batch=COUNT, train__micro_batch=2,
                   optimizer__lr=LR, optimizer__clip="none"), **changes}


@pytest.mark.parametrize("case", CASES)
def test_pefts_adapter_is_trained_further_as_by_peft_and_given_back(work, case):
    model, arguments = CASES[case]
    reference = adapted(work, case)
    data = [json.loads(line) for line in (work / "few.jsonl").open()]
    # It is read as it is.
    ids = torch.tensor([[5, 10, 11, 3, 40, 7]])
    expected, first = reference.eval()(ids).logits.detach(), loss_by_transformers(reference, work)
    assert json.loads(lmlaunch("eval", case, 'data.eval=["eval.jsonl"]', "data.max_length=32", "model.dtype=fp32", "--json", cwd=work).stdout)["eval_loss"] == pytest.approx(first, rel=1e-5)
    lmlaunch("export", case, "-o", f"{case}_again", cwd=work)
    copied = peft.PeftModel.from_pretrained(base(work, model), work / f"{case}_again").eval()
    torch.testing.assert_close(copied(ids).logits, expected, rtol=1e-5, atol=1e-5)
    if case.startswith("tied"):  # the adapter beside its model, by name
        told = [json.loads(lmlaunch("generate", *what, "--prompt", "w5 w10 w11", "--max-tokens", "4", "--json", "model.dtype=fp32", cwd=work).stdout)["tokens"]
                for what in ((case,), (model, "--adapter", case))]
        text = torch.tensor([[5, 10, 11]])
        for _ in range(4):
            text = torch.cat([text, reference(text).logits[:, -1:].argmax(-1)], 1)
        assert told[0] == told[1] == text[0, 3:].tolist()
    # Five steps, and what they give.
    found, norm = trained(reference.train(), data)
    changes = dict(train__method="lora", lora__init=case)
    lmlaunch(config(work, f"{case}_run", **settings(model, **changes)), cwd=work)
    steps = [row for row in rows(work, f"{case}_run") if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(found[0], rel=1e-5) and steps[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert [row["loss"] for row in steps] == pytest.approx(found, rel=1e-4)
    reference.eval().save_pretrained(work / f"{case}_theirs")
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (work / f"runs/{case}_run/model", work / f"{case}_theirs"))
    for module in ("lm_head", "model.embed_tokens"):
        theirs.pop(f"base_model.model.{module}.base_layer.weight", None)  # the base's
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert (ours[key] - value).norm() <= 1e-4 * value.norm(), key
    result = peft.PeftModel.from_pretrained(base(work, model), work / f"runs/{case}_run/model").eval()
    last = [row["eval_loss"] for row in rows(work, f"{case}_run") if "eval_loss" in row][-1]
    assert loss_by_transformers(result, work) == pytest.approx(last, rel=1e-5)
    # Merged, the model has the matrices that were trained.
    lmlaunch("export", f"runs/{case}_run", "--merge", "-o", f"{case}_merged", cwd=work)
    merged = AutoModelForCausalLM.from_pretrained(work / f"{case}_merged", dtype=torch.float32).eval()
    torch.testing.assert_close(merged(ids).logits, result(ids).logits, rtol=1e-5, atol=1e-5)
    recorded = tomllib.loads((work / f"runs/{case}_run/config.toml").read_text())["lora"]
    words = {"embed_tokens": "embed_tokens", "lm_head": "lm_head", "norm": "norms"}
    assert sorted(recorded["also"]) == sorted(words[name] for name in arguments.get("modules_to_save", []))
    assert recorded["tokens"] == arguments.get("trainable_token_indices", [])


def test_fresh_adapters_begin_as_the_base_and_train_what_is_named(work):
    for name, model, keys in [("also", "tied", dict(lora__also=["lm_head", "norms"])), ("rows", "scaled", dict(lora__tokens=["<think>", "w10", 40])),
                              ("both", "untied", dict(lora__also=["lm_head"], lora__tokens=["w3"]))]:
        lmlaunch(config(work, f"fresh_{name}", **settings(model, optimizer__lr=1e-2, **LORA, **keys)), cwd=work)
        before = next(row["eval_loss"] for row in rows(work, f"fresh_{name}") if "eval_loss" in row)
        assert before == pytest.approx(loss_by_transformers(base(work, model), work), rel=1e-5)
        curve = losses(work, f"fresh_{name}")
        assert curve[-1][0] < curve[0][0]
        weights = load_file(work / model / "model.safetensors")
        tensors = load_file(work / f"runs/fresh_{name}/model/adapter_model.safetensors")
        saved = json.loads((work / f"runs/fresh_{name}/model/adapter_config.json").read_text())
        if name == "also":
            embedding = tensors["base_model.model.model.embed_tokens.weight"]
            assert not torch.equal(embedding, weights["model.embed_tokens.weight"]) and saved["ensure_weight_tying"] is True
            assert torch.equal(embedding, tensors["base_model.model.lm_head.weight"])  # which peft reads
            assert sum("norm" in key for key in tensors) == 2 * 2 + 1
        else:
            ids = [VOCAB - 1, 10, 40] if name == "rows" else [3]
            assert saved["trainable_token_indices"] == ids
            trained_rows = tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
            moved = (trained_rows - weights["model.embed_tokens.weight"][ids]).abs().max(1).values
            assert (moved > 0)[-1] == (name == "rows")  # an untied pad token is looked up without a gradient


def test_an_adapter_of_the_embedding_begins_as_the_base_and_as_pefts(work):
    """A of PEFT's is 0, and B normal: the other way about than in linear layers."""
    keys = {**LORA, "lora__targets": ["embed_tokens"], "lora__r": 16}
    lmlaunch(config(work, "fresh_table", **settings("untied", optimizer__lr=1e-4, **keys)), cwd=work)
    before = next(row["eval_loss"] for row in rows(work, "fresh_table") if "eval_loss" in row)
    assert before == pytest.approx(loss_by_transformers(base(work, "untied"), work), rel=1e-5)
    tensors = load_file(work / "runs/fresh_table/model/adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.model.embed_tokens.lora_embedding_{name}"] for name in "AB")
    assert a.shape == (16, VOCAB) and b.shape == (32, 16)
    assert 0 < a.abs().max() <= 2e-3 and b.std().item() == pytest.approx(1, abs=0.1) and abs(b.mean().item()) < 0.15


def test_a_tied_embedding_of_another_name_is_two_equal_copies_for_peft(work):
    """peft shares an embedding with its head where it is called embed_tokens alone."""
    torch.manual_seed(4)
    sizes = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(GPT2Config(**sizes)).save_pretrained(work / "gpt2")
    changes = dict(train__method="lora", optimizer__lr=1e-2, lora__also=["embed_tokens", "ln_f"])
    lmlaunch(config(work, "copies", **settings("gpt2", **changes)), cwd=work)
    saved = json.loads((work / "runs/copies/model/adapter_config.json").read_text())
    assert saved["modules_to_save"] == ["lm_head", "ln_f", "wte"] and saved["ensure_weight_tying"] is False
    last = [row["eval_loss"] for row in rows(work, "copies") if "eval_loss" in row][-1]
    assert loss_by_transformers(peft.PeftModel.from_pretrained(base(work, "gpt2"), work / "runs/copies/model"), work) == pytest.approx(last, rel=1e-5)
    lmlaunch(config(work, "copies_more", **settings("gpt2", train__method="lora", lora__init="runs/copies/model")), cwd=work)
    assert [row["eval_loss"] for row in rows(work, "copies_more") if "eval_loss" in row][0] == pytest.approx(last, rel=1e-6)


@pytest.mark.parametrize("keys", [{**LORA, "lora__also": ["embed_tokens", "norms"]}, dict(train__method="ia3", lora__targets=["q_proj", "down_proj"]),
                                  dict(train__method="norms", lora__targets=["input_layernorm"])], ids=["also", "ia3", "norms"])
def test_a_checkpoint_is_exported_as_the_run_writes_it(work, keys):
    """In bf16: what is trained whole has its working weights there, pairs and vectors their masters."""
    name = f"exported_{keys['train__method']}"
    lmlaunch(config(work, name, **settings("untied", model__dtype="bf16", **keys)), cwd=work)
    checkpoint = sorted((work / "runs" / name / "checkpoints").iterdir())[-1]
    lmlaunch("export", checkpoint, "-o", f"from_{name}", cwd=work)
    hashes = [json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["weights_hash"] for what in (f"runs/{name}/model", f"from_{name}", checkpoint)]
    assert len(set(hashes)) == 1


ELSEWHERE = {
    "on_disk": dict(offload__optimizer="nvme", offload__weights="nvme", offload__paths=["swap"], io__tile="64KiB"),
    "in_backward": dict(train__update="in_backward", train__recompute="block"),
}


@pytest.mark.parametrize("model, keys", [("tied", dict(lora__also=["embed_tokens", "norms"])), ("untied", dict(lora__also=["embed_tokens", "lm_head"])),
                                         ("untied", dict(lora__targets=["q_proj", "lm_head"])), ("untied", dict(lora__targets=["q_proj", "embed_tokens"])), ("tied", dict(lora__tokens=TOKENS)), ("untied", dict(lora__tokens=TOKENS[:3], lora__also=["norms"]))])
def test_where_state_lives_does_not_change_a_bit_and_ranks_agree(work, model, keys):
    (work / "swap").mkdir(exist_ok=True)
    name = f"place_{model}_" + re.sub(r"\W+", "_", str(keys))
    runs = {}
    for way, changes in {"here": {}, **ELSEWHERE}.items():
        lmlaunch(config(work, f"{name}_{way}", **settings(model, model__dtype="bf16", **{**LORA, **keys}, **changes)), cwd=work)
        runs[way] = (losses(work, f"{name}_{way}"), json.loads(lmlaunch("verify", f"runs/{name}_{way}/model", "--json", cwd=work).stdout)["weights_hash"])
    assert runs["on_disk"] == runs["here"] and runs["in_backward"] == runs["here"]
    one, two = {}, {}
    for ranks, out in ((1, one), (2, two)):
        lmlaunch("--ranks", ranks, config(work, f"{name}_{ranks}", **settings(model, train__micro_batch=1, **{**LORA, **keys})), cwd=work)
        out["losses"] = [loss for loss, *_ in losses(work, f"{name}_{ranks}")]
        out["tensors"] = load_file(work / f"runs/{name}_{ranks}/model/adapter_model.safetensors")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    for key, value in one["tensors"].items():
        assert (two["tensors"][key] - value).norm() <= 1e-4 * value.norm(), key


@pytest.mark.parametrize("keys", [dict(lora__also=["embed_tokens", "norms"]), dict(lora__tokens=TOKENS)])
def test_a_stopped_run_goes_on_with_the_same_bits(work, keys):
    changes = settings("tied", **LORA, **keys)
    del changes["train__steps"]
    expect_resumed_bits(work, **changes)
    for name in ("long", "stopped"):
        (work / f"runs/{name}").rename(work / f"runs/{name}_{next(iter(keys))}")


@pytest.mark.parametrize("keys", [dict(lora__also=["embed_tokens", "lm_head", "norms"]), dict(lora__tokens=TOKENS)])
def test_beside_a_quantized_base_they_are_as_in_full_fine_tuning(work, keys):
    name = f"quantized_{next(iter(keys))}"
    changes = {**LORA, "train__method": "qlora", "model__dtype": "bf16", "optimizer__lr": 1e-2}
    lmlaunch(config(work, name, **settings("tied", **changes, **keys)), cwd=work)
    curve = losses(work, name)
    assert curve[-1][0] < curve[0][0]
    tensors = load_file(work / f"runs/{name}/model/adapter_model.safetensors")
    weights = load_file(work / "tied/model.safetensors")["model.embed_tokens.weight"]
    if "lora__also" in keys:
        embedding = tensors["base_model.model.model.embed_tokens.weight"]
        assert torch.equal(embedding, embedding.bfloat16().float()) and (embedding - weights).abs().max() > 1e-3
    done = lmlaunch("export", f"runs/{name}", "--merge", "-o", f"{name}_merged", cwd=work)
    assert "its logits differ by at most" in done.stderr + done.stdout
    merged = load_file(work / f"{name}_merged/model.safetensors")["model.embed_tokens.weight"].float()
    changed = (merged - weights.bfloat16().float()).abs().max(1).values > 0
    assert changed.sum() > VOCAB / 2 if "lora__also" in keys else changed.nonzero().flatten().tolist() == sorted(TOKENS)


def test_what_does_not_fit_is_refused_by_name(work):
    adapted(work, "tied_whole")
    lmlaunch(config(work, "refusals", **settings("untied", **LORA)), "train.steps=1", cwd=work)
    again = lambda name, *keys: ("refusals.toml", f"run.dir=runs/{name}", *keys)
    for arguments, exit_code, text in [
            (again("r1", 'lora.also=["q_proj"]'), 10, "is no embedding, head or norm of the model"),
            (again("r2", 'lora.tokens=["<thinking>"]'), 10, 'or add this one: model.add_tokens = ["<thinking>"]'),
            (again("r3", 'lora.tokens=["w5", 5]'), 10, "which is named twice"),
            (again("r4", f"lora.tokens=[{VOCAB}]"), 10, f"the model's embedding has {VOCAB} rows"),
            (again("r5", 'lora.also=["embed_tokens"]', "lora.tokens=[5]"), 10, "trains the whole embedding, and these rows of it"),
            (again("r6", 'lora.also=["norms"]', "model.dtype=bf16", "lora.dtype=fp32"), 10, "leave lora.dtype out"),
            (again("r7", 'lora.also=["norms"]', "train.method=ia3"), 10, "lora.also is LoRA's"),
            (again("r10", "model.path=tied", 'lora.targets=["lm_head"]'), 10, "a head that is tied to it get no adapter"),
            (again("r11", 'lora.targets=["lm_head"]', "lora.dropout=0.1"), 10, "its adapter has none"),
            (again("r12", 'lora.targets=["lm_head"]', "lora.dora=true"), 10, "its rows' lengths are not trained"),
            (again("r13", 'lora.targets=["lm_head"]', 'lora.also=["lm_head"]'), 10, "lora.also trains it whole"),
            (again("r8", "model.path=tied", "lora.init=tied_whole", 'lora.also=["norms"]'), 10, "and the adapter has also"),
            (again("r9", "model.path=tied", "lora.init=tied_whole", "lora.tokens=[5]"), 10, "leave lora.tokens out"),
            (("merge", "tied_whole", "tied_whole", "-o", "both"), 11, "cannot be added to another adapter's"),
            (("generate", "tied", "--adapter", "tied_whole@0.5", "--prompt", "w1"), 11, "use it alone and with weight 1")]:
        done = lmlaunch(*arguments, cwd=work, check=False)
        assert done.returncode == exit_code and text in done.stderr, (arguments, done.stderr)
    plan = json.loads(lmlaunch("plan", "refusals.toml", 'lora.also=["embed_tokens"]', "--json", cwd=work).stdout)
    assert plan["fits"] is True
