"""Moves files into the cache. Existing files, and partial ones of a killed process, are read and verified like bytes from the
network: a file gets its name when its size and its hash match the hub's list."""

import hashlib
import http.client
import os
import re
import sys
import time

from errors import INTEGRITY, NO_SPACE, FetchError
from hub import Retry

PIECE = 1 << 20
SPARE = 64 << 20  # bytes that stay free


class Progress:
    """A line on stderr every `seconds`."""

    def __init__(self, seconds):
        self.seconds, self.total, self.done, self.moved = seconds, 0, 0, 0
        self.start = self.last = time.monotonic()

    def add(self, size, moved):
        self.done += size
        self.moved += size if moved else 0
        now = time.monotonic()
        if now - self.last < self.seconds or self.total == 0:
            return
        self.last = now
        rate = self.moved / (now - self.start)
        left = f", {_time((self.total - self.done) / rate)} left" if rate > 0 else ""
        print(f"fetching: {100 * self.done / max(self.total, 1):.0f} % of {_size(self.total)}, {_size(rate)}/s{left}", file=sys.stderr, flush=True)


def _size(count):
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _time(seconds):
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Content:
    """The hash of a file as it grows."""

    def __init__(self, file):
        self.file, self.size = file, 0
        self.hash = hashlib.sha256() if len(file.hash) == 64 else hashlib.sha1(b"blob %d\0" % file.size)

    def add(self, piece):
        self.size += len(piece)
        self.hash.update(piece)

    def whole(self):
        return self.size == self.file.size and self.hash.hexdigest() == self.file.hash


def _mismatch(file, what):
    return FetchError(INTEGRITY, what, file.name, "fetch it again later; if it stays so, tell the hub", "the files that were whole")


class Transfer:
    def __init__(self, hub, cache, progress):
        self.hub, self.cache, self.progress = hub, cache, progress
        self.fetched = 0    # bytes over the network
        self.done = set()   # hashes of complete files, verified in this process

    def make_room(self, files):
        """Raises an error before the fetch if the files do not fit."""
        missing = sum(max(file.size - self._there(file), 0) for file in files if file.hash not in self.done)
        disk = os.statvfs(self.cache.blobs)
        free = disk.f_bavail * disk.f_frsize
        if missing + SPARE > free and missing > 0:
            raise FetchError(NO_SPACE, f"{_size(missing)} are to be fetched, and {_size(free)} are free", self.cache.blobs,
                             "free space there, or set HF_HOME to a directory on another disk", "nothing was fetched")

    def content(self, file):
        self.fetch(file)
        with open(self.cache.blob(file), "rb") as blob:
            return blob.read()

    def fetch(self, file):
        if file.hash in self.done:
            return
        if not self._named_already(file):
            partial = self.cache.partial(file)
            resumed = self._there(file) > 0
            content = self.hub.repeat(lambda: self._go_on(file, partial), lambda: self.fetched)
            if not content.whole() and resumed:  # the partial file may be damaged: a power cut leaves zeros
                os.unlink(partial)
                self.progress.done -= content.size
                content = self.hub.repeat(lambda: self._go_on(file, partial), lambda: self.fetched)
            if not content.whole():
                os.unlink(partial)
                raise _mismatch(file, f"the bytes that came are not those of the hub's list: hash {content.hash.hexdigest()}, not {file.hash}")
            self.cache.name_blob(file)
        self.done.add(file.hash)

    def _there(self, file):
        for path in (self.cache.blob(file), self.cache.partial(file)):
            if os.path.isfile(path):
                return os.path.getsize(path)
        return 0

    def _named_already(self, file):
        """Checks a cached file, possibly of another program that did not verify it."""
        path = self.cache.blob(file)
        if not os.path.isfile(path):
            return False
        content = Content(file)
        if os.path.getsize(path) == file.size:
            self._read(path, content)
        if content.whole():
            return True
        self.progress.done -= content.size
        print(f"lmlaunch: warning HUB-37: {file.name} in the cache is damaged; fetching it again", file=sys.stderr, flush=True)
        os.unlink(path)
        return False

    def _read(self, path, content):
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                content.add(piece)
                self.progress.add(len(piece), False)

    def _go_on(self, file, path):
        """Raises Retry if the transfer is interrupted; received bytes stay."""
        content, before = Content(file), self.progress.done
        if os.path.exists(path) and os.path.getsize(path) > file.size:
            os.unlink(path)
        try:
            if os.path.exists(path):
                self._read(path, content)
            if content.size < file.size or not os.path.exists(path):
                content = self._receive(file, path, content)
        except Retry:
            self.progress.done = before
            raise
        return content

    def _receive(self, file, path, content):
        url = self.hub.content_url(self.cache.commit, file.name)
        headers = {"Range": f"bytes={content.size}-"} if content.size else {}
        with self.hub.open(url, headers) as answer:
            if content.size and not self._goes_on(answer, content.size):
                self.progress.done -= content.size
                content = Content(file)
            length = answer.headers.get("Content-Length")
            if length is not None and content.size + int(length) != file.size:
                raise _mismatch(file, f"the hub sends {content.size + int(length)} bytes, its list says {file.size}")
            with open(path, "ab" if content.size else "wb", buffering=0) as out:
                self._pour(answer, out, content)
                os.fsync(out.fileno())
        return content

    @staticmethod
    def _goes_on(answer, offset):
        """Whether the hub sends the requested range; a whole file (200) is read from its beginning."""
        match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
        return answer.status == 206 and match is not None and int(match[1]) == offset

    def _pour(self, answer, out, content):
        file = content.file
        while True:
            try:
                piece = answer.read1(PIECE)
            except (OSError, http.client.HTTPException) as error:
                raise Retry(f"the transfer of {file.name} was cut: {error or type(error).__name__}") from None
            if not piece:
                break
            if content.size + len(piece) > file.size:
                os.unlink(out.name)
                raise _mismatch(file, f"the hub sends more than the {file.size} bytes that its list says")
            view = memoryview(piece)
            while view:
                view = view[out.write(view):]
            content.add(piece)
            self.fetched += len(piece)
            self.progress.add(len(piece), True)
        if content.size < file.size:
            raise Retry(f"the transfer of {file.name} was cut after {content.size} of {file.size} bytes")
