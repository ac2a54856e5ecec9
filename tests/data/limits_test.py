"""Chat templates and tokenizers come with models and are not trusted: what they may take is bounded, by counts that depend on them
and the conversation alone; templates that people use stay far below."""

import json
import os
import resource
import signal

import pytest
from prepare_models import MODELS
from prepare_test import PLAIN_CHAT, TOOL_CHAT, TOOLS, launch, model_dir, refused, run, with_template  # noqa: F401

import sandbox  # of PREPARE
from errors import LimitError
from template import ChatTemplate
from tokenise import Model

TURNS = "{% for i in range(99999) %}{% for j in range(99999) %}INSIDE{% endfor %}{% endfor %}"
STEPS = {
    "loops in loops": TURNS.replace("INSIDE", ""),
    "loops that write": TURNS.replace("INSIDE", "x"),
    "loops that choose nothing": "{% for i in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
    "macros that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "loops that call themselves twice": "{% for n in [40] recursive %}{% if n %}{{ loop([n - 1]) }}{{ loop([n - 1]) }}{% endif %}{% endfor %}",
    "a list of lists": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
    "a text that is searched again and again": "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "texts that are joined": "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{% set y = x ~ 'b' %}{% endfor %}",
    "texts that are added": "{% set n = namespace(x='a' * 9000000) %}{% for i in range(99999) %}{% set y = n.x + 'b' %}{% endfor %}",
}
MEMORY = {
    "a text five thousand million times": "{{ 'a' * 5000000000 }}",
    "a list as long": "{{ ([0] * 100000000) | length }}",
    "a number's width": "{{ '%700000000d' % 1 }}",
    "a format's width": "{{ '{:>700000000}'.format(1) }}",
    "a text in the middle of a line": "{{ 'a' | center(700000000) }}",
    "a value with an indent": "{{ [1] | tojson(indent=5000000000) }}",
    "a text that doubles": "{% set n = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a list that doubles": "{% set n = namespace(x=[0] * 1000) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
}
NUMBERS = {"a power of powers": "{{ 9 ** (9 ** 9) }}", "a product that doubles": "{% set n = namespace(x=9) %}{% for i in range(18) %}{% set n.x = n.x * n.x %}{% endfor %}"}
ALL = [*STEPS.items(), *MEMORY.items(), *NUMBERS.items()]


@pytest.mark.parametrize("what,template", ALL, ids=[what for what, _ in ALL])
def test_a_template_that_never_ends_or_takes_all_memory_is_refused(what, template, run, model_dir, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sandbox, "MOST_STEPS", 30_000)  # a thirtieth, to be quick
    before = resource.getrlimit(resource.RLIMIT_AS)
    hostile = with_template(run, model_dir, tmp_path, template)
    error = refused(hostile, [{"messages": PLAIN_CHAT}], "chatml", loss_on="all")
    expected = "digits" if what in NUMBERS else "steps" if what in STEPS or "doubles" in what else "memory"
    assert isinstance(error, LimitError) and expected in error.what, error.what
    assert error.area == "DATA-23" and error.place and "data.chat_template" in error.next
    assert resource.getrlimit(resource.RLIMIT_AS) == before and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_no_row_is_left_out_for_it(run, model_dir, tmp_path, monkeypatch):  # noqa: F811
    """Of ten thousand rows each would take as long."""
    monkeypatch.setattr(sandbox, "MOST_STEPS", 30_000)
    hostile = with_template(run, model_dir, tmp_path, "{% if messages[0].content == 'slow' %}" + STEPS["loops in loops"] + "{% endif %}{{ messages[0].content }}")
    slow, good = {"messages": [{"role": "user", "content": "slow"}, PLAIN_CHAT[1]]}, {"messages": [{"role": "user", "content": "hello world"}, PLAIN_CHAT[1]]}
    assert len(hostile([good], "chatml", loss_on="all")[0]) == 1
    error = refused(hostile, [slow, good], "chatml", bad_rows="skip", loss_on="all")
    assert "steps" in error.what and error.place.endswith("data.jsonl:1")


def test_the_same_template_is_refused_at_the_same_step(monkeypatch):
    """By a count: a faster machine gets no further."""
    monkeypatch.setattr(sandbox, "MOST_STEPS", 30_000)
    template = ChatTemplate({"default": ("{% for i in range(99999) %}{% for j in range(99999) %}{% set x = (i, j) %}{% endfor %}{% endfor %}", "here")}, {})
    left = []
    for _ in range(2):
        with pytest.raises(LimitError):
            template.render(PLAIN_CHAT)
        left.append(template.compiled["default"].environment.left)
    assert left[0] == left[1] == -1


def test_a_call_of_a_macro_is_a_step(monkeypatch):
    """Beside that of a function, so that what it leaves out is not free."""
    template = ChatTemplate({"default": ("{% macro f() %}{% endmacro %}{{ f() }}", "here")}, {})
    template.render(PLAIN_CHAT)
    before = template.compiled["default"].environment.left
    other = ChatTemplate({"default": ("{% macro f() %}{% endmacro %}", "here")}, {})
    other.render(PLAIN_CHAT)
    assert other.compiled["default"].environment.left - before == 2  # the call and the macro's turn


def test_what_is_not_counted_is_stopped_by_the_processors_time(monkeypatch):
    """Words without end, from one call of a function."""
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.05)
    template = ChatTemplate({"default": ("{{ lipsum(n=1000000, min=1, max=2) }}", "here")}, {})
    with pytest.raises(LimitError, match="processor's time"):
        template.render(PLAIN_CHAT)


@pytest.mark.parametrize("name", [name for name, (_, _, template) in MODELS.items() if template])
def test_templates_that_people_use_take_a_hundredth_of_it(name, model_dir):  # noqa: F811
    template = Model(model_dir(name), "all").template
    tools = name in ("llama3", "qwen")
    template.render(TOOL_CHAT if tools else PLAIN_CHAT, TOOLS if tools else None)
    assert sandbox.MOST_STEPS - template.compiled["default"].environment.left < sandbox.MOST_STEPS // 100


def test_a_long_conversation_has_more_steps(run, model_dir, tmp_path, monkeypatch):  # noqa: F811
    """One for each character, so that a template may look at each."""
    monkeypatch.setattr(sandbox, "MOST_STEPS", 100)
    spelling = with_template(run, model_dir, tmp_path, "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}")
    long = [{"role": "user", "content": "hello " * 2000}, {"role": "assistant", "content": "fox"}]
    assert len(spelling([{"messages": long}], "chatml", loss_on="all")[0]) == 1


def test_a_template_that_is_compiled_without_end_is_refused(run, model_dir, tmp_path):  # noqa: F811
    for template in ("{{ " + "-(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 500 + "{% endif %}" * 500):
        error = refused(with_template(run, model_dir, tmp_path, template), [{"messages": PLAIN_CHAT}], "chatml")
        assert "cannot be parsed" in error.what and error.place.endswith("chat_template.jinja"), error.what


def test_a_file_of_gigabytes_is_refused_unread(run, model_dir, tmp_path):  # noqa: F811
    copied = with_template(run, model_dir, tmp_path, "x")
    for name, what in [("chat_template.jinja", "chat template has more than 1 MiB"), ("special_tokens_map.json", "more than 32 MiB"),
                       ("tokenizer_config.json", "more than 32 MiB"), ("tokenizer.json", "tokenizer has more than 128 MiB")]:
        path = tmp_path / name
        with open(path, "a") as file:
            file.truncate(6 << 30)
        error = refused(copied, [{"messages": PLAIN_CHAT}], "chatml")
        assert isinstance(error, LimitError) and what in error.what and error.place == str(path), error.what
    path = tmp_path / "own.jinja"
    with open(path, "w") as file:
        file.truncate(6 << 30)
    assert "1 MiB" in refused(run, [{"messages": PLAIN_CHAT}], "chatml", chat_template=str(path)).what


def test_the_limits_end_with_the_template(run, model_dir, tmp_path):  # noqa: F811
    """The whole program has them nowhere else: texts may be long."""
    request = run.request([run.write("a.jsonl", [{"messages": PLAIN_CHAT}] * 300)], "chatml", workers=2)
    code, summary, _ = launch(request, "prepare.SMALL_BYTES = 0", "import resource",
                              "import atexit; atexit.register(lambda: print(resource.getrlimit(resource.RLIMIT_AS), file=sys.stderr))")
    assert code == 0 and summary["examples"] == 300


def test_workers_pass_it_on(run, model_dir, tmp_path):  # noqa: F811
    hostile = with_template(run, model_dir, tmp_path, MEMORY["a text five thousand million times"])
    request = hostile.request([hostile.write("a.jsonl", [{"messages": PLAIN_CHAT}] * 300)], "chatml", workers=2)
    code, answer, _ = launch(request, "prepare.SMALL_BYTES = 0")
    assert code == 11 and "MiB of memory" in json.dumps(answer) and os.path.exists(request["model_dir"])
