"""The model's own chat template, rendered as in transformers, byte for byte: the environment (sandbox.py) and the cleaning of
messages below replicate its apply_chat_template."""

import os
from datetime import datetime

import sandbox
from errors import InputError, LimitError
from formats import REASONING
from messages import has_parts, joined


class ChatTemplate:
    """Templates by name ("default", "tool_use", ...) and the special tokens that they may use. `date`: their current date,
    "2026-01-31"; "": today's."""

    def __init__(self, sources, special_tokens, date=""):
        self.special_tokens = special_tokens
        self.date = date or datetime.now().strftime("%Y-%m-%d")
        self.compiled, self.places = {}, {}
        self.marks, self.dated = {}, {}
        for name, (text, place) in sources.items():
            env = sandbox.environment(datetime.strptime(self.date, "%Y-%m-%d"))
            self.compiled[name], self.places[name] = sandbox.compiled(env, text, place), place
            words = [token[2] for token in env.lex(text) if token[1] in ("block_begin", "name")]
            self.marks[name] = any(a.startswith("{%") and b == "generation" for a, b in zip(words, words[1:]))
            self.dated[name] = "strftime_now" in words

    def name_for(self, tools):
        if tools is not None and "tool_use" in self.compiled:
            return "tool_use"
        if "default" not in self.compiled:
            raise InputError("the model has several chat templates and none is named 'default'",
                             next="name one of them 'default'", area="DATA-23")
        return "default"

    def marks_generation(self, tools=None):
        return self.marks[self.name_for(tools)]

    def asks_for_date(self, tools=None):
        """The place of the template if it uses the date; else None."""
        name = self.name_for(tools)
        return self.places[name] if self.dated[name] else None

    def settled(self, messages, tools=None):
        """Messages in the form that the template supports. A template joins text in parts itself; one that only takes strings gets
        the parts concatenated."""
        if not has_parts(messages):
            return messages
        try:
            text = self.render(messages, tools)
        except LimitError:
            raise
        except Exception:
            return joined(messages)
        parted = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        if any(str(parts) in text or sandbox.as_json(parts) in text for parts in parted):
            return joined(messages)
        # A template may drop text on purpose, such as the reasoning of earlier answers.
        missing = [part["text"].strip() for parts in parted for part in parts if part["text"].strip() not in text]
        if missing and any(part in self.render(joined(messages), tools) for part in missing):
            return joined(messages)
        return messages

    def render(self, messages, tools=None, add_generation_prompt=False):
        return self.render_marked(messages, tools, add_generation_prompt)[0]

    def render_marked(self, messages, tools=None, add_generation_prompt=False):
        """The text, and the (start, end) of {% generation %} blocks; None in place of these if the template writes its output
        through macros, so that the positions are unknown while it runs."""
        template = self.compiled[self.name_for(tools)]
        characters = sandbox.extent(messages) + sandbox.extent(tools or [])
        template.environment.begin(characters)
        with template.environment.tracker.active() as tracker, sandbox.bounded(characters):
            for block in template.generate(messages=[_cleaned(m) for m in messages], tools=tools, documents=None,
                                           add_generation_prompt=add_generation_prompt, **self.special_tokens):
                tracker.blocks.append(block)
            text = "".join(tracker.blocks)
            if not all(text.startswith(part, start) for start, part in tracker.spans):
                return text, None
            return text, [(start, start + len(part)) for start, part in tracker.spans]


def _cleaned(message):
    """Drops keys without a value; offers reasoning under all names that templates use."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def read_template(path):
    """Reads the user's own template."""
    try:
        return _read(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InputError(f"data.chat_template cannot be read: {reason}", path, "name a file of Jinja", "DATA-23") from None


def _read(path):
    if os.path.getsize(path) > sandbox.MOST_TEMPLATE:
        raise LimitError(f"the chat template has more than {sandbox.MOST_TEMPLATE >> 20} MiB", path, sandbox.ADVICE, "DATA-23")
    with open(path, encoding="utf-8") as file:
        return file.read()


def load_template(model_dir, config, special_tokens, own=None, date=""):
    """Reads it from `own` (its text and place), chat_template.jinja (which takes precedence) or tokenizer_config.json; None if the
    model has none."""
    if own is not None:
        return ChatTemplate({"default": own}, special_tokens, date)
    sources = {}
    config_path = os.path.join(model_dir, "tokenizer_config.json")
    in_config = config.get("chat_template")
    if isinstance(in_config, str):
        sources["default"] = (in_config, config_path)
    elif isinstance(in_config, list):
        sources = {entry["name"]: (entry["template"], config_path) for entry in in_config}
    files = {}
    path = os.path.join(model_dir, "chat_template.jinja")
    if os.path.isfile(path):
        files["default"] = path
    more = os.path.join(model_dir, "additional_chat_templates")
    if os.path.isdir(more):
        for entry in sorted(os.listdir(more)):
            if entry.endswith(".jinja"):
                files[entry.removesuffix(".jinja")] = os.path.join(more, entry)
    if files:
        sources = {}
        for name, path in files.items():
            sources[name] = (_read(path), path)
    return ChatTemplate(sources, special_tokens, date) if sources else None
