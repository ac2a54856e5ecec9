"""A newcomer's day, which begins at `pip install` of the wheel: what somebody types who trains a first model, looks at it, talks to it,
feeds it, takes it away and gets things wrong; in order, each command with its exit code and what it has to say. On terminals of 80 and of
200 columns, and through pipes. Downloads torch: long."""

import gzip
import json
import os
import re

import pytest
from hub import serving
from installed_wheel import built, installed
from test_first_hour import model, on_a_terminal, through_pipes  # noqa: F401

RUN = "lmlaunch mine.toml train.steps=4 run.dir=runs/"
ANSWER = r"(?m)^(?!lmlaunch: ).*\w"
# (command, exit code, what is said: patterns)
DAY = [
    # Say it.
    ("lmlaunch --help", 0, "fine-tune", r"75  stopped on request"),
    ("lmlaunch --version", 0, r"\d+\.\d+\.\d+"),
    ("lmlaunch generate --help", 0, "default: 128"),
    ("lmlaunch genrate model", 2, "did you mean `generate`"),
    ("lmlaunch presets", 0, "smollm2-135m-lora"),
    ("lmlaunch presets smollm2-135m-lora", 0, r"\[model\]"),
    ("lmlaunch plan smollm2-135m-lora --gpu-memory 8GiB --host-memory 16GiB", 0, "peak .* of the GPU"),
    ("lmlaunch doctor", 0, "cores"),
    # Install it.
    ("lmlaunch completions", 0, "complete"),
    ("""bash -c 'eval "$(lmlaunch completions)"; complete -p lmlaunch'""", 0, "lmlaunch"),
    ("lmlaunch fetch org/other", 11, "no model org/other", "next:"),
    ("lmlaunch fetch org/tiny", 0, "org/tiny is in the cache", "revision"),
    ("lmlaunch init org/tiny chats.jsonl --gpus 0 -o fetched.toml", 0, "fetched.toml"),
    ("lmlaunch init model nothing.jsonl --gpus 0 -o mine.toml", 11, "no such data file", "nothing.jsonl"),
    ("lmlaunch init model chats.jsonl --gpus 0 -o mine.toml", 0, "mine.toml"),
    ("lmlaunch init model chats.jsonl --gpus 0 -o mine.toml", 14, "mine.toml"),
    ("lmlaunch plan mine.toml", 0, "host"),
    ("lmlaunch --dry-run mine.toml", 0, "host"),
    ("lmlaunch plan mine.toml --compare", 0, "qlora"),
    # See it.
    (f"{RUN}full train.eval_every=2 log.to=tensorboard 'train.sample_prompts=[\"Hello\"]' train.sample_tokens=4 checkpoint.every=2", 0,
     "sample after step", "runs/full/model", "lmlaunch generate runs/full"),
    (f"{RUN}full train.eval_every=2 log.to=tensorboard 'train.sample_prompts=[\"Hello\"]' train.sample_tokens=4 checkpoint.every=2", 14,
     "finished after step 4", "another run.dir"),
    (f"{RUN}lora train.method=lora lora.r=4", 0, "runs/lora/model"),
    (f"{RUN}qlora train.method=qlora lora.r=4", 0, "runs/qlora/model"),
    ("lmlaunch report runs/full", 0, "report.html"),
    ("lmlaunch report runs/full runs/lora -o both.html", 0, "both.html"),
    ("lmlaunch mine.toml optimizer.lr=banana", 10, "optimizer.lr", "next:"),
    ("lmlaunch mine.toml optimizer.lrr=1", 10, "did you mean", "optimizer.lr"),
    ("lmlaunch mine.toml run.dir=runs/stopped train.steps=1000000 run.time_limit=3s", 75, "to resume: "),
    ("lmlaunch eval runs/full", 0, "perplexity"),
    ("lmlaunch eval model 'data.eval=[\"chats.jsonl\"]'", 0, "perplexity"),
    ("lmlaunch eval model", 10, "data.eval"),
    # Try it.
    ("lmlaunch generate runs/full --prompt Hello --max-tokens 8 --temperature 2 --seed 3", 0, ANSWER),
    ("lmlaunch generate runs/full/model --prompt Hello --max-tokens 8 --json", 0, '"prompt_tokens"'),
    ("lmlaunch generate runs/lora --prompt Hello --max-tokens 8 --temperature 0.8 --top-p 0.9 --top-k 20 --seed 3", 0, ANSWER),
    ("lmlaunch generate runs/qlora --prompt Hello --max-tokens 8 --temperature 2 --seed 3", 0, ANSWER),
    ("lmlaunch generate model --prompt Hello --max-tokens 4 --json", 0, r'"tokens": ?\[\d+'),
    ("printf 'Hello\\nAgain\\n' | lmlaunch chat runs/full --max-tokens 8 --temperature 2 --seed 3", 0, ANSWER),
    ("lmlaunch generate runs/nothing --prompt Hello", 11, "runs/nothing"),
    ("lmlaunch generate runs/full", 2, "needs --prompt"),
    ("lmlaunch mine.toml run.dir=runs/early train.steps=60 train.eval_every=1 train.early_stopping_patience=2 optimizer.lr=0.5", 0, "stopped early after step"),
    # Feed it.
    (f"{RUN}columns 'data.train=[\"qa.csv\"]' 'data.columns={{prompt=\"q\",completion=\"a\"}}'", 0, "runs/columns/model"),
    (f"{RUN}weights 'data.train=[\"chats.jsonl\",\"more.jsonl.gz\"]' 'data.weights=[1,2]'", 0, "runs/weights/model"),
    (f"{RUN}template data.chat_template=own.jinja", 0, "runs/template/model"),
    (f"{RUN}bad 'data.train=[\"bad.jsonl\"]'", 11, r"bad\.jsonl:3", "next:"),
    (f"{RUN}skipped 'data.train=[\"bad.jsonl\"]' data.bad_rows=skip", 0, r"1 of 40 rows"),
    (f"{RUN}each data.answers=each data.reasoning=drop", 0, "runs/each/model"),
    (f"{RUN}dpo 'data.train=[\"dpo.jsonl\"]'", 11, "preference data", "data.columns"),
    (f"{RUN}hub 'data.train=[\"org/set\"]'", 0, "runs/hub/model"),
    (f"{RUN}none 'data.train=[\"org/none\"]'", 11, "org/none"),
    # Take it away.
    ("lmlaunch export runs/full -o exported", 0, "exported"),
    ("lmlaunch export runs/full -o exported", 14, "exported"),
    ("lmlaunch export runs/lora -o adapter", 0, "adapter"),
    ("lmlaunch export runs/lora -o merged --merge", 0, "logits differ by at most", "merged"),
    ("lmlaunch export adapter -o merged_again --merge", 0, "merged_again"),
    ("lmlaunch verify runs/full", 0, r"ok  \w+  \d+ tensors"),
    ("lmlaunch verify merged", 0, r"ok  \w+  \d+ tensors"),
    ("lmlaunch export runs/full --gguf q8_0 -o full.gguf", 11, "llama.cpp cannot be given this tokenizer", "next:"),
    ("lmlaunch eval merged 'data.eval=[\"chats.jsonl\"]'", 0, "perplexity"),
    ("lmlaunch generate exported --prompt Hello --max-tokens 8 --temperature 2 --seed 3", 0, ANSWER),
]


def prepared(work, model):  # noqa: F811
    (work / "model").symlink_to(model)
    rows = [{"messages": [{"role": "user", "content": f"What is {n} + {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]}
            for n in range(40)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (work / "chats.jsonl").write_text("".join(lines))
    (work / "more.jsonl.gz").write_bytes(gzip.compress("".join(lines[:10]).encode()))
    (work / "bad.jsonl").write_text("".join([*lines[:2], '{"messages": "none"}\n', *lines[3:]]))
    (work / "qa.csv").write_text("q,a\n" + "".join(f"What is {n}?,It is {n}.\n" for n in range(40)))
    (work / "dpo.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    (work / "own.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}")
    snapshot = work / "hub" / "datasets--org--set" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    with installed(built(), tmp_path_factory.mktemp("fresh")) as variables:
        yield variables


@pytest.mark.parametrize("columns", [80, 200, None])
def test_the_day(shell, model, tmp_path, monkeypatch, columns):  # noqa: F811
    prepared(tmp_path, model)
    with serving({"org/tiny": {"main": {path.name: path.read_bytes() for path in model.iterdir()}}}) as hub:
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in {**shell, "HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "hub")}.items():
            monkeypatch.setenv(name, value)
        live(tmp_path, columns)


def live(tmp_path, columns):
    wrong = []
    for command, wanted, *patterns in DAY:
        code, said = through_pipes(tmp_path, command) if columns is None else on_a_terminal(tmp_path, command, columns=columns)
        missing = [pattern for pattern in patterns if not re.search(pattern, said)]
        progress = re.findall(r"\r\x1b\[K([^\r\n\x1b]*)", said)
        if columns is None and ("\x1b" in said or "\r" in said) or any(len(text) >= (columns or 0) for text in progress):
            missing.append("a line that fits")
        if code != wanted or missing:
            wrong.append(f"$ {command}\nexit {code}, {wanted} wanted; not said: {missing}\n{said[-1500:]}")
    assert not wrong, "\n\n".join(wrong)
    assert len(DAY) >= 40
    # What people look at afterwards.
    assert (tmp_path / "both.html").stat().st_size > 10_000 and list((tmp_path / "runs" / "full" / "tensorboard").iterdir())
