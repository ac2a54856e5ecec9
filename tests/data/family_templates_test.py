"""The templates of the families beyond Llama's relatives against transformers: ids, and what ends a turn. Which texts begin with a begin
token; what a row is told whose system message a template refuses."""

import json
import os
import sys

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

sys.path[:0] = [os.path.dirname(__file__)]

import family_models  # noqa: E402
from prepare_test import Runner, refused  # noqa: E402  (it has the path of the sources)
from text import Session  # noqa: E402
from tokenise import Model  # noqa: E402

CHAT = [{"role": "user", "content": "what is 5?"}, {"role": "assistant", "content": "it is fine"},
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "the lazy dog"}]
SYSTEM = [{"role": "system", "content": "Answer."}, *CHAT]
WITH_SYSTEM = [style for style, (*_, system) in family_models.STYLES.items() if system]


def write_model(path, style, **config):
    tokenizer = family_models.tokenizer_of(style)
    tokenizer.save(str(path / "tokenizer.json"))
    of_style, template = family_models.STYLES[style][2:4]
    (path / "tokenizer_config.json").write_text(json.dumps(
        {**of_style, "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return str(path)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}

    def get(style):
        if style not in made:
            made[style] = write_model(tmp_path_factory.mktemp(style), style)
        return made[style]

    return get


@pytest.fixture
def run(tmp_path, directories):
    return Runner(tmp_path, directories)


def theirs(directory, messages):
    return AutoTokenizer.from_pretrained(directory).apply_chat_template(messages, tokenize=True)["input_ids"]


def id_of(directory, token):
    return Tokenizer.from_file(directory + "/tokenizer.json").token_to_id(token)


@pytest.mark.parametrize("style", family_models.STYLES)
@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_ids_are_those_of_transformers(style, loss_on, run, directories):
    """Where nothing ends the last answer, the token that would follow does."""
    directory = directories(style)
    closing = [id_of(directory, "<|user|>")] if style == "glm4" else []
    for messages in [CHAT] + [SYSTEM] * (style in WITH_SYSTEM):
        (ids, marks), = run([{"messages": messages}], style, loss_on=loss_on)[0]
        assert ids == theirs(directory, messages) + closing
        assert all(marks) if loss_on == "all" else 0 < sum(marks) < len(marks)


@pytest.mark.parametrize("style", family_models.STYLES)
def test_answers_are_trained_up_to_what_ends_them(style, run):
    inside, last = family_models.STYLES[style][4:6]
    newline = "\n" if style in ("glm4",) else ""  # behind its role, which the prompt of an answer leaves out
    for messages in [CHAT] + [SYSTEM] * (style in WITH_SYSTEM):
        assert run.trained([{"messages": messages}], style) == [[newline + "it is fine" + inside, newline + "the lazy dog" + last]]


@pytest.mark.parametrize("style", family_models.STYLES)
def test_generation_stops_where_answers_end_in_training(style, directories):
    directory = directories(style)
    inside = family_models.STYLES[style][4]
    assert id_of(directory, inside) in Session(directory, "").about()["stop"]


@pytest.mark.parametrize("style", family_models.STYLES)
def test_no_answer_is_taken_for_one_without_an_end(style, run):
    assert run([{"messages": CHAT}], style)[1]["notes"] == []


def test_an_answer_that_is_not_trained_ends_untrained(run, directories):
    token = id_of(directories("glm4"), "<|user|>")
    silent = [*CHAT[:3], {**CHAT[3], "weight": 0}]
    (ids, marks), = run([{"messages": silent}], "glm4")[0]
    assert ids[-1] == token and marks[-1] == 0 and sum(marks) > 0
    (ids, marks), = run([{"messages": CHAT[:3]}], "glm4")[0]
    assert ids == theirs(directories("glm4"), CHAT[:3])  # a question has no end of its own


def test_a_tool_call_ends_with_the_token_of_its_result(run, directories):
    chat = [CHAT[0], {"role": "assistant", "content": "add"}, {"role": "tool", "content": "7"}, CHAT[1]]
    assert run.trained([{"messages": chat}], "glm4") == [["\nadd<|observation|>", "\nit is fine<|user|>"]]


def test_a_role_that_both_turns_begin_with_ends_none(directories, tmp_path):
    """ "<|im_start|>" begins answers, too: a template without an end token is refused as before."""
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}" \
               "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    directory = write_model(tmp_path, "phi4", chat_template=template)
    assert Model(directory, "completion").next_turn is None
    (tmp_path / "run").mkdir()
    error = refused(Runner(tmp_path / "run", lambda style: directory), [{"messages": CHAT}], "phi4")
    assert "never stop" in error.what


def test_a_system_message_that_a_template_refuses_is_told_by_its_row(run):
    error = refused(run, [{"messages": CHAT}, {"messages": SYSTEM}], "gemma")
    assert "System role not supported" in error.what and error.place.endswith("data.jsonl:2")
    assert "no system role" in error.next and "first user's message" in error.next
    examples, summary = run([{"messages": CHAT}, {"messages": SYSTEM}], "gemma", bad_rows="skip")
    assert len(examples) == 1 and "System role not supported" in summary["notes"][0]
    for messages in (CHAT[1:], [SYSTEM[0], *CHAT[1:]]):  # of another fault, or more than one, that is not the remedy
        assert "system" not in refused(run, [{"messages": messages}], "gemma").next


@pytest.mark.parametrize("style,writes", [("gemma", True), ("cohere2", True), ("deepseek", True), ("phi3", False), ("granite", False)])
def test_raw_text_begins_as_in_transformers(style, writes, run, directories):
    directory = directories(style)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    (ids, marks), = run([{"text": "hello world"}], style)[0]
    assert ids == tokenizer("hello world")["input_ids"] + ([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])
    assert (ids[0] == tokenizer.bos_token_id) == writes


@pytest.mark.parametrize("asks", [True, False])
def test_whether_text_has_a_begin_token_stands_in_tokenizer_json_alone(asks, tmp_path):
    """As in transformers: add_bos_token of tokenizer_config.json is for files that have no tokenizer.json."""
    (tmp_path / "run").mkdir()
    for writes in (True, False):
        directory = write_model(tmp_path, "gemma", add_bos_token=asks)
        path = tmp_path / "tokenizer.json"
        if not writes:
            path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
        mine, tokenizer = Runner(tmp_path / "run", lambda style: directory), AutoTokenizer.from_pretrained(directory)
        (ids, _), = mine([{"text": "hello world"}], "gemma")[0]
        assert ids == tokenizer("hello world")["input_ids"] + [tokenizer.eos_token_id] and (ids[0] == tokenizer.bos_token_id) == writes
        (ids, _), = mine([{"messages": CHAT}], "gemma")[0]
        assert ids == theirs(directory, CHAT)  # the template has its own
