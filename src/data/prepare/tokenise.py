"""From examples to tokens and marks: the model's tokenizer as its files describe it. Data that is tokenised already needs
neither a tokenizer nor its library."""

import array
import json
import os
from dataclasses import dataclass

import jinja2

import formats
import mask
from errors import InputError
from template import load_template

SAMPLE_TOKENS = 1000

# The text of Stanford Alpaca, for models without a chat template.
PREAMBLE = ("Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n")
PREAMBLE_INPUT = ("Below is an instruction that describes a task, paired with an input that provides further context. "
                  "Write a response that appropriately completes the request.\n\n")


@dataclass
class Rendered:
    """Text on its way to the tokenizer. `plain` text gets the tokenizer's BOS and one EOS; a template wrote its own.
    `spans` is where it is trained, in characters; None means all of it."""

    text: str
    spans: list | None
    plain: bool
    place: str


@dataclass
class Chunk:
    """Several examples, flat."""

    lengths: list
    tokens: bytes
    marks: bytes
    trained: int
    dropped: int       # examples without a trained token
    endless: int       # examples whose last answer has no end token
    without_bos: int   # of templates, where the tokenizer would write one
    texts: list        # of each example: whether it is plain text
    sample: list | None


class Model:
    """The tokenizer and template of a model directory; `loss_on` is "completion" or "all", ids are below `most_ids` (0: no
    matter)."""

    def __init__(self, model_dir, loss_on, most_ids=0):
        from tokenizers import Tokenizer

        self.dir, self.loss_on, self.most_ids = model_dir, loss_on, most_ids
        path = os.path.join(model_dir, "tokenizer.json")
        if not os.path.isfile(path):
            raise InputError("the model has no tokenizer.json", model_dir,
                             "save its tokenizer in that form beside the weights", "DATA-23")
        try:
            self.tokenizer = Tokenizer.from_file(path)
        except Exception as error:
            raise InputError(f"the tokenizer is not understood: {error}", path, "download it again", "DATA-23") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        config = self._json("tokenizer_config.json")
        special = _special_tokens(config)
        if "added_tokens_decoder" not in config:
            special.update(_special_tokens(self._json("special_tokens_map.json")))
        self.template = load_template(model_dir, config, special)
        self.eos_text = special.get("eos_token", "")
        self.bos = self._id(special.get("bos_token"))
        self.eos = self._id(special.get("eos_token"))
        self.end_ids = {self._id(token) for token in mask.END_TOKENS} | {self.eos}
        stops = self._json("generation_config.json").get("eos_token_id")
        self.end_ids.update(stops if isinstance(stops, list) else [stops])
        self.end_ids.discard(None)
        self.writes_bos = self.bos is not None and self.bos in self.tokenizer.encode("").ids

    def _json(self, name):
        path = os.path.join(self.dir, name)
        if not os.path.isfile(path):
            return {}
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

    def render(self, example, place):
        """Rendered, for anything but Ids."""
        if isinstance(example, formats.Text):
            return Rendered(example.text, None, True, place)
        if isinstance(example, formats.Pair):
            return self._joined([(example.prompt, False), (example.completion, True)], place)
        if self.template is None:
            return self._joined(self._segments(example, place), place)
        try:
            if self.loss_on == "all":
                return Rendered(self.template.render(example.messages, example.tools), None, False, place)
            text, spans = mask.chat_spans(self.template, example, place)
        except (jinja2.exceptions.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise InputError(f"the chat template refuses this conversation: {error}", place,
                             "correct or remove this row", "DATA-23") from None
        return Rendered(text, spans, False, place)

    def _joined(self, segments, place):
        text, spans = "", []
        for part, answer in segments:
            if answer:
                spans.append((len(text), len(text) + len(part)))
            text += part
        return Rendered(text, None if self.loss_on == "all" else spans, True, place)

    def _segments(self, chat, place):
        """(text, is an answer) in the Alpaca manner."""
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
                yield content + ("" if last else self.eos_text), index >= chat.first
                yield "" if last else "\n\n", False

    def encode(self, rendered):
        """(ids, marks) for each, in order."""
        out = [None] * len(rendered)
        for plain in (True, False):
            for whole in (True, False):
                group = [i for i, r in enumerate(rendered) if (r.plain, r.spans is None) == (plain, whole)]
                # The fast way gives no offsets.
                encode = self.tokenizer.encode_batch_fast if whole else self.tokenizer.encode_batch
                try:
                    encodings = encode([rendered[i].text for i in group], add_special_tokens=plain)
                except (UnicodeEncodeError, TypeError):
                    raise _no_unicode([rendered[i] for i in group]) from None
                for i, encoding in zip(group, encodings):
                    out[i] = self._finish(rendered[i], encoding)
        return out

    def _finish(self, rendered, encoding):
        ids = encoding.ids
        if rendered.spans is None:
            marks = [1] * len(ids)
        else:
            marks = mask.mark_tokens(ids, encoding.offsets, rendered.text, rendered.spans, self.end_ids)
        doubled = self.bos is not None and ids[:2] == [self.bos, self.bos]
        if doubled and not rendered.plain:
            raise InputError(f"the chat template writes the begin token {self.bos} twice", rendered.place,
                             "remove one of them from the template", "DATA-23")
        if doubled:  # the text has its own
            ids, marks = ids[1:], marks[1:]
        if rendered.plain and self.eos is not None:
            if not ids or ids[-1] != self.eos:
                ids, marks = ids + [self.eos], marks + [1]
            marks[-1] = 1
        return ids, marks

    def chunk(self, rows, want_sample):
        """`rows` are (format, place, row)."""
        examples = [(place, formats.example(name, row, place)) for name, place, row in rows]
        rendered = [self.render(e, place) for place, e in examples if not isinstance(e, formats.Ids)]
        encoded = iter(self.encode(rendered))
        chunk = Chunk([], b"", b"", 0, 0, 0, 0, [], None)
        all_ids, all_marks = [], []
        for place, example in examples:
            if isinstance(example, formats.Ids):
                ids = example.ids
                marks = [1] * len(ids) if self.loss_on == "all" else [int(label != -100) for label in example.labels]
            else:
                ids, marks = next(encoded)
                templated = isinstance(example, formats.Chat) and self.template is not None
                chunk.without_bos += templated and self.writes_bos and ids[:1] != [self.bos]
                chunk.endless += 1 in marks and self._endless(ids, marks)
            self._check_ids(ids, example, place)
            if 1 not in marks[1:]:
                chunk.dropped += 1
                continue
            if want_sample and chunk.sample is None:
                chunk.sample = self.sample(ids, marks)
            chunk.lengths.append(len(ids))
            chunk.texts.append(isinstance(example, formats.Text))
            all_ids += ids
            all_marks += marks
        chunk.tokens = array.array("i", all_ids).tobytes()
        chunk.marks = bytes(all_marks)
        chunk.trained = sum(all_marks)
        return chunk

    def _check_ids(self, ids, example, place):
        if not self.most_ids or not ids or max(ids) < self.most_ids:
            return
        known = "correct or remove this row, or" if isinstance(example, formats.Ids) else "the model's tokenizer.json is another's:"
        raise InputError(f"token id {max(ids)} is outside the model's vocabulary of {self.most_ids}", place,
                         f"{known} use the tokenizer that belongs to model.path")

    def _endless(self, ids, marks):
        last = len(marks) - 1 - marks[::-1].index(1)
        # Trained on everything, a line break may follow the end token.
        tail = ids[max(last - 3, 0): last + 1] if self.loss_on == "all" else ids[last: last + 1]
        return not self.end_ids.intersection(tail)

    def sample(self, ids, marks):
        """Text of the tokens in runs of equal mark, for people."""
        # A run is what it adds to the text before it: decoded alone, it may lose the blank that it begins with.
        pieces, start, before, ids = [], 0, "", ids[:SAMPLE_TOKENS]
        for i in range(1, len(ids) + 1):
            if i == len(ids) or marks[i] != marks[start]:
                text = self.tokenizer.decode(ids[:i], skip_special_tokens=False)
                pieces.append({"text": text[len(before):], "trained": bool(marks[start])})
                start, before = i, text
        if len(ids) < len(marks):
            pieces.append({"text": f" ... ({len(marks) - len(ids)} more tokens)", "trained": False})
        return pieces


class IdsOnly(Model):
    """For data that is tokenised already and a model directory without a tokenizer."""

    def __init__(self, loss_on, most_ids=0):
        self.loss_on, self.most_ids, self.template = loss_on, most_ids, None

    def vocab(self):
        return 0

    def encode(self, rendered):
        if rendered:
            raise InputError("this text needs a tokenizer, and the model has no tokenizer.json", rendered[0].place,
                             "save the tokenizer in that form beside the weights", "DATA-23")
        return []

    def sample(self, ids, marks):
        return [{"text": f"{t} ", "trained": bool(m)} for t, m in zip(ids[:200], marks)]


def _no_unicode(rendered):
    """JSON can spell half of a surrogate pair, which is no character."""
    for r in rendered:
        try:
            r.text.encode()
        except UnicodeEncodeError:
            return InputError("the text holds half of a surrogate pair", r.place, "correct or remove this row")
    return InputError("the text is not Unicode", rendered[0].place, "correct or remove this row")


def _special_tokens(config):
    """{"bos_token": "<s>", ...} of a tokenizer_config.json or special_tokens_map.json."""
    special = {}
    for key, value in config.items():
        value = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(value, str):
            special[key] = value
    return special
