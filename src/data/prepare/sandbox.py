"""The sandbox of chat templates. They come with models and are not trusted: they have no access to anything outside, and their work
is limited. A step is an iteration of a loop, a call of a macro, function or filter, or a hundred elements returned by one; the
count depends only on the template and the conversation, so that a refusal is the same on every machine. Memory and CPU time are
also limited, for single steps that are long or large."""

import functools
import json
import os
import resource
import signal
import threading
from contextlib import contextmanager

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from errors import InputError, LimitError

MOST_TEMPLATE = 1 << 20   # bytes of a template's text
MOST_STEPS = 1_000_000    # to render a conversation, plus STEPS_A_CHARACTER
STEPS_A_CHARACTER = 10
MOST_BYTES = 1 << 29      # of memory, plus BYTES_A_CHARACTER
BYTES_A_CHARACTER = 64
MOST_SECONDS = 60         # of the processor
MOST_BITS = 1 << 16       # of a whole number
ELEMENTS_A_STEP = 100
SIZED = (str, list, tuple, dict, range)

ADVICE = "use another template (data.chat_template), or a model that you trust"


def limit(what):
    return LimitError(f"the chat template {what}", next=ADVICE, area="DATA-23")


# ---- memory and time ------------------------------------------------------------------------------------------------

_statm = {}  # per process, because of fork
_handled = []


def _address_space():
    pid = os.getpid()
    if pid not in _statm:
        _statm[pid] = os.open("/proc/self/statm", os.O_RDONLY)
    return int(os.pread(_statm[pid], 64, 0).split()[0]) * resource.getpagesize()


def _out_of_time(signum, frame):
    raise limit(f"takes more than {MOST_SECONDS} s of the processor's time for one conversation")


class bounded:
    """Limits for the template's code; `characters`: of its conversation."""

    def __init__(self, characters=0):
        self.room = MOST_BYTES + BYTES_A_CHARACTER * characters

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        most = min([_address_space() + self.room] + [value for value in self.before if value != resource.RLIM_INFINITY])
        self.timed = threading.current_thread() is threading.main_thread()
        if self.timed and not _handled:
            signal.signal(signal.SIGVTALRM, _out_of_time)  # once: no other code uses this timer
            _handled.append(True)
        resource.setrlimit(resource.RLIMIT_AS, (most, self.before[1]))
        if self.timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)

    def __exit__(self, kind, error, traceback):
        if self.timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, self.before)
        if kind is not None and issubclass(kind, MemoryError):
            raise limit(f"takes more than {self.room >> 20} MiB of memory for one conversation") from None


def extent(value):
    """The characters of a conversation."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind is dict:
        return sum(len(item) if type(item) is str else extent(item) for item in value.values()) + 8 * len(value)
    return sum(map(extent, value)) if kind is list else 1


# ---- steps ----------------------------------------------------------------------------------------------------------


class _Counted(NodeTransformer):
    """Counts a step for each iteration and macro call, and steps by size for joined or searched values."""

    def __init__(self, environment):
        self.environment = environment

    def _filter(self, node, name, line):
        return nodes.Filter(node, name, [], [], None, None).set_lineno(line).set_environment(self.environment)

    def _body(self, node):
        self.generic_visit(node)
        step = self._filter(nodes.Const(None, lineno=node.lineno), "lmlaunch_step", node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _body

    def visit_Concat(self, node):
        self.generic_visit(node)
        return self._filter(node, "lmlaunch_step", node.lineno)

    def visit_Operand(self, node):
        self.generic_visit(node)
        if node.op in ("in", "notin"):
            node.expr = self._filter(node.expr, "lmlaunch_step", node.expr.lineno)
        return node


class Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options):
        super().__init__(**options)
        self.left = MOST_STEPS
        self.filters = {name: self._charged(function) for name, function in self.filters.items()}
        self.filters["lmlaunch_step"] = self._step

    def add_filter(self, name, function):
        self.filters[name] = self._charged(function)

    def begin(self, characters=0):
        self.left = MOST_STEPS + STEPS_A_CHARACTER * characters

    def spend(self, *results):
        """Counts a step, and the size of the value."""
        steps = 1
        for value in results:
            if isinstance(value, SIZED):
                steps += len(value) // ELEMENTS_A_STEP
        self.left -= steps
        if self.left < 0:
            self._refuse()

    def _refuse(self):
        raise limit(f"takes more than {MOST_STEPS} steps, and {STEPS_A_CHARACTER} for each character, for one conversation")

    def _charged(self, function):
        @functools.wraps(function)
        def charged(*args, **kwargs):
            result = function(*args, **kwargs)
            self.spend(result, *args)
            return result

        return charged

    @jinja2.pass_context  # prevents constant folding while the template is compiled
    def _step(self, context, value):
        self.spend(value)
        return value

    def _parse(self, source, name, filename):
        return _Counted(self).visit(super()._parse(source, name, filename))

    def call(__self, __context, __obj, *args, **kwargs):  # noqa: B902, as in jinja2.sandbox: any name may be a keyword
        result = super().call(__context, __obj, *args, **kwargs)
        __self.spend(result)
        return result

    def call_binop(self, context, operator, left, right):
        if operator == "+":  # the most frequent case
            result = left + right
            self.left -= 1 + (len(result) // ELEMENTS_A_STEP if isinstance(result, SIZED) else 0)
            if self.left < 0:
                self._refuse()
            return result
        self._check_number(operator, left, right)
        result = self.binop_table[operator](left, right)
        self.spend(result)
        return result

    def _check_number(self, operator, left, right):
        if operator == "%" or not (isinstance(left, int) and isinstance(right, int)):
            return
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MOST_BITS:
            raise limit("computes a number of more digits than any text needs")


# ---- what templates may use, as in transformers ---------------------------------------------------------------------


class GenerationTracker(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: renders its body and records its span in the text."""

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


def as_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes <, > and &, which are unescaped in the model's training data.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment(date):
    """`date`: a datetime, the result of strftime_now."""
    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTracker, jinja2.ext.loopcontrols])
    env.add_filter("tojson", as_json)
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda format: date.strftime(format)
    env.globals["dict"] = TemplateDict()
    env.globals["namespace"] = TemplateNamespace
    return env


def compiled(env, text, place):
    def not_understood(what, line=0):
        return InputError(f"the chat template cannot be parsed: {what}", f"{place}:{line}" if line else place,
                          "correct the template of the model", "DATA-23")

    if len(text) > MOST_TEMPLATE:
        raise LimitError(f"the chat template has more than {MOST_TEMPLATE >> 20} MiB", place, ADVICE, "DATA-23")
    env.begin()
    try:
        with bounded():
            return env.from_string(text)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise not_understood(error.message, error.lineno) from None
    except LimitError as error:
        error.place = place
        raise
    except Exception as error:
        raise not_understood(error) from None
