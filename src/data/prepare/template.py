"""The model's own chat template, rendered as transformers renders it, byte for byte: the environment, its filters
and the cleaning of messages below repeat what its apply_chat_template does."""

import json
import os
from contextlib import contextmanager
from datetime import datetime

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import InputError
from formats import REASONING


class GenerationTracker(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: renders its body and notes where in the text it stands."""

    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        environment.extend(tracker=self)
        self.blocks = self.spans = None

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        text = caller()
        if self.blocks is not None:
            self.spans.append((sum(map(len, self.blocks)), text))
        return text

    @contextmanager
    def active(self):
        self.blocks, self.spans = [], []
        try:
            yield self
        finally:
            self.blocks = self.spans = None


class TemplateDict:
    """`dict` for templates, without the type's attributes."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` for templates, without names that reach into the interpreter."""

    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name):
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} in a namespace")


def _raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes <, > and &, which the model has never seen escaped.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[GenerationTracker, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    env.globals["dict"] = TemplateDict()
    env.globals["namespace"] = TemplateNamespace
    return env


class ChatTemplate:
    """Templates by name ("default", "tool_use", ...) and the special tokens that they may name."""

    def __init__(self, sources, special_tokens):
        self.special_tokens = special_tokens
        self.compiled = {}
        self.marks = {}
        for name, (text, place) in sources.items():
            env = _environment()
            try:
                self.compiled[name] = env.from_string(text)
            except jinja2.exceptions.TemplateSyntaxError as error:
                raise InputError(f"the chat template is not understood: {error.message}", f"{place}:{error.lineno}",
                                 "correct the template of the model", "DATA-23") from None
            words = [token[2] for token in env.lex(text) if token[1] in ("block_begin", "name")]
            self.marks[name] = any(a.startswith("{%") and b == "generation" for a, b in zip(words, words[1:]))

    def name_for(self, tools):
        if tools is not None and "tool_use" in self.compiled:
            return "tool_use"
        if "default" not in self.compiled:
            raise InputError("the model has several chat templates and none is named 'default'",
                             next="name one of them 'default'", area="DATA-23")
        return "default"

    def marks_generation(self, tools=None):
        return self.marks[self.name_for(tools)]

    def render(self, messages, tools=None, add_generation_prompt=False):
        return self.render_marked(messages, tools, add_generation_prompt)[0]

    def render_marked(self, messages, tools=None, add_generation_prompt=False):
        """The text, and the (start, end) of what {% generation %} encloses; None in place of these when the template
        writes its output through macros, so that the places are not known while it runs."""
        template = self.compiled[self.name_for(tools)]
        with template.environment.tracker.active() as tracker:
            for block in template.generate(messages=[_cleaned(m) for m in messages], tools=tools, documents=None,
                                           add_generation_prompt=add_generation_prompt, **self.special_tokens):
                tracker.blocks.append(block)
            text = "".join(tracker.blocks)
            if not all(text.startswith(part, start) for start, part in tracker.spans):
                return text, None
            return text, [(start, start + len(part)) for start, part in tracker.spans]


def _cleaned(message):
    """Keys without a value are dropped; reasoning is offered under the names that templates know it by."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def read_template(path):
    """A template of the user's own."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InputError(f"data.chat_template cannot be read: {reason}", path, "name a file of Jinja", "DATA-23") from None


def load_template(model_dir, config, special_tokens, own=None):
    """From `own` (the text and place of one), chat_template.jinja (which wins) or tokenizer_config.json; None when the model
    has none."""
    if own is not None:
        return ChatTemplate({"default": own}, special_tokens)
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
            with open(path, encoding="utf-8") as file:
                sources[name] = (file.read(), path)
    return ChatTemplate(sources, special_tokens) if sources else None
