"""The local cache as huggingface_hub lays it out: REPOSITORY/blobs/HASH holds a file, snapshots/COMMIT/NAME links to it,
refs/REVISION holds the commit that a branch or a tag was at. A file gets its name once it is complete, verified and durable; in a
snapshot config.json gets its name last, and then the ref is written."""

import contextlib
import fcntl
import os
import re
import sys

COMMIT = re.compile(r"[0-9a-f]{40}")
PARTIAL = ".lmlaunch.incomplete"  # not the library's suffix: two programs never write to one file


def sync_directory(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Cache:
    def __init__(self, hub_cache, kind, name, commit):
        folder = f"{kind}s--{name.replace('/', '--')}"
        self.repository = os.path.join(hub_cache, folder)
        self.snapshot = os.path.join(self.repository, "snapshots", commit)
        self.blobs = os.path.join(self.repository, "blobs")
        self.locks = os.path.join(hub_cache, ".locks", folder)
        self.commit = commit
        os.makedirs(self.blobs, exist_ok=True)

    def blob(self, file):
        return os.path.join(self.blobs, file.hash)

    def partial(self, file):
        return self.blob(file) + PARTIAL

    @contextlib.contextmanager
    def lock(self):
        """A lock: one of several fetches of a repository works, and the others wait for it."""
        os.makedirs(self.locks, exist_ok=True)
        with open(os.path.join(self.locks, "lmlaunch.lock"), "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("lmlaunch: note HUB-37: another process fetches the same repository; waiting for it", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def name_blob(self, file):
        os.replace(self.partial(file), self.blob(file))
        sync_directory(self.blobs)

    def publish(self, files, revision):
        folders = {self.snapshot}
        for file in files:  # in order: the file that makes the directory a model comes last
            path = os.path.join(self.snapshot, file.name)
            folders.add(os.path.dirname(path))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._replace(path, lambda new, at=path, to=self.blob(file): os.symlink(os.path.relpath(to, os.path.dirname(at)), new))
        for folder in folders | {os.path.dirname(self.snapshot), self.repository}:
            sync_directory(folder)
        if not COMMIT.fullmatch(revision):
            ref = os.path.join(self.repository, "refs", revision)
            os.makedirs(os.path.dirname(ref), exist_ok=True)
            self._replace(ref, self._write_ref)
            sync_directory(os.path.dirname(ref))
        for name in os.listdir(self.blobs):  # partial files that this revision does not have
            if name.endswith(PARTIAL):
                os.unlink(os.path.join(self.blobs, name))

    def _write_ref(self, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.commit)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _replace(path, make):
        new = os.path.join(os.path.dirname(path), f".lmlaunch-{os.path.basename(path)}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)  # left by a killed process
        make(new)
        os.replace(new, path)
