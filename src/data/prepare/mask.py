"""The training mask: first as spans of characters in the rendered text, then as tokens."""

from bisect import bisect_right

from errors import InputError
from messages import is_answer

# End-of-turn tokens that are not always listed in a model's files.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|end_of_turn|>",
              "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[e~[", "</s>", "<|endoftext|>", "<|return|>", "<|call|>")

SENTINEL = "\u2983lmlaunch answer\u2984"


def chat_spans(template, chat, place):
    """Renders a conversation: (text, trained spans of the assistant's text from message chat.first on)."""
    text, spans = template.render_marked(chat.messages, chat.tools)
    answers = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i >= chat.first]
    trained = [i for i in answers if is_answer(chat.messages[i], i, chat.first)]
    if spans is None or not template.marks_generation(chat.tools):
        return text, [_span(template, chat, index, text, place) for index in trained]
    if chat.first:
        before = template.render(chat.messages[: chat.first], chat.tools)
        spans = [span for span in spans if span[0] >= len(before)]
    silent = [_span(template, chat, index, text, place) for index in answers if index not in trained]
    return text, [(a, b) for a, b in spans if not any(a < end and begin < b for begin, end in silent)]


def _span(template, chat, index, text, place):
    return _by_prefix(template, chat, index, text) or _by_sentinel(template, chat, index, text, place)


def _by_prefix(template, chat, index, text):
    """The span from the end of this answer's prompt to the end of the conversation cut after it. None if either is not a prefix of
    the whole (templates that treat the last turn differently)."""
    try:
        start = template.render(chat.messages[:index], chat.tools, True)
        end = text if index + 1 == len(chat.messages) else template.render(chat.messages[: index + 1], chat.tools)
    except InputError:
        raise
    except Exception:  # a template may refuse a conversation that ends here
        return None
    if not text.startswith(end) or not end.startswith(start) or len(end) <= len(start):
        return None
    return len(start), len(end)


def _by_sentinel(template, chat, index, text, place):
    """Renders with a sentinel in place of the answer: the answer is between the common prefix and suffix of the two texts."""
    message = chat.messages[index]
    other = list(chat.messages)
    parts = isinstance(message.get("content"), list)
    other[index] = {**message, "content": [{"type": "text", "text": SENTINEL}] if parts else SENTINEL}
    marked = template.render(other, chat.tools)
    at = marked.find(SENTINEL)
    tail = marked[at + len(SENTINEL):]
    if (at < 0 or message.get("content") is None or not text.startswith(marked[:at])
            or not text.endswith(tail) or at + len(tail) > len(text)):
        raise InputError("cannot locate the answers in the chat template's output", place,
                         'mark them with {% generation %} in the template, or set data.loss_on = "all"', "DATA-23")
    return at, len(text) - len(tail)


def mark_tokens(ids, offsets, text, spans, end_ids):
    """1 for every token that shares a character with a span, and for an end token right after it. Tokens in a span after its own
    end token are not trained unless they are text (templates write a line break there)."""
    marks = [0] * len(ids)
    starts = [offset[0] for offset in offsets]
    for begin, end in spans:
        i = max(bisect_right(starts, begin) - 1, 0)
        while i > 0 and offsets[i - 1][1] > begin:  # several tokens may encode one character
            i -= 1
        inside = []
        while i < len(ids) and offsets[i][0] < end:
            if offsets[i][1] > begin and offsets[i][1] > offsets[i][0]:
                inside.append(i)
            i += 1
        last_end = next((k for k in reversed(range(len(inside))) if ids[inside[k]] in end_ids), None)
        if last_end is not None and not text[offsets[inside[last_end]][1]:end].strip():
            inside = inside[: last_end + 1]
        elif inside and inside[-1] + 1 < len(ids) and ids[inside[-1] + 1] in end_ids:
            inside.append(inside[-1] + 1)
        for k in inside:
            marks[k] = 1
    return marks


def shares_a_token(offsets, spans):
    """Whether one token covers the end of the text before a span and the beginning of the span."""
    starts = [offset[0] for offset in offsets]
    for begin, _ in spans:
        i = bisect_right(starts, begin - 1) - 1  # the last token that begins before the span
        if begin > 0 and i >= 0 and offsets[i][1] > begin:
            return True
    return False
