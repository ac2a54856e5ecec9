"""Writes the token cache; its grammar stands in token_file.h."""

import array
import json
import os
import struct
import tempfile
import zlib

VERSION = 2
HEADER = struct.Struct("<8sII6Q16s8xI")
CHUNK = 65536


class TokenFileWriter:
    """Streams: memory holds the offsets only."""

    def __init__(self, path, vocab, key):
        self.path, self.vocab, self.key = path, vocab, key
        # Files are read with the user's rights alone: they hold the training text.
        self.file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        self.file.write(bytes(HEADER.size + 4))
        self.marks = tempfile.TemporaryFile(dir=os.path.dirname(path) or ".")
        self.offsets = array.array("Q", [0])
        self.trained = 0
        self.sums, self.crc, self.summed = array.array("I"), 0, 0  # of whole chunks; of the one at hand, and its bytes

    def add(self, lengths, tokens, marks, trained):
        """Several examples at once: their lengths, int32 tokens and uint8 marks as bytes, and the sum of the marks."""
        for length in lengths:
            self.offsets.append(self.offsets[-1] + length)
        self._write(tokens)
        self.marks.write(marks)
        self.trained += trained

    @property
    def examples(self):
        return len(self.offsets) - 1

    @property
    def tokens(self):
        return self.offsets[-1]

    def _write(self, data):
        """Of the body: every byte goes through a checksum."""
        self.file.write(data)
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

    def finish(self, summary):
        self.marks.seek(0)
        while marks := self.marks.read(1 << 20):
            self._write(marks)
        self.marks.close()
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
