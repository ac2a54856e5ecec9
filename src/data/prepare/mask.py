"""Which tokens are trained. First in characters (spans of the rendered text), then in tokens."""

from bisect import bisect_right

from errors import InputError

# End-of-turn tokens that are not always named in a model's files.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|end_of_turn|>", "</s>",
              "<|endoftext|>", "<|return|>", "<|call|>")

SENTINEL = "\u2983lmlaunch answer\u2984"


def chat_spans(template, chat, place):
    """Renders a conversation: (text, spans of the assistant's text from message chat.first on)."""
    text, spans = template.render_marked(chat.messages, chat.tools)
    if spans is not None and template.marks_generation(chat.tools):
        if chat.first:
            before = template.render(chat.messages[: chat.first], chat.tools)
            spans = [span for span in spans if span[0] >= len(before)]
        return text, spans
    spans = []
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant" and index >= chat.first:
            spans.append(_by_prefix(template, chat, index, text) or _by_sentinel(template, chat, index, text, place))
    return text, spans


def _by_prefix(template, chat, index, text):
    """From the prompt that asks for this answer to the end of the conversation cut after it. None when either is
    no prefix of the whole (templates that treat the last turn differently)."""
    try:
        start = template.render(chat.messages[:index], chat.tools, True)
        end = text if index + 1 == len(chat.messages) else template.render(chat.messages[: index + 1], chat.tools)
    except Exception:  # a template may refuse a conversation that ends here
        return None
    if not text.startswith(end) or not end.startswith(start) or len(end) <= len(start):
        return None
    return len(start), len(end)


def _by_sentinel(template, chat, index, text, place):
    """Renders with another answer in its place: what lies between the two texts' common ends is the answer."""
    message = chat.messages[index]
    other = list(chat.messages)
    other[index] = {**message, "content": SENTINEL}
    marked = template.render(other, chat.tools)
    at = marked.find(SENTINEL)
    tail = marked[at + len(SENTINEL):]
    if (at < 0 or not isinstance(message.get("content"), str) or not text.startswith(marked[:at])
            or not text.endswith(tail) or at + len(tail) > len(text)):
        raise InputError("cannot tell the answers from the rest in what the chat template writes", place,
                         'mark them with {% generation %} in the template, or set data.loss_on = "all"', "DATA-23")
    return at, len(text) - len(tail)


def mark_tokens(ids, offsets, text, spans, end_ids):
    """1 for every token that shares a character with a span, and for the end token that follows it at once. What a
    span has after its own end token is no answer unless it is text (templates write a line break there)."""
    marks = [0] * len(ids)
    starts = [offset[0] for offset in offsets]
    for begin, end in spans:
        i = max(bisect_right(starts, begin) - 1, 0)
        while i > 0 and offsets[i - 1][1] > begin:  # several tokens may spell one character
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
