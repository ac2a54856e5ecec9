"""Reads and tokenises rows while a run trains on them, and keeps none on a disk. The first line of stdin is a request as prepare.py
reads it, without `out` and `key`; the answer is about the first rows of the files. Each further line is one of

  {"start": [file, row, byte, format], "rows": n}  ->  {}: reading resumes there; n rows come before
  {"next": 1}  ->  {"lengths": [...], "texts": [...], "labels": [...], "end": [file, row, byte, format], "rows": rows up to there,
                    "done": bytes of the files up to there, "notes": [...], "bytes": n}, then n bytes: the tokens (int32) and
                    the marks (uint8) of these examples. {"last": true, "notes": [...]}: there are no more rows.

An error is {"error": {area, what, place, next}}; the program goes on. While the run computes, one chunk is prepared ahead."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter leaves it out

import prepare  # noqa: E402
from errors import InputError  # noqa: E402

SEEN_FILES = 32      # whose first rows are looked at before training
MOST_REASONS = 20    # of rows that are left out, each logged once


class Stream:
    def __init__(self, request):
        from sources import Inputs
        from tokenise import Counts

        self.request = dict(request)
        self.inputs = Inputs(request["files"], streams=True)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if request["workers"] > 1 else "false"
        self.model = prepare.load_model(self.request)
        self.new_counts, self.reasons, self.noted = Counts, set(), False
        self.start(prepare.BEGINNING, 0)

    def opening(self):
        """The answer to the first request, from the first rows of each file."""
        counts, sample, text, length, examples, tokens = self.new_counts(), None, False, 0, 0, 0
        for index in range(min(SEEN_FILES, len(self.inputs.files))):
            for name, rows in self._chunks([index, 0, 0, None], 0):
                if rows.file == index:  # an empty file has none
                    chunk = prepare.work(name, rows, sample is None)
                    counts.add(chunk.counts)
                    if sample is None and chunk.sample:
                        sample, text, length = chunk.sample, chunk.texts[0], chunk.lengths[0]
                    examples += len(chunk.lengths)
                    tokens += sum(chunk.lengths)
                break
        if counts.rows == 0 and len(self.inputs.files) <= SEEN_FILES:
            prepare.check(counts, self.request)
        prepare.check_ends(counts, self.request)
        return {"examples": examples, "tokens": tokens, "trained": counts.trained, "sample": sample or [], "text": text, "sample_tokens": length,
                "pairs": counts.pairs, "template": self.model.template is not None,
                "chat_template": self.model.template_of_result(counts), "total_bytes": self.inputs.total_bytes}

    def start(self, position, rows):
        # Counts of a whole epoch are reported once.
        self.whole = list(position[:3]) == list(prepare.BEGINNING[:3])
        self.counts, self.examples, self.rows, self.file = self.new_counts(), 0, rows, position[0]
        self.chunks, self.waiting = self._chunks(position, rows), None

    def _chunks(self, position, rows):
        chunks = prepare.chunks_of(self.inputs, self.request["format"], self.model.options, position)
        most = self.request.get("max_rows", 0)
        return prepare.first_rows(chunks, most - rows) if most else chunks

    def next(self):
        """(answer, bytes) that was prepared ahead, or now. Behind an error there is nothing, until the next start."""
        self.ahead()
        answer, payload = self.waiting
        if "error" not in answer:
            self.waiting = None
        return answer, payload

    def ahead(self):
        if self.waiting is None:
            self.waiting = self._made()

    def _made(self):
        try:
            return self._read()
        except (InputError, OSError, ImportError) as error:
            return error_of(error), b""

    def _read(self):
        for name, rows in self.chunks:
            chunk = prepare.work(name, rows, False)
            self.counts.add(chunk.counts)
            self.examples, self.rows, self.file = self.examples + len(chunk.lengths), self.rows + chunk.counts.rows, rows.file
            payload = chunk.tokens + chunk.marks
            return {"lengths": chunk.lengths, "texts": [int(text) for text in chunk.texts], "labels": chunk.labels, "end": rows.end,
                    "rows": self.rows, "done": self.inputs.done_bytes,
                    "notes": self._left_out(chunk.counts), "bytes": len(payload)}, payload
        return {"last": True, "notes": self._end()}, b""

    def _left_out(self, counts):
        """A note for each new reason."""
        notes = []
        for what, (_, place) in counts.skipped.items():
            if what not in self.reasons and len(self.reasons) < MOST_REASONS:
                self.reasons.add(what)
                notes.append(f"a row cannot be used and is left out, as are others for this reason: {what} ({place})")
        return notes

    def _end(self):
        if not self.whole or self.noted:
            return []
        prepare.check(self.counts, self.request)
        self.noted = True
        return prepare.notes_on(self.counts, self.examples, self.model.date(), self.request, self.file)


def error_of(error):
    if isinstance(error, InputError):
        return error.as_json()
    if isinstance(error, ImportError):
        return InputError(f"this Python has no module {error.name!r}", sys.executable,
                          "set LMLAUNCH_PYTHON to an interpreter with requirements.txt installed").as_json()
    return InputError(error.strerror or str(error), error.filename or "", "check the path").as_json()


def reply(stream, request):
    if "start" in request:
        stream.start(request["start"], request["rows"])
        return {}, b""
    return stream.next()


def main():
    stream = None
    for line in sys.stdin:
        request, payload = json.loads(line), b""
        try:
            if stream is None:
                stream = Stream(request)
                answer = stream.opening()
            else:
                answer, payload = reply(stream, request)
        except (InputError, OSError, ImportError) as error:
            answer = error_of(error)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + payload)
        sys.stdout.buffer.flush()
        if stream is None:
            sys.exit(11)
        stream.ahead()


if __name__ == "__main__":
    main()
