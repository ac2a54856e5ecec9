"""Tokenises rows of choices for an evaluation: an example for each ending, whose targets are the ending's tokens. As
lm-evaluation-harness 0.4.13 does it: context and ending are encoded as one text, and the ending begins where the tokens of the context
alone end. Nothing is appended."""

import array

import choices
import kinds
from errors import InputError, LimitError
from sources import parsed
from tokenise import Chunk, Counts, check_unicode

MOST_ENDINGS = 1 << 20  # of a token file: its summary lists them


def _encoded(model, texts, special):
    """Ids of each text."""
    return [model.one_bos(encoding.ids) for encoding in model.tokenizer.encode_batch_fast(texts, add_special_tokens=special)]


def _split(model, context, whole, alone, place):
    """(ids of the context, ids of the ending) from the ids of the `whole` and of the context `alone`."""
    if context:
        return alone, whole[len(alone):]  # also where the two texts share fewer tokens than that
    prefix = model.eos if model.bos is None else model.bos
    if prefix is None:
        raise InputError("the context is empty, and the tokenizer has no begin token in its place", place, "remove this row")
    return [prefix], whole[1:] if whole[:1] == [prefix] else whole


def _ids(model, found):
    """Per row the (context, ending) of each ending."""
    parts = [(place, *row.parts(index)) for place, row in found for index in range(len(row.endings))]
    ids = [None] * len(parts)
    for special in (True, False):  # an ending without a context has the prefix instead
        group = [i for i, (_, context, _) in enumerate(parts) if bool(context) == special]
        wholes = _encoded(model, [parts[i][1] + parts[i][2] for i in group], special)
        alone = _encoded(model, [parts[i][1] for i in group], special)
        for i, whole, context in zip(group, wholes, alone):
            ids[i] = whole, context
    parts = iter(zip(parts, ids))
    for place, row in found:
        yield place, row, [next(parts) for _ in row.endings]


def _read(model, name, rows, counts):
    for number, row in rows.rows:
        place = rows.place(number)
        try:
            row = kinds.renamed(parsed(row, place), model.options.columns, place)
            kinds.check_row(row, name, model.options.detected, place, model.options.columns)
            if name != "choices":
                raise InputError("an evaluation set has rows of choices and others", place,
                                 "name them as sets of their own: data.eval = {choices = [...], others = [...]}")
            kinds.check_columns(row, name, place)
            read = choices.read(row, place)
            for text in (*read.contexts, *read.endings):
                check_unicode(text, place)
            counts.see(row, name)
            yield place, read
        except InputError as error:
            model.leave_out(error, place, counts)


def chunk(model, name, rows, want_sample):
    """As Model.chunk. Chunk.groups: per row the index of its right ending, then the characters of each."""
    counts = Counts(rows=len(rows.rows))
    out = Chunk([], b"", b"", [], None, counts)
    all_ids, all_marks = array.array("i"), bytearray()
    for place, row, endings in _ids(model, list(_read(model, name, rows, counts))):
        try:
            made = []
            for number, ((_, context, _), (whole, alone)) in enumerate(endings, 1):
                before, after = _split(model, context, whole, alone, place)
                if not before or not after:
                    raise InputError(f"ending {number} has no token of its own", place, "correct or remove this row")
                model.check_ids(before + after, None, place)
                made.append((before + after, bytes(len(before)) + b"\1" * len(after)))
        except InputError as error:
            model.leave_out(error, place, counts)
            continue
        for ids, marks in made:
            if want_sample and out.sample is None:
                out.sample = model.sample(ids, marks)
            out.lengths.append(len(ids))
            out.texts.append(False)
            all_ids.extend(ids)
            all_marks += marks
        out.groups.append([row.right, *row.characters])
    out.tokens, out.marks = all_ids.tobytes(), bytes(all_marks)
    counts.trained = all_marks.count(1)
    return out


def check_size(endings, place):
    if endings > MOST_ENDINGS:
        raise LimitError(f"an evaluation set has more than {MOST_ENDINGS} endings", place,
                         "divide it into several sets of data.eval")
