"""Converts a row to an example, by the meaning of its columns. An example is one of

  Text(text)                           plain text, all of it trained
  Pair(prompt, completion)             plain text, the completion trained (data.render = "chat" makes a Chat of it)
  Chat(messages, tools, first, alpaca) rendered by the chat template; assistant messages from `first` on are trained, but for
                                       those whose flag (messages.py) says that they are not
  Ids(ids, labels)                     already tokenised; labels of -100 are not trained
"""

import re
from dataclasses import dataclass, field, replace

import choices
import kinds
from errors import InputError
from messages import (check_trained, decoded, flag_of, is_answer, joined, read_messages, read_string, read_tools, text_of,
                      with_system)


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


def example(name, row, place):
    """`name` is a key of kinds.COLUMNS."""
    kinds.check_columns(row, name, place)
    return _MAKERS[name](row, place)


def is_plain_pair(name, row):
    """Whether the row is a plain prompt and completion, to which data.render applies."""
    return name == "prompt-completion" and isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)


def as_chat(row):
    """Converts such a row: the prompt becomes the user's message, the completion the answer."""
    return {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}


def _chat_of(messages, row, first, place):
    whole = with_system(messages, row, place)
    return Chat(whole, read_tools(row, place), first + len(whole) - len(messages) if first else 0)


def _chat(row, place):
    return _chat_of(read_messages(row["messages"], "messages", place), row, 0, place)


def _sharegpt(row, place):
    return _chat_of(read_messages(row["conversations"], "conversations", place), row, 0, place)


def _prompt_completion(row, place):
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        system = read_string(row, "system", place)
        return Pair(f"{system}\n\n{prompt}" if system else prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, (list, str)):
        before = read_messages(prompt, "prompt", place)
        answer = ([{"role": "assistant", "content": completion}] if isinstance(completion, str)
                  else read_messages(completion, "completion", place))
        return _chat_of(before + answer, row, len(before), place)
    raise InputError("'prompt' and 'completion' are neither two strings nor two lists of messages", place,
                     "correct or remove this row")


def _alpaca(row, place):
    fields = {column: read_string(row, column, place) for column in ("instruction", "input", "output", "system")}
    history = decoded(row.get("history")) or []
    if not isinstance(history, list) or not all(
            isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(t, str) for t in turn)
            for turn in history):
        raise InputError("column 'history' is not a list of [question, answer]", place, "correct or remove this row")
    messages = with_system([], row, place)
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question = "\n".join(part for part in (fields["instruction"], fields["input"]) if part)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": fields["output"]}]
    return Chat(messages, None, 0, {**fields, "history": history})


def _ids(row, place):
    ids, labels = decoded(row["input_ids"]), decoded(row.get("labels"))
    labels = ids if labels is None else labels
    if not isinstance(ids, list) or not isinstance(labels, list) or len(labels) != len(ids):
        raise InputError("'input_ids' and 'labels' are not lists of one length", place, "correct or remove this row")
    if not all(type(t) is int and 0 <= t < 1 << 31 for t in ids) or not all(type(t) is int for t in labels):
        raise InputError("'input_ids' or 'labels' contain a value that is not a token id", place,
                         "correct or remove this row")
    for token, label in zip(ids, labels):
        if label not in (token, -100):
            raise InputError(f"a label is {label} where the token is {token}", place,
                             "labels repeat input_ids, or are -100 where nothing is trained")
    mask = decoded(row.get("attention_mask"))
    if mask is not None:  # padding is dropped
        if not isinstance(mask, list) or len(mask) != len(ids):
            raise InputError("'attention_mask' has another length than 'input_ids'", place, "correct this row")
        kept = [i for i, m in enumerate(mask) if m]
        ids, labels = [ids[i] for i in kept], [labels[i] for i in kept]
    return Ids(ids, labels)


def _right_ending(row, place):
    read = choices.read(row, place)
    return Pair(*read.parts(read.right))


_MAKERS = {"tokens": _ids, "chat": _chat, "sharegpt": _sharegpt, "prompt-completion": _prompt_completion,
           "alpaca": _alpaca, "choices": _right_ending, "text": lambda row, place: Text(read_string(row, "text", place))}


# ---- what of a conversation is trained ------------------------------------------------------------------------------

REASONING = ("reasoning_content", "thinking", "reasoning")


def without_reasoning(example):
    """Removes the assistants' reasoning, whether a key of the message or the beginning of its text."""
    def spoken(text):
        return re.sub(r"^\s*<think>.*?</think>\s*", "", text, flags=re.DOTALL)

    if isinstance(example, Pair):
        return Pair(example.prompt, spoken(example.completion))
    if not isinstance(example, Chat):
        return example
    messages = []
    for message in example.messages:
        message = {key: value for key, value in message.items() if key not in REASONING}
        text = text_of(message)
        if message["role"] == "assistant" and text is not None and (bare := spoken(text)) != text:
            message["content"] = bare if isinstance(message["content"], str) else [{"type": "text", "text": bare}]
        messages.append(message)
    alpaca = example.alpaca and {**example.alpaca, "output": spoken(example.alpaca["output"])}
    return replace(example, messages=messages, alpaca=alpaca)


def chats(chat, answers):
    """`answers` is data.answers: the whole conversation, only its last answer trained, or split after each answer, which alone is
    trained, so that a template renders each as it will when the model generates it."""
    spoken = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i >= chat.first]
    if answers == "all" or not spoken:
        return [chat]
    if answers == "last":
        return [replace(chat, first=spoken[-1])]
    spoken = [i for i in spoken if flag_of(chat.messages[i]) is not False]
    if not spoken:
        return [chat]
    if len(spoken) == 1:
        return [replace(chat, messages=chat.messages[: spoken[0] + 1], first=spoken[0])]
    return [Chat(chat.messages[: i + 1], chat.tools, i) for i in spoken]


def has_empty_answer(example):
    if isinstance(example, Pair):
        return not example.completion.strip()
    return isinstance(example, Chat) and any(
        is_answer(message, index, example.first) and not message.get("tool_calls")
        and text_of(message) is not None and not text_of(message).strip()
        for index, message in enumerate(example.messages))


def without_parts(chat):
    return replace(chat, messages=joined(chat.messages))


def check_flags(chat, loss_on, place):
    """Checks the messages' training flags against the configuration."""
    if loss_on == "completion":
        check_trained(chat.messages, chat.first, place)
    elif any(flag_of(message) is False for message in chat.messages):
        raise InputError('a message says that it is not trained, and data.loss_on = "all" trains every token', place,
                         'set data.loss_on = "completion", or leave the flag out')


def check_tools(chat, text, place):
    """`text` is the rendered conversation: a template without support for tools drops them."""
    def name(tool):
        inner = tool.get("function", tool)
        return inner.get("name") if isinstance(inner, dict) else None

    calls = [("call of tool", name(call)) for message in chat.messages for call in message.get("tool_calls") or []
             if isinstance(call, dict)]
    for what, tool in calls + [("tool", name(tool)) for tool in chat.tools or []]:
        if isinstance(tool, str) and tool not in text:
            raise InputError(f"the chat template drops the {what} {tool!r}", place,
                             "use a template that writes tools (data.chat_template), or leave these rows out", "DATA-23")
