"""From a row to an example: which columns mean what. An example is one of

  Text(text)                           plain text, all of it trained
  Pair(prompt, completion)             plain text, the completion trained
  Chat(messages, tools, first, alpaca) rendered by the chat template; assistant messages from `first` on are trained
  Ids(ids, labels)                     already tokenised; labels of -100 are not trained
"""

import json
import re
from dataclasses import dataclass, field, replace

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
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
# What a format may have beside these.
MORE_COLUMNS = {"tokens": ("labels", "attention_mask"), "chat": ("tools",), "sharegpt": ("tools", "system"),
                "prompt-completion": ("tools",), "alpaca": ("input", "system", "history"), "text": ()}

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
         "system": "system", "observation": "tool", "tool": "tool", "function_call": "function_call",
         "developer": "developer"}


def renamed(row, columns, place):
    """`columns` maps our names to the files' names."""
    for ours, theirs in columns.items():
        if theirs not in row:
            raise InputError(f"data.columns takes {ours!r} from column {theirs!r}, which is not here; found "
                             + (", ".join(map(str, row)) or "none"), place, "correct data.columns, or this row")
    taken = set(columns.values())
    kept = {key: value for key, value in row.items() if key not in taken}
    return {**kept, **{ours: row[theirs] for ours, theirs in columns.items()}}


def detect(row, place, columns=()):
    """`columns` are those that data.columns names: the format is one that has them."""
    _refuse_preferences(row, place, columns)
    for name, needed in COLUMNS.items():
        if all(column in row for column in needed) and set(columns) <= {*needed, *MORE_COLUMNS[name]}:
            return name
    known = "; ".join(" + ".join(columns) for columns in COLUMNS.values())
    raise InputError("unknown columns: found " + (", ".join(map(str, row)) or "none"), place,
                     f"rename them, in the files or by data.columns, to one of these sets: {known}")


def _refuse_preferences(row, place, columns):
    """What is made for DPO and KTO looks like examples, and half of it is what a model should not write."""
    what = "this is preference data ({}), and lmlaunch trains on examples of what is right"
    if "chosen" in row and "rejected" in row and not {"messages", "text"}.intersection(columns):
        chosen = _decoded(row["chosen"])
        # Answers that are lists of messages have the question in them, unless that is such a list itself.
        whole = isinstance(chosen, list) and not isinstance(_decoded(row.get("prompt")), list)
        ours = "messages" if whole else "completion" if "prompt" in row else "text"
        raise InputError(what.format("columns chosen and rejected"), place,
                         f'to train on the chosen answers, set data.columns = {{{ours} = "chosen"}}')
    if isinstance(row.get("label"), bool) and "completion" in row:
        raise InputError(what.format("each completion with a label, true or false"), place,
                         "keep the rows whose label is true, and leave the column out")


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
        except (ValueError, RecursionError):
            return value
    return value


def _messages(value, column, place):
    value = _decoded(value)
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise InputError(f"column {column!r} is not a list of messages", place, "write [{role, content}, ...]")
    return [_message(message, column, place) for message in value]


def _message(message, column, place):
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in ROLES:
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
    if isinstance(prompt, list) and isinstance(completion, str):
        before = _messages(prompt, "prompt", place)
        return Chat(before + [{"role": "assistant", "content": completion}], _tools(row, place), len(before))
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


_MAKERS = {"tokens": _ids, "chat": _chat, "sharegpt": _sharegpt, "prompt-completion": _prompt_completion,
           "alpaca": _alpaca, "text": lambda row, place: Text(_string(row, "text", place))}


# ---- what of a conversation is trained ------------------------------------------------------------------------------

REASONING = ("reasoning_content", "thinking", "reasoning")


def without_reasoning(example):
    """What assistants thought goes, be it a key of the message or the beginning of its text."""
    def spoken(text):
        return re.sub(r"^\s*<think>.*?</think>\s*", "", text, flags=re.DOTALL)

    if isinstance(example, Pair):
        return Pair(example.prompt, spoken(example.completion))
    if not isinstance(example, Chat):
        return example
    messages = []
    for message in example.messages:
        message = {key: value for key, value in message.items() if key not in REASONING}
        if message["role"] == "assistant" and isinstance(message.get("content"), str):
            message["content"] = spoken(message["content"])
        messages.append(message)
    alpaca = example.alpaca and {**example.alpaca, "output": spoken(example.alpaca["output"])}
    return replace(example, messages=messages, alpaca=alpaca)


def chats(chat, answers):
    """`answers` is data.answers: the conversation as it is, with its last answer trained alone, or cut after each answer,
    which alone is trained: so a template shows each as it will when the model has to write it."""
    spoken = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i >= chat.first]
    if answers == "all" or not spoken:
        return [chat]
    if answers == "last":
        return [replace(chat, first=spoken[-1])]
    if len(spoken) == 1:
        return [replace(chat, messages=chat.messages[: spoken[0] + 1], first=spoken[0])]
    return [Chat(chat.messages[: i + 1], chat.tools, i) for i in spoken]


def has_empty_answer(example):
    if isinstance(example, Pair):
        return not example.completion.strip()
    return isinstance(example, Chat) and any(
        message["role"] == "assistant" and not message.get("tool_calls")
        and isinstance(message.get("content"), str) and not message["content"].strip()
        for message in example.messages[example.first:])


def check_tools(chat, text, place):
    """`text` is what the template made of the conversation: a template that knows no tools leaves them out."""
    def name(tool):
        inner = tool.get("function", tool)
        return inner.get("name") if isinstance(inner, dict) else None

    calls = [("call of tool", name(call)) for message in chat.messages for call in message.get("tool_calls") or []
             if isinstance(call, dict)]
    for what, tool in calls + [("tool", name(tool)) for tool in chat.tools or []]:
        if isinstance(tool, str) and tool not in text:
            raise InputError(f"the chat template drops the {what} {tool!r}", place,
                             "use a template that writes tools (data.chat_template), or leave these rows out", "DATA-23")
