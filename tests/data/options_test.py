"""What the configuration decides about rows: names of columns, rows that cannot be used, which answers are trained, whose
template, compressed files, and going on after a kill. Masks against transformers and the datasets library's own files."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
import types

import pyarrow
import pytest
from prepare_models import QWEN  # noqa: I001
from prepare_test import (PLAIN_CHAT, PREPARE, SYSTEM_CHAT, TOOL_CHAT, TOOLS, model_dir, oracle, read_tokens,  # noqa: F401
                          refused, run, with_template)
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import formats  # noqa: I001, of PREPARE
import judged
import kinds
import prepare
import text
from errors import InputError
from token_file import BESIDE
from token_file import TokenFileWriter as prepare_writer

PAIR = {"prompt": "hello", "completion": " world"}

# ---- columns --------------------------------------------------------------------------------------------------------


def test_columns_with_other_names_give_the_same_examples(run):
    expected = run([PAIR], "chatml")[0]
    named = {"q": "hello", "a": " world", "prompt": 5, "id": 1}
    assert run([named], "chatml", columns={"prompt": "q", "completion": "a"})[0] == expected
    # Two that have changed places.
    assert run([{"prompt": " world", "completion": "hello"}], "chatml",
               columns={"prompt": "completion", "completion": "prompt"})[0] == expected
    chat = run([{"messages": PLAIN_CHAT}], "chatml")[0]
    assert run([{"dialog": PLAIN_CHAT}], "chatml", columns={"messages": "dialog"})[0] == chat
    # The format is one that has them: without that, `text` would not be seen beside `messages`.
    both = {"messages": PLAIN_CHAT, "body": "fox"}
    assert run([both], "chatml", columns={"text": "body"})[0] == run([{"text": "fox"}], "chatml")[0]


def test_a_column_that_is_not_there_is_named_with_what_is(run):
    error = refused(run, [PAIR], "chatml", columns={"prompt": "q"})
    assert "'prompt' from column 'q'" in error.what and "found prompt, completion" in error.what
    assert error.place.endswith("data.jsonl:1") and "data.columns" in error.next


@pytest.mark.parametrize("row,ours", [
    ({"prompt": "hello", "chosen": " world", "rejected": " dog"}, "completion"),
    ({"chosen": PLAIN_CHAT, "rejected": PLAIN_CHAT[:2]}, "messages"),
    ({"prompt": PLAIN_CHAT[:1], "chosen": PLAIN_CHAT[1:2], "rejected": PLAIN_CHAT[3:]}, "completion"),
    ({"prompt": "hello", "chosen": PLAIN_CHAT, "rejected": PLAIN_CHAT[:2]}, "messages"),
    ({"chosen": " world", "rejected": " dog"}, "text"),
    ({"chosen": PLAIN_CHAT, "rejected": PLAIN_CHAT[:2], "messages": PLAIN_CHAT}, "messages")])
def test_preferences_are_named_and_their_chosen_half_can_be_trained(run, row, ours):
    error = refused(run, [row], "chatml")
    assert "preference data" in error.what and f'{ours} = "chosen"' in error.next and error.place.endswith(":1")
    assert len(run([row], "chatml", columns={ours: "chosen"})[0]) == 1


def test_labelled_completions_are_preferences_too(run):
    assert "preference data" in refused(run, [{**PAIR, "label": True}], "chatml").what


# ---- plain prompts and completions on a model with a template --------------------------------------------------------


def test_a_plain_pair_is_rendered_as_a_conversation_on_request(run):
    def chat(*messages):
        return [{"role": role, "content": content} for role, content in messages]

    turn = [("user", "hello"), ("assistant", " world")]
    for more, messages in [({}, turn), ({"system": "The fox"}, [("system", "The fox"), *turn])]:
        for model in ("chatml", "generation_in"):
            assert run([{**PAIR, **more}], model, render="chat")[0] == run([{"messages": chat(*messages)}], model)[0]
    assert run([{**PAIR, "tools": TOOLS}], "qwen", render="chat")[0] == run([{"messages": chat(*turn), "tools": TOOLS}], "qwen")[0]
    # Without a template they are written as other conversations are; rows of messages stay what they are.
    assert run([PAIR], "plain", render="chat")[0] == run([{"messages": chat(*turn)}], "plain")[0] != run([PAIR], "plain")[0]
    listed = {"prompt": PLAIN_CHAT[:1], "completion": PLAIN_CHAT[1:2]}
    assert run([listed], "chatml", render="chat")[0] == run([listed], "chatml")[0]


def test_rows_of_plain_prompt_and_completion_are_counted(run):
    rows = [PAIR, {"prompt": PLAIN_CHAT[:1], "completion": PLAIN_CHAT[1:2]}, PAIR]
    for render in ("plain", "chat"):
        assert run(rows, "chatml", render=render)[1]["pairs"] == 2
    assert [run([PAIR], model)[1]["template"] for model in ("chatml", "plain")] == [True, False]


def test_prompts_are_written_without_the_template_for_a_model_trained_so(model_dir):  # noqa: F811
    plain, usual = (text.Session(model_dir("chatml"), "", plain=plain).reply({"prompt": "hello"})["ids"] for plain in (True, False))
    encoded = Tokenizer.from_file(model_dir("chatml") + "/tokenizer.json").encode("hello").ids
    assert plain == encoded and len(usual) > len(plain)


# ---- rows that cannot be used ---------------------------------------------------------------------------------------

BAD = ["{\"text\": fox}", "[1]", json.dumps({"other": 1}), json.dumps({"text": 5}), "{\"text\": \"\\ud800 fox\"}"]


def test_bad_rows_are_left_out_counted_and_named_on_request(run):
    good = [json.dumps({"text": "fox"}), json.dumps({"text": "dog"})]
    text = "\n".join([BAD[0], good[0], *BAD[1:], good[1], BAD[3]]) + "\n"
    examples, summary = run(text, "chatml", bad_rows="skip")
    assert examples == run([{"text": "fox"}, {"text": "dog"}], "chatml")[0]
    note, = summary["notes"]
    assert note.startswith("6 of 8 rows cannot be used and are left out: ") and "data.jsonl:1:" in note
    assert "2 x column 'text' is not a string" in note and "surrogate" in note and "a list instead of" in note
    assert refused(run, text, "chatml").place.endswith("data.jsonl:1:10")


@pytest.mark.parametrize("name,text", [("a.csv", "text,more\nfox,1\nfox\ndog,2\n"), ("a.csv", "text,more\nfox,1\n\"a\"b,1\ndog,2\n"),
                                       ("a.json", "[{\"text\": \"fox\"}, 5, {\"text\": \"dog\"}]")])
def test_bad_rows_of_every_kind_of_file_are_left_out(run, name, text):
    examples, summary = run(text, "chatml", name=name, bad_rows="skip")
    assert examples == run([{"text": "fox"}, {"text": "dog"}], "chatml")[0]
    assert summary["notes"][0].startswith("1 of 3 rows")


def test_what_the_template_or_the_vocabulary_refuses_is_a_bad_row(run):
    rows = [{"messages": PLAIN_CHAT}, {"messages": PLAIN_CHAT[1:]}, {"messages": PLAIN_CHAT[2:]}]
    examples, summary = run(rows, "mistral", bad_rows="skip")
    assert len(examples) == 2 and "must alternate" in summary["notes"][0] and "data.jsonl:2" in summary["notes"][0]
    examples, summary = run([{"input_ids": [1, 2]}, {"input_ids": [1, 900]}], "chatml", vocab=800, bad_rows="skip")
    assert examples == [([1, 2], [1, 1])] and "outside the model's vocabulary" in summary["notes"][0]


def test_a_set_of_bad_rows_alone_is_refused(run):
    error = refused(run, "\n".join(BAD), "chatml", bad_rows="skip", format="text")
    assert "not one of 5 rows can be used" in error.what and "data.jsonl:1" in error.place


def test_empty_answers_are_counted_and_named(run):
    rows = [PAIR, {"prompt": "hello", "completion": " "}, {"messages": PLAIN_CHAT[:1] + [{"role": "assistant", "content": ""}]}]
    _, summary = run([rows[0], rows[1]], "chatml")
    assert summary["notes"] == ["1 of 2 examples have an empty answer (first: " + os.path.join(str(run.dir), "data.jsonl") +
                                ":2): from these the model learns empty answers"]
    assert "1 of 2" in run([{"messages": PLAIN_CHAT}, rows[2]], "chatml")[1]["notes"][0]
    assert run([{"messages": TOOL_CHAT, "tools": TOOLS}], "qwen")[1]["notes"] == []  # a call is no empty answer


def test_calls_and_tools_that_the_template_drops_are_refused(run, model_dir, tmp_path):  # noqa: F811
    call = TOOL_CHAT[:2] + TOOL_CHAT[3:]
    error = refused(run, [{"messages": PLAIN_CHAT}, {"messages": call}], "chatml")
    assert "drops the call of tool 'add'" in error.what and error.place.endswith(":2") and "data.chat_template" in error.next
    error = refused(run, [{"messages": PLAIN_CHAT, "tools": TOOLS}], "chatml")
    assert "drops the tool 'add'" in error.what
    assert len(run([{"messages": TOOL_CHAT, "tools": TOOLS}], "qwen")[0]) == 1


# ---- which answers --------------------------------------------------------------------------------------------------

THOUGHTS = [{"role": "user", "content": "hello"},
            {"role": "assistant", "content": "<think>\nquick\n</think>\n\nworld"},
            {"role": "user", "content": "what is it?"},
            {"role": "assistant", "content": "lazy dog", "reasoning_content": "brown fox"}]


def test_the_last_answer_alone_is_trained(run, oracle):  # noqa: F811
    ascii_chat = [{**m, "content": m["content"].encode("ascii", "ignore").decode()} for m in SYSTEM_CHAT]
    (ids, marks), = run([{"messages": ascii_chat}], "generation_in", answers="last")[0]
    whole = oracle("generation_in").apply_chat_template(ascii_chat, return_assistant_tokens_mask=True)
    before = oracle("generation_in").apply_chat_template(ascii_chat[:-1])["input_ids"]
    assert ids == whole["input_ids"]
    assert marks == [0] * len(before) + whole["assistant_masks"][len(before):] and 1 in marks
    assert run.trained([{"messages": SYSTEM_CHAT}], "chatml", answers="last") == [["world<|im_end|>"]]


def test_each_answer_is_an_example_as_the_model_will_see_it(run, oracle):  # noqa: F811
    """Qwen's template takes out what earlier answers thought, so that only the end of a conversation shows it."""
    examples, _ = run([{"messages": THOUGHTS}], "qwen", answers="each")
    expected = [oracle("qwen").apply_chat_template(THOUGHTS[:n])["input_ids"] for n in (2, 4)]
    assert [ids for ids, _ in examples] == expected
    assert run.trained([{"messages": THOUGHTS}], "qwen", answers="each") == [
        ["<think>\nquick\n</think>\n\nworld<|im_end|>"], ["<think>\nbrown fox\n</think>\n\nlazy dog<|im_end|>"]]
    assert run.trained([{"messages": THOUGHTS}], "qwen")[0][0] == "world<|im_end|>"


def test_reasoning_is_taken_out_on_request(run):
    bare = [{"role": m["role"], "content": m["content"].split("</think>\n\n")[-1]} for m in THOUGHTS]
    assert run([{"messages": THOUGHTS}], "qwen", reasoning="drop")[0] == run([{"messages": bare}], "qwen")[0]
    assert run([{"messages": THOUGHTS}], "chatml", reasoning="drop")[0] == run([{"messages": bare}], "chatml")[0]
    assert run([{"messages": THOUGHTS}], "chatml")[0] != run([{"messages": bare}], "chatml")[0]


ODD_ROWS = {"a number of 5000 digits": '{"text": "x", "n": ' + "7" * 5000 + "}",
            "a list for a role": '{"messages": [{"role": ["user"], "content": "x"}]}',
            "lists in a hundred thousand lists": json.dumps({"messages": "[" * 100_000})}


@pytest.mark.parametrize("row", ODD_ROWS.values(), ids=ODD_ROWS)
@pytest.mark.parametrize("first", [True, False])
def test_an_odd_row_is_named_or_left_out(run, row, first):
    good = json.dumps({"text": "fox"} if '"text"' in row else {"messages": PLAIN_CHAT})
    rows = "\n".join([row, good] if first else [good, row])
    error = refused(run, rows, "chatml")
    assert re.search(r"data\.jsonl:\d", error.place) and error.place.split(":")[1] == ("1" if first else "2")
    if not first:
        assert len(run(rows, "chatml", bad_rows="skip")[0]) == 1


def test_reasoning_goes_from_pairs_and_from_alpacas_answers_too(run, model_dir, tmp_path):  # noqa: F811
    pair, alpaca = {"prompt": "q", "completion": "<think>hm</think>fox"}, {"instruction": "q", "output": "<think>hm</think>fox"}
    without = with_template(run, model_dir, tmp_path, None, "chatml")
    for row in (pair, alpaca):
        texts = without.trained([row], "chatml", reasoning="drop")
        assert "fox" in texts[0][0] and "think" not in texts[0][0]
        assert "think" in without.trained([row], "chatml")[0][0]


def test_without_a_template_a_call_of_a_tool_is_refused(run, model_dir, tmp_path):  # noqa: F811
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {}}}]}
    error = refused(with_template(run, model_dir, tmp_path, None, "chatml"), [{"messages": [{"role": "user", "content": "rain?"}, call]}], "chatml")
    assert "drops the call of tool 'weather'" in error.what


def test_conversations_without_a_tokenizer_say_what_they_need(run, tmp_path):
    (tmp_path / "bare").mkdir()
    request = run.request([run.write("a.jsonl", [{"messages": 2 * PLAIN_CHAT[:2]}])], "chatml", model_dir=str(tmp_path / "bare"))
    assert "no tokenizer.json" in refused(prepare.prepare, request).what


# ---- whose template -------------------------------------------------------------------------------------------------


def test_a_template_of_the_users_own_is_used_and_kept(run, model_dir, tmp_path):  # noqa: F811
    path = tmp_path / "own.jinja"
    path.write_text(QWEN)
    examples, summary = run([{"messages": PLAIN_CHAT}], "chatml", chat_template=str(path))
    tokenizer = AutoTokenizer.from_pretrained(model_dir("chatml"))
    assert examples[0][0] == tokenizer.apply_chat_template(PLAIN_CHAT, chat_template=QWEN)["input_ids"]
    assert summary["chat_template"] == QWEN and run([{"messages": PLAIN_CHAT}], "chatml")[1]["chat_template"] == ""
    error = refused(run, [PAIR], "chatml", chat_template=str(tmp_path / "none.jinja"))
    assert "data.chat_template" in error.what and error.place.endswith("none.jinja")


@pytest.mark.parametrize("name", ["plain", "chatml"])
@pytest.mark.parametrize("chat", [PLAIN_CHAT, SYSTEM_CHAT, PLAIN_CHAT[:2]])
def test_a_model_without_a_template_gets_the_one_that_was_used(run, model_dir, tmp_path, name, chat):  # noqa: F811
    without = with_template(run, model_dir, tmp_path, None, name)
    examples, summary = without([{"messages": chat}], name)
    assert any("has no chat template" in note for note in summary["notes"])
    (tmp_path / "chat_template.jinja").write_text(summary["chat_template"])
    rendered = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(chat)
    assert rendered["input_ids"] == examples[0][0]


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_a_list_of_many_rows_is_read_to_its_end(run, tmp_path, kind):
    data = json.dumps([PAIR] * 300).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True)}[kind]
    (tmp_path / ("a.json" + kind)).write_bytes(pack(data))
    assert prepare.prepare(run.request([str(tmp_path / ("a.json" + kind))], "chatml"))["examples"] == 300


def test_a_quote_that_is_never_closed_is_an_error_though_bad_rows_are_left_out(run):
    error = refused(run, "text,x\nfox,1\n\"dog,2\n" + "fox,3\n" * 500, "chatml", name="a.csv", bad_rows="skip")
    assert "not CSV" in error.what and error.place.endswith("a.csv:3")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_packed_files_give_the_same_examples(run, tmp_path, name, kind):
    text = {"a.jsonl": 400 * (json.dumps(PAIR) + "\n"), "a.json": json.dumps([PAIR] * 3), "a.csv": "text,x\nfox,1\n\"do\ng\",2\n",
            "a.txt": "hello\nworld"}[name]
    expected = run(text, "chatml", name=name)[0]
    packed = tmp_path / (name + kind)
    half = len(text) // 2  # in two members, as `cat a.gz b.gz` leaves them
    pack = gzip.compress if kind == ".gz" else lambda data: pyarrow.compress(data, codec="zstd", asbytes=True)
    packed.write_bytes(b"".join(pack(part) for part in (text[:half].encode(), text[half:].encode())))
    request = run.request([str(packed)], "chatml")
    prepare.prepare(request)
    assert read_tokens(request["out"]) == expected


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_a_packed_file_that_is_cut_short_is_named(run, tmp_path, kind):
    data = os.urandom(3000).hex().encode()
    line = b'{"text": "' + data + b'"}\n'
    packed = gzip.compress(line) if kind == ".gz" else pyarrow.compress(line, codec="zstd", asbytes=True)
    for bad in (packed[:-900], b"nonsense" * 20):
        (tmp_path / ("a.jsonl" + kind)).write_bytes(bad)
        error = refused(prepare.prepare, run.request([str(tmp_path / ("a.jsonl" + kind))], "chatml"))
        assert ("damaged" in error.what or "not JSON" in error.what) and "a.jsonl" + kind in error.place


def test_arrow_files_of_the_datasets_library_are_read(run, tmp_path):
    table = pyarrow.Table.from_pylist([{"messages": PLAIN_CHAT}, {"messages": PLAIN_CHAT[:2]}])
    for writer in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
        with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, writer(file, table.schema) as out:
            out.write_table(table)
        request = run.request([str(tmp_path / "a.arrow")], "chatml")
        prepare.prepare(request)
        assert read_tokens(request["out"]) == run([{"messages": PLAIN_CHAT}, {"messages": PLAIN_CHAT[:2]}], "chatml")[0]
    (tmp_path / "a.arrow").write_text("nonsense")
    assert "not a readable Arrow file" in refused(prepare.prepare, run.request([str(tmp_path / "a.arrow")], "chatml")).what


def test_each_files_examples_are_counted(run):
    files = [run.write("b.jsonl", [PAIR] * 3), run.write("a.jsonl", [{"text": "fox"}]), run.write("c.jsonl", [PAIR] * 2)]
    assert prepare.prepare(run.request(files, "chatml"))["files"] == [3, 1, 2]


# ---- what it tells while it works ------------------------------------------------------------------------------------


def test_progress_is_told_as_time_passes(run, monkeypatch, capfd):
    """A clock that is three seconds further at each look, so that there is a line for each piece of 128 rows."""
    now = iter(range(0, 3000, 3))
    monkeypatch.setattr(prepare, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    prepare.prepare(run.request([run.write("a.jsonl", [{"text": "fox"}] * 300)], "chatml"))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tokenising: ")]
    assert [re.search(r", (\d+) examples, ", line)[1] for line in lines] == ["128", "256", "300"], lines
    assert all(re.fullmatch(r"tokenising: \d+ % read, \d+ examples, 0\.0 M tokens, \d+ k tokens/s, \d+ (s|min) left", line) for line in lines), lines
    assert lines[-1].startswith("tokenising: 100 % read")


def test_the_words_of_data_format_are_those_of_the_configuration():
    names = open(os.path.join(os.path.dirname(PREPARE), "..", "config", "config_names.h")).read()
    words = re.findall(r'DataFormat::k\w+, "([\w-]+)"', names)
    assert set(words) == {"auto", *kinds.COLUMNS, judged.FORMATS["classify"]}
    for word in kinds.COLUMNS:
        with pytest.raises(InputError) as caught:
            formats.example(word, {}, "a.jsonl:1")
        assert f"every row of a {word} file needs" in caught.value.next


# ---- killed and started again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("a.jsonl", "b.jsonl"), ("a.jsonl.gz", "b.csv")])
def test_a_preparation_that_is_killed_goes_on_and_ends_with_the_same_file(run, tmp_path, names):
    rows = [{"text": f"fox {n} " + "hello world " * (n % 40)} for n in range(6000)]
    files = []
    for name in names:
        path = tmp_path / name
        if name.endswith(".csv"):
            path.write_text("text\n" + "".join(row["text"] + "\n" for row in rows))
        else:
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        files.append(str(path))
    request = run.request(files, "chatml", workers=2, save_seconds=0)
    prepare.prepare(request)
    expected = open(request["out"], "rb").read()
    os.unlink(request["out"])
    (tmp_path / "request").write_text(json.dumps(request))
    command = [sys.executable, "-I", "-B", PREPARE + "/prepare.py", str(tmp_path / "request")]
    kills, positions = 0, []
    for _ in range(3):
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            state, before = request["out"] + ".state", positions[-1] if positions else 0
            while process.poll() is None:
                try:
                    saved = json.load(open(state))["examples"]
                except (OSError, ValueError):
                    saved = 0
                if saved > before + 1500:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                    positions.append(saved)
                    break
                time.sleep(0.002)
    assert kills >= 1 and positions == sorted(positions)
    with open(request["out"], "ab") as file:  # what it had written after the last save, and more than is still to come
        file.write(b"junk" * len(expected))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tokenising resumes after" in done.stderr
    assert open(request["out"], "rb").read() == expected
    assert not any(os.path.exists(request["out"] + suffix) for suffix in BESIDE)


def test_a_file_keeps_the_format_of_its_first_row_where_it_goes_on(run):
    rows = [{"text": "fox"}] * 130 + [{"messages": PLAIN_CHAT}] * 200
    request = run.request([run.write("a.jsonl", rows)], "chatml", save_seconds=0, bad_rows="skip")
    prepare.prepare(request)
    expected = open(request["out"], "rb").read()

    class Killed(Exception):
        pass

    def save(self, state, kept=prepare_writer.save):
        kept(self, state)
        raise Killed

    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(prepare_writer, "save", save)
            prepare.prepare(request)
    prepare.prepare(request)
    assert open(request["out"], "rb").read() == expected


def test_max_rows_trains_on_the_first_rows_of_the_files_in_their_order(run, monkeypatch):
    texts = [{"text": f"fox {i}"} for i in range(300)]
    whole, _ = run(texts, "chatml")
    files = [run.write("a.jsonl", texts[:200]), run.write("b.jsonl", texts[200:290] + [{"bad": 1}] * 10)]

    def first(most, **options):
        request = run.request(files, "chatml", max_rows=most, **options)
        summary = prepare.prepare(request)
        return read_tokens(request["out"]), summary

    for most, of_files in ((1, [1, 0]), (128, [128, 0]), (200, [200, 0]), (290, [200, 90])):  # a chunk has 128 rows
        examples, summary = first(most)
        assert examples == whole[:most] and summary["files"] == of_files
        left = "; files that are not read: 1 of 2" if of_files[1] == 0 else ""
        assert summary["notes"] == [f"data.max_rows = {most}: only the first {most} rows are used{left}"]
    # Rows that are left out count, and more rows than there are change nothing.
    examples, summary = first(295, bad_rows="skip")
    assert examples == whole[:290] and len(summary["notes"]) == 2
    assert first(301, bad_rows="skip")[1]["notes"] == first(0, bad_rows="skip")[1]["notes"]

    class Killed(Exception):
        pass

    def save(self, state, kept=prepare_writer.save):
        kept(self, state)
        raise Killed

    for _ in range(2):  # what resumes counts the rows before
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(prepare_writer, "save", save)
            first(150, save_seconds=0)
    assert first(150, save_seconds=0)[0] == whole[:150]


@pytest.mark.parametrize("damaged", ["", ".marks", ".offsets", ".state"])
def test_what_is_damaged_or_of_another_request_is_made_anew(run, tmp_path, damaged):
    from token_file import TokenFileWriter

    path = str(tmp_path / "out.tokens")
    writer = TokenFileWriter(path, 1000, bytes(16))
    writer.add([3], b"\1\0\0\0\2\0\0\0\3\0\0\0", b"\1\1\1", 3)
    writer.save({"end": 7})
    assert TokenFileWriter(path, 1000, bytes(16)).went_on == {"end": 7}
    assert TokenFileWriter(path, 1000, bytes(15) + b"\1").went_on is None  # and has begun anew
    writer = TokenFileWriter(path, 1000, bytes(16))
    writer.add([3], b"\1\0\0\0\2\0\0\0\3\0\0\0", b"\1\1\1", 3)
    writer.save({"end": 7})
    data = bytearray(open(path + damaged, "rb").read())
    data[100 if damaged == "" else -1] ^= 1
    open(path + damaged, "wb").write(data)
    assert TokenFileWriter(path, 1000, bytes(16)).went_on is None


def test_labels_are_names_or_numbers():
    names = ["bad", "good"]
    assert [judged.label(value, names, "single_label", "") for value in ("good", 0, 1.0, "1", True)] == [[1], [0], [1], [1], [1]]
    assert judged.label(["good"], names, "multi_label", "") == [0, 1] and judged.label("[1, 0]", names, "multi_label", "") == [1, 0]
    assert judged.label("2.5", ["s"], "regression", "") == [2.5] and judged.label([1, 2], names, "regression", "") == [1, 2]
    for value, problem in [("fair", "single_label"), (2, "single_label"), (-1, "single_label"), (None, "single_label"), ("good", "multi_label"),
                           ([2], "multi_label"), ("x", "regression"), ([1], "regression"), (float("nan"), "regression"), ("inf", "regression"),
                           (1e39, "regression"), (-10**400, "regression"), ("\u00b2", "single_label"), ("1" * 5000, "single_label")]:
        with pytest.raises(InputError):
            judged.label(value, names, problem, "")
