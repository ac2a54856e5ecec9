"""Writes the token cache; token_file.h has its grammar. Beside an unfinished file are OUT.marks, OUT.offsets and OUT.state, which
has the valid size of each: a second writer resumes from there."""

import array
import json
import os
import struct
import zlib

VERSION = 2
HEADER = struct.Struct("<8sII6Q16s8xI")
CHUNK = 65536
BESIDE = (".marks", ".offsets", ".state")


class TokenFileWriter:
    """Streams: only the offsets are in memory."""

    def __init__(self, path, vocab, key):
        self.path, self.vocab, self.key = path, vocab, key
        self.offsets = array.array("Q", [0])
        self.trained = 0
        self.sums, self.crc, self.summed = array.array("I"), 0, 0  # of complete chunks; of the current one, and its bytes
        self.marks_crc = self.offsets_crc = 0                      # of the files beside
        self.saved_offsets = 0
        self.went_on = self._continue()  # save()'s argument, or None
        if self.went_on is None:
            self.file, self.marks, self.offsets_file = (_create(path + suffix) for suffix in ("", ".marks", ".offsets"))
            self.file.write(bytes(HEADER.size + 4))

    def add(self, lengths, tokens, marks, trained):
        """Several examples at once: their lengths, int32 tokens and uint8 marks as bytes, and the sum of the marks."""
        for length in lengths:
            self.offsets.append(self.offsets[-1] + length)
        self._write(tokens)
        self.marks.write(marks)
        self.marks_crc = zlib.crc32(marks, self.marks_crc)
        self.trained += trained

    @property
    def examples(self):
        return len(self.offsets) - 1

    @property
    def tokens(self):
        return self.offsets[-1]

    def _write(self, data):
        """Writes to the body and updates the checksums."""
        self.file.write(data)
        self._sum(data)

    def _sum(self, data):
        rest = memoryview(data).cast("B")
        while rest:
            part = rest[:CHUNK - self.summed]
            self.crc, self.summed = zlib.crc32(part, self.crc), self.summed + len(part)
            rest = rest[len(part):]
            if self.summed == CHUNK:
                self._end_chunk()

    def _end_chunk(self):
        self.sums.append(self.crc)
        self.crc = self.summed = 0

    # ---- going on ---------------------------------------------------------------------------------------------------

    def save(self, more):
        """Makes the data so far, with `more` (JSON), survive a kill of this process."""
        new = self.offsets[1 + self.saved_offsets:].tobytes()
        self.offsets_file.write(new)
        self.offsets_crc, self.saved_offsets = zlib.crc32(new, self.offsets_crc), self.examples
        for file in (self.file, self.marks, self.offsets_file):
            file.flush()
            os.fsync(file.fileno())
        state = {"version": VERSION, "key": self.key.hex(), "vocab": self.vocab, "tokens": self.tokens,
                 "examples": self.examples, "trained": self.trained, "sums": zlib.crc32(self.sums.tobytes(), self.crc),
                 "marks": self.marks_crc, "offsets": self.offsets_crc, "more": more}
        with _create(self.path + ".state.new") as file:
            file.write(json.dumps(state).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path + ".state.new", self.path + ".state")

    def _continue(self):
        """Resumes from an earlier process's saved state if it is complete and intact; else None."""
        try:
            with open(self.path + ".state", "rb") as file:
                state = json.load(file)
            if (state["version"], state["key"], state["vocab"]) != (VERSION, self.key.hex(), self.vocab):
                return None
            self.offsets.frombytes(_read(self.path + ".offsets", 8 * state["examples"]))
            marks_crc = _crc(self.path + ".marks", state["tokens"])
            with open(self.path, "rb") as file:
                file.seek(HEADER.size + 4)
                left = 4 * state["tokens"]
                while left and (data := file.read(min(left, 1 << 20))):
                    self._sum(data)
                    left -= len(data)
            self.offsets_crc = zlib.crc32(self.offsets[1:].tobytes())
            good = (self.tokens, self.offsets_crc, marks_crc, zlib.crc32(self.sums.tobytes(), self.crc), left) == (
                state["tokens"], state["offsets"], state["marks"], state["sums"], 0)
        except (OSError, ValueError, KeyError, TypeError):
            good = False
        if not good:
            self.offsets, self.sums, self.crc, self.summed = array.array("Q", [0]), array.array("I"), 0, 0
            self.offsets_crc = 0
            return None
        self.marks_crc, self.trained, self.saved_offsets = marks_crc, state["trained"], self.examples
        self.file = _append(self.path, HEADER.size + 4 + 4 * self.tokens)
        self.marks = _append(self.path + ".marks", self.tokens)
        self.offsets_file = _append(self.path + ".offsets", 8 * self.examples)
        return state["more"]

    # ---- the end ----------------------------------------------------------------------------------------------------

    def finish(self, summary):
        self.marks.close()
        self.offsets_file.close()
        with open(self.path + ".marks", "rb") as file:
            while marks := file.read(1 << 20):
                self._write(marks)
        self._write(bytes(-self.file.tell() % 8))
        self._write(self.offsets.tobytes())
        text = json.dumps(summary, ensure_ascii=False).encode()
        self._write(text)
        if self.summed:
            self._end_chunk()
        sums = self.sums.tobytes()
        self.file.write(sums)
        header = HEADER.pack(b"LMTOKENS", VERSION, HEADER.size + 4, self.vocab, self.tokens, self.trained,
                             self.examples, len(text), self.file.tell(), self.key, zlib.crc32(sums))
        self.file.seek(0)
        self.file.write(header + struct.pack("<I", zlib.crc32(header)))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        for suffix in BESIDE:
            if os.path.exists(self.path + suffix):
                os.unlink(self.path + suffix)


def _create(path):
    # Files are readable by this user only: they contain the training text.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _append(path, size):
    """Drops bytes after `size`: a killed process may have written them only in part."""
    os.truncate(path, size)
    file = open(path, "r+b")
    file.seek(size)
    return file


def _read(path, size):
    with open(path, "rb") as file:
        return file.read(size)


def _crc(path, size):
    crc = 0
    with open(path, "rb") as file:
        while size and (data := file.read(min(size, 1 << 20))):
            crc, size = zlib.crc32(data, crc), size - len(data)
    return crc if size == 0 else None
