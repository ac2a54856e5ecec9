"""Every kind of row against transformers' own apply_chat_template: the tokens, and one by one which of them are trained. What the
marks must be is made out of transformers' tokens alone: an answer is what follows its turn's header, up to the first end token."""

import datetime
import json

import pyarrow
import pyarrow.parquet
import pytest
import transformers.utils.chat_template_utils
from prepare_test import TOOL_CHAT, TOOLS, Runner, model_dir, oracle, read_tokens, refused, run, with_template  # noqa: F401

import prepare  # of PREPARE
from errors import InputError
from kinds import detect

DATE = "2024-07-26"


def user(content="what is it?", **more):
    return {"role": "user", "content": content, **more}


def said(content="the lazy dog", **more):
    return {"role": "assistant", "content": content, **more}


def system(content="You are quick"):
    return {"role": "system", "content": content}


def text(*parts):
    return [{"type": "text", "text": part} for part in parts]


def bare(chat):
    return [{key: value for key, value in message.items() if key not in ("weight", "train", "loss")} for message in chat]


class Case:
    """A row, and the conversation that it is; `trained` are its answers by index."""

    def __init__(self, row, chat, trained, models=("chatml", "llama3", "qwen"), tools=None, **options):
        self.row, self.chat, self.trained, self.models, self.tools, self.options = row, bare(chat), trained, models, tools, options


TWO = [user("hello"), said("fox"), user(), said()]


def flagged(first, last):
    return [TWO[0], said("fox", **first), TWO[2], said(**last)]


CASES = {
    "messages": Case({"messages": TWO}, TWO, [1, 3]),
    "messages, a system first": Case({"messages": [system(), *TWO]}, [system(), *TWO], [2, 4]),
    "messages as JSON text": Case({"messages": json.dumps(TWO)}, TWO, [1, 3]),
    "the last alone": Case({"messages": TWO}, TWO, [3], answers="last"),
    # Flags.
    **{f"{key} {zero!r} and {one!r}": Case({"messages": flagged({key: zero}, {key: one})}, TWO, [3])
       for key, zero, one in [("weight", 0, 1), ("weight", 0.0, 1.0), ("train", False, True), ("train", 0, 1), ("loss", False, True), ("loss", 0, 1)]},
    "weight 0 at the end": Case({"messages": flagged({}, {"weight": 0})}, TWO, [1]),
    "a weight of 1 beside none": Case({"messages": flagged({"weight": 1}, {})}, TWO, [1, 3]),
    "weight null": Case({"messages": flagged({"weight": None}, {"weight": 0})}, TWO, [1]),
    "two flags that agree": Case({"messages": flagged({"weight": 0, "train": False}, {"weight": 1})}, TWO, [3]),
    "a user's message of weight 0": Case({"messages": [user("hello", weight=0), said("fox"), user(train=False), said()]}, TWO, [1, 3]),
    "flags in ShareGPT": Case({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fox", "loss": False},
                                                 {"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "the lazy dog", "loss": True}]}, TWO, [3]),
    "flags in a completion": Case({"prompt": TWO[:1], "completion": [said("fox", train=0), *TWO[2:]]}, TWO, [3]),
    "flags where a template marks answers": Case({"messages": flagged({"weight": 0}, {})}, TWO, [3],
                                                 ("generation_in", "generation_out", "generation_macro")),
    "a flag in the middle where a template marks answers": Case(
        {"messages": [*TWO, user("5"), said("7")]} | {"messages": [*TWO[:3], said(train=False), user("5"), said("7")]},
        [*TWO, user("5"), said("7")], [1, 5], ("generation_in", "generation_out")),
    "weight 0 of a call": Case({"messages": [TOOL_CHAT[0], {**TOOL_CHAT[1], "weight": 0}, *TOOL_CHAT[2:]], "tools": TOOLS}, TOOL_CHAT, [3],
                               ("qwen",), TOOLS),
    # Text in parts.
    "a part": Case({"messages": [user(text("hello")), said(text("fox"))]}, TWO[:2], [1]),
    "several parts": Case({"messages": [user(text("hel", "lo")), said(text("f", "o", "x")), user(text("what is", " it?")), said()]}, TWO, [1, 3]),
    "parts of a Parquet file": Case({"messages": [user([{"type": "text", "text": "hello", "image_url": None}]), said("fox")]}, TWO[:2], [1]),
    "a system in parts": Case({"messages": [{"role": "system", "content": text("You are", " quick")}, *TWO]}, [system(), *TWO], [2, 4]),
    "parts and a flag": Case({"messages": [TWO[0], said(text("fo", "x"), weight=0), *TWO[2:]]}, TWO, [3]),
    "parts where a template marks answers": Case({"messages": [user(text("hel", "lo")), said(text("fo", "x"))]}, TWO[:2], [1],
                                                 ("generation_in", "generation_out")),
    "parts in ShareGPT": Case({"conversations": [{"from": "human", "value": text("hello")}, {"from": "gpt", "value": text("fox")}]}, TWO[:2], [1]),
    # The column `system`.
    "system beside messages": Case({"messages": TWO, "system": "You are quick"}, [system(), *TWO], [2, 4]),
    "the same system in both": Case({"messages": [system(), *TWO], "system": "You are quick"}, [system(), *TWO], [2, 4]),
    "an empty system": Case({"messages": TWO, "system": ""}, TWO, [1, 3]),
    "system beside conversations": Case({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fox"}],
                                         "system": "You are quick"}, [system(), *TWO[:2]], [2]),
    "system beside prompt and completion": Case({"prompt": TWO[:3], "completion": TWO[3:], "system": "You are quick"}, [system(), *TWO], [4]),
    "system beside a prompt and a text": Case({"prompt": TWO[:3], "completion": "the lazy dog", "system": "You are quick"}, [system(), *TWO], [4]),
    "system beside instruction and output": Case({"instruction": "hello", "output": "fox", "system": "You are quick"}, [system(), *TWO[:2]], [2]),
    # The others.
    "conversations": Case({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fox"}]}, TWO[:2], [1]),
    "prompt and completion": Case({"prompt": TWO[:3], "completion": TWO[3:]}, TWO, [3]),
    "instruction, input, output, history": Case({"instruction": "what", "input": "is it?", "output": "the lazy dog", "history": [["hello", "fox"]]},
                                                [*TWO[:2], user("what\nis it?"), said()], [1, 3]),
    "calls of tools": Case({"messages": TOOL_CHAT, "tools": TOOLS}, TOOL_CHAT, [1, 3], ("qwen",), TOOLS),
    "a column that nobody reads": Case({"messages": TWO, "source": "somewhere"}, TWO, [1, 3]),
}


HEADERS = {"llama3": ("<|start_header_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")}
CHATML_HEADER = ("<|im_start|>", "<|im_start|>assistant\n", "<|im_end|>")


def expected(tokenizer, case, name):
    """Turns begin with a token of their own; a template may write one more in front, a system's."""
    start, header, end = HEADERS.get(name, CHATML_HEADER)
    whole = tokenizer.apply_chat_template(case.chat, tools=case.tools)["input_ids"]
    starts = [i for i, token in enumerate(whole) if token == tokenizer.convert_tokens_to_ids(start)][-len(case.chat):]
    marks = [0] * len(whole)
    for index in case.trained:
        first = starts[index]
        while tokenizer.decode(whole[starts[index]:first]) != header:
            first += 1
        last = whole.index(tokenizer.convert_tokens_to_ids(end), first)
        marks[first:last + 1] = [1] * (last + 1 - first)
    return whole, marks


@pytest.fixture(autouse=True)
def date(monkeypatch):
    """What transformers' strftime_now knows of today."""
    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.strptime(DATE, "%Y-%m-%d")

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Then)


ALL = [(kind, name) for kind, case in CASES.items() for name in case.models]


def test_the_kinds_of_rows_are_many():
    assert len(CASES) >= 30


@pytest.mark.parametrize("kind,name", ALL)
def test_a_row_is_trained_as_transformers_tokenises_it(kind, name, run, oracle):  # noqa: F811
    case, tokenizer = CASES[kind], oracle(name)
    (ids, marks), = run([case.row], name, date=DATE, **case.options)[0]
    whole, trained = expected(tokenizer, case, name)
    assert ids == whole
    assert [(token, mark) for token, mark in zip(ids, marks)] == list(zip(whole, trained))


def test_parquet_gives_the_same(run, tmp_path):  # noqa: F811
    """Where rows differ in their keys, Parquet fills them up with nulls."""
    rows = [CASES[kind].row for kind in ("messages", "weight 0 and 1", "weight 0 at the end")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    request = run.request([str(tmp_path / "a.parquet")], "chatml")
    prepare.prepare(request)
    assert read_tokens(request["out"]) == run(rows, "chatml")[0]


PARTED = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
          "{% for part in m.content %}{{ '[' + part.text + ']' }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


@pytest.mark.parametrize("roles", ["user assistant", "user", "assistant"])
def test_a_template_that_takes_parts_joins_them_itself(roles, run, model_dir, tmp_path, oracle):  # noqa: F811
    parted = with_template(run, model_dir, tmp_path, PARTED)
    chat = [user(text("hel", "lo")) if "user" in roles else user("hello"), said(text("f", "ox")) if "assistant" in roles else said("fox")]
    (ids, marks), = parted([{"messages": chat}], "chatml")[0]
    assert ids == oracle("chatml").apply_chat_template(chat, chat_template=PARTED)["input_ids"]
    trained, = parted.trained([{"messages": chat}], "chatml")
    assert trained == [("[f][ox]" if "assistant" in roles else "fox") + "<|im_end|>"]


@pytest.mark.parametrize("template,told", [
    ("{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}", "a list in the text"),
    ("{% for m in messages %}{{ m.role + ': ' + (m.content | tojson) + '<|im_end|>\n' }}{% endfor %}", "JSON in the text"),
    ("{% for m in messages %}{{ m.role + ': ' + (m.content if m.content is string else '') + '<|im_end|>\n' }}{% endfor %}", "nothing"),
    ("{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>\n' }}{% endfor %}", "an error")])
def test_a_template_that_takes_strings_gets_one(template, told, run, model_dir, tmp_path):  # noqa: F811
    """What such templates make of a list otherwise."""
    parted = with_template(run, model_dir, tmp_path, template)
    assert parted([{"messages": [user(text("hel", "lo")), said(text("f", "ox"))]}], "chatml") == parted([{"messages": [user("hello"), said("fox")]}], "chatml")


def test_the_recorded_date_gives_the_same_tokens_next_month(run, oracle):  # noqa: F811
    row = {"messages": TWO}
    (ids, _), = run([row], "llama3", date=DATE)[0]
    assert ids == oracle("llama3").apply_chat_template(TWO)["input_ids"]
    summary = run([row], "llama3", date="2019-01-01")[1]
    assert run([row], "llama3", date="2019-01-01")[0][0][0] != ids
    assert any("uses the date: it gets 2019-01-01" in note and "tokenizer_config.json" in note for note in summary["notes"])
    assert run([row], "chatml", date=DATE)[0] == run([row], "chatml", date="2019-01-01")[0]
    for rows, name in (([row], "chatml"), ([{"text": "fox"}], "llama3")):  # that do not ask
        assert not any("date" in note for note in run(rows, name, date=DATE)[1]["notes"])


# ---- what is refused, or asked ---------------------------------------------------------------------------------------

IMAGE = {"type": "image", "image": "a.png"}
REFUSED = {
    "a weight of a half": ({"messages": flagged({"weight": 0.5}, {})}, "weight = 0.5", "write 0 or 1"),
    "a flag of words": ({"messages": flagged({"train": "no"}, {})}, 'train = "no"', "write 0 or 1"),
    "two flags that differ": ({"messages": flagged({"train": True, "weight": 0}, {})}, "contradict", "keep one"),
    "a user's message to be trained": ({"messages": [user(train=True), said()]}, "of role 'user' has train = true", "leave 'train' out"),
    "a prompt to be trained": ({"prompt": flagged({"weight": 1}, {})[:3], "completion": [said()]}, "of the prompt has weight = 1", "leave 'weight' out"),
    "a part that is an image": ({"messages": [user([IMAGE]), said()]}, "'image'", "data.bad_rows"),
    "a text with an image": ({"messages": [user([{**text("x")[0], "image_url": "x"}]), said()]}, "'image_url'", "data.bad_rows"),
    "a part of another type": ({"messages": [user([{"type": "input_audio", "input_audio": {}}]), said()]}, "'input_audio'", "data.bad_rows"),
    "a part without a text": ({"messages": [user([{"type": "text"}]), said()]}, "is not text", "write parts"),
    "a message's images": ({"messages": [user(images=["a.png"]), said()]}, "'images'", "data.bad_rows"),
    **{f"a column {name}": ({"messages": TWO, name: ["x"]}, f"column '{name}' is not empty", "data.bad_rows")
       for name in ("image", "images", "audio", "video", "videos")},
    "an image beside a text": ({"text": "fox", "image": "a.png"}, "column 'image'", "data.bad_rows"),
    "kto_tag": ({"messages": TWO, "kto_tag": True}, "kto_tag", "keep the rows whose kto_tag is true"),
    "kto_tag beside instruction and output": ({"instruction": "q", "output": "a", "kto_tag": False}, "kto_tag", "keep the rows"),
    "a label beside messages": ({"messages": TWO, "label": False}, "label", "keep the rows whose label is true"),
    "a label beside conversations": ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fox"}], "label": 1}, "label", "keep"),
    "a label as text": ({"prompt": "q", "completion": "a", "label": "True"}, "label", "keep the rows"),
    "messages beside prompt and completion": ({"messages": TWO, "prompt": "q", "completion": "a"}, "in 2 ways: messages beside prompt + completion",
                                              'data.format = "chat" or "prompt-completion"'),
    "messages beside conversations": ({"messages": TWO, "conversations": TWO}, "in 2 ways", 'data.format = "chat" or "sharegpt"'),
    "instruction and output beside text": ({"instruction": "q", "output": "a", "text": "fox"}, "in 2 ways", 'data.format = "alpaca" or "text"'),
    "tokens beside text": ({"input_ids": [1, 2], "text": "fox"}, "in 2 ways", 'data.format = "tokens" or "text"'),
    "two system prompts": ({"messages": [system("You are slow"), *TWO], "system": "You are quick"}, "two system prompts", "keep one"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("first", [True, False])
def test_a_row_that_could_be_trained_wrongly_is_refused(kind, first, run):  # noqa: F811
    row, what, then = REFUSED[kind]
    plain = {key: row[key] for key in row if key in ("instruction", "output", "prompt", "completion") and not isinstance(row[key], list)}
    good = {"messages": TWO} if "messages" in row else {"text": "fox"} if "text" in row else plain or {"prompt": TWO[:3], "completion": TWO[3:]}
    if "conversations" in row and "messages" not in row:
        good = {"conversations": row["conversations"]}
    error = refused(run, [row] if first else [good, row], "qwen")
    assert what in error.what and then in error.next, (error.what, error.next)
    assert error.place.endswith("data.jsonl:1" if first else "data.jsonl:2")


def test_a_format_that_is_named_answers_the_question(run):  # noqa: F811
    both = {"messages": TWO, "prompt": "q", "completion": "a"}
    assert run([both], "chatml", format="chat")[0] == run([{"messages": TWO}], "chatml")[0]
    assert run([both], "chatml", format="prompt-completion")[0] == run([{"prompt": "q", "completion": "a"}], "chatml")[0]
    empty = {"messages": TWO, "prompt": "", "completion": "", "text": None}  # as CSV and Parquet fill up rows
    assert run([empty], "chatml")[0] == run([{"messages": TWO}], "chatml")[0]


def test_nothing_that_is_empty_or_no_truth_is_refused(run):  # noqa: F811
    row = {"messages": TWO, "images": [], "audio": None, "label": "sports", "kto_tag": None}
    assert run([row], "chatml")[0] == run([{"messages": TWO}], "chatml")[0]


def test_all_tokens_and_a_message_that_is_not_trained_are_a_question(run):  # noqa: F811
    error = refused(run, [{"messages": flagged({"weight": 0}, {})}], "chatml", loss_on="all")
    assert "trains every token" in error.what and 'data.loss_on = "completion"' in error.next
    (ids, marks), = run([{"messages": [user(train=True), said(train=True)]}], "chatml", loss_on="all")[0]
    assert all(marks)


def test_flags_and_which_answers(run):  # noqa: F811
    rows = [{"messages": flagged({"weight": 0}, {})}]
    assert run(rows, "chatml", answers="each")[0] == run([{"messages": TWO}], "chatml", answers="each")[0][1:]
    examples, summary = run([{"messages": flagged({}, {"weight": 0})}, {"messages": TWO}], "chatml", answers="last")
    assert len(examples) == 1 and summary["dropped"] == 1


def test_a_sharegpt_call_keeps_its_flag(run):  # noqa: F811
    call = {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {}})}
    turns = [{"from": "human", "value": "hello"}, {**call, "weight": 0}, {"from": "observation", "value": "7"}, {"from": "gpt", "value": "it is 7"}]
    assert len(run.trained([{"conversations": turns}], "qwen")[0]) == 1
    assert len(run.trained([{"conversations": [turns[0], call, *turns[2:]]}], "qwen")[0]) == 2


def test_of_two_kinds_none_is_chosen_as_format(run):  # noqa: F811
    """The first row decides for a file: also where it is asked before any row is read."""
    with pytest.raises(InputError) as caught:
        detect({"messages": TWO, "text": "fox"}, "a.jsonl:1")
    assert "in 2 ways" in caught.value.what
    assert detect({"messages": TWO, "text": None}, "a.jsonl:1") == "chat" and detect({"messages": None, "text": "fox"}, "a.jsonl:1") == "text"


def test_flags_without_a_template(run):  # noqa: F811
    assert run.trained([{"messages": flagged({"weight": 0}, {})}], "plain") == [["the lazy dog</s>"]]
    assert run.trained([{"messages": [user(text("hel", "lo")), said(text("fo", "x"))]}], "plain") == [["fox</s>"]]


def test_a_system_prompt_of_plain_text_stands_before_the_prompt(run):  # noqa: F811
    with_system = run([{"prompt": "hello", "completion": " world", "system": "You are quick"}], "plain")[0]
    assert with_system == run([{"prompt": "You are quick\n\nhello", "completion": " world"}], "plain")[0]


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_columns_that_nobody_reads_are_named_once_with_their_rows(run):  # noqa: F811
    rows = [{"messages": TWO, "id": n, "source": "x" if n % 2 else None, "tools": None} for n in range(300)]
    note, = [note for note in run(rows, "chatml")[1]["notes"] if "not read" in note]
    assert note == "columns that are not read: id (300 of 300 rows), source (150 of 300 rows)"
    assert not any("not read" in note for note in run([{"messages": TWO}], "chatml")[1]["notes"])
    assert "text (1 of 1 rows)" in run([{"messages": TWO, "text": "fox"}], "chatml", format="chat")[1]["notes"][-1]


def test_so_many_columns_are_counted_together(run):  # noqa: F811
    note = run([{"text": "fox", f"column {n}": 1} for n in range(50)], "chatml")[1]["notes"][-1]
    assert note.count("column ") == 20 and "other columns (30 of 50 rows)" in note


def test_a_token_of_prompt_and_answer_is_counted(run):  # noqa: F811
    rows = [{"prompt": "hello wo", "completion": "rld"}, {"prompt": "hello", "completion": " world"}, {"prompt": "hello", "completion": "\nworld"}]
    note, = run(rows, "chatml")[1]["notes"]
    assert note.startswith("in 1 of 3 examples the end of a prompt and the beginning of its answer are one token") and "data.jsonl:1" in note
    assert run(rows[1:], "chatml")[1]["notes"] == []


def test_the_sample_is_told_token_by_token(run, oracle):  # noqa: F811
    chat = [user("ünïcode 日本語"), said("\U0001f600 fine")]
    (ids, marks), = run([{"messages": chat}], "chatml")[0]
    sample = run([{"messages": chat}], "chatml")[1]["sample"]
    assert [piece["trained"] for piece in sample] == [mark == 1 for mark in marks]
    assert "".join(piece["text"] for piece in sample) == oracle("chatml").decode(ids)
    assert "".join(piece["text"] for piece in sample if piece["trained"]) == "\U0001f600 fine<|im_end|>"


def test_a_message_names_some_of_many_columns():
    with pytest.raises(InputError) as refusal:
        detect({f"{'c' * 200}{i}": 1 for i in range(500)}, "a.jsonl:1")
    assert refusal.value.what == "unknown columns: found " + ", ".join(["c" * 60] * 20) + " and 480 more"
