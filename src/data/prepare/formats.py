"""From a row to an example: which columns mean what. An example is one of

  Text(text)                           plain text, all of it trained
  Pair(prompt, completion)             plain text, the completion trained
  Chat(messages, tools, first, alpaca) rendered by the chat template; assistant messages from `first` on are trained
  Ids(ids, labels)                     already tokenised; labels of -100 are not trained
"""

import json
from dataclasses import dataclass, field

from errors import InputError


@dataclass
class Text:
    text: str


@dataclass
class Pair:
    prompt: str
    completion: str


@dataclass
class Chat:
    messages: list
    tools: list | None = None
    first: int = 0
    alpaca: dict | None = field(default=None)  # the row, for models without a chat template


@dataclass
class Ids:
    ids: list
    labels: list


# What a format needs, in the order of detection.
COLUMNS = {
    "tokens": ("input_ids",),
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
         "system": "system", "observation": "tool", "tool": "tool", "function_call": "function_call",
         "developer": "developer"}


def detect(row, place):
    for name, columns in COLUMNS.items():
        if all(column in row for column in columns):
            return name
    known = "; ".join(" + ".join(columns) for columns in COLUMNS.values())
    raise InputError("unknown columns: found " + (", ".join(map(str, row)) or "none"), place,
                     f"rename them to one of these sets: {known}")


def example(name, row, place):
    """`name` is a key of COLUMNS."""
    for column in COLUMNS[name]:
        if row.get(column) is None:
            raise InputError(f"column {column!r} is missing; found " + (", ".join(map(str, row)) or "none"), place,
                             f"every row of a {name} file needs " + " and ".join(COLUMNS[name]))
    return _MAKERS[name](row, place)


def _string(row, column, place):
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"column {column!r} is not a string", place, "correct or remove this row")
    return value


def _decoded(value):
    """CSV and many Parquet files carry lists as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _messages(value, column, place):
    value = _decoded(value)
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise InputError(f"column {column!r} is not a list of messages", place, "write [{role, content}, ...]")
    return [_message(message, column, place) for message in value]


def _message(message, column, place):
    role = message.get("role", message.get("from"))
    if role not in ROLES:
        raise InputError(f"unknown role {role!r} in {column!r}", place, "use one of " + ", ".join(ROLES))
    # The keys beyond role and content (tool_calls, name, reasoning_content) belong to the template. A null key is
    # dropped, since templates test for presence.
    kept = {key: value for key, value in message.items() if value is not None and key not in ("from", "value")}
    if "content" not in kept and message.get("value") is not None:
        kept["content"] = message["value"]
    if not isinstance(kept.get("content", ""), (str, list)) or ("content" not in kept and "tool_calls" not in kept):
        raise InputError(f"a message in {column!r} has no content", place, "give each message a content string")
    kept["role"] = ROLES[role]
    return _function_call(kept) if kept["role"] == "function_call" else kept


def _function_call(message):
    """ShareGPT writes a call as JSON text; templates expect the structure."""
    calls = _decoded(message["content"])
    calls = calls if isinstance(calls, list) else [calls]
    if all(isinstance(call, dict) and "name" in call for call in calls):
        return {"role": "assistant", "content": "",
                "tool_calls": [{"type": "function", "function": call} for call in calls]}
    return {"role": "assistant", "content": message["content"]}


def _tools(row, place):
    tools = _decoded(row.get("tools"))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError("column 'tools' is not a list of JSON schemas", place, "correct or remove this row")
    return tools


def _system(row, place):
    system = _string(row, "system", place)
    return [{"role": "system", "content": system}] if system else []


def _chat(row, place):
    return Chat(_messages(row["messages"], "messages", place), _tools(row, place))


def _sharegpt(row, place):
    messages = _messages(row["conversations"], "conversations", place)
    if messages[0]["role"] != "system":
        messages = _system(row, place) + messages
    return Chat(messages, _tools(row, place))


def _prompt_completion(row, place):
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Pair(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt", place)
        return Chat(before + _messages(completion, "completion", place), _tools(row, place), len(before))
    raise InputError("'prompt' and 'completion' are neither two strings nor two lists of messages", place,
                     "correct or remove this row")


def _alpaca(row, place):
    fields = {column: _string(row, column, place) for column in ("instruction", "input", "output", "system")}
    history = _decoded(row.get("history")) or []
    if not isinstance(history, list) or not all(
            isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(t, str) for t in turn)
            for turn in history):
        raise InputError("column 'history' is not a list of [question, answer]", place, "correct or remove this row")
    messages = _system(row, place)
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question = "\n".join(part for part in (fields["instruction"], fields["input"]) if part)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": fields["output"]}]
    return Chat(messages, None, 0, {**fields, "history": history})


def _ids(row, place):
    ids, labels = _decoded(row["input_ids"]), _decoded(row.get("labels"))
    labels = ids if labels is None else labels
    if not isinstance(ids, list) or not isinstance(labels, list) or len(labels) != len(ids):
        raise InputError("'input_ids' and 'labels' are not lists of one length", place, "correct or remove this row")
    if not all(type(t) is int and 0 <= t < 1 << 31 for t in ids) or not all(type(t) is int for t in labels):
        raise InputError("'input_ids' or 'labels' hold something that is no token id", place,
                         "correct or remove this row")
    for token, label in zip(ids, labels):
        if label not in (token, -100):
            raise InputError(f"a label is {label} where the token is {token}", place,
                             "labels repeat input_ids, or are -100 where nothing is learnt")
    mask = _decoded(row.get("attention_mask"))
    if mask is not None:  # padding is dropped: we need none
        if not isinstance(mask, list) or len(mask) != len(ids):
            raise InputError("'attention_mask' has another length than 'input_ids'", place, "correct this row")
        kept = [i for i, m in enumerate(mask) if m]
        ids, labels = [ids[i] for i in kept], [labels[i] for i in kept]
    return Ids(ids, labels)


_MAKERS = {"tokens": _ids, "chat": _chat, "sharegpt": _sharegpt, "prompt_completion": _prompt_completion,
           "alpaca": _alpaca, "text": lambda row, place: Text(_string(row, "text", place))}
