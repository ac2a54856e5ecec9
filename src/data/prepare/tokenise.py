"""Converts examples to tokens and training masks by the model's own tokenizer. Data that is already tokenised needs neither a
tokenizer nor its library."""

import array
import json
import os
from dataclasses import dataclass, field, replace

import formats
import kinds
import mask
import turns
from decoding import Decoder
from errors import InputError, LimitError
from messages import is_answer
from sources import parsed
from template import load_template, read_template

SAMPLE_TOKENS = 1000
MOST_REASONS = 20  # reasons for skipped rows; others are counted together
MOST_COLUMNS = 20  # unread columns by name; likewise
MOST_TOKENIZER = 128 << 20  # bytes of a tokenizer.json; the largest vocabularies take 40 MiB
MOST_JSON = 32 << 20        # of other files beside it

# The text of Stanford Alpaca, for models without a chat template.
PREAMBLE = ("Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n")
PREAMBLE_INPUT = ("Below is an instruction that describes a task, paired with an input that provides further context. "
                  "Write a response that appropriately completes the request.\n\n")


# The format of _segments as a chat template, saved with a model that was trained on it. The tokenizer adds BOS itself.
TEMPLATE = ("{% if messages[0].role != 'system' %}{{ PREAMBLE }}{% endif %}{% for message in messages %}"
            "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
            "{% elif message.role == 'user' %}{{ '### Instruction:\\n' + message.content + '\\n\\n### Response:' }}"
            "{% else %}{{ message.content + eos_token }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endif %}{% endfor %}")


@dataclass
class Options:
    """The configuration's options on rows, besides loss_on."""

    columns: dict = field(default_factory=dict)
    chat_template: str = ""
    bad_rows: str = "stop"
    answers: str = "all"
    reasoning: str = "keep"
    render: str = "plain"   # "chat": plain prompts and completions become conversations
    detected: bool = False  # the format was not configured
    objective: str = ""     # "classify" or "reward": examples that are scored as a whole (judged.py)
    labels: list = field(default_factory=list)  # of classify: their names
    problem: str = ""       # of classify: "single_label", "multi_label" or "regression"
    score: bool = False     # rows of choices: every ending, for an evaluation (scored.py)
    date: str = ""          # "2026-01-31", for chat templates that use it; "": today's


@dataclass
class Rendered:
    """Rendered text for the tokenizer. `plain` text gets the tokenizer's BOS and one EOS; a template writes its own. `spans`: the
    trained characters; None means all of it. `closing`: the mark of the token that begins the next turn, where the text ends with an
    answer and nothing else ends it; None: no such token is added."""

    text: str
    spans: list | None
    plain: bool
    place: str
    closing: int | None = None


@dataclass
class Chunk:
    """Several examples, concatenated."""

    lengths: list
    tokens: bytes
    marks: bytes
    texts: list        # per example: whether it is plain text
    sample: list | None
    counts: "Counts"
    groups: list = field(default_factory=list)  # of scored rows (scored.py)
    labels: list = field(default_factory=list)  # of judged ones (judged.py)


@dataclass
class Counts:
    """Counts of a chunk, then of all; saved beside unfinished token files."""

    trained: int = 0
    dropped: int = 0       # examples without a trained token
    answered: int = 0      # examples with an answer that is trained
    endless: int = 0       # of these, those whose last answer has no end token
    without_bos: int = 0   # of a template, though the tokenizer would add BOS
    untemplated: int = 0   # conversations of a model without a template
    empty: int = 0         # examples with an empty answer
    first_empty: str = ""  # the place of the first
    shared: int = 0        # examples in which one token covers the end of a prompt and the beginning of its answer
    first_shared: str = ""
    dated: str = ""        # the place of a chat template that used the date
    unread: dict = field(default_factory=dict)   # an unread column -> number of rows with it
    rows: int = 0
    pairs: int = 0         # rows of a plain prompt and completion
    choices: int = 0       # rows of choices, of which the right ending is trained
    skipped: dict = field(default_factory=dict)  # error -> [number of rows, the first one's place]

    def add(self, other):
        for name in ("trained", "dropped", "answered", "endless", "without_bos", "untemplated", "empty", "shared", "rows",
                     "pairs", "choices"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("first_empty", "first_shared", "dated"):
            setattr(self, name, getattr(self, name) or getattr(other, name))
        for column, count in other.unread.items():
            self._see_unread(column, count)
        for what, (count, place) in other.skipped.items():
            known = self.skipped.setdefault(what if len(self.skipped) < MOST_REASONS else "other reasons", [0, place])
            known[0] += count

    def _see_unread(self, column, count=1):
        known = column if column in self.unread or len(self.unread) < MOST_COLUMNS else "other columns"
        self.unread[known] = self.unread.get(known, 0) + count

    def see(self, row, name):
        self.see_unread(kinds.unread(row, name))

    def see_unread(self, columns):
        for column in columns:
            self._see_unread(column)

    def skip(self, error, place):
        self.add(Counts(skipped={error.what[:120]: [1, error.place or place]}))


class Model:
    """The tokenizer and template of a model directory; `loss_on` is "completion" or "all", ids must be below `most_ids` (0:
    unchecked). `own_template`: the text of one that replaces the model's."""

    def __init__(self, model_dir, loss_on, most_ids=0, options=None, own_template=""):
        from tokenizers import Tokenizer

        self.dir, self.loss_on, self.most_ids, self.options = model_dir, loss_on, most_ids, options or Options()
        path = os.path.join(model_dir, "tokenizer.json")
        if not os.path.isfile(path):
            raise InputError("the model has no tokenizer.json", model_dir,
                             "save its tokenizer in that form beside the weights", "DATA-23")
        if os.path.getsize(path) > MOST_TOKENIZER:
            raise LimitError(f"the tokenizer has more than {MOST_TOKENIZER >> 20} MiB", path, "download it again", "DATA-23")
        try:
            self.tokenizer = Tokenizer.from_file(path)
        except Exception as error:
            raise InputError(f"the tokenizer cannot be parsed: {error}", path, "download it again", "DATA-23") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        config = self._json("tokenizer_config.json")
        special = _special_tokens(config)
        if "added_tokens_decoder" not in config:
            special.update(_special_tokens(self._json("special_tokens_map.json")))
        path = self.options.chat_template
        self.own_template = read_template(path) if path else own_template
        self.template = load_template(model_dir, config, special, (self.own_template, path) if self.own_template else None,
                                      self.options.date)
        self.eos_text = special.get("eos_token", "")
        self.bos = self._id(special.get("bos_token"))
        self.eos = self._id(special.get("eos_token"))
        self.end_ids = {self._id(token) for token in mask.END_TOKENS} | {self.eos}
        stops = self._json("generation_config.json").get("eos_token_id")
        self.end_ids.update(stops if isinstance(stops, list) else [stops])
        self.end_ids.discard(None)
        self.next_turn = turns.next_turn(self.template, self.tokenizer, self.end_ids)
        if self.next_turn is not None:
            self.end_ids |= {self.next_turn, self._id("<|observation|>")} - {None}
        # Where tokenizer.json writes it before text; transformers asks no other file.
        self.writes_bos = self.bos is not None and self.bos in self.tokenizer.encode("").ids

    def _json(self, name):
        path = os.path.join(self.dir, name)
        if not os.path.isfile(path):
            return {}
        if os.path.getsize(path) > MOST_JSON:
            raise LimitError(f"{name} has more than {MOST_JSON >> 20} MiB", path, "download it again", "DATA-23")
        try:
            with open(path, encoding="utf-8") as file:
                value = json.load(file)
        except (ValueError, RecursionError) as error:
            raise InputError(f"not JSON: {error}", path, "download it again", "DATA-23") from None
        return value if isinstance(value, dict) else {}

    def _id(self, token):
        return None if token is None else self.tokenizer.token_to_id(token)

    def vocab(self):
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def date(self):
        """The date for a template that uses it."""
        return self.template.date if self.template is not None else ""

    def template_of_result(self, counts):
        """The chat template for the trained model's directory; "" if the model's own is right."""
        if self.own_template or not counts.untemplated:
            return self.own_template
        bos = "{{ bos_token }}" if self.writes_bos else ""
        eos = TEMPLATE if self.eos_text else TEMPLATE.replace(" + eos_token", "")
        return bos + eos.replace("PREAMBLE", json.dumps(PREAMBLE))

    def render(self, example, place):
        """Renders any example but Ids."""
        if isinstance(example, formats.Text):
            return Rendered(example.text, None, True, place)
        if isinstance(example, formats.Pair):
            return self._joined([(example.prompt, False), (example.completion, True)], place)
        if self.template is None:
            example = formats.without_parts(example)
            rendered = self._joined(self._segments(example, place), place)
            formats.check_tools(example, rendered.text, place)
            return rendered
        try:
            example = replace(example, messages=self.template.settled(example.messages, example.tools))
            if self.loss_on == "all":
                text, spans = self.template.render(example.messages, example.tools), None
            else:
                text, spans = mask.chat_spans(self.template, example, place)
        except InputError as error:
            error.place = error.place or place
            raise
        except Exception as error:  # any error of the template
            raise InputError(f"the chat template refuses this conversation: {error}", place, turns.instead(self.template, example), "DATA-23") from None
        formats.check_tools(example, text, place)
        return Rendered(text, spans, False, place, self._closing(example))

    def _closing(self, chat):
        last = chat.messages[-1]
        if self.next_turn is None or last["role"] != "assistant":
            return None
        return int(self.loss_on == "all" or is_answer(last, len(chat.messages) - 1, chat.first))

    def _joined(self, segments, place):
        text, spans = "", []
        for part, answer in segments:
            if answer:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return Rendered(text, None if self.loss_on == "all" else spans, True, place)

    def _segments(self, chat, place):
        """(text, is an answer) in Alpaca style."""
        if chat.alpaca and not chat.alpaca["history"]:
            row = chat.alpaca
            yield (row["system"] + "\n\n" if row["system"] else PREAMBLE_INPUT if row["input"] else PREAMBLE), False
            extra = f"### Input:\n{row['input']}\n\n" if row["input"] else ""
            yield f"### Instruction:\n{row['instruction']}\n\n{extra}### Response:", False
            yield row["output"], True
            return
        messages = chat.messages
        if not messages or messages[0]["role"] != "system":
            yield PREAMBLE, False
        for index, message in enumerate(messages):
            content = message.get("content")
            if message["role"] not in ("system", "user", "assistant") or not isinstance(content, str):
                raise InputError(f"a {message['role']} message needs a chat template, and the model has none", place,
                                 "put chat_template.jinja into the model's directory", "DATA-23")
            if message["role"] == "system":
                yield content + "\n\n", False
            elif message["role"] == "user":
                yield f"### Instruction:\n{content}\n\n### Response:", False
            else:
                last = index + 1 == len(messages)
                yield content + ("" if last else self.eos_text), is_answer(message, index, chat.first)
                yield "" if last else "\n\n", False

    def encode(self, rendered):
        """One encoding per text, in order."""
        out = [None] * len(rendered)
        for plain in (True, False):
            for whole in (True, False):
                group = [i for i, r in enumerate(rendered) if (r.plain, r.spans is None) == (plain, whole)]
                # The fast variant has no offsets.
                encode = self.tokenizer.encode_batch_fast if whole else self.tokenizer.encode_batch
                for i, encoding in zip(group, encode([rendered[i].text for i in group], add_special_tokens=plain)):
                    out[i] = encoding
        return out

    def doubles_bos(self, ids):
        return self.bos is not None and ids[:2] == [self.bos, self.bos]

    def one_bos(self, ids):
        """A text that writes the begin token itself gets no other."""
        return ids[1:] if self.doubles_bos(ids) else ids

    def _finish(self, rendered, encoding):
        ids = encoding.ids
        if rendered.spans is None:
            marks = bytearray(b"\1" * len(ids))
        else:
            marks = mask.mark_tokens(ids, encoding.offsets, rendered.text, rendered.spans, self.end_ids)
        doubled = self.doubles_bos(ids)
        if doubled and not rendered.plain:
            raise InputError(f"the chat template writes the begin token {self.bos} twice", rendered.place,
                             "remove one of them from the template", "DATA-23")
        if doubled:  # the text has its own
            ids, marks = ids[1:], marks[1:]
        if rendered.closing is not None and ids[-1:] != [self.next_turn]:
            ids.append(self.next_turn)
            marks.append(rendered.closing)
        if rendered.plain and self.eos is not None:
            if not ids or ids[-1] != self.eos:
                ids.append(self.eos)
                marks.append(1)
            marks[-1] = 1
        return ids, marks

    def examples(self, name, row, place):
        """(example, Rendered or None) of one row."""
        if self.options.render == "chat" and formats.is_plain_pair(name, row):
            row = formats.as_chat(row)
        example = formats.example(name, row, place)
        if isinstance(example, formats.Chat):
            formats.check_flags(example, self.loss_on, place)
        if self.options.reasoning == "drop":
            example = formats.without_reasoning(example)
        several = formats.chats(example, self.options.answers) if isinstance(example, formats.Chat) else [example]
        out = []
        for one in several:
            rendered = None if isinstance(one, formats.Ids) else self.render(one, place)
            if rendered is not None and not rendered.text.isascii():
                check_unicode(rendered.text, place)
            out.append((place, one, rendered))
        return out

    def chunk(self, name, rows, want_sample):
        """`rows` is a sources.Rows, `name` their format."""
        counts, examples = Counts(rows=len(rows.rows)), []
        for number, row in rows.rows:
            place = rows.place(number)
            try:
                row = kinds.renamed(parsed(row, place), self.options.columns, place)
                kinds.check_row(row, name, self.options.detected, place, self.options.columns)
                examples += self.examples(name, row, place)
                counts.see(row, name)
                counts.pairs += formats.is_plain_pair(name, row)
                counts.choices += name == "choices"
            except InputError as error:
                self.leave_out(error, place, counts)
        encoded = iter(self.encode([rendered for _, _, rendered in examples if rendered is not None]))
        chunk = Chunk([], b"", b"", [], None, counts)
        all_ids, all_marks = array.array("i"), bytearray()
        for place, example, rendered in examples:
            try:
                encoding = next(encoded) if rendered else None
                ids, marks = self._finish(rendered, encoding) if rendered else self._given(example)
                self.check_ids(ids, example, place)
            except InputError as error:
                self.leave_out(error, place, counts)
                continue
            if rendered is not None:
                self._count(example, ids, marks, place, counts)
                if rendered.spans and mask.shares_a_token(encoding.offsets, rendered.spans):
                    counts.add(Counts(shared=1, first_shared=place))
            if 1 not in marks or 1 not in marks[1:]:
                counts.dropped += 1
                continue
            if want_sample and chunk.sample is None:
                chunk.sample = self.sample(ids, marks)
            chunk.lengths.append(len(ids))
            chunk.texts.append(isinstance(example, formats.Text))
            all_ids.extend(ids)
            all_marks += bytes(marks)
        chunk.tokens, chunk.marks = all_ids.tobytes(), bytes(all_marks)
        counts.trained = all_marks.count(1)
        return chunk

    def leave_out(self, error, place, counts):
        if self.options.bad_rows == "stop" or isinstance(error, LimitError):
            raise error
        counts.skip(error, place)

    def _given(self, example):
        return example.ids, [1] * len(example.ids) if self.loss_on == "all" else [int(label != -100) for label in example.labels]

    def _count(self, example, ids, marks, place, counts):
        chat = isinstance(example, formats.Chat)
        counts.without_bos += chat and self.template is not None and self.writes_bos and ids[:1] != [self.bos]
        counts.untemplated += chat and self.template is None
        if chat and self.template is not None and not counts.dated:
            counts.dated = self.template.asks_for_date(example.tools) or ""
        if 1 in marks and not isinstance(example, formats.Text):
            counts.answered += 1
            counts.endless += self._endless(ids, marks)
        if formats.has_empty_answer(example):
            counts.first_empty = counts.first_empty or place
            counts.empty += 1

    def check_ids(self, ids, example, place):
        if not self.most_ids or not ids or max(ids) < self.most_ids:
            return
        given = isinstance(example, formats.Ids)
        if not given:
            self._refuse_added_tokens(ids, place)
        known = "correct or remove this row, or" if given else "the model's tokenizer.json is another's:"
        raise InputError(f"token id {max(ids)} is outside the model's vocabulary of {self.most_ids}", place,
                         f"{known} use the tokenizer that belongs to model.path")

    def _refuse_added_tokens(self, ids, place):
        """The error for added tokens of the tokenizer without embeddings in the model."""
        added = {id: token.content for id, token in self.tokenizer.get_added_tokens_decoder().items() if id >= self.most_ids}
        beyond = {id for id in ids if id >= self.most_ids}
        if not beyond <= set(added):
            return
        names = [added[id] for id in sorted(added)]
        told = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise InputError(
            f"the tokenizer has added tokens that the model has no embeddings for: {told}; its vocabulary is {self.most_ids}, and this "
            f"row has token id {max(beyond)}", place,
            "remove them from added_tokens of tokenizer.json, or give the model rows for them (transformers: resize_token_embeddings)")

    def _endless(self, ids, marks):
        last = len(marks) - 1 - marks[::-1].index(1)
        # With loss_on = "all", a line break may follow the end token.
        tail = ids[max(last - 3, 0): last + 1] if self.loss_on == "all" else ids[last: last + 1]
        return not self.end_ids.intersection(tail)

    def sample(self, ids, marks):
        """The text of each of the first tokens, for display; at most as many as a sequence has."""
        decoder = Decoder(self.tokenizer, skip_special_tokens=False)
        pieces = [{"text": decoder.next(token), "trained": bool(mark)} for token, mark in zip(ids[:SAMPLE_TOKENS], marks)]
        pieces[-1]["text"] += decoder.end()
        return pieces


class IdsOnly(Model):
    """For data that is already tokenised and a model directory without a tokenizer."""

    def __init__(self, loss_on, most_ids=0, options=None):
        self.loss_on, self.most_ids, self.options, self.template = loss_on, most_ids, options or Options(), None
        self.eos_text = ""

    def date(self):
        return ""

    def template_of_result(self, counts):
        return ""

    def vocab(self):
        return 0

    def encode(self, rendered):
        if rendered:
            raise InputError("this text needs a tokenizer, and the model has no tokenizer.json", rendered[0].place,
                             "save the tokenizer in that form beside the weights", "DATA-23")
        return []

    def sample(self, ids, marks):
        return [{"text": f"{t} ", "trained": bool(m)} for t, m in zip(ids[:200], marks)]


def check_unicode(text, place):
    """JSON can encode half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("the text holds half of a surrogate pair", place, "correct or remove this row") from None


def _special_tokens(config):
    """{"bos_token": "<s>", ...} of a tokenizer_config.json or special_tokens_map.json."""
    special = {}
    for key, value in config.items():
        value = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(value, str):
            special[key] = value
    return special
