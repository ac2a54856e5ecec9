"""Prefix, prompt and P-tuning (train.method = "prefix", "prompt" and "ptuning") as users run them: files, resumed runs, tiers, ranks, answers."""

import json
import tomllib

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from test_run import VOCAB, config, eval_losses, filled, lmlaunch, loss_by_transformers, losses, rows, save_tokenizer
from transformers import LlamaForCausalLM

METHODS = ["prefix", "prompt", "ptuning"]
COUNT = 5


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = filled(tmp_path_factory.mktemp("virtual"), layers=2)
    save_tokenizer(folder / "model", [f"w{i}" for i in range(VOCAB)])
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))
    return folder


def settings(method, **changes):
    return {"train__method": method, "prompt__length": COUNT, "optimizer__lr": 3e-3 if method == "ptuning" else 3e-2, "data__max_length": 48, **changes}


@pytest.fixture(scope="module", params=METHODS)
def trained(work, request):
    lmlaunch(config(work, request.param, **settings(request.param)), cwd=work)
    return request.param


class OfTheText(torch.nn.Module):
    """peft's model, whose logits are those of the text's own tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        out = self.model(input_ids=ids)
        out.logits = out.logits[:, -ids.shape[1]:]
        return out


def base_of(work):
    return LlamaForCausalLM.from_pretrained(work / "model", dtype=torch.float32)


def weights(work, name):
    return load_file(work / f"runs/{name}/model/adapter_model.safetensors")


def test_peft_reads_what_was_trained(work, trained):
    assert eval_losses(work, trained)[-1] != eval_losses(work, trained)[0]  # of a model with random weights either may be lower
    tensors = weights(work, trained)
    base = base_of(work)
    width = {"prefix": 2 * 2 * 2 * 8, "prompt": 32, "ptuning": 32}[trained]  # layers x (keys, values) x heads x dimensions
    assert {name: list(value.shape) for name, value in tensors.items()} == {"prompt_embeddings": [COUNT, width]}
    adapted = OfTheText(PeftModel.from_pretrained(base, work / f"runs/{trained}/model"))
    assert loss_by_transformers(adapted, work) == pytest.approx(eval_losses(work, trained)[-1], rel=1e-5)
    evaluated = json.loads(lmlaunch("eval", f"runs/{trained}", "--json", cwd=work).stdout)
    assert evaluated["eval_loss"] == pytest.approx(eval_losses(work, trained)[-1], rel=1e-6)
    for what in (f"runs/{trained}", f"runs/{trained}/model"):
        assert json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["ok"]
    lmlaunch("export", f"runs/{trained}", "-o", f"exported_{trained}", cwd=work)
    again = load_file(work / f"exported_{trained}/adapter_model.safetensors")
    assert torch.equal(again["prompt_embeddings"], tensors["prompt_embeddings"])


@pytest.mark.parametrize("method, make", zip(METHODS[:2], (PrefixTuningConfig, PromptTuningConfig)))
def test_pefts_adapter_is_trained_further(work, method, make):
    torch.manual_seed(4)
    model = get_peft_model(base_of(work), make(task_type="CAUSAL_LM", num_virtual_tokens=7))
    model.save_pretrained(work / f"theirs_{method}")
    changes = settings(method, lora__init=f"theirs_{method}", train__steps=2)
    del changes["prompt__length"]
    lmlaunch(config(work, f"further_{method}", **changes), cwd=work)
    assert eval_losses(work, f"further_{method}")[0] == pytest.approx(loss_by_transformers(OfTheText(model), work), rel=1e-5)
    assert tomllib.loads((work / f"runs/further_{method}/config.toml").read_text())["prompt"]["length"] == 7
    lmlaunch(f"further_{method}.toml", "train.steps=4", cwd=work)  # resumed, though the file does not name the length
    assert len(losses(work, f"further_{method}")) == 4
    other = lmlaunch(f"further_{method}.toml", "run.dir=runs/other", "prompt.length=6", cwd=work, check=False)
    assert other.returncode == 10 and "prompt.length = 6 is written, and the adapter has 7" in other.stderr
    other = lmlaunch(f"further_{method}.toml", "run.dir=runs/other", "train.method=lora", cwd=work, check=False)
    assert other.returncode == 10 and f'set train.method = "{method}"' in other.stderr


def test_an_adapter_of_p_tuning_is_used_and_not_trained(work):
    torch.manual_seed(4)
    model = get_peft_model(base_of(work), PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    model.save_pretrained(work / "encoded")
    expected = loss_by_transformers(OfTheText(model), work)
    evaluated = json.loads(lmlaunch("eval", "encoded", "data.eval=[\"eval.jsonl\"]", "model.dtype=fp32", "data.max_length=48", "--json", cwd=work).stdout)
    assert evaluated["eval_loss"] == pytest.approx(expected, rel=1e-5)
    changes = settings("prompt", lora__init="encoded")
    del changes["prompt__length"]
    for command in ((), ("plan",)):
        done = lmlaunch(*command, config(work, "encoded_further", **changes), cwd=work, check=False)
        assert done.returncode == 10 and "not the encoder's weights" in done.stderr and "PROMPT_TUNING" in done.stderr
        done = lmlaunch(*command, "encoded_further.toml", "train.method=ptuning", cwd=work, check=False)
        assert done.returncode == 10 and "cannot be trained further by P-tuning" in done.stderr and "PROMPT_TUNING" in done.stderr


def test_a_run_with_an_encoder_keeps_it_in_its_checkpoints(work):
    lmlaunch(config(work, "small", **settings("ptuning", prompt__hidden=24, train__steps=4)), cwd=work)
    lmlaunch(config(work, "plain", **settings("ptuning", train__steps=2)), cwd=work)
    hidden = [tomllib.loads((work / f"runs/{name}/config.toml").read_text())["prompt"]["hidden"] for name in ("small", "plain")]
    assert hidden == [24, 32]  # the model's hidden size unless it is given
    checkpoint = sorted((work / "runs/small/checkpoints").iterdir())[-1]
    shapes = {tensor["name"]: tensor["shape"] for tensor in json.loads((checkpoint / "MANIFEST.json").read_text())["tensors"]}
    encoder = {"embedding.weight": [COUNT, 32], "mlp_head.0.weight": [24, 32], "mlp_head.0.bias": [24], "mlp_head.2.weight": [24, 24],
               "mlp_head.2.bias": [24], "mlp_head.4.weight": [32, 24], "mlp_head.4.bias": [32]}
    assert shapes == {f"prompt_encoder.{name}": shape for name, shape in encoder.items()}
    lmlaunch("export", checkpoint, "-o", "of_checkpoint", cwd=work)
    assert torch.equal(load_file(work / "of_checkpoint/adapter_model.safetensors")["prompt_embeddings"], weights(work, "small")["prompt_embeddings"])
    written = json.loads((work / "of_checkpoint/adapter_config.json").read_text())
    assert written["peft_type"] == "P_TUNING" and written["num_virtual_tokens"] == COUNT and written["token_dim"] == 32
    evaluated = json.loads(lmlaunch("eval", checkpoint, "--json", cwd=work).stdout)
    assert evaluated["eval_loss"] == pytest.approx(eval_losses(work, "small")[-1], rel=1e-6)
    lmlaunch("plain.toml", "train.steps=4", cwd=work)  # resumed, though the file does not name the size
    assert len(losses(work, "plain")) == 4
    for name, change in (("small", "prompt.hidden=16"), ("small", "prompt.hidden=auto"), ("plain", "prompt.hidden=24")):
        done = lmlaunch(f"{name}.toml", change, "train.steps=6", cwd=work, check=False)
        assert done.returncode == 14 and "prompt.hidden" in done.stderr, (name, change, done.stderr)


def test_an_lstm_is_refused_by_name(work):
    done = lmlaunch(config(work, "lstm", **settings("ptuning")), "prompt.encoder_reparameterization_type=LSTM", cwd=work, check=False)
    assert done.returncode == 10 and "an LSTM is not there: leave it out" in done.stderr


def test_a_resumed_run_has_the_same_bits(work, trained):
    lmlaunch(config(work, f"half_{trained}", **settings(trained, train__steps=6)), cwd=work)
    lmlaunch(f"half_{trained}.toml", "train.steps=12", cwd=work)
    assert losses(work, f"half_{trained}") == losses(work, trained)
    assert torch.equal(weights(work, f"half_{trained}")["prompt_embeddings"], weights(work, trained)["prompt_embeddings"])
    checkpoint = sorted((work / f"runs/half_{trained}/checkpoints").iterdir())[-1]
    hashes = [json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["weights_hash"] for what in (checkpoint, f"runs/half_{trained}/model")]
    assert hashes[0] == hashes[1]


def test_where_state_lives_and_ranks_do_not_change_what_is_trained(work, trained):
    (work / "swap").mkdir(exist_ok=True)
    away = {"offload__optimizer": "nvme", "offload__weights": "nvme", "offload__paths": [str(work / "swap")]}
    variants = {"away": away, "in_backward": {"train__update": "in_backward", "train__micro_batch": 8},
                "here": {"train__micro_batch": 8}, "recomputed": {"train__recompute": "block"}}
    for name, changes in variants.items():
        lmlaunch(config(work, f"{name}_{trained}", **settings(trained, **changes)), cwd=work)
    assert losses(work, f"away_{trained}") == losses(work, f"recomputed_{trained}") == losses(work, trained)
    assert losses(work, f"in_backward_{trained}") == losses(work, f"here_{trained}")
    lmlaunch("--ranks", "2", config(work, f"ranks_{trained}", **settings(trained)), cwd=work)
    assert [row[0] for row in losses(work, f"ranks_{trained}")] == pytest.approx([row[0] for row in losses(work, trained)], rel=1e-5)


def test_packed_documents_have_their_own_virtual_tokens(work, trained):
    lmlaunch(config(work, f"packed_{trained}", **settings(trained, data__packing=True, train__steps=1)), cwd=work)
    assert eval_losses(work, f"packed_{trained}")[0] == pytest.approx(eval_losses(work, trained)[0], rel=1e-6)
    shorter = lmlaunch(config(work, f"short_{trained}", **settings(trained, data__max_length=16, train__steps=1)), cwd=work)
    longest = 16 - COUNT
    cut = sum(len(json.loads(line)["input_ids"]) > longest for line in open(work / "train.jsonl"))
    assert f"{cut} cut" in shorter.stderr


def test_muon_steps_them_as_adamw(work, trained):
    lmlaunch(config(work, f"muon_{trained}", **settings(trained, optimizer__name="muon")), cwd=work)
    assert losses(work, f"muon_{trained}") == losses(work, trained)
    assert torch.equal(weights(work, f"muon_{trained}")["prompt_embeddings"], weights(work, trained)["prompt_embeddings"])


@pytest.mark.parametrize("method", METHODS)
def test_the_base_may_be_quantized_and_the_adapter_more_precise(work, method):
    changes = {"model__dtype": "bf16", "lora__dtype": "fp32", "model__quantize": "nf4", "train__steps": 4}
    lmlaunch(config(work, f"nf4_{method}", **settings(method, **changes)), cwd=work)
    values = weights(work, f"nf4_{method}")["prompt_embeddings"]
    assert not torch.equal(values, values.bfloat16().float())


def test_starts(work):
    def start(method, word):
        lmlaunch(config(work, f"{word}_{method}", **settings(method, prompt__start=word, optimizer__lr=1e-12, train__steps=1)), cwd=work)
        return weights(work, f"{word}_{method}")["prompt_embeddings"]

    assert start("prefix", "zero").abs().max() < 1e-9
    normal = start("prefix", "normal")
    assert abs(normal.mean()) < 0.2 and abs(normal.std() - 1) < 0.2 and not torch.equal(normal[:, :32], normal[:, 32:])
    rows_of = base_of(work).get_input_embeddings().weight
    distance = torch.cdist(start("prompt", "vocabulary"), rows_of, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
    assert distance.values.max() < 1e-5 and len(set(distance.indices.tolist())) > 1


def test_answers_are_those_of_peft(work, trained):
    text = torch.tensor([[5, 8, 11]])
    model = OfTheText(PeftModel.from_pretrained(base_of(work), work / f"runs/{trained}/model")).eval()
    for _ in range(6):
        text = torch.cat([text, model(text).logits[:, -1].argmax(-1)[None]], dim=1)
    answer = text[0, 3:].tolist()
    expected = [f"w{token}" for token in answer[:answer.index(2) if 2 in answer else None]]
    assert len(expected) > 1
    for what in (f"runs/{trained}", f"runs/{trained}/model"):
        done = lmlaunch("generate", what, "--prompt", "w5 w8 w11", "--max-tokens", 6, cwd=work)
        assert done.stdout.split()[-len(expected):] == expected, done.stdout
    lmlaunch(config(work, f"samples_{trained}", **settings(trained, train__sample_prompts=["w5 w8 w11"], train__sample_tokens=4, train__steps=2)), cwd=work)
    assert any("answer" in row for row in rows(work, f"samples_{trained}"))


def test_the_plan_has_them(work, trained):
    planned = json.loads(lmlaunch("plan", f"{trained}.toml", "--json", cwd=work).stdout)
    assert planned["fits"]
    tokens = sum(min(len(json.loads(line)["input_ids"]), 48 - COUNT) + COUNT for line in open(work / "train.jsonl")) / 64
    assert planned["sequence_tokens"] == pytest.approx(tokens)


def test_what_virtual_tokens_cannot_do_is_refused(work, trained):
    for arguments, code, text in [
            (("export", f"runs/{trained}", "--merge", "-o", "merged"), 2, "virtual tokens, which are part of no weight"),
            (("export", f"runs/{trained}", "--gguf", "f16", "-o", "x.gguf"), 2, "llama.cpp has no virtual tokens"),
            (("merge", f"runs/{trained}/model", f"runs/{trained}/model", "-o", "both"), 11, "virtual tokens, which cannot be added"),
            ((f"{trained}.toml", "run.dir=runs/r1", "prompt.length=47"), 10, "leaves 1 of data.max_length = 48"),
            ((f"{trained}.toml", "run.dir=runs/r2", "lora.r=4"), 10, "lora.r is LoRA's"),
            ((f"{trained}.toml", "run.dir=runs/r3", 'lora.targets=["q_proj"]'), 10, "lora.targets is LoRA's"),
            ((f"{trained}.toml", "run.dir=runs/r4", "train.method=lora"), 10, "prompt.length is of virtual tokens"),
            ((f"{trained}.toml", "run.dir=runs/r5", "prompt.start=" + ("zero" if trained == "prompt" else "vocabulary")), 10, "prompt.start"),
            ((f"{trained}.toml", "run.dir=runs/r6", "train.objective=reward"), 10, "beside a head of scores"),
            ((f"{trained}.toml", "run.dir=runs/r7", "prompt.hidden=8", f"train.method={'prompt' if trained == 'ptuning' else trained}"), 10, "prompt.hidden is of the MLP of P-tuning"),
            ((f"{trained}.toml", "run.dir=runs/r8", "train.method=lora", "prompt.length=20", "prompt.hidden=8"), 10, "prompt.hidden is of virtual tokens")]:
        done = lmlaunch(*arguments, cwd=work, check=False)
        assert done.returncode == code and text in done.stderr, (arguments, done.stderr)
