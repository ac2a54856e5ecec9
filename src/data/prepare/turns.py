"""What a chat template says of turns: which token ends one where the template itself writes none, and whether a system message is what
it refuses."""


def next_turn(template, tokenizer, end_ids):
    """The token that begins a user's turn, where the template writes nothing at the end of an answer (GLM's): generation stops at it.
    None where something ends an answer, or a user's turn begins as an answer does."""
    if template is None:
        return None
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    try:
        short, long = template.render(chat[:2]), template.render(chat)
        prompt = template.render(chat, add_generation_prompt=True)
    except Exception:  # a template may want other conversations; what it cannot render is refused with its row
        return None
    if not long.startswith(short) or not prompt.startswith(long):
        return None
    before, after, answer = (tokenizer.encode(part, add_special_tokens=False).ids
                             for part in (short.rstrip(), long[len(short):], prompt[len(long):]))
    if not before or before[-1] in end_ids or not after or after[0] in answer:
        return None
    return after[0] if after[0] in tokenizer.get_added_tokens_decoder() else None


def instead(template, chat):
    """What to do about a conversation that the template refuses."""
    others = [message for message in chat.messages if message["role"] not in ("system", "developer")]
    if others and len(others) < len(chat.messages):
        try:
            template.render(others, chat.tools)
            return "this template has no system role: put that text in front of the first user's message, or remove it"
        except Exception:  # it is not the system message, or not that alone
            pass
    return "correct or remove this row"
