"""Conversations in rows: roles, text in parts, tool calls, and the flags that select trained messages."""

import json

from errors import InputError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
         "system": "system", "observation": "tool", "tool": "tool", "function_call": "function_call",
         "developer": "developer"}

# Columns, keys of messages and types of parts without text.
MEDIA = ("image", "images", "audio", "audios", "video", "videos", "image_url", "input_image", "input_audio", "audio_url", "video_url")
TEXT_ALONE = "lmlaunch trains on text alone"

# Keys of a message: 1 (true) or 0 (false), whether it is trained.
FLAGS = ("weight", "train", "loss")


def decoded(value):
    """CSV and many Parquet files have lists as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def read_messages(value, column, place):
    value = decoded(value)
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
    for key in MEDIA:
        if kept.get(key):
            raise InputError(f"a message in {column!r} has {key!r}, and {TEXT_ALONE}", place, WITHOUT)
    if isinstance(kept.get("content"), list):
        kept["content"] = [_part(part, column, place) for part in kept["content"]]
    kept["role"] = ROLES[role]
    kept = _function_call(kept) if kept["role"] == "function_call" else kept
    _check_flags(kept, column, place)
    return kept


WITHOUT = 'remove it, or the row (data.bad_rows = "skip" leaves such rows out)'


def _part(part, column, place):
    """A part of a content list: {"type": "text", "text": ...}. Null keys are those of other parts in a Parquet file."""
    kept = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    other = next((key for key in MEDIA if kept.get(key)), None)
    if kept.get("type") == "text" and isinstance(kept.get("text"), str) and other is None:
        return kept
    kind = other or kept.get("type")
    if isinstance(kind, str) and kind != "text":
        raise InputError(f"a message in {column!r} has a part of type {kind!r}, and {TEXT_ALONE}", place, WITHOUT)
    raise InputError(f"a message in {column!r} has a part that is not text", place, 'write parts as {"type": "text", "text": ...}')


def text_of(message):
    """The text of content that is a string or parts; None if there is none."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def joined(messages):
    """For templates without support for parts."""
    return [{**m, "content": text_of(m)} if isinstance(m.get("content"), list) else m for m in messages]


def has_parts(messages):
    return any(isinstance(message.get("content"), list) for message in messages)


def _function_call(message):
    """ShareGPT writes a call as JSON text; templates expect the structure."""
    text = text_of(message)
    calls = decoded(text)
    calls = calls if isinstance(calls, list) else [calls]
    flags = {key: message[key] for key in FLAGS if key in message}
    if all(isinstance(call, dict) and "name" in call for call in calls):
        return {"role": "assistant", "content": "",
                "tool_calls": [{"type": "function", "function": call} for call in calls], **flags}
    return {"role": "assistant", "content": text, **flags}


# ---- which messages are trained -------------------------------------------------------------------------------------


def _check_flags(message, column, place):
    flags = {key: message[key] for key in FLAGS if key in message}
    for key, value in flags.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise InputError(f"a message in {column!r} has {key} = {json.dumps(value)[:40]}: a message is trained or it is not",
                             place, f"write 0 or 1 (false or true), or leave {key!r} out")
    if len({bool(value) for value in flags.values()}) > 1:
        raise InputError(f"a message in {column!r} has {' and '.join(flags)}, which contradict each other", place, "keep one of them")


def flag_of(message):
    """True, False, or None where the message has none."""
    return next((bool(message[key]) for key in FLAGS if key in message), None)


def check_trained(messages, first, place):
    """Only an assistant's messages from `first` on can be trained: a flag on any other message is an error."""
    for index, message in enumerate(messages):
        if flag_of(message) and (message["role"] != "assistant" or index < first):
            key = next(key for key in FLAGS if key in message)
            what = "of the prompt" if message["role"] == "assistant" else f"of role {message['role']!r}"
            raise InputError(f"a message {what} has {key} = {json.dumps(message[key])}, and only answers are trained", place,
                             f'leave {key!r} out of it; to train every token, leave it out everywhere and set data.loss_on = "all"')


def is_answer(message, index, first):
    """Whether it is trained."""
    return message["role"] == "assistant" and index >= first and flag_of(message) is not False


# ---- columns beside a conversation ----------------------------------------------------------------------------------


def read_string(row, column, place):
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"column {column!r} is not a string", place, "correct or remove this row")
    return value


def read_tools(row, place):
    tools = decoded(row.get("tools"))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError("column 'tools' is not a list of JSON schemas", place, "correct or remove this row")
    return tools


def with_system(messages, row, place):
    """The column `system` is the first message, in every format."""
    system = read_string(row, "system", place)
    if not system:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):
        if text_of(messages[0]) != system:
            raise InputError("column 'system' and the first message are two system prompts", place, "keep one of them")
        return messages
    return [{"role": "system", "content": system}, *messages]
