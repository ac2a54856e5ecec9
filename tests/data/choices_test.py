"""Rows of choices: the texts of four data sets as the tasks of lm-evaluation-harness 0.4.13 write them (the expected strings are made
by hand from hellaswag/utils.py, arc/arc_easy.yaml, piqa/piqa.yaml and winogrande/preprocess_winogrande.py), the tokens against
transformers as that program splits them, and the messages for bad rows."""

import json
import os

import pytest
from prepare_test import model_dir, oracle, read_tokens, refused, run  # noqa: F401

import choices  # noqa: I001, of PREPARE
import kinds
import prepare
import scored

GENERIC = {"context": "hello", "endings": ["world", "the lazy dog", "fox"], "label": 2}
HELLASWAG = {"ind": 4, "activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.", "ctx_b": "he", "ctx": "…", "split": "val",
             "endings": ["is using wrap to wrap a pair of skis.", "starts pulling up roofing [step] on a  roof."], "label": "1"}
WIKIHOW = {"activity_label": "Health", "ctx_a": "How to sleep [title] Go to bed. [step] Be early.", "ctx_b": "",
           "endings": ["Do it [title] Now.", "[substeps] Never."], "label": 0}
ARC = {"id": "Mercury_7", "question": "What is it?", "choices": {"text": ["a fox", "a dog", "the world"], "label": ["A", "B", "C"]}, "answerKey": "C"}
ARC_DIGITS = {**ARC, "choices": {"text": ["a fox", "a dog"], "label": ["1", "2"]}, "answerKey": "1"}
PIQA = {"goal": "When boiling butter, when it's ready, you can", "sol1": "Pour it onto a plate", "sol2": "Pour it into a jar", "label": 1}
WINOGRANDE = {"sentence": "Sarah was a better surgeon than Maria so _ always got the easier cases.", "option1": "Sarah", "option2": "Maria",
              "answer": "2"}
QUESTION = "Question: What is it?\nAnswer:"
BUTTER = "Question: When boiling butter, when it's ready, you can\nAnswer:"
SURGEON = "Sarah was a better surgeon than Maria so "
EASIER = "always got the easier cases."

# Per row: (context, ending) of each choice as the program asks for their log-likelihood, the lengths by which acc_norm divides, and the gold index.
TEXTS = {
    "generic": (GENERIC, [("hello", " world"), ("hello", " the lazy dog"), ("hello", " fox")], [5, 12, 3], 2),
    "generic, a number as text": ({**GENERIC, "label": " 1 "}, [("hello", " world"), ("hello", " the lazy dog"), ("hello", " fox")], [5, 12, 3], 1),
    "generic, a blank at the end": ({**GENERIC, "context": "hello \n", "endings": ["a", "b"], "label": 0}, [("hello", " \n a"), ("hello", " \n b")],
                                    [1, 1], 0),
    "generic, lists as JSON text": ({**GENERIC, "endings": json.dumps(["ü", "日本"]), "label": 1.0}, [("hello", " ü"), ("hello", " 日本")], [1, 2], 1),
    "HellaSwag": (HELLASWAG, [("Roof shingle removal: A man is sitting on a roof. He", " is using wrap to wrap a pair of skis."),
                              ("Roof shingle removal: A man is sitting on a roof. He", " starts pulling up roofing on a roof.")], [37, 36], 1),
    "HellaSwag of WikiHow": (WIKIHOW, [("Health: How to sleep. Go to bed. Be early.", " Do it. Now."),
                                       ("Health: How to sleep. Go to bed. Be early.", "  Never.")], [11, 7], 0),
    "ARC": (ARC, [(QUESTION, " a fox"), (QUESTION, " a dog"), (QUESTION, " the world")], [5, 5, 9], 2),
    "ARC of digits": (ARC_DIGITS, [(QUESTION, " a fox"), (QUESTION, " a dog")], [5, 5], 0),
    "PIQA": (PIQA, [(BUTTER, " Pour it onto a plate"), (BUTTER, " Pour it into a jar")], [20, 18], 1),
    "WinoGrande": (WINOGRANDE, [(SURGEON + "Sarah", " " + EASIER), (SURGEON + "Maria", " " + EASIER)], [46, 46], 1),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_those_of_the_tasks(name):
    row, texts, characters, right = TEXTS[name]
    read = choices.read(row, "a.jsonl:1")
    assert [read.parts(index) for index in range(len(read.endings))] == texts
    assert (read.characters, read.right) == (characters, right)
    assert kinds.detect(row, "a.jsonl:1") == "choices"


def split_by_transformers(tokenizer, context, ending):
    """TemplateLM._encode_pair, and loglikelihood for an empty context."""
    if context:
        whole, alone = tokenizer.encode(context + ending), tokenizer.encode(context)
        return alone, whole[len(alone):]
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = tokenizer.encode(ending, add_special_tokens=False)
    return ([prefix], ids) if ids[0] != prefix else (ids[:1], ids[1:])


@pytest.mark.parametrize("model", ["chatml", "llama3", "qwen", "mistral"])
def test_an_evaluation_has_an_example_for_each_ending(run, oracle, model):
    empty = {"context": "", "endings": ["hello world", "fox"], "label": 0}
    begun = {"context": "<|begin_of_text|>hello", "endings": ["world", "fox"], "label": 0}
    rows = [row for row, *_ in TEXTS.values()] + [empty, begun]
    examples, summary = run(rows, model, format="choices", score=True)
    texts = [*(pair for _, pairs, _, _ in TEXTS.values() for pair in pairs), ("", " hello world"), ("", " fox")]
    if model == "llama3":  # a text that begins with the begin token gets no second one
        tokenizer = oracle(model)
        assert [ids.count(tokenizer.bos_token_id) for ids, _ in examples[-2:]] == [1, 1]
    for (ids, marks), (context, ending) in zip(examples, texts):
        before, after = split_by_transformers(oracle(model), context, ending)
        assert (ids, marks) == (before + after, [0] * len(before) + [1] * len(after)), (context, ending)
    assert summary["groups"] == [*([right, *lengths] for _, _, lengths, right in TEXTS.values()), [0, 11, 3], [0, 5, 3]]
    assert summary["examples"] == len(examples) == len(texts) + 2 and summary["choices"] == 0 and summary["text"] == []


def test_training_learns_the_right_ending_and_its_end(run):
    for row, texts, _, right in TEXTS.values():
        (trained,), = run.trained([row], "chatml")
        assert trained == texts[right][1] + "<|im_end|>"
    summary = run([GENERIC, ARC], "chatml", name="both.jsonl")[1]
    assert summary["choices"] == 2 and summary["groups"] == [] and not any("not read" in note and "endings" in note for note in summary["notes"])


def test_columns_of_other_names_are_renamed(run):
    row = {"ctx": "hello", "options": ["world", "fox"], "gold": 1}
    (trained,), = run.trained([row], "chatml", columns={"context": "ctx", "endings": "options", "label": "gold"})
    assert trained == " fox<|im_end|>"


BAD = {
    "an index too large": ({**GENERIC, "label": 3}, "names ending 4, and there are 3"),
    "a label below zero": ({**GENERIC, "label": -2}, "names ending -1"),
    "an answer of 0 in WinoGrande": ({**WINOGRANDE, "answer": "0"}, "names ending 0, and there are 2"),
    "a test split's number": ({**PIQA, "label": -1}, "'label' has no label"),
    "a test split's text": ({**HELLASWAG, "label": ""}, "'label' has no label"),
    "WinoGrande's test split": ({**WINOGRANDE, "answer": ""}, "'answer' has no label"),
    "a null label": ({**GENERIC, "label": None}, "'label' is missing"),
    "a label of letters": ({**GENERIC, "label": "C"}, "'C', not the number of an ending"),
    "a label of true": ({**GENERIC, "label": True}, "'True', not the number of an ending"),
    "a half": ({**GENERIC, "label": 0.5}, "'0.5', not the number of an ending"),
    "an answer that is no choice": ({**ARC, "answerKey": "E"}, "'E' is not one of the labels A, B, C of 3 endings"),
    "labels fewer than texts": ({**ARC, "choices": {"text": ["a", "b"], "label": ["A"]}, "answerKey": "A"}, "of 2 endings"),
    "choices that are a list": ({**ARC, "choices": ["a", "b"]}, "is not {text: [...], label: [...]}"),
    "no endings": ({**GENERIC, "endings": [], "label": 0}, "there are 0 endings"),
    "one ending": ({**GENERIC, "endings": ["fox"], "label": 0}, "there are 1 endings"),
    "an empty ending": ({**GENERIC, "endings": ["fox", " "]}, "ending 2 is empty"),
    "an ending of marks alone": ({**WIKIHOW, "endings": ["[title]", "fox"]}, "ending 1 is empty"),
    "an ending that is a number": ({**PIQA, "sol1": 5}, "ending 1 is not a string"),
    "endings that are a text": ({**GENERIC, "endings": "fox"}, "'endings' is not a list"),
    "a context that is a list": ({**GENERIC, "context": ["hello"]}, "'context' is not a string"),
    "no place for the option": ({**WINOGRANDE, "sentence": "Sarah"}, "has no _"),
    "nothing after the option": ({**WINOGRANDE, "sentence": "Sarah _ "}, "ending 1 is empty"),
    "half of a character": ({**GENERIC, "endings": ["a\ud800", "b"], "label": 0}, "half of a surrogate pair"),
}


@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named_and_left_out_on_request(run, name, score):
    row, message = BAD[name]
    error = refused(run, [GENERIC, row], "chatml", format="choices", score=score)
    assert message in error.what and error.place.endswith("data.jsonl:2") and error.area == "DATA-24" and error.next
    examples, summary = run([row, GENERIC, row], "chatml", format="choices", score=score, bad_rows="skip")
    assert len(examples) == (3 if score else 1) and summary["groups"] == ([[2, 5, 12, 3]] if score else [])


def test_a_file_of_other_columns_is_refused(run):
    error = refused(run, [{"context": "hello", "label": 1}], "chatml", format="choices")
    assert "'endings' is missing" in error.what and "HellaSwag, ARC, PIQA, WinoGrande" in error.next
    error = refused(run, [GENERIC, {"text": "fox"}], "chatml", score=True)
    assert "'context' is missing" in error.what
    error = refused(run, [{"text": "fox"}], "chatml", score=True)
    assert "rows of choices and others" in error.what and "data.eval = {" in error.next
    error = refused(run, [{**GENERIC, "text": "fox"}], "chatml")
    assert "read in 2 ways: context + endings + label beside text" in error.what
    # The CLI reads the context's own row where a data set's columns are there as well.
    assert choices.read({**HELLASWAG, "context": "hello"}, "a").contexts == ["hello"] * 2


def test_a_preparation_of_choices_that_is_killed_goes_on(run, monkeypatch):
    files = [run.write(f"{name}.jsonl", [{**GENERIC, "context": f"hello {n}", "label": n % 3} for n in range(700)]) for name in "ab"]
    request = run.request(files, "chatml", format="choices", score=True, save_seconds=0)
    whole, summary = prepare.prepare(request), None
    expected = read_tokens(request["out"])
    os.unlink(request["out"])
    results, left = prepare._results, [3]

    def some(*arguments):
        for made in results(*arguments):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            yield made

    monkeypatch.setattr(prepare, "_results", some)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(request)
    monkeypatch.setattr(prepare, "_results", results)
    summary = prepare.prepare(request)
    assert summary["groups"] == whole["groups"] and len(whole["groups"]) == 1400 and read_tokens(request["out"]) == expected


def test_a_set_has_at_most_so_many_endings(run, monkeypatch):
    monkeypatch.setattr(scored, "MOST_ENDINGS", 5)
    error = refused(run, [GENERIC] * 2, "chatml", score=True, bad_rows="skip")
    assert "more than 5 endings" in error.what
    assert len(run([GENERIC], "chatml", score=True)[0]) == 3
