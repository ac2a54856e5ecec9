"""Tokenises examples that are scored as a whole (train.objective = "classify" or "reward").

classify: a row's `text` as the tokenizer encodes it, and its `label`: a name or number of one of the labels; for several labels a list of
names or numbers, or of 0 and 1 for each label; for regression a number, or a list of one for each label.
reward: `chosen` and `rejected`, two strings that follow an optional `prompt`, or two conversations. An example is both texts, one after
the other; each ends with the end token. The mask is 1, but 0 where the second text begins."""

import array
from dataclasses import replace

import formats
import kinds
from errors import InputError
from messages import decoded, read_messages, read_string, read_tools, with_system
from sources import parsed
from tokenise import Chunk, Counts, check_unicode

FORMATS = {"classify": "classify", "reward": "reward"}
COLUMNS = {"classify": ("text", "label"), "reward": ("chosen", "rejected")}
MORE_COLUMNS = {"classify": (), "reward": ("prompt", "system", "tools")}
LARGEST = 3.4e38  # the loss reads a number of 32 bits
MOST_DIGITS = 9   # of a label's number


def _check_columns(row, name, place):
    for column in COLUMNS[name]:
        if row.get(column) in (None, ""):
            raise InputError(f"column {column!r} is missing or empty; found {kinds.found(row)}", place,
                             f'a row of train.objective = "{name}" needs ' + " and ".join(COLUMNS[name])
                             + "; data.columns renames columns")


# ---- labels ---------------------------------------------------------------------------------------------------------


def _number(value, place):
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:  # which NaN is not
        raise InputError(f"the label {str(value)[:40]!r} is not a number up to {LARGEST:g}", place, "correct or remove this row")
    return float(value)


def _index(value, labels, place):
    """Of a label's name, or of its number."""
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float) and value.is_integer():  # a column with missing values
        value = int(value)
    if isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS:
        value = int(value)
    if type(value) is not int or not 0 <= value < len(labels):
        named = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
        raise InputError(f"the label {str(value)[:40]!r} is none of the {len(labels)} labels: {named}", place,
                         "correct train.labels, or remove this row (labels' numbers count from 0)")
    return value


def label(value, labels, problem, place):
    """The numbers that the loss reads: the class, or one for each label."""
    value = decoded(value) if problem != "single_label" else value
    if problem == "single_label":
        return [_index(value, labels, place)]
    several = isinstance(value, (list, tuple))
    if problem == "regression":
        numbers = [_number(one, place) for one in (value if several else [value])]
        if len(numbers) != len(labels):
            raise InputError(f"the label has {len(numbers)} numbers, and the model {len(labels)} labels", place, "correct this row")
        return numbers
    if not several:
        raise InputError(f"the label {str(value)[:40]!r} is not a list", place, "write a list of labels, or of 0 and 1 for each")
    if len(value) == len(labels) and not any(isinstance(one, str) for one in value) and all(one in (0, 1) for one in value):
        return [float(one) for one in value]
    marks = [0.0] * len(labels)
    for one in value:
        marks[_index(one, labels, place)] = 1.0
    return marks


# ---- texts ----------------------------------------------------------------------------------------------------------


def _conversation(row, column, place):
    prompt, answer = decoded(row.get("prompt")), decoded(row[column])
    whole = read_messages(answer, column, place)
    if isinstance(prompt, list) and prompt:
        whole = read_messages(prompt, "prompt", place) + whole
    return formats.Chat(with_system(whole, row, place), read_tools(row, place), 0)


def _answers(row, place):
    """The chosen example and the rejected one."""
    lists = [isinstance(decoded(row[column]), list) for column in COLUMNS["reward"]]
    if all(lists):
        return [_conversation(row, column, place) for column in COLUMNS["reward"]]
    if any(lists) or not all(isinstance(row[column], str) for column in COLUMNS["reward"]):
        raise InputError("'chosen' and 'rejected' are neither two strings nor two lists of messages", place, "correct or remove this row")
    prompt = read_string(row, "prompt", place)
    return [formats.Text(prompt + row[column]) for column in COLUMNS["reward"]]


def _texts(name, row, model, place):
    if name == "classify":
        examples = [formats.Text(read_string(row, "text", place))]
    else:
        examples = _answers(row, place)
    rendered = [replace(model.render(example, place), spans=None) for example in examples]
    for one in rendered:
        if not one.text.isascii():
            check_unicode(one.text, place)
    return rendered


def _ids(model, name, rendered, encoding):
    if name == "reward":
        return model._finish(rendered, encoding)[0]
    return model.one_bos(encoding.ids)


def _read(model, name, rows, counts):
    """(place, texts, label) of the rows."""
    options = model.options
    for number, row in rows.rows:
        place = rows.place(number)
        try:
            row = kinds.renamed(parsed(row, place), options.columns, place)
            _check_columns(row, name, place)
            numbers = label(row["label"], options.labels, options.problem, place) if name == "classify" else []
            texts = _texts(name, row, model, place)
            counts.see_unread(kinds.not_of(row, {*COLUMNS[name], *MORE_COLUMNS[name]}))
            yield place, texts, numbers
        except InputError as error:
            model.leave_out(error, place, counts)


def chunk(model, name, rows, want_sample):
    """As Model.chunk. Chunk.labels: the labels' numbers of all examples."""
    counts = Counts(rows=len(rows.rows))
    out = Chunk([], b"", b"", [], None, counts)
    read = list(_read(model, name, rows, counts))
    encoded = iter(model.encode([text for _, texts, _ in read for text in texts]))
    all_ids, all_marks = array.array("i"), bytearray()
    for place, texts, numbers in read:
        parts = [(text, next(encoded)) for text in texts]
        try:
            made = [_ids(model, name, text, encoding) for text, encoding in parts]
            for ids in made:
                if not ids:
                    raise InputError("the tokenizer makes no token of the text", place, "correct or remove this row")
                model.check_ids(ids, None, place)
        except InputError as error:
            model.leave_out(error, place, counts)
            continue
        ids = [token for part in made for token in part]
        marks = bytearray(b"\1" * len(ids))
        if len(made) > 1:
            marks[len(made[0])] = 0
        if want_sample and out.sample is None:
            out.sample = model.sample(ids, marks)
        out.lengths.append(len(ids))
        out.texts.append(False)
        out.labels += numbers
        all_ids.extend(ids)
        all_marks += marks
    out.tokens, out.marks = all_ids.tobytes(), bytes(all_marks)
    counts.trained = all_marks.count(1)
    return out
