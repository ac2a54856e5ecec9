"""Tokenises training data into a token file (token_file.h). Reads one JSON request from stdin or from the file named
on the command line:

  {"files": [...], "format": "auto", "model_dir": "...", "loss_on": "completion", "workers": 2, "vocab": 49152, "out": "...",
   "key": hex}

(vocab: ids must be below it; 0: no matter; further keys are those of tokenise.Options) writes `out`, and prints one JSON
line: {examples, tokens, trained_tokens, dropped, notes, sample (text of each token), chat_template, files: how many examples each of them gave,
text: [[first, end], ...] of the examples that are plain text, pairs: how many rows are a plain prompt and completion, choices: how many are
choices of which the right ending is trained, groups: of scored rows of choices [right, characters of each ending] each, labels: of
texts that are scored as a whole the numbers of all labels, template: whether there is a chat template}, or {"error": {area, what, place, next}} with exit code 11.
Progress goes to stderr. Reads only the given files and the model's. A request that was interrupted, by a killed process or SIGTERM,
is resumed from files beside `out` (token_file.py)."""

import ctypes
import json
import os
import signal
import sys
import time
from collections import deque

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter leaves it out

from errors import InputError  # noqa: E402

SMALL_BYTES = 1 << 20  # below this, starting worker processes costs more than they save
KEPT = "what is tokenised so far: the next start resumes there"
SAVE_SECONDS = 10      # between two points from which a killed process resumes

BEGINNING = [0, 0, 0, None]

_model = None  # set before the workers are forked, which inherit it


def _start_worker():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: workers do not outlive this process


def work(name, rows, want_sample):
    if _model.options.objective:
        import judged

        return judged.chunk(_model, name, rows, want_sample)
    if _model.options.score:
        import scored

        return scored.chunk(_model, name, rows, want_sample)
    return _model.chunk(name, rows, want_sample)


def load_model(request):
    """The model that this process and its workers tokenise with. Sets the request's format where the objective decides it."""
    global _model
    if objective := request.get("objective"):
        import judged

        request.update(format=judged.FORMATS[objective], loss_on="all")
    _model = _load_model(request)
    return _model


def _load_model(request):
    from tokenise import IdsOnly, Model, Options

    directory = request["model_dir"]
    options = Options(**{key: request[key] for key in Options.__dataclass_fields__ if key in request})
    options.detected = request["format"] == "auto"
    if request["format"] in ("auto", "tokens") and not options.score and not os.path.isfile(os.path.join(directory, "tokenizer.json")):
        return IdsOnly(request["loss_on"], request.get("vocab", 0), options)
    return Model(directory, request["loss_on"], request.get("vocab", 0), options)


def chunks_of(inputs, name, options, start):
    """(format, Rows). The first row of a file that can be read decides its format. Reading resumes at `start`: Rows.end and the
    format of that file."""
    import kinds
    from sources import parsed

    def detect(rows):
        for number, row in rows.rows:
            place = rows.place(number)
            try:
                row = kinds.renamed(parsed(row, place), options.columns, place)
            except InputError:
                if options.bad_rows == "stop":
                    raise
                continue
            return kinds.detect(row, place, options.columns)
        return None

    current, detected = start[0], start[3]
    for rows in inputs.chunks(start[:3]):
        if rows.file != current or detected is None:
            current, detected = rows.file, detect(rows) if name == "auto" else name
        rows.end.append(detected)
        # Without a format: no row is usable.
        yield detected or "text", rows


def first_rows(chunks, left):
    """The chunks of chunks_of with the first `left` rows."""
    if left <= 0:
        return
    for name, rows in chunks:
        rows.rows = rows.rows[:left]
        left -= len(rows.rows)
        yield name, rows
        if left == 0:  # nothing behind them is read
            return


def _pool(workers):
    import concurrent.futures
    import multiprocessing

    try:
        return concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker)
    except OSError as error:  # semaphores are files in /dev/shm
        print(f"lmlaunch: note DATA-33: tokenising in one process: /dev/shm cannot be used ({error.strerror})", file=sys.stderr, flush=True)
        return None


def _results(inputs, request, start, done):
    """(position to resume at, Chunk), in the order of the rows. `done`: the number of rows before `start`."""
    chunks = chunks_of(inputs, request["format"], _model.options, start)
    if most := request.get("max_rows", 0):
        chunks = first_rows(chunks, most - done)
    workers, first = request["workers"], start == BEGINNING
    pool = None if workers <= 1 or inputs.total_bytes < SMALL_BYTES else _pool(workers)
    if pool is None:
        for number, (name, rows) in enumerate(chunks):
            yield rows.end, work(name, rows, first and number == 0)
        return
    from concurrent.futures.process import BrokenProcessPool

    with pool:
        pool.submit(os.getpid).result()  # forks now, before reading starts any thread
        waiting = deque()
        try:
            for number, (name, rows) in enumerate(chunks):
                waiting.append((rows.end, pool.submit(work, name, rows, first and number == 0)))
                if len(waiting) > 4 * workers:  # memory stays bounded when reading is faster than tokenising
                    end, future = waiting.popleft()
                    yield end, future.result()
            while waiting:
                end, future = waiting.popleft()
                yield end, future.result()
        except BrokenProcessPool:
            raise InputError("a tokenising process died, perhaps because memory ran out",
                             next="free memory, or split very long documents", kept=KEPT) from None
        finally:
            pool.shutdown(cancel_futures=True)


class Progress:
    """A line on stderr every two seconds."""

    def __init__(self, inputs, tokens):
        self.inputs, self.start, self.tokens_before = inputs, time.monotonic(), tokens
        self.last, self.read_before = self.start, None

    def show(self, writer):
        now = time.monotonic()
        if self.read_before is None:  # reading has reached its start position
            self.read_before = self.inputs.done_bytes
        if now - self.last < 2:
            return
        self.last = now
        total, done = max(self.inputs.total_bytes, 1), self.inputs.done_bytes
        left = (now - self.start) * (total - done) / max(done - self.read_before, 1)
        print(f"tokenising: {100 * done / total:.0f} % read, {writer.examples} examples, {writer.tokens / 1e6:.1f} M tokens, "
              f"{(writer.tokens - self.tokens_before) / (now - self.start) / 1e3:.0f} k tokens/s, "
              f"{_time(left)} left", file=sys.stderr, flush=True)


def _time(seconds):
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def notes_on(counts, examples, date, request, last_file):
    notes = []
    if counts.rows == request.get("max_rows", 0):
        files = request["files"]
        left = len(files) - last_file - 1
        unread = f"; files that are not read: {left} of {len(files)}" if left else ""
        notes.append(f"data.max_rows = {counts.rows}: only the first {counts.rows} rows are used{unread}")
    left_out = sum(count for count, _ in counts.skipped.values())
    if left_out:
        reasons = "; ".join(f"{count} x {what} (first: {place})" for what, (count, place) in counts.skipped.items())
        notes.append(f"{left_out} of {counts.rows} rows cannot be used and are left out: {reasons}")
    if counts.dropped:
        notes.append(f"{counts.dropped} of {examples + counts.dropped} examples have nothing to learn and are dropped")
    if counts.empty:
        notes.append(f"{counts.empty} of {examples} examples have an empty answer (first: {counts.first_empty}): "
                     "from these the model learns empty answers")
    if counts.shared:
        notes.append(f"in {counts.shared} of {examples} examples the end of a prompt and the beginning of its answer are one token (first: "
                     f"{counts.first_shared}), which is trained, and which no prompt will have: begin answers with a blank or a line break, "
                     "or prompts end with another character")
    if counts.endless:
        notes.append(f"{counts.endless} of {examples} examples end without an end token: the model will not learn to stop")
    if counts.without_bos:
        notes.append("the chat template writes no begin token although the tokenizer adds one to plain text")
    if counts.untemplated:
        notes.append("the model has no chat template: conversations are formatted in Alpaca style (### Instruction, "
                     "### Response), and the trained model gets a chat_template.jinja that does so")
    if counts.dated:
        notes.append(f"the chat template {counts.dated} uses the date: it gets {date}, the day of this run's first start")
    if counts.unread:
        notes.append("columns that are not read: " + ", ".join(f"{column} ({rows} of {counts.rows} rows)" for column, rows in counts.unread.items()))
    return notes


def check(counts, request):
    left_out = sum(count for count, _ in counts.skipped.values())
    if counts.rows == 0:
        raise InputError("the data is empty", ", ".join(request["files"][:3]), "name files that hold examples")
    if left_out >= counts.rows:
        what, (_, place) = next(iter(counts.skipped.items()))
        raise InputError(f"not one of {counts.rows} rows can be used: {what}", place, "correct data.format or the files")
    check_ends(counts, request)


def check_ends(counts, request):
    if request["loss_on"] == "completion" and counts.answered and counts.endless == counts.answered:
        raise InputError(
            "no answer ends with an end token: a model trained on these would never stop", ", ".join(request["files"][:3]),
            "let the chat template write one after each answer, or name one as eos_token in tokenizer_config.json", "DATA-23")


def _add_texts(ranges, first, texts):
    """`texts`: flags of the examples from `first` on."""
    for index, text in enumerate(texts, first):
        if text and ranges and ranges[-1][1] == index:
            ranges[-1][1] = index + 1
        elif text:
            ranges.append([index, index + 1])


def prepare(request):
    from sources import Inputs
    import scored
    from token_file import TokenFileWriter
    from tokenise import Counts

    request = dict(request)
    inputs = Inputs(request["files"])
    # Workers tokenise on one thread each; alone, the tokenizer uses all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if inputs.total_bytes < SMALL_BYTES else "false"
    load_model(request)
    writer = TokenFileWriter(request["out"], _model.vocab(), bytes.fromhex(request["key"]))
    state = writer.went_on or {"end": BEGINNING, "sample": None, "texts": [], "groups": [], "labels": [],
                               "files": [0] * len(inputs.files), "counts": {}}
    counts = Counts(**state["counts"])
    if writer.went_on:
        print(f"lmlaunch: note DATA-24: tokenising resumes after {writer.examples} examples", file=sys.stderr, flush=True)
    progress, saved = Progress(inputs, writer.tokens), time.monotonic()
    for end, chunk in _results(inputs, request, state["end"], counts.rows):
        _add_texts(state["texts"], writer.examples, chunk.texts)
        state["groups"] += chunk.groups
        state["labels"] += chunk.labels
        if chunk.groups:
            scored.check_size(writer.examples + len(chunk.lengths), ", ".join(request["files"][:3]))
        writer.add(chunk.lengths, chunk.tokens, chunk.marks, chunk.counts.trained)
        counts.add(chunk.counts)
        state["files"][end[0]] += len(chunk.lengths)
        state["end"], state["sample"] = end, state["sample"] or chunk.sample
        progress.show(writer)
        if time.monotonic() - saved >= request.get("save_seconds", SAVE_SECONDS):
            writer.save({**state, "counts": vars(counts)})
            saved = time.monotonic()
    check(counts, request)
    summary = {"examples": writer.examples, "tokens": writer.tokens, "trained_tokens": writer.trained,
               "dropped": counts.dropped, "notes": notes_on(counts, writer.examples, _model.date(), request, state["end"][0]), "sample": state["sample"] or [],
               "text": state["texts"], "files": state["files"], "chat_template": _model.template_of_result(counts),
               "pairs": counts.pairs, "choices": counts.choices, "groups": state["groups"], "labels": state["labels"], "template": _model.template is not None}
    writer.finish(summary)
    return summary


def main():
    try:
        with open(sys.argv[1], encoding="utf-8") if len(sys.argv) > 1 else sys.stdin as file:
            request = json.load(file)
        made = prepare(request)
        print(json.dumps({key: made[key] for key in made if key not in ("groups", "labels")}))  # which may be megabytes
        return 0
    except InputError as error:
        print(json.dumps(error.as_json()))
    except ModuleNotFoundError as error:
        missing = InputError(f"this Python has no module {error.name!r}", sys.executable,
                             "set LMLAUNCH_PYTHON to an interpreter with requirements.txt installed")
        print(json.dumps(missing.as_json()))
    except OSError as error:
        print(json.dumps(InputError(error.strerror or str(error), error.filename or "",
                                    "check the path and the space on its disk", kept=KEPT).as_json()))
    return 11


if __name__ == "__main__":
    sys.exit(main())
