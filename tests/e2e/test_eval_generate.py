"""Answers that are generated at each evaluation and scored: the same that `generate` gives, scores as a few lines of Python compute
them, a program of one's own, several ranks."""

import json
import re
import string
import sys
from collections import Counter

import pytest
from test_run import config, losses, rows, lmlaunch
from test_try_it import work  # noqa: F401 (a fixture)

# Ten rows: more than are generated together. References begin as answers of this model may.
ASKED = [{"prompt": "hello"[: 1 + i % 5], "completion": f"the {i} {chr(65 + i)}, and more"} for i in range(8)] + [
    {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}, {"role": "user", "content": "hello"},
                  {"role": "assistant", "content": "EG"}]},
    {"prompt": [{"role": "user", "content": "hello"}], "completion": [{"role": "assistant", "content": "gj mp"}]}]
SCORE = """import json, sys
rows = [json.loads(line) for line in sys.stdin]
open(sys.argv[1], "a").write(json.dumps(rows) + "\\n")
print("noise for the log", file=sys.stderr)
print(json.dumps({"characters": sum(len(row["answer"]) for row in rows), "rows": len(rows)}))
"""


def exact_match(answer, reference):
    return float(answer.strip() == reference.strip())


def f1(common, ours, theirs):
    return 2 * common / (ours + theirs) if common else 0.0


def token_f1(answer, reference):
    def words(text):
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    ours, theirs = words(answer), words(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    return f1(sum((Counter(ours) & Counter(theirs)).values()), len(ours), len(theirs))


def rouge_l(answer, reference):
    ours, theirs = (re.findall("[a-z0-9]+", text.lower()) for text in (answer, reference))
    table = [[0] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    for i, a in enumerate(ours):
        for j, b in enumerate(theirs):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return f1(table[-1][-1], len(ours), len(theirs))


def scored(work, name, *more, command=True, **changes):  # noqa: F811
    """Runs it; its generate_* columns by step."""
    (work / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ASKED))
    (work / "score.py").write_text(SCORE)
    # Without a special token before an answer, which this model would say again: it has no text.
    (work / "letters.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    keys = ['eval.generate.data=["asked.jsonl"]', "eval.generate.max_tokens=6"]
    if command:
        keys.append("eval.generate.command=" + json.dumps([sys.executable, "score.py", f"{name}.answers"]))
    changes["data__chat_template"] = "letters.jinja"
    done = lmlaunch(config(work, name, train__steps=4, train__eval_every=2, **changes), *more, *keys, cwd=work)
    return done, {row["step"]: {key.removeprefix("generate_"): value for key, value in row.items() if key.startswith("generate_")}
                  for row in rows(work, name) if "eval_loss" in row}


def test_answers_are_generated_and_scored_at_each_evaluation(work):  # noqa: F811
    done, scores = scored(work, "scored")
    told = [json.loads(line) for line in open(work / "scored.answers")]
    assert list(scores) == [0, 2, 4] and len(told) == 3
    for answers, score in zip(told, scores.values()):
        assert [(row["prompt"], row["reference"]) for row in answers] == [
            *((row["prompt"], row["completion"]) for row in ASKED[:8]), ("hello", "EG"), ("hello", "gj mp")]
        for metric in (exact_match, token_f1, rouge_l):
            assert score.pop(metric.__name__) == pytest.approx(sum(metric(row["answer"], row["reference"]) for row in answers) / len(answers), abs=1e-12)
        assert score == {"characters": sum(len(row["answer"]) for row in answers), "rows": len(ASKED)}
    assert told[0] != told[2] and "answers after step 4: exact_match " in done.stderr and "noise for the log" in done.stderr
    # The answers are generate's, to their last letter.
    assert any(len(answers[-1]["answer"]) > 2 for answers in told), told
    (work / "prompts.jsonl").write_text("".join(
        json.dumps({"messages": row["messages"][:-1]} if "messages" in row else {"prompt": row["prompt"]}) + "\n" for row in ASKED))
    said = lmlaunch("generate", "runs/scored", "--prompts", "prompts.jsonl", "--max-tokens", "6", cwd=work).stdout.splitlines()
    assert [json.loads(line)["text"] for line in said] == [row["answer"] for row in told[2]]
    # The last evaluation once more; text and JSON have the same scores.
    again = json.loads(lmlaunch("eval", "runs/scored", "--json", cwd=work).stdout)
    last = next(row for row in rows(work, "scored") if row["step"] == 4 and "eval_loss" in row)
    assert {key: value for key, value in again.items() if key.startswith("generate_")} == {
        key: value for key, value in last.items() if key.startswith("generate_")}
    # A failure of the command loses its scores alone. Neither changes the training.
    done, scores = scored(work, "failing", 'eval.generate.command=["false"]', command=False)
    assert "eval.generate.command (false) gives no score: it ended with status 1" in done.stderr
    assert [list(score) for score in scores.values()] == [["exact_match", "token_f1", "rouge_l"]] * 3
    lmlaunch(config(work, "unasked", train__steps=4, train__eval_every=2), cwd=work)
    assert losses(work, "unasked") == losses(work, "scored") == losses(work, "failing")


def test_ranks_answer_together(work):  # noqa: F811
    sizes = dict(train__global_batch=8, train__micro_batch=4)
    answers = []
    for name, more in (("one_rank", []), ("two_ranks", ["--ranks", "2", "zero.stage=3"])):
        _, scores = scored(work, name, *more, **sizes)
        answers.append([json.loads(line) for line in open(work / f"{name}.answers")][0])
        assert len(scores) == 3
    assert answers[0] == answers[1]


def test_a_prompt_without_room_ends_the_run_before_it_begins(work):  # noqa: F811
    (work / "long.jsonl").write_text(json.dumps({"prompt": "x" * 40, "completion": "y"}) + "\n")
    done = lmlaunch(config(work, "no_room"), 'eval.generate.data=["long.jsonl"]', cwd=work, check=False)
    assert done.returncode == 11 and "long.jsonl:1" in done.stderr and "with its answer it may have 32" in done.stderr
