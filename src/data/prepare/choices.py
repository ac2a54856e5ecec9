"""Rows of multiple choice: a context and its endings, one of which is right. Training learns the right ending; an evaluation scores
each (scored.py). The columns of four data sets are recognised, and their texts are written as the tasks of lm-evaluation-harness
0.4.13 write them: an ending follows its context after a blank. The endings of WinoGrande differ in their contexts."""

import re
from dataclasses import dataclass

from errors import InputError
from messages import decoded, read_string

# The required columns, in the order of recognition; the last one says which ending is right.
SETS = {
    "choices": ("context", "endings", "label"),
    "HellaSwag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "ARC": ("question", "choices", "answerKey"),
    "PIQA": ("goal", "sol1", "sol2", "label"),
    "WinoGrande": ("sentence", "option1", "option2", "answer"),
}
BRACKETS = re.compile(r"\[[^\]\n]*\]")  # in HellaSwag, marks of the pages that its texts are from
UNLABELLED = (None, "", -1, "-1")       # in test splits


@dataclass
class Choices:
    """Per ending: its context, its text, and the characters by which accuracy_norm divides. `right`: the index of the right one."""

    contexts: list
    endings: list
    characters: list
    right: int

    def parts(self, index):
        """(context, continuation) of an ending; blanks at the end of the context belong to the continuation."""
        context = self.contexts[index].rstrip()
        return context, self.contexts[index][len(context):] + " " + self.endings[index]


def set_of(row):
    """A key of SETS; None if the row has the columns of none."""
    return next((name for name, columns in SETS.items() if all(column in row for column in columns)), None)


def read(row, place):
    contexts, endings, right = _READERS[set_of(row)](row, place)
    if len(endings) < 2:
        raise InputError(f"there are {len(endings)} endings, and a choice needs two", place, "correct or remove this row")
    for number, ending in enumerate(endings, 1):
        if not isinstance(ending, str) or not ending.strip():
            raise InputError(f"ending {number} is " + ("empty" if isinstance(ending, str) else "not a string"), place,
                             "correct or remove this row")
    if not 0 <= right < len(endings):
        raise InputError(f"the label names ending {right + 1}, and there are {len(endings)}", place,
                         "count endings from 0 (WinoGrande's answer: from 1), or remove this row")
    # WinoGrande's endings are alike: what the task lists as choices are the contexts.
    texts = endings if len(set(contexts)) == 1 else contexts
    return Choices(contexts, endings, [len(text) for text in texts], right)


def _list(value, column, place):
    value = decoded(value)
    if not isinstance(value, (list, tuple)):
        raise InputError(f"column {column!r} is not a list", place, "write a list of strings")
    return list(value)


def _label(row, column, place):
    """The value of a column that says which ending is right."""
    value = row[column]
    value = value.strip() if isinstance(value, str) else value
    if value in UNLABELLED:
        raise InputError(f"column {column!r} has no label", place,
                         "take a split that has labels (test splits often have none), or remove this row")
    return value


def _number(row, column, place):
    value = _label(row, column, place)
    if isinstance(value, float) and value.is_integer():  # a column with missing values
        value = int(value)
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value):
        value = int(value)
    if type(value) is not int:
        raise InputError(f"column {column!r} is {str(value)[:40]!r}, not the number of an ending", place, "correct or remove this row")
    return value


def _choices(row, place):
    endings = _list(row["endings"], "endings", place)
    return [read_string(row, "context", place)] * len(endings), endings, _number(row, "label", place)


def _cleaned(text):
    return BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ") if isinstance(text, str) else text


def _hellaswag(row, place):
    topic, first, second = (read_string(row, column, place) for column in ("activity_label", "ctx_a", "ctx_b"))
    endings = [_cleaned(ending) for ending in _list(row["endings"], "endings", place)]
    return [_cleaned(f"{topic}: {first} {second.capitalize()}")] * len(endings), endings, _number(row, "label", place)


def _question(text):
    return f"Question: {text}\nAnswer:"


def _arc(row, place):
    choices = decoded(row["choices"])
    if not isinstance(choices, dict) or not {"text", "label"} <= set(choices):
        raise InputError("column 'choices' is not {text: [...], label: [...]}", place, "correct or remove this row")
    endings, names = (_list(choices[key], f"choices.{key}", place) for key in ("text", "label"))
    key = str(_label(row, "answerKey", place))
    names = [str(name) for name in names]
    if len(names) != len(endings) or key not in names:
        raise InputError(f"the answer {key[:40]!r} is not one of the labels {', '.join(names)[:60]} of {len(endings)} endings", place,
                         "correct or remove this row")
    return [_question(read_string(row, "question", place))] * len(endings), endings, names.index(key)


def _piqa(row, place):
    return [_question(read_string(row, "goal", place))] * 2, [row["sol1"], row["sol2"]], _number(row, "label", place)


def _winogrande(row, place):
    before, blank, after = read_string(row, "sentence", place).partition("_")
    if not blank:
        raise InputError("column 'sentence' has no _ where an option belongs", place, "correct or remove this row")
    options = [read_string(row, column, place) for column in ("option1", "option2")]
    return [before + option for option in options], [after.strip()] * 2, _number(row, "answer", place) - 1


_READERS = {"choices": _choices, "HellaSwag": _hellaswag, "ARC": _arc, "PIQA": _piqa, "WinoGrande": _winogrande}
