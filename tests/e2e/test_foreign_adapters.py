"""Adapters that peft has made, each key of its configurations in turn (../weights/foreign_adapters.py), given to the program: trained further from
what peft computes with them, or refused by the key's name. None is read as something else."""

import copy
import json
import sys
from pathlib import Path

import peft
import pytest
import torch
from test_run import config, eval_losses, lmlaunch, loss_by_transformers
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "weights"))
from foreign_adapters import ADAPTERS, OTHERS, case_of  # noqa: E402

VOCAB = 67
torch.set_num_threads(1)
# What differs from another case in nothing that a forward pass sees, or only in the layout of the refusal: interop_test.py alone has them.
READ_ALIKE = {"rank_of_none", "exclude_nothing", "no_modules_to_save", "dropout", "no_task", "weight_tying", "regex_of_pythons_end", "regex_ignoring_case",
              "gaussian_start", "orthogonal_start", "rank_of_no_end", "two_layers", "layers_by_names"}
# Read and merged, but no configuration of a run has such a value.
NOT_TRAINED = {"negative_alpha": "lora_alpha"}
READ = [name for name in ADAPTERS if case_of(name)[2] is None and name not in READ_ALIKE | NOT_TRAINED.keys()]
REFUSED = [name for name in ADAPTERS if case_of(name)[2] and not name.startswith("kind_")]


class Foreign:
    def __init__(self, work):
        torch.manual_seed(0)
        self.work = work
        self.model = AutoModelForCausalLM.from_config(Qwen3Config(
            hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB,
            max_position_embeddings=64, attention_bias=True, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2))
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.model.save_pretrained(work / "model")
        (work / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
        generator = torch.Generator().manual_seed(2)
        for name, count in (("train", 8), ("eval", 4)):
            with open(work / f"{name}.jsonl", "w") as file:
                for _ in range(count):
                    ids = torch.randint(VOCAB, (20,), generator=generator).tolist()
                    file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")

    def fresh(self):
        return copy.deepcopy(self.model)

    def make(self, name, made, edits):
        """(its directory, the model with the adapter). What peft would train has random values."""
        torch.manual_seed(1)
        model = peft.get_peft_model(self.fresh(), made)
        for key, parameter in model.named_parameters():
            if "lora_" in key or (parameter.requires_grad and (key.endswith(".bias") or isinstance(made, (peft.IA3Config, peft.LNTuningConfig)))):
                torch.nn.init.normal_(parameter, mean=0 if "lora_" in key else 1, std=0.3)
        directory = self.work / "adapters" / name
        model.save_pretrained(directory)
        written = json.loads((directory / "adapter_config.json").read_text())
        (directory / "adapter_config.json").write_text(json.dumps({**written, **edits}))
        return directory, model

    def toml(self, name, directory, method):
        """A step of no length: what is written is what was read."""
        return config(self.work, name, train__method=method, lora__init=str(directory), train__steps=1, train__global_batch=8, train__micro_batch=8,
                      optimizer__lr=1e-30)

    def expect_read(self, name, directory, model, method="lora"):
        lmlaunch(self.toml(name, directory, method), cwd=self.work)
        assert eval_losses(self.work, name)[0] == pytest.approx(loss_by_transformers(model, self.work), rel=1e-5)
        back = peft.PeftModel.from_pretrained(self.fresh(), self.work / "runs" / name / "model")
        torch.testing.assert_close(logits(back), logits(model), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logits(model), logits(self.model), atol=1e-3)

    def expect_refused(self, name, directory, key, method="lora"):
        toml = self.toml(name, directory, method)
        done = lmlaunch("plan", toml, cwd=self.work, check=False)  # the configuration alone is read; what its tensors are is seen by a run
        if done.returncode == 0:
            done = lmlaunch(toml, cwd=self.work, check=False)
        assert done.returncode in (10, 11) and key in done.stderr, done.stderr
        metrics = self.work / "runs" / name / "metrics.jsonl"
        assert not metrics.exists() or not metrics.read_text()


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(20).reshape(2, 10)).logits


def lora_of(name):
    arguments, edits, refused = case_of(name)
    return peft.LoraConfig(**{**dict(r=4, lora_alpha=6, task_type="CAUSAL_LM"), **arguments}), edits, refused


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return Foreign(tmp_path_factory.mktemp("foreign"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_it_is_trained_further_from_what_peft_computes(name, foreign):
    made, edits, _ = lora_of(name)
    foreign.expect_read(name, *foreign.make(name, made, edits))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_the_keys_name(name, foreign):
    made, edits, refused = lora_of(name)
    directory, _ = foreign.make(name, made, edits)
    foreign.expect_refused(name, directory, refused)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOT_TRAINED)
def test_neither_a_plan_nor_a_run_takes_what_is_not_trained(name, foreign):
    made, edits, _ = lora_of(name)
    directory, _ = foreign.make(name, made, edits)
    toml = foreign.toml(name, directory, "lora")
    for command in (("plan",), ("plan", "--compare"), ()):
        done = lmlaunch(*command, toml, cwd=foreign.work, check=False)
        assert done.returncode == 10 and NOT_TRAINED[name] in done.stderr, (command, done.stderr)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, case in OTHERS.items() if case[0] in (peft.IA3Config, peft.LNTuningConfig)])  # others: test_virtual_tokens.py
def test_factors_and_norms_are_trained_further_or_refused_by_the_keys_name(name, foreign):
    make, arguments, edits, refused = OTHERS[name]
    method, run = "ia3" if make is peft.IA3Config else "norms", name.replace(" ", "_")
    directory, model = foreign.make(run, make(task_type="CAUSAL_LM", **arguments), edits)
    if refused:
        foreign.expect_refused(run, directory, refused, method)
    else:
        foreign.expect_read(run, directory, model, method)


def test_the_cases_are_many():
    assert len(READ) + len(REFUSED) + len(NOT_TRAINED) + len(OTHERS) >= 90 and len(READ) >= 40
