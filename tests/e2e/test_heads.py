"""Heads of scores (train.objective = "classify" and "reward") against transformers and PEFT: losses, gradients, weights and files."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from test_run import config, lmlaunch, rows, save_tokenizer
from transformers import (AutoModelForSequenceClassification, GPT2Config, GPT2ForSequenceClassification, LlamaConfig,
                          LlamaForCausalLM, LlamaForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification)

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]
NAMES = ["bad", "fair", "good"]
SIZES = dict(vocab_size=len(WORDS), pad_token_id=0, bos_token_id=1, eos_token_id=1)
LLAMA = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, **SIZES)
COUNT, STEPS, LR = 6, 5, 1e-3
PLAIN = dict(optimizer__clip="none", optimizer__lr=LR, train__steps=STEPS, train__global_batch=COUNT, train__micro_batch=2)


def saved(model, directory):
    model.save_pretrained(directory)
    save_tokenizer(directory, WORDS)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return model


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    torch.manual_seed(1)
    labels = lambda n: dict(num_labels=n, id2label=dict(enumerate(NAMES[:n] if n > 1 else ["LABEL_0"])))
    saved(LlamaForSequenceClassification(LlamaConfig(**LLAMA, tie_word_embeddings=True, **labels(3))), folder / "llama")
    saved(Qwen3ForSequenceClassification(Qwen3Config(**LLAMA, head_dim=8, **labels(1))), folder / "qwen3")
    saved(GPT2ForSequenceClassification(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0,
                                                   attn_pdrop=0, **SIZES, **labels(3))), folder / "gpt2")
    saved(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)), folder / "base")
    write(folder, "single", [{"text": text, "label": NAMES[i % 3]} for i, text in enumerate(texts(COUNT))])
    write(folder, "multi", [{"text": text, "label": [NAMES[i % 3], "good"]} for i, text in enumerate(texts(COUNT))])
    write(folder, "regression", [{"text": text, "label": i / 2 - 1} for i, text in enumerate(texts(COUNT))])
    pairs = texts(2 * COUNT)
    write(folder, "pairs", [{"prompt": "w1 ", "chosen": pairs[2 * i], "rejected": pairs[2 * i + 1]} for i in range(COUNT)])
    return folder


def texts(count):
    generator = torch.Generator().manual_seed(3)
    return [" ".join(f"w{int(w)}" for w in torch.randint(62, (3 + i % 5,), generator=generator)) for i in range(count)]


def write(folder, name, lines):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def scores(model, batch):
    """Of padded texts, as users give them."""
    ids = [[WORDS.index(word) for word in text.split()] for text in batch]
    width = max(map(len, ids))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    return model(input_ids=padded, attention_mask=mask).logits


def loss_of(model, data):
    """The mean over the rows of a file, by torch's own losses."""
    functional = torch.nn.functional
    if "chosen" in data[0]:
        chosen, rejected = (scores(model, [row["prompt"] + row[side] + " <eos>" for row in data]) for side in ("chosen", "rejected"))
        return -functional.logsigmoid(chosen - rejected).mean(), (chosen > rejected).float().mean()
    found = scores(model, [row["text"] for row in data])
    label = [row["label"] for row in data]
    if isinstance(label[0], str):
        truth = torch.tensor([NAMES.index(name) for name in label])
        return functional.cross_entropy(found, truth), (found.argmax(-1) == truth).float().mean()
    if isinstance(label[0], list):
        truth = torch.tensor([[float(name in marks) for name in NAMES] for marks in label])
        return functional.binary_cross_entropy_with_logits(found, truth), ((found > 0) == (truth > 0.5)).all(-1).float().mean()
    return functional.mse_loss(found.squeeze(-1), torch.tensor(label)), None


def trained(directory, data):
    """Losses, the first gradient's norm and the weights after STEPS of torch's AdamW; accuracy before them."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses, norms, accuracy = [], [], None
    for step in range(STEPS):
        loss, right = loss_of(model, data)
        accuracy = right if step == 0 else accuracy
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms[0], accuracy, model


CASES = {
    "llama-single": ("llama", "single", dict(train__objective="classify", data__packing=True)),
    "gpt2-multi": ("gpt2", "multi", dict(train__objective="classify", train__problem="multi_label")),
    "qwen3-regression": ("qwen3", "regression", dict(train__objective="classify")),
    "qwen3-pairs": ("qwen3", "pairs", dict(train__objective="reward", data__packing=True)),
}


def settings(model, data, **changes):
    return dict(model__path=model, data__train=[f"{data}.jsonl"], data__eval=[f"{data}.jsonl"], **PLAIN, **changes)


@pytest.mark.parametrize("case", CASES)
def test_a_head_of_scores_trains_as_with_transformers(work, case):
    model, name, changes = CASES[case]
    data = [json.loads(line) for line in (work / f"{name}.jsonl").open()]
    losses, norm, accuracy, reference = trained(work / model, data)
    lmlaunch(config(work, case, **settings(model, name, **changes)), cwd=work)
    steps = [row for row in rows(work, case) if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert steps[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert [row["loss"] for row in steps] == pytest.approx(losses, rel=1e-4)
    assert steps[0]["target_tokens"] == COUNT and not any("token_accuracy" in row for row in rows(work, case))
    first = next(row for row in rows(work, case) if "eval_loss" in row)
    assert first["eval_loss"] == pytest.approx(losses[0], rel=1e-5)
    if accuracy is not None:
        assert first["accuracy"] == steps[0]["accuracy"] == pytest.approx(accuracy.item(), abs=1e-6)
    result = AutoModelForSequenceClassification.from_pretrained(work / "runs" / case / "model", dtype=torch.float32)
    assert type(result) is type(reference)
    theirs = dict(reference.named_parameters())
    for key, value in result.named_parameters():
        here, there = value.detach(), theirs[key].detach()
        if key.endswith("c_attn.bias"):  # a key's bias moves all scores of a query alike: its gradient is rounding alone
            third = here.numel() // 3
            here, there = (torch.cat([bias[:third], bias[2 * third:]]) for bias in (here, there))
        assert (here - there).norm() <= 1e-4 * there.norm(), key
    evaluated = json.loads(lmlaunch("eval", f"runs/{case}", "--json", cwd=work).stdout)
    assert evaluated["eval_loss"] == pytest.approx(loss_of(result.eval(), data)[0].item(), rel=1e-4)
    assert ("f1" in evaluated) == (case in ("llama-single", "gpt2-multi")) and "perplexity" not in evaluated


def test_where_state_lives_and_ranks_do_not_change_what_is_trained(work):
    data = ("llama", "single")
    lmlaunch(config(work, "here", **settings(*data, train__objective="classify")), cwd=work)
    (work / "swap").mkdir()
    away = dict(offload__optimizer="nvme", offload__paths=[str(work / "swap")], train__update="in_backward")
    lmlaunch(config(work, "away", **settings(*data, train__objective="classify", **away)), cwd=work)
    lmlaunch("--ranks", "2", config(work, "ranks", **settings(*data, train__objective="classify")), cwd=work)
    here, away, ranks = ([(row["loss"], row["accuracy"]) for row in rows(work, name) if "loss" in row] for name in ("here", "away", "ranks"))
    assert here == away
    assert [loss for loss, _ in ranks] == pytest.approx([loss for loss, _ in here], rel=1e-6)
    assert [right for _, right in ranks] == [right for _, right in here]


@pytest.mark.parametrize("method", ["lora", "qlora", "dora", "ia3", "norms"])
def test_a_fresh_head_is_saved_with_the_adapter_as_peft_does(work, method):
    data = [json.loads(line) for line in (work / "single.jsonl").open()]
    changes = dict(train__method=method, train__objective="classify", train__labels=NAMES)
    if method in ("lora", "qlora", "dora"):
        changes.update(lora__r=4, lora__alpha=8)
    if method == "dora":
        changes.update(train__method="lora", lora__dora=True)
    # Adapters of several ranks are written with one; magnitudes and the head have none.
    ranks = ["lora.ranks={q_proj=2}"] if method == "dora" else []
    lmlaunch(config(work, method, **settings("base", "single", **changes)), *ranks, cwd=work)
    last = [row["eval_loss"] for row in rows(work, method) if "eval_loss" in row][-1]
    assert last < next(row["eval_loss"] for row in rows(work, method) if "eval_loss" in row)
    saved_as = json.loads((work / f"runs/{method}/model/adapter_config.json").read_text())
    assert saved_as["task_type"] == "SEQ_CLS" and saved_as["modules_to_save"] == ["classifier", "score"]
    if method != "qlora":
        base = AutoModelForSequenceClassification.from_pretrained(work / "base", num_labels=3, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(base, work / f"runs/{method}/model").eval()
        assert loss_of(adapted, data)[0].item() == pytest.approx(last, rel=1e-5)
    lmlaunch("export", f"runs/{method}", "--merge", "-o", f"merged_{method}", cwd=work)
    merged = AutoModelForSequenceClassification.from_pretrained(work / f"merged_{method}", dtype=torch.float32).eval()
    assert merged.config.id2label == dict(enumerate(NAMES)) and merged.config.problem_type == "single_label_classification"
    assert loss_of(merged, data)[0].item() == pytest.approx(last, rel=1e-4)
    if method != "lora":
        return
    shutil.copytree(work / "runs/lora/model", work / "scored")
    for arguments, exit_code, text in [(("generate", "scored", "--prompt", "w1"), 10, "adapter has a head of scores"),
                                       (("generate", "base", "--adapter", "scored", "--prompt", "w1"), 2, "two heads do not become one"),
                                       (("merge", "scored", "scored", "-o", "both"), 2, "two heads do not become one")]:
        done = lmlaunch(*arguments, cwd=work, check=False)
        assert done.returncode == exit_code and text in done.stderr, (arguments, done.stderr)


def test_a_head_of_an_fp16_model_has_the_loss_scale(work):
    data = [json.loads(line) for line in (work / "single.jsonl").open()]
    losses, norm, _, _ = trained(work / "llama", data)
    changes = dict(train__objective="classify", model__dtype="fp16", train__loss_scale=1024.0)
    lmlaunch(config(work, "fp16", **settings("llama", "single", **changes)), cwd=work)
    steps = [row for row in rows(work, "fp16") if "loss" in row]
    assert steps[0]["grad_norm"] == pytest.approx(norm, rel=0.02) and steps[0]["loss_scale"] == 1024
    assert [row["loss"] for row in steps] == pytest.approx(losses, rel=0.05)


def test_a_head_may_be_more_precise_than_its_model(work):
    changes = dict(train__method="lora", train__objective="classify", train__labels=NAMES, model__dtype="bf16")
    losses = {}
    for dtype in ("bf16", "fp32"):
        lmlaunch(config(work, f"mixed_{dtype}", **settings("base", "single", lora__dtype=dtype, **changes)), cwd=work)
        losses[dtype] = [row["loss"] for row in rows(work, f"mixed_{dtype}") if "loss" in row]
    assert losses["bf16"][-1] < losses["bf16"][0] and losses["fp32"] == pytest.approx(losses["bf16"], rel=0.05)


def test_what_a_head_of_scores_cannot_do_is_refused(work):
    lmlaunch(config(work, "refusals", **{**settings("llama", "single", train__objective="classify"), "train__steps": 1}), cwd=work)
    for arguments, exit_code, text in [
            (("generate", "runs/refusals", "--prompt", "w1"), 10, "writes no text"),
            (("export", "runs/refusals", "--gguf", "f16", "-o", "x.gguf"), 11, "a head of scores"),
            (("refusals.toml", "run.dir=runs/r1", "train.objective=sft"), 10, "has a head of scores"),
            (("refusals.toml", "run.dir=runs/r2", 'train.labels=["a", "b"]'), 10, "has 3 labels"),
            (("refusals.toml", "run.dir=runs/r3", "model.path=base"), 10, "needs the labels' names"),
            (("refusals.toml", "run.dir=runs/r4", "train.objective=reward"), 10, "has 3 labels"),
            (("refusals.toml", "run.dir=runs/r5", "data.too_long=split"), 10, "data.too_long"),
            (("refusals.toml", "run.dir=runs/r6", "model.path=base", 'train.labels=["a", "a"]'), 10, "a name twice"),
            (("refusals.toml", "run.dir=runs/r8", 'eval.generate.data=["single.jsonl"]'), 10, "eval.generate.data asks for answers"),
            (("refusals.toml", "run.dir=runs/r7", "model.path=base", 'train.labels=["x", "y"]'), 11, "is none of the 2 labels: x, y")]:
        done = lmlaunch(*arguments, cwd=work, check=False)
        assert done.returncode == exit_code and text in done.stderr, (arguments, done.stderr)
