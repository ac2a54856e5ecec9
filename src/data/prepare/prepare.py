"""Tokenises training data into a token file (token_file.h). Reads one JSON request from stdin or from the file named
on the command line:

  {"files": [...], "format": "auto", "model_dir": "...", "loss_on": "completion", "workers": 2, "vocab": 49152, "out": "...", "key": hex}

(vocab: ids must be below it; 0: no matter) writes `out`, and prints one JSON line: {examples, tokens, trained_tokens, dropped,
notes, sample, text: [[first, end], ...] of the examples that are plain text}, or {"error": {area,
what, place, next}} with exit code 11. Progress goes to stderr. Nothing is read but the files named and the model's."""

import ctypes
import json
import os
import signal
import sys
import time
from collections import deque

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter leaves it out

from errors import InputError  # noqa: E402

ROWS_PER_CHUNK = 128
SMALL_BYTES = 1 << 20  # below this, starting worker processes costs more than they save

_model = None  # set before the workers are forked, which inherit it


def _start_worker():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives this process


def _work(rows, want_sample):
    return _model.chunk(rows, want_sample)


def _load_model(request):
    from tokenise import IdsOnly, Model

    directory = request["model_dir"]
    if request["format"] in ("auto", "tokens") and not os.path.isfile(os.path.join(directory, "tokenizer.json")):
        return IdsOnly(request["loss_on"], request.get("vocab", 0))
    return Model(directory, request["loss_on"], request.get("vocab", 0))


def _chunks(inputs, name):
    """Lists of (format, place, row). The first row of a file decides its format."""
    import formats

    chunk, current, detected = [], None, None
    for path, place, row in inputs.rows():
        if path != current:
            current, detected = path, formats.detect(row, place) if name == "auto" else name
        chunk.append((detected, place, row))
        if len(chunk) == ROWS_PER_CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _pool(workers):
    import concurrent.futures
    import multiprocessing

    try:
        return concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker)
    except OSError as error:  # semaphores are files there
        print(f"lmlaunch: note DATA-33: tokenising in one process: /dev/shm cannot be used ({error.strerror})", file=sys.stderr, flush=True)
        return None


def _results(inputs, request):
    """Chunks of tokens in the order of the rows."""
    chunks = _chunks(inputs, request["format"])
    workers = request["workers"]
    pool = None if workers <= 1 or inputs.total_bytes < SMALL_BYTES else _pool(workers)
    if pool is None:
        for number, rows in enumerate(chunks):
            yield _work(rows, number == 0)
        return
    from concurrent.futures.process import BrokenProcessPool

    with pool:
        pool.submit(os.getpid).result()  # forks now, before reading starts any thread
        waiting = deque()
        try:
            for number, rows in enumerate(chunks):
                waiting.append(pool.submit(_work, rows, number == 0))
                if len(waiting) > 4 * workers:  # memory stays bounded when reading is faster than tokenising
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise InputError("a tokenising process died, perhaps for want of memory",
                             next="free memory, or split very long documents") from None
        finally:
            pool.shutdown(cancel_futures=True)


class Progress:
    """A line on stderr every two seconds."""

    def __init__(self, inputs):
        self.inputs, self.start = inputs, time.monotonic()
        self.last = self.start

    def show(self, writer):
        now = time.monotonic()
        if now - self.last < 2:
            return
        self.last = now
        share = 100 * self.inputs.done_bytes / max(self.inputs.total_bytes, 1)
        print(f"tokenising: {share:.0f} % read, {writer.examples} examples, {writer.tokens / 1e6:.1f} M tokens, "
              f"{writer.tokens / (now - self.start) / 1e3:.0f} k tokens/s", file=sys.stderr, flush=True)


def _notes(dropped, endless, without_bos, examples):
    notes = []
    if dropped:
        notes.append(f"{dropped} of {examples + dropped} examples have nothing to learn and are dropped")
    if endless:
        notes.append(f"{endless} of {examples} examples end without an end token: the model will not learn to stop")
    if without_bos:
        notes.append("the chat template writes no begin token although the tokenizer adds one to plain text")
    return notes


def _add_texts(ranges, first, texts):
    """`texts` are of the examples from `first` on."""
    for index, text in enumerate(texts, first):
        if text and ranges and ranges[-1][1] == index:
            ranges[-1][1] = index + 1
        elif text:
            ranges.append([index, index + 1])


def prepare(request):
    global _model
    from sources import Inputs
    from token_file import TokenFileWriter

    inputs = Inputs(request["files"])
    # Workers tokenise on one thread each; alone, the tokenizer uses all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if inputs.total_bytes < SMALL_BYTES else "false"
    _model = _load_model(request)
    writer = TokenFileWriter(request["out"], _model.vocab(), bytes.fromhex(request["key"]))
    progress, sample, dropped, endless, without_bos = Progress(inputs), None, 0, 0, 0
    texts = []
    for chunk in _results(inputs, request):
        _add_texts(texts, writer.examples, chunk.texts)
        writer.add(chunk.lengths, chunk.tokens, chunk.marks, chunk.trained)
        sample = sample or chunk.sample
        dropped, endless = dropped + chunk.dropped, endless + chunk.endless
        without_bos += chunk.without_bos
        progress.show(writer)
    if writer.examples + dropped == 0:
        raise InputError("the data is empty", ", ".join(request["files"][:3]), "name files that hold examples")
    summary = {"examples": writer.examples, "tokens": writer.tokens, "trained_tokens": writer.trained,
               "dropped": dropped, "notes": _notes(dropped, endless, without_bos, writer.examples),
               "sample": sample or [], "text": texts}
    writer.finish(summary)
    return summary


def main():
    try:
        with open(sys.argv[1], encoding="utf-8") if len(sys.argv) > 1 else sys.stdin as file:
            request = json.load(file)
        print(json.dumps(prepare(request)))
        return 0
    except InputError as error:
        print(json.dumps(error.as_json()))
    except ModuleNotFoundError as error:
        missing = InputError(f"this Python has no module {error.name!r}", sys.executable,
                             "set LMLAUNCH_PYTHON to an interpreter with requirements.txt installed")
        print(json.dumps(missing.as_json()))
    except OSError as error:
        print(json.dumps(InputError(error.strerror or str(error), error.filename or "",
                                    "check the path and the space on its disk").as_json()))
    return 11


if __name__ == "__main__":
    sys.exit(main())
