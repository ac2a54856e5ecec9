"""Fetches one revision of a model or a data set from the hub into its local cache, in the layout of huggingface_hub. Reads one
JSON request from stdin:

  {"name": "ORG/NAME", "revision": "main", "kind": "model" | "dataset", "only": "all" | "config", "cache": DIR, "endpoint": URL,
   "token": "", "token_from": ""}

(optional: "pause", seconds before the first repetition of a request; "progress", seconds between two lines of progress), and
prints one JSON line: {name, kind, revision: the commit, directory: its snapshot, bytes, fetched_bytes, base: of an adapter its
model, files: [{name, size, hash}]}, or {"error": {exit, area, what, place, next, kept}} with that exit code. Progress goes to
stderr.

The library huggingface_hub is not used for the transfer: it names a file in the cache without verifying its hash, it sends other
requests (telemetry, update checks, a registry of agents), and the internals to replace differ from version to version. Three
addresses are enough: the list of a revision's files with sizes and hashes (/api/models/NAME/revision/REVISION?blobs=true), each
file (/NAME/resolve/COMMIT/FILE), and the target of its redirect.
"""

import errno
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated interpreter omits it

from cache import Cache  # noqa: E402
from choice import chosen  # noqa: E402
from errors import AREA, NO_SPACE, FetchError  # noqa: E402
from hub import Hub  # noqa: E402
from transfer import Progress, Transfer  # noqa: E402


def _base_of(path):
    """The name of an adapter's base model."""
    try:
        with open(path, encoding="utf-8") as file:
            base = json.load(file).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        return ""
    return base if isinstance(base, str) else ""


def fetch(request):
    hub = Hub(request)
    revision = hub.revision()
    cache = Cache(request["cache"], request["kind"], request["name"], revision.commit)
    with cache.lock():
        transfer = Transfer(hub, cache, Progress(request.get("progress", 2)))
        transfer.make_room(chosen(revision, request, None))
        # The list of weights is known once the index has been fetched.
        files = chosen(revision, request, lambda index: transfer.content(index))
        transfer.make_room(files)
        transfer.progress.total = sum(file.size for file in files)
        for file in files:
            transfer.fetch(file)
        cache.publish(files, request["revision"])
        adapter = next((file for file in files if file.name == "adapter_config.json"), None)
        return {"name": request["name"], "kind": request["kind"], "revision": revision.commit, "directory": cache.snapshot,
                "bytes": sum(file.size for file in files), "fetched_bytes": transfer.fetched,
                "base": _base_of(cache.blob(adapter)) if adapter else "",
                "files": [{"name": file.name, "size": file.size, "hash": file.hash} for file in files]}


def main():
    try:
        print(json.dumps(fetch(json.load(sys.stdin))))
        return 0
    except FetchError as error:
        failure = error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        failure = FetchError(NO_SPACE if full else 21, os.strerror(error.errno) if error.errno else str(error), error.filename or "",
                             "free space there, or set HF_HOME to a directory on another disk",
                             "what has been fetched so far: the next start resumes there")
    print(json.dumps({"error": {"area": AREA, **failure.as_json()}}))
    return failure.exit


if __name__ == "__main__":
    sys.exit(main())
