"""Every command of the pages in docs/, run as it stands there, each page in its order and in a folder of its own, with a tiny
model. `my.toml` is a configuration of the tester's, training takes six steps, and /nvme0/swap lies in the folder. Commands inside
sentences, README's too, have a table: what is run for each, or which test runs it. test_docs_pages.py has the rest of the pages."""

import json
import re

import pytest
import torch
from test_first_hour import README, ROOT, commands_of, first_hour, through_pipes
from test_gguf import CHATML, SIZES, SPECIAL, byte_level
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

PAGES = sorted((ROOT / "docs").glob("*.md"))
TRAINS = re.compile(r"lmlaunch (--ranks \d+ )?\S+\.toml ")
SHORT = " train.steps=6"

# Commands inside sentences. Those that name no files of their own are run with some.
RUN_AS = {
    "lmlaunch plan": "lmlaunch plan my.toml",
    "lmlaunch plan --compare": "lmlaunch plan --compare my.toml",
    "lmlaunch doctor": "lmlaunch doctor",
    "lmlaunch doctor --json": "lmlaunch doctor --json",
    "lmlaunch plan llama-3.1-8b-full-24gib --gpu-memory 24GiB --host-memory 64GiB":
        "lmlaunch plan llama-3.1-8b-full-24gib --gpu-memory 24GiB --host-memory 64GiB",
    "lmlaunch presets NAME": "lmlaunch presets smollm2-135m-lora",
    "lmlaunch help KEY": "lmlaunch help optimizer.lr",
    "lmlaunch help TABLE": "lmlaunch help offload",
    "lmlaunch help --markdown": "lmlaunch help --markdown",
    "lmlaunch COMMAND --help": "lmlaunch export --help",
    "lmlaunch init --from FILE": "echo '{\"base_model\": \"build/quickstart/model\", \"datasets\": [{\"path\": \"build/quickstart/train.jsonl\"}]}'"
                                 " > a.json && lmlaunch init --from a.json",
    "lmlaunch init --words": "lmlaunch init --words",
}
# Those that need a launcher, GPUs, a browser, another model or two runs that differ, in sentences and in blocks.
ELSEWHERE = {
    "lmlaunch merge": "tests/e2e/test_serve.py",
    "lmlaunch eval": "tests/e2e/test_try_it.py",
    "lmlaunch generate": "tests/e2e/test_try_it.py",
    "lmlaunch fetch ORG/NAME": "tests/e2e/test_fetch.py",
    "lmlaunch fetch ORG/NAME@REVISION": "tests/e2e/test_fetch.py",
    "lmlaunch fetch ORG/NAME --data": "tests/e2e/test_fetch.py",
    "mpirun -n 4 lmlaunch fetch ORG/NAME": "tests/e2e/test_fetch.py",
    "lmlaunch --gpus 4 my.toml": "tests/e2e/test_gpus.py",
    "mpirun -n 4 lmlaunch config.toml": "tests/e2e/test_mpi.py",
    "srun --mpi=pmix -n 4 lmlaunch config.toml": "tests/faults/test_slurm_ranks.py",
    "sbatch configs/slurm/train.sbatch config.toml": "tests/faults/test_slurm_ranks.py",
    "sbatch configs/slurm/gpus.sbatch config.toml": "tests/e2e/test_manifests.py",
    "sbatch configs/slurm/sweep.sbatch config.toml": "tests/e2e/test_manifests.py",
    "lmlaunch diff RUN RUN": "tests/e2e/test_diff.py",
    "lmlaunch diff runs/a runs/b": "tests/e2e/test_diff.py",  # they differ: exit code 1
    "tensorboard --logdir runs": "tests/e2e/test_see_it.py",
    "lmlaunch export runs/lora --each-expert -o each_expert": "tests/e2e/test_expert_adapters.py",  # of a mixture
    # They end when they are told to.
    "lmlaunch serve runs/tried --port 8000": "tests/e2e/test_serve.py",
    "lmlaunch serve runs/tried --host 0.0.0.0 --token-file token.txt": "tests/e2e/test_serve.py",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With a tokenizer that llama.cpp has a name for."""
    directory = tmp_path_factory.mktemp("model")
    byte_level(SPECIAL).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[2], "chat_template": CHATML}))
    torch.manual_seed(1)
    sizes = {**SIZES, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(directory)
    return directory


def line_of(work, command, short=SHORT):
    command = re.sub(r"/(nvme\d)", rf"{work}/\1", command)
    exports = f'export PATH="{work}/build/bin:$PATH" HF_HOME="{work}/hf"\n'
    return exports + command + (short if TRAINS.match(command) and "train.steps=" not in command else "")


def tiny_gpt2(work):
    """In the hub cache, where `lmlaunch fetch` would have put GPT-2."""
    cache = work / "hf" / "hub" / "models--openai-community--gpt2"
    directory = cache / "snapshots" / "1"
    directory.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1")
    tokenizer = byte_level(SPECIAL[:1])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": SPECIAL[0], "eos_token": SPECIAL[0]}))
    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.get_vocab_size(), n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0,
                               eos_token_id=0)).save_pretrained(directory)


def inside_sentences(text):
    text = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    found = re.findall(r"`((?:lmlaunch|mpirun|srun|sbatch|tensorboard)\s[^`]*)`", text)
    return [" ".join(command.split()) for command in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_the_page_works(model, tmp_path, page):
    commands = commands_of(page.read_text())
    first_hour(tmp_path, model)
    if page.stem == "quick-answer":
        tiny_gpt2(tmp_path)
    for command in commands:
        if command in ELSEWHERE:
            continue
        code, said = through_pipes(tmp_path, line_of(tmp_path, command))
        assert code == 0, f"{page.name}: {command}\n{said}"
    if page.stem == "offload":
        check_offload(tmp_path)
    if page.stem == "quick-answer":
        check_quick_answer(tmp_path)


def check_offload(work):
    names = {event.get("name") for event in json.loads((work / "steps.json").read_text())["traceEvents"]}
    assert any(name and name.startswith("forward") for name in names)
    for run in ("auto", "two_disks"):
        assert json.loads((work / "runs" / run / "status.json").read_text())["state"] == "done"
    assert json.loads((work / "runs" / "two_disks" / "plan.json").read_text())["peak"]["disk_bytes"] > 0
    assert not list(work.glob("nvme*/swap/*"))


def check_quick_answer(work):
    """What the script's settings ask for is what was run."""
    plan = (work / "runs" / "gpt2" / "plan.txt").read_text()
    assert "step: 1 x 2 sequences" in plan and "recompute block" in plan
    config = (work / "runs" / "gpt2" / "config.toml").read_text()
    assert 'path = "openai-community/gpt2"' in config and 'dtype = "fp16"' in config
    steps = [json.loads(line) for line in (work / "runs" / "gpt2" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == list(range(1, 11))
    assert AutoModelForCausalLM.from_pretrained(work / "runs" / "gpt2" / "model").config.model_type == "gpt2"


def test_the_tables_have_what_stands_inside_sentences():
    # The tables of coming-from.md are the program's own (test_init_from.py), and have parts of commands.
    pages = [re.sub(r"^\|.*$", "", page.read_text(), flags=re.M) if page.stem == "coming-from" else page.read_text() for page in PAGES]
    texts = [README, *pages]
    found = {command for text in texts for command in inside_sentences(text)}
    assert found - {*ELSEWHERE} == {*RUN_AS}
    assert {*ELSEWHERE} <= found | {command for text in texts for command in commands_of(text)}
    assert inside_sentences("Then `lmlaunch\nnew thing` does it.") == ["lmlaunch new thing"]


def word_of(command):
    """What a test of it has in its text: the subcommand; of training the launcher, and --gpus where there is none."""
    words = command.split()
    verb = words[words.index("lmlaunch") + 1] if "lmlaunch" in words else ""
    return f'"{verb}"' if verb.isalpha() else words[0].replace("lmlaunch", "--gpus")


def test_every_command_inside_a_sentence_is_run_here_or_elsewhere(model, tmp_path):
    for command, file in ELSEWHERE.items():
        assert word_of(command) in (ROOT / file).read_text(), (command, file)
    first_hour(tmp_path, model)
    for command, run in RUN_AS.items():
        code, said = through_pipes(tmp_path, line_of(tmp_path, run, short=""))
        assert code == 0, f"{command}\n{said}"


def test_a_command_that_does_not_work_is_found(model, tmp_path):
    first_hour(tmp_path, model)
    assert through_pipes(tmp_path, line_of(tmp_path, "lmlaunch my.toml train.stepz=1"))[0] == 10
