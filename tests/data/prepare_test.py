"""The preparation against transformers: templates byte for byte, token ids, and which tokens are trained; then every
format and kind of file, and the messages for bad rows. Files are read back by the grammar of token_file.h."""

import csv
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

PREPARE = os.path.join(os.path.dirname(__file__), "..", "..", "src", "data", "prepare")
sys.path[:0] = [PREPARE, os.path.dirname(__file__)]

import prepare  # noqa: E402
from errors import InputError  # noqa: E402
from prepare_models import LLAMA3, MODELS, TEXT  # noqa: E402
from tokenise import Model  # noqa: E402


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            make, config, template = MODELS[name]
            make().save(str(path / "tokenizer.json"))
            config = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
            if template:
                config["chat_template"] = template
            (path / "tokenizer_config.json").write_text(json.dumps(config))
            made[name] = str(path)
        return made[name]

    return get


@pytest.fixture(scope="session")
def oracle(model_dir):
    made = {}
    return lambda name: made.setdefault(name, AutoTokenizer.from_pretrained(model_dir(name)))


# ---- running --------------------------------------------------------------------------------------------------------


def read_tokens(path):
    """[(ids, marks)], and the header's fields."""
    data = open(path, "rb").read()
    magic, version, size, vocab, tokens, trained, examples, summary, total = struct.unpack_from("<8sII6Q", data)
    assert (magic, version, size, total) == (b"LMTOKENS", 2, 96, len(data))
    sums_crc, crc = struct.unpack_from("<II", data, 88)
    assert data[80:88] == bytes(8) and crc == zlib.crc32(data[:92])
    ids = np.frombuffer(data, "<i4", tokens, 96)
    marks = np.frombuffer(data, "u1", tokens, 96 + 4 * tokens)
    at = -(-(96 + 5 * tokens) // 8) * 8
    offsets = np.frombuffer(data, "<u8", examples + 1, at)
    assert trained == marks.sum() and set(marks.tolist()) <= {0, 1}
    end = at + 8 * (examples + 1) + summary
    json.loads(data[end - summary:end])
    sums = [zlib.crc32(data[i:min(i + 65536, end)]) for i in range(96, end, 65536)]
    assert data[end:] == struct.pack(f"<{len(sums)}I", *sums) and sums_crc == zlib.crc32(data[end:])
    return [(ids[a:b].tolist(), marks[a:b].tolist()) for a, b in zip(offsets[:-1].astype(int), offsets[1:].astype(int))]


def test_every_chunk_of_a_large_file_has_its_checksum(tmp_path):
    from token_file import TokenFileWriter

    writer = TokenFileWriter(str(tmp_path / "out.tokens"), 1000, bytes(16))
    examples = [(list(range(n % 1000)), [1] * (n % 1000)) for n in range(0, 40000, 333)]
    for ids, marks in examples:
        writer.add([len(ids)], np.array(ids, "<i4").tobytes(), bytes(marks), len(ids))
    writer.finish({"dropped": 0})
    assert os.path.getsize(tmp_path / "out.tokens") > 4 * 65536
    assert read_tokens(tmp_path / "out.tokens") == examples


def test_a_file_is_on_the_disk_whole(tmp_path, monkeypatch):
    from token_file import TokenFileWriter

    flushed, fsync = {}, os.fsync

    def watched(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        flushed[path] = open(path, "rb").read()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    path = tmp_path / "out.tokens"
    writer = TokenFileWriter(str(path), 1000, bytes(16))
    writer.add([3], np.array([1, 2, 3], "<i4").tobytes(), bytes(3), 3)
    writer.finish({"dropped": 0})
    assert flushed == {str(path): path.read_bytes()}


class Runner:
    def __init__(self, directory, model_dir):
        self.dir, self.model_dir = directory, model_dir

    def write(self, name, rows):
        path = str(self.dir / name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        return path

    def request(self, files, model, **options):
        return {"files": files, "format": "auto", "model_dir": self.model_dir(model), "loss_on": "completion",
                "workers": 1, "out": str(self.dir / "out.tokens"), "key": "0123456789abcdef" * 2, **options}

    def __call__(self, rows, model, name="data.jsonl", **options):
        """Prepares rows (or the text of a file): [(ids, marks)], summary."""
        request = self.request([self.write(name, rows)], model, **options)
        summary = prepare.prepare(request)
        examples = read_tokens(request["out"])
        assert summary["examples"] == len(examples) and summary["tokens"] == sum(len(ids) for ids, _ in examples)
        return examples, summary

    def trained(self, rows, model, **options):
        """The trained text of each example, as a list of runs."""
        examples, _ = self(rows, model, **options)
        tokenizer = Tokenizer.from_file(self.model_dir(model) + "/tokenizer.json")
        return [runs(tokenizer, ids, marks) for ids, marks in examples]


def runs(tokenizer, ids, marks):
    out, current = [], []
    for token, mark in zip(ids + [0], marks + [0]):
        if mark:
            current.append(token)
        elif current:
            out.append(tokenizer.decode(current, skip_special_tokens=False))
            current = []
    return out


@pytest.fixture
def run(tmp_path, model_dir):
    return Runner(tmp_path, model_dir)


def refused(call, *args, **kwargs):
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    return caught.value


# ---- templates and ids against transformers -----------------------------------------------------------------------

PLAIN_CHAT = [{"role": "user", "content": "what is <b>5 & 7</b>? 'quoted' \"too\""},
              {"role": "assistant", "content": "  I am fine ünïcode 日本語 \U0001f600\n"},
              {"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
SYSTEM_CHAT = [{"role": "system", "content": "The lazy <dog>"}] + PLAIN_CHAT
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & c", "parameters": {
    "type": "object", "properties": {"x": {"type": "number"}}}}}]
TOOL_CHAT = [{"role": "user", "content": "what is 5?"},
             {"role": "assistant", "content": "", "tool_calls": [
                 {"type": "function", "function": {"name": "add", "arguments": {"x": 5, "é": "<ü>"}}}]},
             {"role": "tool", "content": "{\"a\": 7}", "name": None},
             {"role": "assistant", "content": "it is 7", "reasoning": "I am fine"}]
CHATS = {"plain": (PLAIN_CHAT, None), "system": (SYSTEM_CHAT, None), "tools": (TOOL_CHAT, TOOLS),
         "thoughts": ([{"role": "user", "content": "hello"},
                       {"role": "assistant", "content": "<think>\nquick\n</think>\n\nworld"}] + PLAIN_CHAT, None)}
PAIRS = [(m, c) for m in ("chatml", "llama3", "qwen", "generation_in", "generation_out", "generation_macro")
         for c in CHATS if c != "tools" or m in ("llama3", "qwen")] + [("mistral", "plain"), ("mistral", "thoughts")]


@pytest.mark.parametrize("name,chat", PAIRS)
def test_templates_render_byte_for_byte_as_in_transformers(name, chat, model_dir, oracle):
    template, tokenizer = Model(model_dir(name), "completion").template, oracle(name)
    messages, tools = CHATS[chat]
    for prompt in (False, True):
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        assert template.render(messages, tools, prompt) == expected


@pytest.mark.parametrize("name,chat", PAIRS)
@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_chat_ids_are_those_of_transformers(name, chat, loss_on, run, oracle):
    messages, tools = CHATS[chat]
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    (ids, marks), = run([row], name, loss_on=loss_on)[0]
    assert ids == oracle(name).apply_chat_template(messages, tools=tools, tokenize=True)["input_ids"]
    assert 0 < sum(marks) < len(marks) if loss_on == "completion" else all(marks)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "plain"])
def test_plain_text_ids_are_those_of_transformers_and_one_trained_eos(name, run, oracle):
    texts = TEXT + ["a", " leading blank", "ünï\n\ncode \U0001f600"]
    examples, _ = run([{"text": text} for text in texts], name)
    tokenizer = oracle(name)
    for text, (ids, marks) in zip(texts, examples):
        assert ids == tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        assert all(marks[1:])  # the first is nobody's target


def test_text_that_ends_with_the_end_token_gets_no_second(run, oracle):
    (ids, _), = run([{"text": "hello</s>"}], "plain")[0]
    assert ids.count(oracle("plain").eos_token_id) == 1 and ids[-1] == oracle("plain").eos_token_id


def test_every_example_has_one_bos(run, oracle):
    for name in ("llama3", "mistral", "plain"):
        bos = oracle(name).bos_token_id
        rows = [{"text": "hello"}, {"text": oracle(name).bos_token + "hello"}]
        for ids, _ in run(rows, name)[0] + run([{"messages": PLAIN_CHAT}], name)[0]:
            assert ids[0] == bos and ids.count(bos) == 1


def test_a_template_that_writes_bos_twice_is_refused(run, model_dir, tmp_path):
    copied = Runner(tmp_path, lambda name: str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(open(os.path.join(model_dir("llama3"), file)).read())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}" + LLAMA3)
    error = refused(copied, [{"messages": PLAIN_CHAT}], "llama3")
    assert "twice" in error.what and error.place.endswith("data.jsonl:1")


def test_the_template_file_wins_over_the_config(model_dir, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(open(os.path.join(model_dir("chatml"), file)).read())
    (tmp_path / "chat_template.jinja").write_text("default")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    template, tokenizer = Model(str(tmp_path), "all").template, AutoTokenizer.from_pretrained(str(tmp_path))
    for tools in (None, TOOLS):
        assert template.render(PLAIN_CHAT, tools) == tokenizer.apply_chat_template(PLAIN_CHAT, tools=tools, tokenize=False)
    assert template.render(PLAIN_CHAT, TOOLS) == "with tools"


@pytest.mark.parametrize("text,what", [("{% for %}", "cannot be parsed"), ("{% unknown_tag %}", "cannot be parsed")])
def test_a_template_that_is_not_understood_is_named_with_its_line(text, what, model_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_text(open(model_dir("chatml") + "/tokenizer.json").read())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}\n" + text)
    error = refused(Model, str(tmp_path), "completion")
    assert what in error.what and error.place.endswith("chat_template.jinja:2")


@pytest.mark.parametrize("text", [
    "{{ ''.__class__.__mro__ }}", "{% set n = namespace() %}{% set n.__init__ = 1 %}", "{{ messages.append(1) }}"])
def test_templates_cannot_reach_out_of_the_sandbox(text, model_dir, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(open(os.path.join(model_dir("chatml"), file)).read())
    (tmp_path / "chat_template.jinja").write_text(text)
    boxed = Runner(tmp_path, lambda name: str(tmp_path))
    error = refused(boxed, [{"messages": PLAIN_CHAT}], "chatml", loss_on="all")
    assert "refuses this conversation" in error.what and error.place.endswith("data.jsonl:1")


# ---- which tokens are trained ---------------------------------------------------------------------------------------


def test_answers_and_their_end_tokens_are_trained(run):
    first, second = PLAIN_CHAT[1]["content"], PLAIN_CHAT[3]["content"]
    for name in ("chatml", "generation_in", "generation_out", "generation_macro"):
        assert run.trained([{"messages": SYSTEM_CHAT}], name) == [[first + "<|im_end|>", second + "<|im_end|>"]], name
    assert run.trained([{"messages": SYSTEM_CHAT}], "llama3") == [[first.strip() + "<|eot_id|>", second + "<|eot_id|>"]]
    assert run.trained([{"messages": PLAIN_CHAT}], "mistral") == [[first + "</s>", "world</s>"]]  # a leading blank lost in decoding


def test_answers_are_found_when_the_template_rewrites_earlier_turns(run):
    chat = CHATS["thoughts"][0]
    answers = run.trained([{"messages": chat}], "qwen")[0]
    assert answers == ["world<|im_end|>", PLAIN_CHAT[1]["content"] + "<|im_end|>",
                       "<think>\n\n</think>\n\nworld<|im_end|>"]


def test_tool_calls_are_trained_and_tool_results_are_not(run):
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 5, "é": "<ü>"}}\n</tool_call><|im_end|>'
    answers = run.trained([{"messages": TOOL_CHAT, "tools": TOOLS}], "qwen")[0]
    assert len(answers) == 2 and answers[0].endswith(call)
    assert answers[1].endswith("I am fine\n</think>\n\nit is 7<|im_end|>")


def test_marks_equal_those_of_transformers_where_the_template_gives_them(run, oracle):
    ascii_chat = [{**m, "content": m["content"].encode("ascii", "ignore").decode()} for m in SYSTEM_CHAT]
    (ids, marks), = run([{"messages": ascii_chat}], "generation_in")[0]
    expected = oracle("generation_in").apply_chat_template(ascii_chat, return_assistant_tokens_mask=True)
    assert ids == expected["input_ids"] and marks == expected["assistant_masks"]


def test_every_byte_of_a_character_is_trained(run):
    chat = [{"role": "user", "content": "hello 𝔘"}, {"role": "assistant", "content": "𝔘𝔘"}]
    assert run.trained([{"messages": chat}], "chatml") == [["𝔘𝔘<|im_end|>"]]


def test_loss_on_all_trains_every_token(run):
    (ids, marks), = run([{"messages": SYSTEM_CHAT}], "chatml", loss_on="all")[0]
    assert marks == [1] * len(ids)


def test_only_the_completion_of_a_pair_is_trained(run):
    rows = [{"prompt": "hello", "completion": " world"},
            {"prompt": PLAIN_CHAT[:3], "completion": PLAIN_CHAT[3:]}]
    assert run.trained(rows[:1], "chatml") == [[" world<|im_end|>"]]
    # A token that spells characters of both sides is learnt: without it the completion could not be written.
    assert run.trained([{"prompt": "hello ", "completion": "world"}], "chatml") == [[" world<|im_end|>"]]
    for name in ("chatml", "generation_in"):
        assert run.trained(rows[1:], name) == [["world<|im_end|>"]]


def with_template(run, model_dir, tmp_path, template, name="chatml"):
    """A runner over a copy of that model with another template, or none."""
    config = json.load(open(os.path.join(model_dir(name), "tokenizer_config.json")))
    config.pop("chat_template", None)
    (tmp_path / "tokenizer.json").write_text(open(os.path.join(model_dir(name), "tokenizer.json")).read())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return Runner(tmp_path, lambda name: str(tmp_path))


NO_END = ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}assistant: {% endif %}")


def test_an_answer_without_an_end_token_is_told_and_nothing_but_those_is_refused(run, model_dir, tmp_path):
    endless = with_template(run, model_dir, tmp_path, NO_END)
    error = refused(endless, [{"messages": PLAIN_CHAT}] * 2, "chatml")
    assert "never stop" in error.what and error.place.endswith("data.jsonl") and "eos_token" in error.next
    files = [run.write("a.jsonl", [{"messages": PLAIN_CHAT}]), run.write("b.jsonl", ROWS[:1])]  # the pair's end token is ours
    summary = prepare.prepare(endless.request(files, "chatml"))
    assert any(note.startswith("1 of 2 examples end without an end token") for note in summary["notes"])
    assert endless([{"messages": PLAIN_CHAT}], "chatml", loss_on="all")[1]["notes"]
    assert run([{"messages": PLAIN_CHAT}], "chatml")[1]["notes"] == []
    assert run([{"messages": PLAIN_CHAT}], "chatml", loss_on="all")[1]["notes"] == []


def test_examples_without_an_answer_are_dropped_and_counted(run):
    examples, summary = run([{"messages": PLAIN_CHAT[:1]}, {"messages": PLAIN_CHAT}], "chatml")
    assert len(examples) == 1 and summary["dropped"] == 1 and "1 of 2" in summary["notes"][0]


# ---- formats and files ----------------------------------------------------------------------------------------------


def chat_ids(run, messages, tools=None):
    return run([{"messages": messages} | ({"tools": tools} if tools else {})], "qwen", name="expected.jsonl")[0]


def test_sharegpt_is_the_same_conversation(run):
    expected = chat_ids(run, SYSTEM_CHAT)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in SYSTEM_CHAT]
    assert run([{"conversations": turns}], "qwen")[0] == expected
    assert run([{"conversations": turns[1:], "system": turns[0]["value"]}], "qwen")[0] == expected
    expected = chat_ids(run, [{k: v for k, v in m.items() if k != "reasoning"} for m in TOOL_CHAT], TOOLS)
    call = TOOL_CHAT[1]["tool_calls"][0]["function"]
    turns = [{"from": "human", "value": "what is 5?"}, {"from": "function_call", "value": json.dumps(call)},
             {"from": "observation", "value": TOOL_CHAT[2]["content"]}, {"from": "gpt", "value": "it is 7"}]
    assert run([{"conversations": turns, "tools": json.dumps(TOOLS)}], "qwen")[0] == expected


def test_alpaca_is_a_conversation_when_there_is_a_template(run):
    row = {"instruction": "hello", "input": "5 & 7", "output": "world", "system": "lazy",
           "history": [["what?", "fox"]]}
    messages = [{"role": "system", "content": "lazy"}, {"role": "user", "content": "what?"},
                {"role": "assistant", "content": "fox"}, {"role": "user", "content": "hello\n5 & 7"},
                {"role": "assistant", "content": "world"}]
    assert run([row], "qwen")[0] == chat_ids(run, messages)


def test_alpaca_has_its_own_text_without_a_template(run, oracle):
    tokenizer = oracle("plain")
    text = ("Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\nhello\n\n### Input:\n5\n\n### Response:world")
    (ids, marks), = run([{"instruction": "hello", "input": "5", "output": "world"}], "plain")[0]
    assert ids == tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    assert tokenizer.decode([t for t, m in zip(ids, marks) if m]) == "world</s>"
    text = ("Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nhello\n\n### Response:world")
    (ids, _), = run([{"instruction": "hello", "output": "world"}], "plain")[0]
    assert ids == tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]


def test_a_conversation_without_a_template_ends_each_answer(run):
    answers = run.trained([{"messages": PLAIN_CHAT}], "plain")[0]
    assert answers == [PLAIN_CHAT[1]["content"] + "</s>", "world</s>"]


def test_tokenised_rows_pass_through_without_padding(run):
    rows = [{"input_ids": [1, 2, 3, 0], "labels": [-100, 2, 3, -100], "attention_mask": [1, 1, 1, 0]},
            {"input_ids": [4, 5]}]
    assert run(rows, "chatml")[0] == [([1, 2, 3], [0, 1, 1]), ([4, 5], [1, 1])]
    assert "a label is 9" in refused(run, [{"input_ids": [1, 2], "labels": [1, 9]}], "chatml").what
    assert "not a token id" in refused(run, [{"input_ids": [1, -2]}], "chatml").what


def test_tokenised_rows_need_no_tokenizer(run, tmp_path):
    bare = Runner(tmp_path, lambda name: str(tmp_path))
    assert bare([{"input_ids": [1, 2]}], "none")[0] == [([1, 2], [1, 1])]
    assert "tokenizer.json" in refused(bare, [{"text": "hello"}], "none").what


def test_tokenised_rows_need_no_library(tmp_path):
    """A machine that only has torch, whose wheels bring jinja2, can train on them."""
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    (tmp_path / "request").write_text(json.dumps({
        "files": [str(tmp_path / "a.jsonl")], "format": "auto", "model_dir": str(tmp_path), "loss_on": "all", "workers": 1,
        "out": str(tmp_path / "out"), "key": "00" * 32}))
    program = ("import sys, runpy; sys.modules.update(tokenizers=None, numpy=None, transformers=None); "
               f"sys.argv[1:] = [{str(tmp_path / 'request')!r}]; runpy.run_path({PREPARE + '/prepare.py'!r}, run_name='__main__')")
    subprocess.run([sys.executable, "-c", program], check=True)
    assert read_tokens(tmp_path / "out") == [([1, 2], [1, 1])]


ROWS = [{"prompt": "hello, \"you\" ", "completion": "world\nand dog"}, {"prompt": "", "completion": "ünï"}]


def test_every_kind_of_file_gives_the_same_examples(run, tmp_path):
    expected = run(ROWS, "chatml")[0]
    assert run("\ufeff" + "\n\n".join(json.dumps(r) for r in ROWS), "chatml", name="a.jsonl")[0] == expected
    assert run(json.dumps(ROWS, indent=1), "chatml", name="a.json")[0] == expected
    assert run(ROWS, "chatml", name="lines.json")[0] == expected
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with open(tmp_path / "x", "w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
        assert run((tmp_path / "x").read_bytes().decode(), "chatml", name=name)[0] == expected
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    request = run.request([str(tmp_path / "a.parquet")], "chatml")
    prepare.prepare(request)
    assert read_tokens(request["out"]) == expected


def test_parquet_conversations_lose_the_keys_that_other_rows_have(run, tmp_path):
    rows = [{"messages": TOOL_CHAT}, {"messages": PLAIN_CHAT}]
    expected = run(rows, "qwen")[0]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    request = run.request([str(tmp_path / "a.parquet")], "qwen")
    prepare.prepare(request)
    assert read_tokens(request["out"]) == expected


def test_a_text_file_is_one_document(run, oracle):
    (ids, _), = run("hello\n\nworld", "chatml", name="a.txt")[0]
    assert ids == oracle("chatml")("hello\n\nworld")["input_ids"] + [oracle("chatml").eos_token_id]


def test_files_keep_their_order_and_may_differ_in_format(run):
    files = [run.write("b.jsonl", ROWS), run.write("a.jsonl", [{"text": "fox"}])]
    request = run.request(files, "chatml")
    prepare.prepare(request)
    assert read_tokens(request["out"]) == run(ROWS, "chatml")[0] + run([{"text": "fox"}], "chatml")[0]


def test_a_named_format_is_used_and_checked(run):
    both = {"text": "fox", "prompt": "hello", "completion": " world"}
    assert run.trained([both], "chatml", format="text") == [["fox<|im_end|>"]]
    assert run.trained([both], "chatml", format="prompt-completion") == [[" world<|im_end|>"]]
    error = refused(run, [both], "chatml", format="alpaca")
    assert "'instruction' is missing" in error.what and "text, prompt, completion" in error.what


# ---- bad input ------------------------------------------------------------------------------------------------------

GOOD = json.dumps({"text": "fox"}) + "\n"


@pytest.mark.parametrize("name,text,place,what", [
    ("a.jsonl", GOOD + "{\"text\": fox}\n", "a.jsonl:2:10", "not JSON"),
    ("a.jsonl", GOOD + GOOD + "[1]\n", "a.jsonl:3", "a list instead of an object"),
    ("a.jsonl", GOOD + GOOD + '{"text":\n', "a.jsonl:3:9", "not JSON"),
    ("a.jsonl", GOOD + GOOD + '{"text": "fo', "a.jsonl:3:10", "not JSON"),
    ("a.jsonl", GOOD + "\n" + '{"text":\r\n' + GOOD, "a.jsonl:3:9", "not JSON"),
    ("a.jsonl", "[" * 100000, "a.jsonl:1", "nested too deeply"),
    ("a.json", "[\n{\"text\": \"fox\"},\n{\"text\" 5}]", "a.json:3:9", "not JSON"),
    ("a.json", "5", "a.json", "a number instead of a list"),
    ("a.csv", "text,more\nfox,1\nfox\n", "a.csv:3", "2 fields"),
    ("a.csv", "text,more\nfox,1\n\"multi\nline\",2\nfox,1,2\n", "a.csv:5", "2 fields"),
    ("a.xyz", GOOD, "a.xyz", "unknown kind of file"),
    ("a.parquet", GOOD, "a.parquet", "Parquet"),
    ("a.jsonl", "", "a.jsonl", "the data is empty"),
    ("a.jsonl", GOOD + json.dumps({"other": 1}) + "\n", "a.jsonl:2", "'text' is missing; found other"),
    ("a.jsonl", json.dumps({"question": 1, "reply": 2}) + "\n", "a.jsonl:1", "found question, reply"),
    ("a.jsonl", GOOD + json.dumps({"text": 5}) + "\n", "a.jsonl:2", "'text' is not a string"),
    ("a.jsonl", "{\"text\": \"\\ud800\"}\n", "a.jsonl:1", "surrogate"),
    ("a.jsonl", json.dumps({"messages": []}) + "\n", "a.jsonl:1", "not a list of messages"),
    ("a.jsonl", json.dumps({"messages": [{"role": "narrator", "content": "x"}]}) + "\n", "a.jsonl:1", "'narrator'"),
    ("a.jsonl", json.dumps({"messages": [{"role": "user"}]}) + "\n", "a.jsonl:1", "has no content"),
    ("a.jsonl", json.dumps({"prompt": "x", "completion": []}) + "\n", "a.jsonl:1", "neither two strings"),
    ("a.jsonl", json.dumps({"input_ids": [1, 2], "labels": [1]}) + "\n", "a.jsonl:1", "not lists of one length"),
])
def test_a_bad_row_is_named_with_its_place(name, text, place, what, run):
    error = refused(run, text, "chatml", name=name)
    assert what in error.what, error.what
    assert error.place.endswith(place), error.place
    assert error.next


def test_an_id_outside_the_models_vocabulary_is_named_with_its_row(run, tmp_path):
    with pytest.raises(InputError) as caught:
        run([{"input_ids": [1, 2, 3]}, {"input_ids": [5, 1 << 20, 6]}], "chatml", vocab=1 << 19)
    error = caught.value
    assert f"{1 << 20} is outside the model's vocabulary of {1 << 19}" in error.what and error.place.endswith("data.jsonl:2")
    with pytest.raises(InputError) as caught:
        run([{"text": "fox"}], "chatml", vocab=1)
    assert caught.value.place.endswith("data.jsonl:1") and "tokenizer" in caught.value.next


def test_added_tokens_beyond_the_models_vocabulary_are_named(run, tmp_path):
    """The tokenizer is the model's: "another's" would send its user the wrong way."""
    theirs = run.model_dir("chatml")
    shutil.copytree(theirs, tmp_path / "grown")
    run.model_dir = lambda name: str(tmp_path / "grown")
    tokenizer = Tokenizer.from_file(theirs + "/tokenizer.json")
    vocab = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<extra_0>", "<extra_1>"])
    tokenizer.save(str(tmp_path / "grown" / "tokenizer.json"))
    with pytest.raises(InputError) as caught:
        run([{"text": "fox"}, {"text": "fox <extra_1>"}], "chatml", vocab=vocab)
    assert "added tokens that the model has no embeddings for: '<extra_0>', '<extra_1>'" in caught.value.what, caught.value.what
    assert f"token id {vocab + 1}" in caught.value.what and caught.value.place.endswith("data.jsonl:2")
    assert "another's" not in caught.value.next and "resize_token_embeddings" in caught.value.next


def test_plain_text_is_told_from_other_rows(run, tmp_path):
    files = [run.write("a.jsonl", [{"text": "fox"}] * 2), run.write("b.jsonl", [{"input_ids": [1, 2]}] * 3), run.write("c.txt", "fox fox")]
    assert prepare.prepare(run.request(files, "chatml"))["text"] == [[0, 2], [5, 6]]


def test_what_is_not_utf8_is_named_with_its_line(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b"{\"text\": \"\xff\"}\n")
    error = refused(prepare.prepare, run.request([str(tmp_path / "a.jsonl")], "chatml"))
    assert error.what == "not UTF-8" and error.place.endswith("a.jsonl:2")


def test_a_template_that_refuses_a_conversation_names_the_row(run):
    rows = [{"messages": PLAIN_CHAT}, {"messages": PLAIN_CHAT[1:]}]
    error = refused(run, rows, "mistral")
    assert "must alternate" in error.what and error.place.endswith("data.jsonl:2")


# ---- the program ----------------------------------------------------------------------------------------------------


def launch(request, *before):
    program = "; ".join(["import sys", f"sys.path.insert(0, {PREPARE!r})", "import prepare", *before,
                         "sys.exit(prepare.main())"])
    done = subprocess.run([sys.executable, "-I", "-B", "-c", program], input=json.dumps(request), text=True,
                          capture_output=True, timeout=60)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_worker_processes_give_the_same_file(run):
    rows = [{"messages": PLAIN_CHAT[:1] + [{"role": "assistant", "content": f"fox {i} " + "dog " * (i % 17)}]}
            for i in range(1000)]
    request = run.request([run.write("a.jsonl", rows)], "qwen", workers=2)
    code, summary, stderr = launch(request, "prepare.SMALL_BYTES = 0")
    assert code == 0 and summary["examples"] == 1000, stderr
    parallel = open(request["out"], "rb").read()
    prepare.prepare(request)
    assert parallel == open(request["out"], "rb").read()


def test_without_shared_memory_one_process_does_it(run, monkeypatch, capfd):
    """Queues between processes need semaphores, which are files in /dev/shm."""
    import multiprocessing.synchronize

    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    rows = [{"text": f"line {i} of a text that is long enough"} for i in range(300)]
    request = run.request([run.write("a.jsonl", rows)], "qwen", workers=2)
    with_workers = prepare.prepare(request), read_tokens(request["out"])

    def refused(*_, **__):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(multiprocessing.synchronize, "SemLock", refused)
    monkeypatch.setattr(multiprocessing.synchronize.Lock, "__init__", refused)
    capfd.readouterr()
    assert (prepare.prepare(request), read_tokens(request["out"])) == with_workers
    assert "note DATA-33: tokenising in one process: /dev/shm cannot be used (No space left on device)" in capfd.readouterr().err


def test_errors_of_workers_arrive_as_json_with_exit_code_11(run):
    request = run.request([run.write("a.jsonl", GOOD * 200 + json.dumps({"text": 5}) + "\n")], "chatml", workers=2)
    code, answer, _ = launch(request, "prepare.SMALL_BYTES = 0")
    assert code == 11 and answer["error"]["place"].endswith("a.jsonl:201")
    assert answer["error"]["area"] == "DATA-24" and answer["error"]["next"]


def test_a_missing_module_is_named(run):
    request = run.request([run.write("a.jsonl", GOOD)], "chatml")
    code, answer, _ = launch(request, "sys.modules['tokenizers'] = None")
    assert code == 11 and "'tokenizers'" in answer["error"]["what"] and "LMLAUNCH_PYTHON" in answer["error"]["next"]
