"""Detects the format from columns. If the columns are ambiguous, the user must choose; columns for examples that must not be
learned, or without text, are refused; unread columns are counted."""

import choices
from errors import InputError
from messages import MEDIA, TEXT_ALONE, WITHOUT, decoded

# The required columns of a format, in the order of detection; the last column is trained.
COLUMNS = {
    "tokens": ("input_ids",),
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "choices": choices.SETS["choices"],  # or those of another of SETS: columns_of
    "text": ("text",),
}
# The optional columns of a format.
MORE_COLUMNS = {"tokens": ("labels", "attention_mask"), "chat": ("tools", "system"), "sharegpt": ("tools", "system"),
                "prompt-completion": ("tools", "system"), "alpaca": ("input", "system", "history"), "choices": ("ctx",), "text": ()}

TRUTHS = {True: True, False: False, -1: False, "true": True, "false": False, "1": True, "0": False, "-1": False}
LISTED = 20       # columns, by name
NAME_LENGTH = 60  # of a name


def found(row):
    """The columns of a row, for messages."""
    names = [str(column)[:NAME_LENGTH] for column in row]
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "") or "none"


def renamed(row, columns, place):
    """`columns`: maps our names to the files' names."""
    for ours, theirs in columns.items():
        if theirs not in row:
            raise InputError(f"data.columns takes {ours!r} from column {theirs!r}, which is not here; found {found(row)}",
                             place, "correct data.columns, or this row")
    taken = set(columns.values())
    kept = {key: value for key, value in row.items() if key not in taken}
    return {**kept, **{ours: row[theirs] for ours, theirs in columns.items()}}


def columns_of(row, name):
    """The required columns of a row."""
    return choices.SETS[choices.set_of(row) or "choices"] if name == "choices" else COLUMNS[name]


def check_columns(row, name, place):
    """Whether each required column has a value."""
    needed = columns_of(row, name)
    for column in needed:
        if row.get(column) is None:
            others = ", or the columns of " + ", ".join(list(choices.SETS)[1:]) if name == "choices" else ""
            raise InputError(f"column {column!r} is missing; found {found(row)}", place,
                             f"every row of a {name} file needs " + " and ".join(needed) + others)


def _filled(row, name):
    needed = columns_of(row, name)
    return all(row.get(column) is not None for column in needed) and row[needed[-1]] not in ("", [])


def _ask(names, row, place):
    columns = " beside ".join(" + ".join(columns_of(row, name)) for name in names)
    raise InputError(f"this row can be read in {len(names)} ways: {columns}", place,
                     "say which: data.format = " + " or ".join(f'"{name}"' for name in names))


def detect(row, place, columns=()):
    """`columns`: those in data.columns, which the format must have."""
    _refuse_preferences(row, place, columns)
    names = [name for name, needed in COLUMNS.items() if set(columns) <= {*needed, *MORE_COLUMNS[name]}]
    filled = [name for name in names if _filled(row, name)]
    if len(filled) > 1:
        _ask(filled, row, place)
    for name in filled + names:
        if all(column in row for column in columns_of(row, name)):
            return name
    known = "; ".join(" + ".join(columns) for columns in {**COLUMNS, **choices.SETS}.values())
    raise InputError(f"unknown columns: found {found(row)}", place,
                     f"rename them, in the files or by data.columns, to one of these sets: {known}")


def check_row(row, name, detected, place, columns=()):
    """Checked for every row, since a file's first one decides for all. `detected`: the format was not configured."""
    for column in MEDIA:
        if row.get(column):
            raise InputError(f"column {column!r} is not empty, and {TEXT_ALONE}", place, WITHOUT)
    _refuse_labels(row, name, place)
    if detected:
        _refuse_preferences(row, place, columns)
        readings = [other for other, needed in COLUMNS.items()
                    if set(columns) <= {*needed, *MORE_COLUMNS[other]} and _filled(row, other)]
        if name in readings and len(readings) > 1:
            _ask(readings, row, place)


def unread(row, name):
    """Non-empty columns that the format does not use."""
    return not_of(row, {*columns_of(row, name), *MORE_COLUMNS[name]})


def not_of(row, known):
    """Non-empty columns that are not known."""
    return [str(column)[:NAME_LENGTH] for column, value in row.items() if column not in known and value not in (None, "", [])]


PREFERENCES = "this is preference data ({}), and lmlaunch trains on examples of what is right"


def _refuse_preferences(row, place, columns):
    """Refuses DPO data: it looks like examples, but half of its answers are rejected ones."""
    if "chosen" in row and "rejected" in row and not {"messages", "text"}.intersection(columns):
        chosen = decoded(row["chosen"])
        # Answers that are lists of messages include the question, unless the prompt is such a list itself.
        whole = isinstance(chosen, list) and not isinstance(decoded(row.get("prompt")), list)
        ours = "messages" if whole else "completion" if "prompt" in row else "text"
        raise InputError(PREFERENCES.format("columns chosen and rejected"), place,
                         f'to train a reward model on them, set train.objective = "reward"; to train on the chosen answers, set '
                         f'data.columns = {{{ours} = "chosen"}}')


def _refuse_labels(row, name, place):
    """Refuses KTO data, whose rows have a label for good or bad."""
    label = row.get("label")
    label = label.strip().lower() if isinstance(label, str) else label
    truth = isinstance(label, (bool, int, float, str)) and label in TRUTHS
    if row.get("kto_tag") not in (None, ""):
        column = "kto_tag"
    elif truth and name in ("chat", "sharegpt", "prompt-completion", "alpaca"):
        column = "label"
    else:
        return
    raise InputError(PREFERENCES.format(f"each answer with a {column}, true or false"), place,
                     f"keep the rows whose {column} is true, and leave the column out")
