"""Trying the result: generate and chat from whatever holds a model, samples during a run, and the end of a run whose held-out loss
does not fall any more."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time

import pytest
from counts import some_of
import tokenizers
import torch
from test_run import BIN, VOCAB, config, eval_losses, filled, lmlaunch, losses, rows
from transformers import AutoModelForCausalLM

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
EXTRA = ["<user>", "<assistant>", "<system>", "<end>"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The small model of test_run with a tokenizer of bytes (so that one character may be several tokens) and a chat template."""
    work = filled(tmp_path_factory.mktemp("try"), layers=2)
    letters = [chr(code) for code in range(32, 125)]  # 93, and four special tokens
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({**{c: i + 4 for i, c in enumerate(letters)}, **{t: i for i, t in enumerate(EXTRA)}},
                                                             unk_token=" "))
    words.add_special_tokens(EXTRA)
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    words.save(str(work / "model" / "tokenizer.json"))
    (work / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (work / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (work / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert len(letters) + 4 == VOCAB
    return work


@pytest.fixture(scope="module")
def runs(work):
    """A full run and a LoRA run, each with a checkpoint."""
    for name, method in (("full", "full"), ("lora", "lora")):
        lmlaunch(config(work, name, train__steps=6, train__method=method, checkpoint__every=3), cwd=work)
    return work / "runs"


def generated(where, work, *more, prompt="ab"):
    return json.loads(lmlaunch("generate", where, "--prompt", prompt, "--max-tokens", "8", "--json", "--gpus", "0", *more, cwd=work).stdout)


def test_greedy_text_is_that_of_transformers(work):
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    prompt = f"<user>{'hello'}<assistant>"
    ids = tokenizers.Tokenizer.from_file(str(work / "model" / "tokenizer.json")).encode(prompt, add_special_tokens=False).ids
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=3, pad_token_id=3)[0, len(ids):].tolist()
    ours = json.loads(lmlaunch("generate", "model", "--prompt", "hello", "--max-tokens", "20", "--json", "model.dtype=fp32", cwd=work).stdout)
    assert ours["tokens"] == [token for token in theirs if token != 3]
    assert ours["prompt_tokens"] == len(ids) == 7
    printed = lmlaunch("generate", "model", "--prompt", "hello", "--max-tokens", "20", "model.dtype=fp32", cwd=work).stdout
    assert printed == ours["text"] + "\n"


@pytest.mark.parametrize("method", some_of("lora", "full"))
def test_every_place_of_a_run_speaks(runs, work, method):
    run = runs / method
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    answers = [generated(where, work)["tokens"] for where in (run, run / "model", f"{run / 'model'}/")]
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 8
    assert len(generated(checkpoint, work)["tokens"]) == 8
    # ... and is evaluated, verified and exported.
    losses = {json.loads(lmlaunch("eval", where, "--json", "--gpus", "0", cwd=work).stdout)["eval_loss"] for where in (run, run / "model")}
    assert losses == {eval_losses(work, method)[-1]}
    lmlaunch("eval", checkpoint, cwd=work)
    for where in (run, run / "model", checkpoint):
        assert json.loads(lmlaunch("verify", where, "--json", "--gpus", "0", cwd=work).stdout)["ok"]
        shutil.rmtree(work / "exported", ignore_errors=True)
        lmlaunch("export", where, "-o", "exported", "--gpus", "0", cwd=work)
        assert (work / "exported" / ("adapter_config.json" if method == "lora" else "config.json")).exists()


@pytest.mark.parametrize("method", some_of("full", "lora"))
def test_a_run_is_asked_with_the_template_that_it_was_trained_with(work, method):
    (work / "own.jinja").write_text("{% for m in messages %}<{{ m.role }}>!!!!{{ m.content }}{% endfor %}"
                                    "{% if add_generation_prompt %}<assistant>{% endif %}")
    name = f"own_{method}"
    lmlaunch(config(work, name, train__steps=2, train__method=method, data__chat_template="own.jinja", checkpoint__every=1), cwd=work)
    run = work / "runs" / name
    lmlaunch("export", run, "-o", f"exported_{name}", cwd=work)
    for where in (run, run / "model", sorted((run / "checkpoints").iterdir())[-1], f"exported_{name}"):
        assert generated(where, work)["prompt_tokens"] == generated("model", work)["prompt_tokens"] + len("!!!!"), where


def test_a_run_trained_on_plain_pairs_is_prompted_as_data_render_says(work):
    (work / "pairs.jsonl").write_text(json.dumps({"prompt": "ab", "completion": "cd"}) + "\n")
    (work / "ends.jinja").write_text(TEMPLATE.replace("{% endfor %}", "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"))
    data = dict(data__train=["pairs.jsonl"], data__eval=[], data__chat_template="ends.jinja")
    prompted = {}
    for render in ("plain", "chat"):
        name = f"render_{render}"
        done = lmlaunch(config(work, name, train__steps=2, **data, data__render=render, train__sample_prompts=["ab"], train__sample_tokens=8), cwd=work)
        assert "data.render" not in done.stderr
        prompted[render] = [generated(work / "runs" / name / where, work) for where in ("", "model")]
    assert [answer["prompt_tokens"] for answer in prompted["plain"]] == [2, 2]
    assert [answer["prompt_tokens"] for answer in prompted["chat"]] == [4, 4]
    # The last sample is the answer of the trained model.
    for render in prompted:
        assert rows(work, f"render_{render}")[-1]["answer"] == prompted[render][0]["text"], render
    assert "without the chat template" in chat(work, "a\n", model=work / "runs" / "render_plain").stderr
    done = lmlaunch(config(work, "render_auto", train__steps=1, **data), cwd=work)
    notes = [line for line in done.stderr.splitlines() if 'set data.render = "chat"' in line]
    assert len(notes) == 1 and "1 row is a plain prompt and completion" in notes[0], done.stderr


def test_named_sets_are_evaluated_each_and_the_first_decides(work):
    """By name they would stand the other way round."""
    sets = 'data.eval={zeta = ["eval.jsonl"], alpha = ["train.jsonl"]}'
    settings = ["train.eval_every=2", "train.early_stopping_patience=1", "train.early_stopping_threshold=100", "checkpoint.keep_best=true"]
    done = lmlaunch(config(work, "sets", train__steps=9), sets, *settings, cwd=work)
    lmlaunch(config(work, "unnamed", train__steps=9), *settings, cwd=work)
    told = rows(work, "sets")
    losses_of = {name: [(row["step"], row[f"eval_loss/{name}"]) for row in told if f"eval_loss/{name}" in row] for name in ("zeta", "alpha")}
    # The set without a name has the names and the bits that it always had.
    assert losses_of["zeta"] == [(row["step"], row["eval_loss"]) for row in rows(work, "unnamed") if "eval_loss" in row]
    assert [step for step, _ in losses_of["alpha"]] == [step for step, _ in losses_of["zeta"]] == [0, 2, 4]
    assert not any("eval_loss" in row for row in told) and losses_of["alpha"] != losses_of["zeta"]
    loss, step = min((loss, step) for step, loss in losses_of["zeta"][1:])
    assert f"gave no lower eval loss of zeta than {loss:.4f}, of step {step}" in done.stderr
    assert "data: eval zeta: 12 rows" in done.stderr and "eval loss of alpha after step 4: " in done.stderr
    # A command says the same of the weights of that step.
    answer = json.loads(lmlaunch("eval", "runs/sets", "--json", cwd=work).stdout)
    assert answer["eval_loss/zeta"] == loss and answer["eval_loss/alpha"] == dict(losses_of["alpha"])[step]
    assert lmlaunch("eval", "model", sets, "data.max_length=32", "data.cache_dir=cache", "model.dtype=fp32", cwd=work).stdout.count("eval loss of ") == 2
    card = (work / "runs" / "sets" / "model" / "README.md").read_text()
    assert re.findall(r"eval loss of (\w+): ", card) == ["zeta", "alpha"]


def choice_rows(generator, count):
    """Contexts and endings of letters, so that the shortest ending is often the likeliest one and not the likeliest per character."""
    def number(least, most):
        return int(torch.randint(least, most + 1, (1,), generator=generator))

    def letters(least, most):
        return "".join(chr(number(97, 122)) for _ in range(number(least, most)))

    for _ in range(count):
        endings = [letters(1, 9) for _ in range(number(2, 4))]
        yield {"context": letters(3, 20), "endings": endings, "label": number(0, len(endings) - 1)}


def log_likelihoods_by_transformers(work, rows):
    """Per row the sum of log-probabilities of each ending's tokens: those behind the context's own."""
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32).eval()
    words = tokenizers.Tokenizer.from_file(str(work / "model" / "tokenizer.json"))
    spans = [(len(words.encode(row["context"]).ids), words.encode(row["context"] + " " + ending).ids) for row in rows for ending in row["endings"]]
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for _, ids in spans], batch_first=True)
    with torch.no_grad():
        probabilities = model(padded).logits[:, :-1].double().log_softmax(-1).gather(2, padded[:, 1:, None])[..., 0]
    sums = iter([line[first - 1:len(ids) - 1].sum().item() for line, (first, ids) in zip(probabilities, spans)])
    return [[next(sums) for _ in row["endings"]] for row in rows]


def test_accuracy_of_choices_is_that_of_transformers(work):
    asked = list(choice_rows(torch.Generator().manual_seed(5), 200))
    (work / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    sums = log_likelihoods_by_transformers(work, asked)
    by_sum = [row["label"] == max(range(len(of)), key=of.__getitem__) for row, of in zip(asked, sums)]
    by_character = [row["label"] == max(range(len(of)), key=lambda i: of[i] / len(row["endings"][i])) for row, of in zip(asked, sums)]
    expected = {"accuracy": sum(by_sum) / 200, "accuracy_norm": sum(by_character) / 200}
    assert expected["accuracy"] != expected["accuracy_norm"]
    keys = ("data.max_length=64", "data.cache_dir=cache", "model.dtype=fp32")
    told = json.loads(lmlaunch("eval", "model", 'data.eval=["choices.jsonl"]', "data.format=choices", *keys, "--scores", "scores.jsonl", "--json",
                               cwd=work).stdout)
    scores = [json.loads(line) for line in open(work / "scores.jsonl")]
    assert [len(row["log_likelihoods"]) for row in scores] == [len(row["endings"]) for row in asked]
    for number, (ours, of, row) in enumerate(zip(scores, sums, asked), 1):
        assert ours["log_likelihoods"] == pytest.approx(of, abs=1e-4, rel=0), row
        assert (ours["row"], ours["label"], ours["characters"]) == (number, row["label"], [len(ending) for ending in row["endings"]])
        assert (ours["chosen"] == row["label"], ours["chosen_norm"] == row["label"]) == (by_sum[number - 1], by_character[number - 1])
    assert {key: told[key] for key in expected} == expected
    # The loss is that of the right endings: what training lowers.
    right = [of[row["label"]] for row, of in zip(asked, sums)]
    targets = sum(len(row["endings"][row["label"]]) + 1 for row in asked)
    assert told["target_tokens"] == targets and told["eval_loss"] == pytest.approx(-sum(right) / targets, rel=1e-5)
    # The same in training, found by the columns, over ranks and in packed sequences; and beside a set of other rows.
    data = dict(data__train=["choices.jsonl"], data__max_length=64, data__packing=True)
    done = lmlaunch("--ranks", "2", config(work, "choices", **data, train__steps=4),
                    'data.eval={which = ["choices.jsonl"], other = ["eval.jsonl"]}', cwd=work)
    rows_of = {name: [row for row in rows(work, "choices") if f"eval_loss/{name}" in row] for name in ("which", "other")}
    first, last = rows_of["which"]
    assert {key: first[f"{key}/which"] for key in expected} == expected and last["eval_loss/which"] < first["eval_loss/which"]
    assert not any(key.startswith("accuracy") for row in rows_of["other"] for key in row)
    assert all(0 <= row[f"token_accuracy/{name}"] < 1 for name in ("which", "other") for row in rows_of[name][-1:])
    assert f"eval loss of which after step 0: {first['eval_loss/which']:.4f}" in done.stderr
    assert f", accuracy {expected['accuracy']:.4f}, accuracy_norm {expected['accuracy_norm']:.4f} over 200 rows" in done.stderr
    answer = lmlaunch("eval", "runs/choices", cwd=work).stdout
    assert f", accuracy {last['accuracy/which']:.4f}, accuracy_norm {last['accuracy_norm/which']:.4f} over 200 rows\n" in answer
    refused = lmlaunch("eval", "model", 'data.eval=["eval.jsonl"]', *keys, "--scores", "none.jsonl", cwd=work, check=False)
    assert refused.returncode == 10 and "no evaluation set has rows of choices" in refused.stderr and not (work / "none.jsonl").exists()


def test_a_run_without_a_model_yet_gives_its_newest_checkpoint(runs, work):
    shutil.copytree(runs / "full", work / "unfinished")
    shutil.rmtree(work / "unfinished" / "model")
    for command in ("generate", "eval", "verify"):
        more = ["--prompt", "a", "--max-tokens", "1"] if command == "generate" else []
        done = lmlaunch(command, "unfinished", *more, cwd=work)
        assert "taking its newest checkpoint" in done.stderr, command


def test_a_model_directory_is_evaluated_on_any_data(runs, work):
    numerics = ("run.threads=1", "train.micro_batch=4", "train.global_batch=8")  # the run's, which decide about the last bits
    told = json.loads(lmlaunch("eval", "model", "data.eval=[\"eval.jsonl\"]", "data.max_length=32", "data.cache_dir=cache", "model.dtype=fp32", *numerics,
                               "--json", cwd=work).stdout)
    assert told["eval_loss"] == eval_losses(work, "full")[0]  # before training
    adapter = json.loads(lmlaunch("eval", runs / "lora" / "model", "data.eval=[\"train.jsonl\"]", "--json", cwd=work).stdout)
    assert adapter["target_tokens"] > told["target_tokens"]
    refused = lmlaunch("eval", "model", cwd=work, check=False)
    assert refused.returncode == 10 and "data.eval=" in refused.stderr
    refused = lmlaunch("eval", "no-such-model", "data.eval=[\"eval.jsonl\"]", cwd=work, check=False)
    assert refused.returncode not in (0, 70)


def test_commands_that_move_files_say_why_they_take_no_gpu(runs, work):
    for command in (["verify", "model"], ["export", "model", "-o", "x"]):
        done = lmlaunch(*command, "--gpus", "1", cwd=work, check=False)
        assert done.returncode == 2 and "on the CPU" in done.stderr, done.stderr


def test_sampling_is_a_matter_of_its_seed(work):
    settings = ["--temperature", "1.5"]
    texts = [generated("model", work, *settings, "--seed", str(seed))["tokens"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = generated("model", work)["tokens"]
    assert texts[0] != greedy == generated("model", work, *settings, "--top-k", "1")["tokens"]
    assert greedy == generated("model", work, *settings, "--top-p", "0.000001")["tokens"]


def answered(work, lines, *more, name="asked.jsonl", check=True):
    (work / name).write_text("".join(line + "\n" for line in lines))
    return lmlaunch("generate", "model", "--prompts", name, "--max-tokens", "8", "--gpus", "0", *more, cwd=work, check=check)


@pytest.mark.parametrize("sampling", [[], ["--temperature", "2", "--seed", "5"]])
def test_a_file_of_prompts_is_answered_as_each_of_them_alone(sampling, work):
    asked = ["hello there", "hello", "hello there"]  # they begin alike: no answer may depend on the one before
    done = answered(work, [json.dumps({"id": i, "prompt": text}) for i, text in enumerate(asked)], *sampling)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["id"], row["prompt"]) for row in answers] == list(enumerate(asked))
    for i, row in enumerate(answers):
        alone = generated("model", work, *(sampling and [*sampling[:-1], str(5 + i)]), prompt=row["prompt"])
        assert (row["tokens"], row["text"], row["prompt_tokens"]) == (alone["tokens"], alone["text"], alone["prompt_tokens"])
    assert (answers[0]["tokens"] == answers[2]["tokens"]) == (not sampling)
    as_lines = [json.loads(line) for line in answered(work, asked, *sampling, name="asked.txt").stdout.splitlines()]
    assert [row["tokens"] for row in as_lines] == [row["tokens"] for row in answers]


def test_a_system_message_stands_before_a_prompt(work):
    def of(*more, prompt="b"):
        return generated("model", work, *more, prompt=prompt)["prompt_tokens"]

    assert of("--system", "abc") == of() + len("abc") + 1  # <system> is one token
    row, own = {"messages": [{"role": "user", "content": "b"}]}, [{"role": "system", "content": "abcdef"}]
    told = answered(work, [json.dumps({"prompt": "b"}), json.dumps(row), json.dumps({"messages": own + row["messages"]})], "--system", "abc")
    assert [json.loads(line)["prompt_tokens"] - of() for line in told.stdout.splitlines()] == [4, 4, 7]
    assert json.loads(told.stdout.splitlines()[1])["messages"] == row["messages"]  # as it was asked
    # Without a template: text and an empty line, as training writes prompts that have one.
    shutil.copytree(work / "model", work / "bare", dirs_exist_ok=True)
    (work / "bare" / "chat_template.jinja").unlink()
    bare = [generated("bare", work, *more, prompt="b")["prompt_tokens"] for more in ([], ["--system", "abc"])]
    assert bare[1] == bare[0] + len("abc\n\n")


@pytest.mark.parametrize("line, reason", [('{"text": "a"}', 'neither "prompt" nor "messages"'), ("{", "asked.jsonl:2"), ('{"prompt": ""}', "asked.jsonl:2")])
def test_a_row_that_cannot_be_asked_ends_it_before_the_first_answer(line, reason, work):
    shutil.copytree(work / "model", work / "bare", dirs_exist_ok=True)
    (work / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    (work / "asked.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    done = lmlaunch("generate", "bare", "--prompts", "asked.jsonl", "--gpus", "0", cwd=work, check=False)
    assert done.returncode == 11 and reason in done.stderr and done.stdout == "", done.stderr


@pytest.mark.parametrize("wrong", [["--top-k", "5"], ["--top-p", "0.9"], ["--seed", "1"], ["--temperature", "-1"], ["--temperature", "warm"],
                                   ["--temperature", "1", "--top-p", "1.5"], ["--temperature", "1", "--top-p", "0"]])
def test_what_cannot_be_sampled_by_is_refused(wrong, work):
    done = lmlaunch("generate", "model", "--prompt", "a", *wrong, cwd=work, check=False)
    assert done.returncode == 2 and wrong[-2] in done.stderr, done.stderr


def test_text_comes_while_it_is_made(work):
    shutil.copytree(work / "model", work / "endless", dirs_exist_ok=True)
    (work / "endless" / "generation_config.json").write_text("{}")
    (work / "endless" / "tokenizer_config.json").write_text("{}")
    command = [BIN / "lmlaunch", "generate", "endless", "--gpus", "0", "--prompt", "a", "--max-tokens", "49000", "--temperature", "2"]
    with subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        first = process.stdout.read(5)
        going_on = process.poll() is None
        process.kill()
    assert len(first) == 5 and going_on


def test_text_comes_as_whole_characters(tmp_path):
    """A model of bytes that says one text, whose characters have up to four of them: what has been written is always UTF-8."""
    text = "aé€😀z"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_of = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bytes_of.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_of.decoder = tokenizers.decoders.ByteLevel()
    bytes_of.save(str(tmp_path / "tokenizer.json"))
    program = BIN.parent / "share" / "lmlaunch" / "prepare" / "text.py"
    ids = bytes_of.encode(text).ids
    steps = [{"begin": True}, *({"next": token} for token in ids), {"end": True}, {"begin": True}, {"next": ids[1]}, {"end": True}]
    requests = [{"model_dir": str(tmp_path), "chat_template": ""}, *({**step, "answer": 0} for step in steps)]
    done = subprocess.run([os.environ.get("LMLAUNCH_PYTHON", "python3"), "-I", "-B", program], input="".join(json.dumps(r) + "\n" for r in requests),
                          capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    pieces = [answer["text"] for answer in answers[2:2 + len(ids)]]
    assert "".join(pieces) == text and [piece for piece in pieces if piece] == list(text)
    assert answers[-1] == {"text": "\ufffd"}  # half a character at the end is told as such


# chat

VARIED = ["--temperature", "2", "--seed", "3"]  # the small model's likeliest token is a special one now and then, which has no text


def chat(work, lines, *more, model="model"):
    return subprocess.run([BIN / "lmlaunch", "chat", model, "--gpus", "0", "--max-tokens", "6", *more], cwd=work, input=lines, capture_output=True,
                          text=True, timeout=120)


def test_a_line_of_a_pipe_is_a_turn(work):
    done = chat(work, "hello\n\nand you\n")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    # The second answer has the whole conversation before it.
    whole = json.loads(lmlaunch("generate", "model", "--prompt", f"hello<assistant>{first}<user>and you", "--max-tokens", "6", "--json", cwd=work).stdout)
    assert second == whole["text"] and first == generated("model", work, "model.dtype=bf16", prompt="hello")["text"][:6]
    again = chat(work, "hello\n/reset\nhello\n/exit\nhello\n")
    assert again.stdout.splitlines() == [first, first] and again.returncode == 0
    assert "unknown command /what" in chat(work, "/what\n").stderr


@pytest.mark.parametrize("method", some_of("lora", "full"))
def test_every_place_of_a_run_is_talked_to(runs, work, method):
    run = runs / method
    lmlaunch("export", run, "-o", f"taken_{method}", cwd=work)
    said = []
    for where in (run, run / "model", f"taken_{method}", sorted((run / "checkpoints").iterdir())[-1]):
        done = chat(work, "hello\n", *VARIED, model=where)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    *of_its_end, of_a_checkpoint = said
    assert len(set(of_its_end)) == 1 and of_its_end[0].strip() and of_a_checkpoint.strip()


def test_a_full_context_is_said_and_a_reset_helps(work):
    done = chat(work, "hello there\nhello there\n/reset\nhello there\n", "--context", "24", *VARIED)
    assert done.returncode == 0 and done.stderr.count("/reset begins a new") >= 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] != ""


def test_a_system_message_comes_first(work):
    plain, led = chat(work, "x\n", *VARIED).stdout, chat(work, "x\n", "--system", "You are terse.", *VARIED).stdout
    assert plain != led


class Terminal:
    """A pseudo-terminal with lmlaunch chat at its other end."""

    def __init__(self, work, *more, model="model"):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(work)
            os.execv(BIN / "lmlaunch", ["lmlaunch", "chat", model, "--gpus", "0", *more])
        self.seen = ""

    def until(self, pattern):
        while not re.search(pattern, self.seen):
            assert select.select([self.fd], [], [], 60)[0], self.seen
            try:
                self.seen += os.read(self.fd, 4096).decode()
            except OSError:
                break
        found = re.search(pattern, self.seen)
        assert found, self.seen
        told, self.seen = self.seen[:found.end()], self.seen[found.end():]
        return told

    def say(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        """A chat that does not end is a failure, not a wait."""
        for _ in range(600):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"the chat did not end: {self.seen}")


def test_a_terminal_is_asked_for_each_turn(work):
    terminal = Terminal(work, "--max-tokens", "6")
    terminal.until("Ctrl-C stops an answer")
    terminal.until("> $")
    terminal.say("hello\n")
    told = terminal.until(r"> $")
    assert told.splitlines()[0] == "hello" and len(told.splitlines()) >= 2  # the terminal's echo, then the answer
    terminal.say("/exit\n")
    assert terminal.end() == 0


def test_an_interrupt_ends_the_answer_and_then_the_chat(work):
    shutil.copytree(work / "model", work / "endless", dirs_exist_ok=True)
    (work / "endless" / "generation_config.json").write_text("{}")
    (work / "endless" / "tokenizer_config.json").write_text("{}")
    # A user's turn that begins as an answer does: no token of another turn ends the answer, whatever is sampled.
    (work / "endless" / "chat_template.jinja").write_text(TEMPLATE.replace("<{{ m.role }}>", "<assistant>"))
    terminal = Terminal(work, "--max-tokens", "49000", "--context", "50000", *VARIED, model="endless")
    terminal.until("> $")
    terminal.say("hello\n")
    terminal.until("hello\r\n.{5}")
    terminal.say("\x03")
    terminal.until(r"\n> (\^C)?$")  # the terminal may echo the key after the prompt that it brings
    terminal.say("\x03")  # at the prompt: the end
    assert terminal.end() == 0


def test_an_interrupt_right_after_the_prompt_ends_the_chat(work):
    """The terminal holds the second prompt back, so that the signal comes before the wait for a line. Where it comes even earlier, it
    ends the chat at the first prompt."""
    terminal = Terminal(work)
    terminal.until("> $")
    terminal.say("\x13\n")  # Ctrl-S
    time.sleep(0.5)
    os.kill(terminal.pid, signal.SIGINT)
    time.sleep(0.5)
    terminal.say("\x11")  # Ctrl-Q
    assert terminal.end() == 0


def test_help_gives_the_defaults():
    for command in ("generate", "chat"):
        text = subprocess.run([BIN / "lmlaunch", command, "--help"], capture_output=True, text=True, check=True).stdout
        flags = re.findall(r"^  (--(?:max-tokens|temperature|top-p|top-k|seed)) .*default: ", text, re.M)
        assert sorted(flags) == ["--max-tokens", "--seed", "--temperature", "--top-k", "--top-p"], text


# samples

def test_samples_are_told_and_change_nothing(work):
    (work / "prompts.txt").write_text("first line\n\nhello line\n")
    settings = dict(train__steps=6, train__eval_every=2, checkpoint__every=4)
    lmlaunch(config(work, "plain", **settings), cwd=work)
    done = lmlaunch(config(work, "sampled", train__sample_prompts=["hello", "@prompts.txt"], train__sample_tokens=5, **settings), cwd=work)
    assert losses(work, "plain") == losses(work, "sampled") and eval_losses(work, "plain") == eval_losses(work, "sampled")
    hashes = {json.loads(lmlaunch("verify", work / "runs" / name, "--json", cwd=work).stdout)["weights_hash"] for name in ("plain", "sampled")}
    assert len(hashes) == 1
    samples = [row for row in rows(work, "sampled") if "prompt" in row]
    assert [(row["step"], row["prompt"]) for row in samples] == [(step, prompt) for step in (0, 2, 4, 6)
                                                                 for prompt in ("hello", "first line", "hello line")]
    assert len({row["answer"] for row in samples}) > 1
    assert done.stderr.count("sample after step 4: hello => ") == 1
    at_once = lmlaunch("sampled.toml", "run.dir=runs/at_once", "run.time_limit=1s", cwd=work, check=False)
    assert at_once.returncode == 75 and "sample after step" not in at_once.stderr and rows(work, "at_once") == []
    # The last ones are what generate says of the result, the first ones what it says of the model.
    for step, where in ((0, "model"), (6, "runs/sampled")):
        answer = json.loads(lmlaunch("generate", where, "--prompt", "hello", "--max-tokens", "5", "--json", "model.dtype=fp32", cwd=work).stdout)["text"]
        assert answer == next(row["answer"] for row in samples if row["step"] == step)
    page = (work / "runs" / "sampled" / "report.html").read_text()
    told = json.loads(re.search(r'id="runs">(.*?)</script>', page)[1])[0]["answers"]
    assert told == [[row["step"], row["prompt"], row["answer"]] for row in samples]
    # The plan has room for them, and says so.
    assert "key-value cache" in (work / "runs" / "sampled" / "plan.txt").read_text()
    assert "key-value cache" not in (work / "runs" / "plain" / "plan.txt").read_text()


def test_samples_are_of_their_steps_weights(work):
    """One prompt, asked again and again: what the answer before has left in the cache is of older weights, and a learning rate like
    this changes every answer."""
    lmlaunch(config(work, "moving", train__steps=3, train__eval_every=1, train__sample_prompts=["hello"], train__sample_tokens=12,
                    checkpoint__every=1, checkpoint__keep=100, optimizer__lr=0.1), cwd=work)
    answers = [row["answer"] for row in rows(work, "moving") if "prompt" in row]
    places = ["model", *(f"runs/moving/checkpoints/step_{step:08}" for step in (1, 2)), "runs/moving"]
    said = [json.loads(lmlaunch("generate", place, "--prompt", "hello", "--max-tokens", "12", "--json", "model.dtype=fp32", cwd=work).stdout)["text"]
            for place in places]
    assert answers == said and len(set(answers)) > 2, (answers, said)


def test_ranks_sample_together(work):
    settings = dict(train__steps=2, train__sample_prompts=["hello"], train__sample_tokens=4, train__global_batch=8, train__micro_batch=4)
    answers = []
    for name, more in (("alone", []), ("pair", ["--ranks", "2", "zero.stage=3"])):
        lmlaunch(config(work, name, **settings), *more, cwd=work)
        answers.append([(row["step"], row["answer"]) for row in rows(work, name) if "prompt" in row])
    assert answers[0] == answers[1] and len(answers[0]) == 2


@pytest.mark.parametrize("prompts, reason", [(["x" * 40], "and with its answer it may have 32"), ([""], "train.sample_prompts"),
                                             (["@nowhere.txt"], "nowhere.txt")])
def test_a_prompt_that_cannot_be_answered_ends_the_run_before_it_begins(prompts, reason, work):
    done = lmlaunch(config(work, "refused", train__sample_prompts=prompts), cwd=work, check=False)
    assert done.returncode in (10, 11) and reason in done.stderr, done.stderr


# early stopping

def stopping(work, name, **more):
    """A rate so high that the held-out loss rises again."""
    return config(work, name, **{**dict(train__steps=200, train__eval_every=2, train__early_stopping_patience=3, optimizer__lr=0.3), **more})


def stop_by(values, patience, threshold):
    """transformers' EarlyStoppingCallback, as its Trainer calls it: the evaluation after which it stops."""
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import EarlyStoppingCallback
    arguments = TrainingArguments(output_dir="x", metric_for_best_model="loss", greater_is_better=False, eval_strategy="steps", save_strategy="no",
                                  report_to=[], use_cpu=True)
    callback, state, control = EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
    for i, loss in enumerate(values):
        callback.on_evaluate(arguments, state, control, metrics={"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:
            state.best_metric = loss
        if control.should_training_stop:
            return i
    return None


@pytest.mark.parametrize("threshold", [0.0, 0.02])
def test_a_run_ends_where_that_of_transformers_does(threshold, work):
    name = f"early_{threshold}"
    done = lmlaunch(stopping(work, name, train__early_stopping_threshold=threshold), cwd=work)
    evaluated = [(row["step"], row["eval_loss"]) for row in rows(work, name) if "eval_loss" in row][1:]  # without step 0
    assert "stopped early after step" in done.stderr and evaluated[-1][0] < 200
    assert stop_by([loss for _, loss in evaluated], 3, threshold) == len(evaluated) - 1
    assert "checkpoint.keep_best = true" in done.stderr
    assert (work / "runs" / name / "model" / "config.json").exists()
    # Its model is the last step's.
    assert json.loads(lmlaunch("eval", f"runs/{name}", "--json", cwd=work).stdout)["eval_loss"] == evaluated[-1][1]


def test_the_best_is_the_result_where_it_is_kept(work):
    done = lmlaunch(stopping(work, "early_best", checkpoint__keep_best=True), cwd=work)
    evaluated = [(row["eval_loss"], row["step"]) for row in rows(work, "early_best") if "eval_loss" in row][1:]
    least, step = min(evaluated)
    assert f"the result has the weights of step {step}, the best" in done.stderr and evaluated[-1][1] == step + 6
    assert json.loads(lmlaunch("eval", "runs/early_best", "--json", cwd=work).stdout)["eval_loss"] == least


def test_a_best_checkpoint_that_is_damaged_costs_nothing_but_itself(work):
    name = stopping(work, "early_damaged", checkpoint__keep_best=True, checkpoint__every=1)
    step = int(re.search(r"the result has the weights of step (\d+)", lmlaunch(name, cwd=work).stderr)[1])
    run = work / "runs" / "early_damaged"
    shutil.rmtree(run / "model")
    (run / "status.json").unlink()
    for file in (run / "checkpoints" / f"step_{step:08}").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    done = lmlaunch(name, cwd=work)
    assert "fails verification, the last step's model is kept" in done.stderr, done.stderr
    last = [row["eval_loss"] for row in rows(work, "early_damaged") if "eval_loss" in row][-1]
    assert json.loads(lmlaunch("eval", "runs/early_damaged", "--json", cwd=work).stdout)["eval_loss"] == last
    assert (run / "checkpoints" / f"step_{step:08}.damaged").exists()


def test_patience_outlives_an_interruption(work):
    name = stopping(work, "early_whole", checkpoint__every=1, checkpoint__keep=100)
    end = int(re.search(r"stopped early after step (\d+)", lmlaunch(name, cwd=work).stderr)[1])
    # As if it had been interrupted behind the first evaluation without a lower loss.
    halves = work / "runs" / "early_halves"
    shutil.copytree(work / "runs" / "early_whole", halves)
    shutil.rmtree(halves / "model")
    (halves / "status.json").unlink()
    for checkpoint in (halves / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > end - 3:
            shutil.rmtree(checkpoint)
    second = lmlaunch(name, "run.dir=runs/early_halves", cwd=work)
    assert f"resumes from runs/early_halves/checkpoints/step_{end - 3:08}" in second.stderr
    assert f"stopped early after step {end}:" in second.stderr
    assert losses(work, "early_halves") == losses(work, "early_whole")


def test_patience_needs_something_to_evaluate(work):
    done = lmlaunch(config(work, "patient", train__early_stopping_patience=2), cwd=work, check=False)
    assert done.returncode == 10 and "train.early_stopping_patience = 2 follows the eval loss: set train.eval_every" in done.stderr
