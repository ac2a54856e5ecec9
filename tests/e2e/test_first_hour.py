"""A newcomer's first hour: the commands of README.md, taken from README.md and in its order, once on a terminal of 80 columns
and once through pipes. What `./dev demo` would have made is stood in for: the same paths, a tiny model, a few rows. A command
that README gets and this test does not know fails it."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from pathlib import Path

import pytest
import tokenizers
import torch
from test_run import BIN
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COLUMNS = 80

# What each command needs to run here: fewer steps, and a run.dir of its own where README asks for one.
SHORT = ["train.steps=5"]
COMMANDS = {
    'export PATH="$PWD/build/bin:$PATH"': [],
    "lmlaunch init build/quickstart/model build/quickstart/train.jsonl -o first.toml": [],
    "lmlaunch plan first.toml": [],
    "lmlaunch first.toml": SHORT,
    "lmlaunch first.toml run.dir=runs/second optimizer.lr=1e-4": SHORT,
    'lmlaunch generate runs/second --prompt "..."': ["--max-tokens", "8"],
    "lmlaunch chat runs/second": ["--max-tokens", "4"],
    "lmlaunch report runs/first runs/second -o both.html": [],
    "lmlaunch help optimizer": [],
    "lmlaunch presets": [],
    "lmlaunch --help": [],
}
# What is typed where a command asks for it; the last character ends it.
TYPED = {"lmlaunch chat runs/second": b"Hello\n\x04"}
NOT_HERE = {
    "lmlaunch diff runs/first runs/second": "ends with 1, since they differ; tests/e2e/test_diff.py",
    "lmlaunch serve runs/second --port 8000": "ends when it is told to; tests/e2e/test_serve.py",
    "./dev demo": "trains a real model for minutes; tests/parity/test_quickstart.py has its inputs",
    "./dev package": "tests/e2e/test_package.py",
    "pip install build/package/lmlaunch-*.whl": "tests/e2e/test_package.py",
}


def commands_of(text):
    """The commands of fenced and of indented code blocks; what stands two blanks behind one explains it. A block with a language
    (```text, ```toml) has none."""
    text = re.sub(r"^```\w+\n.*?^```\n", "", text, flags=re.M | re.S)
    fenced = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```\n.*?^```", "", text, flags=re.M | re.S)
    indented = re.findall(r"^    (\S.*)$", rest, re.M)
    lines = [line for block in fenced for line in block.splitlines() if line.strip()] + indented
    return [re.split(r"\s{2,}", line.strip())[0] for line in lines]


def test_every_command_of_the_readme_is_known():
    found = commands_of(README)
    assert [command for command in found if command not in COMMANDS and command not in NOT_HERE] == []
    assert [command for command in [*COMMANDS, *NOT_HERE] if command not in found] == []
    # A new one would be seen.
    assert "lmlaunch new thing" in commands_of(README + "\n```\nlmlaunch new thing    does it\n```\n\n    lmlaunch more\n")
    assert "lmlaunch more" in commands_of(README + "\n    lmlaunch more\n")
    assert commands_of("```text\nlmlaunch: said\n```\n\n```\nlmlaunch it\n```\n") == ["lmlaunch it"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    letters = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=96,
        max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=95)).to(torch.bfloat16).save_pretrained(directory)
    return directory


def first_hour(work, model):
    """The clone after `./dev demo`, and the disks and files that README leaves to its reader."""
    made = work / "build" / "quickstart"
    made.mkdir(parents=True)
    (work / "build" / "bin").symlink_to(BIN)
    (work / "configs").symlink_to(ROOT / "configs")
    (made / "model").symlink_to(model)
    rows = [{"messages": [{"role": "user", "content": f"What is {n} + {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]}
            for n in range(200)]
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[20:]))
    (made / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    mine = (ROOT / "configs" / "quickstart.toml").read_text().replace('dir = "runs/quickstart"', "")
    for name in ("c.toml", "my.toml"):
        (work / name).write_text(mine if name == "c.toml" else mine.replace('device = "cpu"', ""))
    for disk in ("nvme0", "nvme1"):
        (work / disk / "swap").mkdir(parents=True)


def shell_lines(work):
    """(command as README has it, what the shell is given), each after the exports before it."""
    exports = ""
    for command in commands_of(README):
        if command in NOT_HERE:
            continue
        if command.startswith("export "):
            exports += command + "\n"
            continue
        words = " ".join([command, *COMMANDS[command]])
        yield command, exports + re.sub(r"/(nvme\d)", rf"{work}/\1", words)


def environment(work):
    return {**os.environ, "XDG_CACHE_HOME": str(work / "user-cache"), "TERM": "xterm"}


def through_pipes(work, line):
    done = subprocess.run(["bash", "-c", line], cwd=work, env=environment(work), stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=120)
    return done.returncode, (done.stdout + done.stderr).decode()


def on_a_terminal(work, line, typed=b"", columns=COLUMNS):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(["bash", "-c", line], cwd=work, env=environment(work), stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True)
    os.close(theirs)
    os.write(ours, typed)
    parts = []

    def read():
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # the other side is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(timeout=120)
    reader.join()
    os.close(ours)
    return code, b"".join(parts).decode()


def check_logs(work):
    logs = list((work / "runs").glob("*/log.txt"))
    assert len(logs) == 2, logs
    for log in logs:
        text = log.read_text()
        assert "\x1b" not in text and "\r" not in text and "step 5/5" in text, log


def check_results(work, said):
    AutoModelForCausalLM.from_pretrained(work / "runs" / "first" / "model")
    assert re.search(r"\bexport\b", said["lmlaunch --help"]) and "75  stopped on request" in said["lmlaunch --help"]
    assert "smollm2-135m-full" in said["lmlaunch presets"] and "peak learning rate" in said["lmlaunch help optimizer"]


def test_the_first_hour_through_pipes(model, tmp_path):
    first_hour(tmp_path, model)
    said = {}
    for command, line in shell_lines(tmp_path):
        code, said[command] = through_pipes(tmp_path, line)
        assert code == 0, f"{command}\n{said[command]}"
        assert "\x1b" not in said[command] and "\r" not in said[command], command
    check_logs(tmp_path)
    check_results(tmp_path, said)


def test_the_first_hour_on_a_terminal(model, tmp_path):
    first_hour(tmp_path, model)
    said, shown = {}, 0
    for command, line in shell_lines(tmp_path):
        code, said[command] = on_a_terminal(tmp_path, line, TYPED.get(command, b""))
        assert code == 0, f"{command}\n{said[command]}"
        # Colours, and the line that is written over: nothing else steers the terminal.
        codes = set(re.findall(r"\x1b[^a-zA-Z]*[a-zA-Z]", said[command]))
        assert codes <= {"\x1b[K", "\x1b[32m", "\x1b[0m", "\x1b[1m"}, (command, codes)
        progress = re.findall(r"\r\x1b\[K([^\r\n\x1b]*)", said[command])
        assert all(len(text) < COLUMNS for text in progress), (command, progress)
        shown += sum(re.match(r"(step )?\d+/5 ", text) is not None for text in progress)
    assert shown == 2 * 5
    check_logs(tmp_path)
    check_results(tmp_path, said)
