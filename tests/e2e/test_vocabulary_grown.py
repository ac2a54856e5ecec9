"""Tokens that a model does not have (model.add_tokens), end to end: against a model that transformers has resized, and PEFT's adapters
beside one."""

import copy
import json
import warnings

import peft
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from test_run import VOCAB, config, expect_resumed_bits, filled, lmlaunch, losses, loss_by_transformers, rows, save_tokenizer
from test_vocabulary import LORA, SIZES, TARGETS, base, settings, trained
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

warnings.filterwarnings("ignore", module="peft")
NEW, PADDED = ["<a>", "</a>"], VOCAB + 7
IDS = [VOCAB, VOCAB + 1]
MODELS = {"tied": LlamaConfig(tie_word_embeddings=True, **SIZES), "untied": Qwen3Config(tie_word_embeddings=False, **SIZES),
          "padded": Qwen3Config(tie_word_embeddings=False, **{**SIZES, "vocab_size": PADDED})}
ROWS = {**LORA, "model__add_tokens": NEW, "lora__tokens": [*NEW, 5]}
# name -> (model, LoraConfig's arguments)
CASES = {
    "rows_tied": ("tied", dict(trainable_token_indices=[*IDS, 5])),
    "rows_untied": ("untied", dict(trainable_token_indices=[*IDS, 5])),
    "whole_tied": ("tied", dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "whole_untied": ("untied", dict(modules_to_save=["embed_tokens", "lm_head"])),
    "pairs": ("untied", dict(target_modules=["q_proj", "embed_tokens", "lm_head"])),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Every document has both new tokens."""
    folder = filled(tmp_path_factory.mktemp("grown"), layers=1)
    for file, count in (("few", 6), ("eval", 6)):
        generator = torch.Generator().manual_seed(count + len(file))
        with open(folder / f"{file}.jsonl", "w") as out:
            for i in range(count):
                ids = torch.randint(4, VOCAB, (8 + i,), generator=generator).tolist()
                ids[3:3], ids[6:6] = [IDS[0]], [IDS[1]]
                out.write(json.dumps({"input_ids": ids, "labels": [-100] * 2 + ids[2:]}) + "\n")
    for name, made in MODELS.items():
        torch.manual_seed(4)
        AutoModelForCausalLM.from_config(made).save_pretrained(folder / name)
        save_tokenizer(folder / name, [f"w{i}" for i in range(VOCAB)])
    return folder


def resized(work, name, like=None):
    """As model.add_tokens makes it: new rows are the mean of the tokenizer's tokens, or a token's."""
    model = base(work, name)
    model.resize_token_embeddings(max(model.config.vocab_size, VOCAB + len(NEW)), mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            known = layer.weight[:VOCAB]
            layer.weight[VOCAB: VOCAB + len(NEW)] = known.double().mean(0).float() if like is None else known[like]
    return model


def examples(work):
    return [json.loads(line) for line in (work / "few.jsonl").open()]


def expect_the_same_tokenizer(directory, work, name):
    """As transformers' add_tokens makes it."""
    ours, theirs = (tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")) for path in (directory, work / name))
    theirs.add_tokens(NEW)
    text = "w5 <a> w6</a>w7"
    assert ours.encode(text).ids == theirs.encode(text).ids == [5, IDS[0], 6, IDS[1], 7]
    assert json.loads(ours.to_str())["added_tokens"] == json.loads(theirs.to_str())["added_tokens"]


@pytest.mark.parametrize("name, like", [("tied", None), ("untied", 5), ("padded", None)])
def test_full_fine_tuning_is_that_of_a_resized_model(work, name, like):
    reference = resized(work, name, like)
    before = loss_by_transformers(reference, work)
    found, norm = trained(reference.train(), examples(work))
    keys = {} if like is None else dict(model__new_rows=f"w{like}")
    lmlaunch(config(work, f"full_{name}", **settings(name, model__add_tokens=NEW, **keys)), cwd=work)
    steps = [row for row in rows(work, f"full_{name}") if "loss" in row]
    assert next(row["eval_loss"] for row in rows(work, f"full_{name}") if "eval_loss" in row) == pytest.approx(before, rel=1e-5)
    assert steps[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert [row["loss"] for row in steps] == pytest.approx(found, rel=1e-4)
    made = work / f"runs/full_{name}/model"
    result = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    assert result.config.vocab_size == (PADDED if name == "padded" else VOCAB + 2)
    for (key, ours), theirs in zip(result.named_parameters(), reference.parameters(), strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm(), key
    expect_the_same_tokenizer(made, work, name)
    # What was made is read as any model, and a second run finds the tokens there.
    assert json.loads(lmlaunch("verify", made, "--json", cwd=work).stdout)["ok"]
    done = lmlaunch(config(work, f"again_{name}", **settings(str(made), model__add_tokens=NEW)), "train.steps=1", cwd=work)
    assert "new tokens" not in done.stderr


def adapted(work, case):
    """A resized model with a random adapter, which PEFT saves with the matrices that have grown."""
    name, arguments = CASES[case]
    made = peft.get_peft_model(resized(work, name), peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **{"target_modules": TARGETS, **copy.deepcopy(arguments)}))
    generator = torch.Generator().manual_seed(5)
    for _, parameter in made.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    made.save_pretrained(work / case)
    return made


@pytest.mark.parametrize("case", CASES)
def test_pefts_adapter_of_a_resized_model_is_trained_further_and_given_back(work, case):
    model, _ = CASES[case]
    reference = adapted(work, case)
    ids = torch.tensor([[5, *IDS, 3, 40]])
    expected, first = reference.eval()(ids).logits.detach(), loss_by_transformers(reference, work)
    assert json.loads(lmlaunch("eval", case, 'data.eval=["eval.jsonl"]', "data.max_length=32", "model.dtype=fp32", "data.cache_dir=cache", "--json", cwd=work).stdout)["eval_loss"] == pytest.approx(first, rel=1e-5)
    assert json.loads(lmlaunch("verify", case, "--json", cwd=work).stdout)["ok"]
    lmlaunch("export", case, "-o", f"{case}_again", cwd=work)
    again = peft.PeftModel.from_pretrained(resized(work, model), work / f"{case}_again").eval()
    torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)
    found, norm = trained(reference.train(), examples(work))
    lmlaunch(config(work, f"{case}_run", **settings(model, train__method="lora", lora__init=case)), cwd=work)
    steps = [row for row in rows(work, f"{case}_run") if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(found[0], rel=1e-5) and steps[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert [row["loss"] for row in steps] == pytest.approx(found, rel=1e-4)
    reference.eval().save_pretrained(work / f"{case}_theirs")
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (work / f"runs/{case}_run/model", work / f"{case}_theirs"))
    assert ours.keys() <= theirs.keys() and sum("q_proj" in key for key in ours) == 4
    for key, value in ours.items():
        assert (theirs[key] - value).norm() <= 1e-4 * value.norm(), key
    lmlaunch("export", f"runs/{case}_run", "--merge", "-o", f"{case}_merged", cwd=work)
    merged = AutoModelForCausalLM.from_pretrained(work / f"{case}_merged", dtype=torch.float32).eval()
    torch.testing.assert_close(merged(ids).logits, reference(ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_new_tokens_are_trained_beside_fresh_adapters(work, name):
    run = f"rows_of_{name}"
    lmlaunch(config(work, run, **settings(name, optimizer__lr=1e-2, **ROWS)), cwd=work)
    evals = [row["eval_loss"] for row in rows(work, run) if "eval_loss" in row]
    assert evals[0] == pytest.approx(loss_by_transformers(resized(work, name), work), rel=1e-5)
    assert losses(work, run)[-1][0] < losses(work, run)[0][0]
    made = work / f"runs/{run}/model"
    assert json.loads((made / "adapter_config.json").read_text())["trainable_token_indices"] == [*IDS, 5]
    expect_the_same_tokenizer(made, work, name)
    # PEFT reads the adapter beside a model with as many rows, whose new ones the file has.
    model = base(work, name)
    model.resize_token_embeddings(max(model.config.vocab_size, VOCAB + 2))
    result = peft.PeftModel.from_pretrained(model, made).eval()
    assert loss_by_transformers(result, work) == pytest.approx(evals[-1], rel=1e-5)
    # A copy without its run is the same, and so is the merged model.
    lmlaunch("export", f"runs/{run}", "-o", f"{run}_copy", cwd=work)
    alone = lmlaunch("eval", f"{run}_copy", 'data.eval=["eval.jsonl"]', "data.max_length=32", "model.dtype=fp32", "data.cache_dir=cache", "--json", cwd=work)
    assert json.loads(alone.stdout)["eval_loss"] == pytest.approx(evals[-1], rel=1e-6)
    text = torch.tensor([[5, *IDS]])
    for _ in range(4):
        text = torch.cat([text, result(text).logits[:, -1:].argmax(-1)], 1)
    answer = text[0, 3:].tolist()
    answer = answer[:answer.index(2)] if 2 in answer else answer  # up to the end token
    for what in (f"runs/{run}", f"{run}_copy"):
        told = lmlaunch("generate", what, "--prompt", "w5 <a></a>", "--max-tokens", "4", "--json", "model.dtype=fp32", cwd=work)
        assert json.loads(told.stdout)["tokens"] == answer
    lmlaunch("export", f"runs/{run}", "--merge", "-o", f"{run}_merged", cwd=work)
    merged = AutoModelForCausalLM.from_pretrained(work / f"{run}_merged", dtype=torch.float32).eval()
    ids = torch.tensor([[5, *IDS, 7]])
    torch.testing.assert_close(merged(ids).logits, result(ids).logits, rtol=1e-4, atol=1e-5)
    expect_the_same_tokenizer(work / f"{run}_merged", work, name)
    if name == "tied":
        done = lmlaunch("merge", f"runs/{run}", f"{run}_copy", "-o", "both", cwd=work, check=False)
        assert done.returncode == 11 and "has tokens that its base model has not" in done.stderr and not (work / "both").exists()
        done = lmlaunch("generate", name, "--adapter", f"{run}_copy@0.5", "--prompt", "w5", cwd=work, check=False)
        assert done.returncode == 11 and "has tokens that its base model has not" in done.stderr


def hash_of(work, what):
    return json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["weights_hash"]


@pytest.mark.parametrize("name, changes", [("tied", ROWS), ("untied", {**ROWS, "lora__tokens": [], "lora__also": ["embed_tokens", "lm_head"]})],
                         ids=["rows", "whole"])
def test_a_checkpoint_has_the_hash_of_the_adapter_that_is_exported(work, name, changes):
    """The export has the base's matrices of the vocabulary beside what was trained; the checkpoint has not."""
    run = f"hash_{name}"
    lmlaunch(config(work, run, **settings(name, model__dtype="bf16", checkpoint__every=2, **changes)), "train.steps=2", cwd=work)
    (checkpoint,) = (work / "runs" / run / "checkpoints").iterdir()
    lmlaunch("export", checkpoint, "--patterns", "-o", f"{run}_copy", cwd=work)
    assert hash_of(work, checkpoint) == hash_of(work, f"runs/{run}/model") == hash_of(work, f"{run}_copy")


ELSEWHERE = {
    "on_disk": dict(offload__optimizer="nvme", offload__weights="nvme", offload__paths=["swap"], io__tile="64KiB"),
    "in_backward": dict(train__update="in_backward", train__recompute="block"),
}


@pytest.mark.parametrize("name, keys", [("tied", ROWS), ("untied", dict(model__add_tokens=NEW))], ids=["rows", "full"])
def test_where_state_lives_does_not_change_a_bit_and_ranks_agree(work, name, keys):
    (work / "swap").mkdir(exist_ok=True)
    runs = {}
    for way, changes in {"here": {}, **ELSEWHERE}.items():
        run = f"place_{name}_{way}"
        lmlaunch(config(work, run, **settings(name, model__dtype="bf16", **keys, **changes)), cwd=work)
        runs[way] = (losses(work, run), json.loads(lmlaunch("verify", f"runs/{run}/model", "--json", cwd=work).stdout)["weights_hash"])
    assert runs["on_disk"] == runs["here"] and runs["in_backward"] == runs["here"]
    curves = []
    for ranks in (1, 2):
        lmlaunch("--ranks", ranks, config(work, f"ranks_{name}_{ranks}", **settings(name, train__micro_batch=1, **keys, data__cache_dir=f"cache_{name}_{ranks}")), cwd=work)
        curves.append([loss for loss, *_ in losses(work, f"ranks_{name}_{ranks}")])
        assert len(list((work / f"cache_{name}_{ranks}/models").iterdir())) == 1  # one for both ranks
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)


def test_a_stopped_run_goes_on_with_the_same_bits(work):
    changes = settings("tied", **ROWS)
    del changes["train__steps"]
    expect_resumed_bits(work, **changes)


def test_beside_a_quantized_base(work):
    changes = {**ROWS, "train__method": "qlora", "model__dtype": "bf16", "optimizer__lr": 1e-2}
    lmlaunch(config(work, "quantized", **settings("untied", **changes)), cwd=work)
    assert losses(work, "quantized")[-1][0] < losses(work, "quantized")[0][0]
    lmlaunch("export", "runs/quantized", "--merge", "-o", "quantized_merged", cwd=work)
    assert load_file(work / "quantized_merged/model.safetensors")["model.embed_tokens.weight"].shape[0] == VOCAB + 2


def test_what_does_not_fit_is_refused_by_name_and_a_plan_writes_nothing(work):
    adapted(work, "rows_tied")
    toml = config(work, "refusals", **{**settings("tied", **ROWS), "data__cache_dir": "none"})
    (work / "no_tokenizer").mkdir()
    for file in ("config.json", "model.safetensors"):
        (work / "no_tokenizer" / file).symlink_to(work / "tied" / file)
    again = lambda *keys: (toml, "run.dir=runs/refused", *keys)
    for arguments, text in [
            (again("lora.tokens=[5]"), "would stay as it begins"),
            (again('model.add_tokens=["<a>", "<a>"]'), 'names "<a>" twice'),
            (again('model.add_tokens=[""]'), "expected a list of strings"),
            (again("train.method=ia3", "lora.tokens=[]"), "trains none"),
            (again("model.new_rows=w1000"), 'the tokenizer has no token "w1000"'),
            (again("model.new_rows=w1", "model.add_tokens=[]", "lora.tokens=[5]"), "which is empty"),
            (again("model.path=no_tokenizer"), "has no tokenizer.json"),
            (again("model.add_tokens=[]"), 'model.add_tokens = ["<a>"]'),
            (again("lora.init=rows_tied", 'model.add_tokens=["<a>", "</a>", "<b>"]', f"lora.tokens={[*IDS, 5]}"), 'was trained without a token "<b>"'),
            (again("model.add_tokens=[]", "lora.tokens=[5]", 'lora.targets=["embed_tokens"]'), "the two are one matrix"),
            (again("model.path=untied", 'lora.targets=["embed_tokens"]'), "and lora.tokens trains rows of it"),
            (again("model.path=untied", 'lora.targets=["embed_tokens"]', "lora.tokens=[]", "lora.dora=true", "model.add_tokens=[]"), "its rows' lengths are not trained"),
            (again("model.path=untied", 'lora.targets=["embed_tokens"]', "lora.tokens=[]", 'lora.also=["embed_tokens"]'), "lora.also trains it whole")]:
        done = lmlaunch(*arguments, cwd=work, check=False)
        assert done.returncode == 10 and text in done.stderr, (arguments, done.stderr)
    (work / "claims_more").mkdir()
    for file in (work / "tied").iterdir():
        (work / "claims_more" / file.name).symlink_to(file)
    (work / "claims_more/config.json").unlink()
    claimed = {**json.loads((work / "tied/config.json").read_text()), "vocab_size": VOCAB + 1}
    (work / "claims_more/config.json").write_text(json.dumps(claimed))
    for like in ("mean", f"w{VOCAB - 1}"):
        done = lmlaunch(*again("model.path=claims_more", f"model.new_rows={like}", "data.cache_dir=claimed"), cwd=work, check=False)
        assert done.returncode == 11 and "shape: model.embed_tokens.weight" in done.stderr, done.stderr
    for model, name in ("tied", "train.only does not name the embedding"), ("untied", 'and "lm_head"'):
        only = config(work, "refused_only", **settings(model, model__add_tokens=NEW, train__only=["mlp"]))
        done = lmlaunch(only, cwd=work, check=False)
        assert done.returncode == 10 and name in done.stderr and not (work / "runs/refused_only").exists(), done.stderr
    plans = [json.loads(lmlaunch("plan", toml, *keys, "--json", cwd=work).stdout) for keys in ([], ["model.add_tokens=[]", "lora.tokens=[5]"])]
    assert plans[0]["fits"] and plans[1]["fits"] and not (work / "none/models").exists()
