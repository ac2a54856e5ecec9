"""Writes train.jsonl and eval.jsonl (`messages`) from the Python language reference that every CPython carries.

Run: python make_data.py MODEL_DIR OUTPUT_DIR. The 79 topics of pydoc_data are cut at their headings and at the
definitions below them, so that each answer is one subject: "What does str.title() do in Python?", 'Explain "The pass
statement"'. Several topics repeat parts of others; each text is used once, and nothing that trains is held out. The
choice depends on the texts alone (their hashes), so two runs on one Python write the same files.
"""

import hashlib
import json
import re
import sys
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

from jinja2 import Environment
from tokenizers import Tokenizer

TRAIN_TOKENS = 38_000  # about 2 minutes of training on 2 cores
EVAL_TOKENS = 6_000
MAX_ANSWER_TOKENS = 380  # a longer text is cut at paragraphs; with the template around it an example stays under 512
MIN_ANSWER_TOKENS = 24


def sections(text):
    """(heading, body) pairs: a heading is a line that the next one underlines."""
    parts = re.split(r"(?m)^(\S.*)\n([*=\-^~])\2{2,}[ ]*$", text)
    for i in range(1, len(parts), 3):
        yield parts[i].strip(), parts[i + 2].strip("\n")


def definitions(body):
    """Takes the definitions (a signature at the margin, its text indented below) out of a section's body: returns the rest
    and a list of (signature, text)."""
    rest, found, lines, i = [], [], body.split("\n"), 0
    while i < len(lines):
        signature = re.match(r"(?:class |exception |async )*([\w.]+)\(.*\)$", lines[i])
        end = i + 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith("   ")):
            end += 1
        text = textwrap.dedent("\n".join(lines[i + 1:end])).strip()
        if signature and text:
            found.append((lines[i].strip(), text))
            i = end
        else:
            rest.append(lines[i])
            i += 1
    return "\n".join(rest).strip(), found


def cut(text, fits):
    """The text in pieces at paragraphs, each as long as `fits` allows (one paragraph may be longer than that)."""
    pieces = []
    for paragraph in re.split(r"\n\s*\n", text):
        if pieces and fits(pieces[-1] + "\n\n" + paragraph):
            pieces[-1] += "\n\n" + paragraph
        elif paragraph.strip():
            pieces.append(paragraph)
    return pieces


def examples(count_tokens):
    """Every (instruction, answer), each answer once."""
    seen = set()
    fits = lambda text: count_tokens(text) <= MAX_ANSWER_TOKENS
    for name in sorted(set(topics) - {"debugger"}):  # a tool's manual
        for heading, body in sections(topics[name]):
            rest, defined = definitions(body)
            subjects = [(f"What does `{signature}` do in Python?", text) for signature, text in defined]
            subjects.append((f"Explain this topic of the Python language reference: {heading}", rest))
            for instruction, text in subjects:
                pieces = cut(text, fits)
                for i, piece in enumerate(pieces):
                    key = " ".join(piece.split())
                    if key in seen or not MIN_ANSWER_TOKENS <= count_tokens(piece) <= MAX_ANSWER_TOKENS:
                        continue
                    seen.add(key)
                    part = f" (part {i + 1} of {len(pieces)})" if len(pieces) > 1 else ""
                    yield instruction + part, piece


def order(example):
    """A fixed shuffle in which the parts of one subject stay together."""
    subject = re.sub(r" \(part \d+ of \d+\)$", "", example[0])
    return hashlib.sha256(subject.encode()).hexdigest(), example[0]


def paragraphs(answer):
    return {" ".join(paragraph.split()) for paragraph in answer.split("\n\n") if len(paragraph) > 80}


def main():
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string((model / "chat_template.jinja").read_text())
    count_tokens = lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)

    # In one fixed order: the first 6k tokens are held out; what shares a paragraph with them is not trained on.
    split, used, limit = {"eval": [], "train": []}, {"eval": 0, "train": 0}, {"eval": EVAL_TOKENS, "train": TRAIN_TOKENS}
    held_out = set()
    for instruction, answer in sorted(examples(count_tokens), key=order):
        messages = [{"role": "user", "content": instruction}, {"role": "assistant", "content": answer}]
        tokens = count_tokens(template.render(messages=messages))
        part = "eval" if not split["train"] and used["eval"] + tokens <= EVAL_TOKENS else "train"
        if used[part] + tokens > limit[part] or (part == "train" and paragraphs(answer) & held_out):
            continue
        split[part].append({"messages": messages})
        used[part] += tokens
        if part == "eval":
            held_out |= paragraphs(answer)

    out.mkdir(parents=True, exist_ok=True)
    for name, chosen in split.items():
        lines = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in chosen)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"make_data: {len(chosen)} examples, {used[name]} tokens in {out / name}.jsonl", file=sys.stderr)


if __name__ == "__main__":
    main()
