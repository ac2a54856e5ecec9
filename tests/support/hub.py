"""A hub on the loopback: the three addresses that a fetch uses, with the faults that a test asks for. Large files are redirected
to a second server, as the real one's are; both write down what they were asked."""

import hashlib
import json
import random
import re
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

LARGE = (".safetensors", ".parquet")
PIECE = 16384


def blob_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def tiny_model(size=1_500_000, seed=1):
    """Files of a repository: as many bytes as it takes for a transfer to be cut, of no model."""
    noise = random.Random(seed)
    parts = {f"model-{i:05}-of-00002.safetensors": noise.randbytes(size // 2 + i) for i in (1, 2)}
    index = {"metadata": {}, "weight_map": {f"tensor.{i}": name for i, name in enumerate(parts)}}
    return {**parts, "model.safetensors.index.json": json.dumps(index).encode(), "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": noise.randbytes(200_000), "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}",
            "README.md": b"not wanted", "pytorch_model.bin": b"pickled", "consolidated.safetensors": b"not wanted",
            "original/params.json": b"{}", "additional_chat_templates/tool.jinja": b"{{ tools }}", "../escape.json": b"{}"}


class Hub:
    """`files`: {"ORG/NAME" or "datasets/ORG/NAME": {"main": {file: bytes}, other revisions}}."""

    def __init__(self, files):
        self.repositories = files
        self.commits = {}  # (repository, revision) -> commit
        for name, revisions in files.items():
            for revision, content in revisions.items():
                self.commits[name, revision] = hashlib.sha1(repr((name, sorted(content.items()))).encode()).hexdigest()
        self.log = []            # (server, path, headers)
        self.sent = 0            # bytes of content
        self.on_piece = lambda: None
        self.fails = {}          # regex of a path -> [status, ...], each once (None: not yet); "-": for ever
        self.headers = {}        # of failures
        self.cuts = []           # bytes after which a transfer of more than that is cut, each once
        self.token = None        # without this one: 401
        self.refused = False     # with it: 403
        self.lies = {}           # file -> its size in the list
        self.wrong = set()       # files whose content has another byte
        self.ignores_ranges = False
        self.longer = 0          # bytes that follow the content, without a Content-Length
        self.location = None     # where large files are redirected instead

    # what is asked of a server; `handler` answers
    def answer(self, handler, server):
        path = unquote(handler.path)
        self.log.append((server, path, dict(handler.headers)))
        for pattern, codes in self.fails.items():
            if re.search(pattern, path) and codes:
                code = codes[0] if codes[-1] == "-" else codes.pop(0)
                if code:
                    return self.refuse(handler, code, self.headers)
        if server == "content":
            return self.content(handler, *self.find(path))
        given = handler.headers.get("Authorization")
        if self.token and given != f"Bearer {self.token}":
            return self.refuse(handler, 401, {"X-Error-Code": "GatedRepo"})
        if self.token and self.refused:
            return self.refuse(handler, 403, {"X-Error-Code": "GatedRepo"})
        if match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/(.+)\?blobs=true", path):
            return self.list(handler, ("datasets/" if match[1] == "datasets" else "") + match[2], match[3])
        found = self.find(path)
        if found is None:
            return self.refuse(handler, 404, {"X-Error-Code": "EntryNotFound"})
        if found[0].endswith(LARGE):
            handler.send_response(302)
            handler.send_header("Location", self.location or self.other.address + handler.path)
            handler.send_header("Content-Length", "0")
            return handler.end_headers()
        return self.content(handler, *found)

    def list(self, handler, name, revision):
        asked = self.commits.get((name, revision), revision)
        known = [r for (n, r), commit in self.commits.items() if n == name and commit == asked]
        if not known:
            return self.refuse(handler, 404, {"X-Error-Code": "RevisionNotFound" if name in self.repositories else "RepoNotFound"})
        entries = []
        for file, content in self.repositories[name][known[0]].items():
            size = self.lies.get(file, len(content))
            large = {"lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 130}} if file.endswith(LARGE) else {}
            entries.append({"rfilename": file, "size": size, "blobId": blob_hash(content), **large})
        text = json.dumps({"id": name, "sha": asked, "siblings": entries}).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def find(self, path):
        match = re.fullmatch(r"/(.+)/resolve/([0-9a-f]{40})/(.+)", path)
        for (name, revision), commit in self.commits.items():
            if match and (name, commit) == (match[1], match[2]) and match[3] in self.repositories[name][revision]:
                return match[3], self.repositories[name][revision][match[3]]
        return None

    def content(self, handler, file, content):
        if file in self.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        start = int(asked[1]) if asked and not self.ignores_ranges else 0
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.longer:
            content += bytes(self.longer)
        else:
            handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        end = start + self.cuts.pop(0) if self.cuts and start + self.cuts[0] < len(content) else len(content)
        for at in range(start, min(end, len(content)), PIECE):
            piece = content[at:min(at + PIECE, end)]
            handler.wfile.write(piece)
            self.sent += len(piece)
            self.on_piece()
        if end < len(content):
            handler.connection.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def refuse(handler, status, headers):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def asked(self, pattern):
        return [path for _, path, _ in self.log if re.search(pattern, path)]

    def starts(self, file):
        """The first bytes that were asked for of a file, in order."""
        return [int(re.search(r"\d+", headers.get("Range", "0"))[0]) for server, path, headers in self.log
                if path.endswith("/" + file) and (server == "content" or not file.endswith(LARGE))]


@contextmanager
def serving(files):
    """The hub, with `address` of its first server."""
    hub = Hub(files)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # of a client that was killed

    servers = []
    for name in ("hub", "content"):
        class Handler(BaseHTTPRequestHandler):
            server_name = name

            def setup(self):
                self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE)
                super().setup()

            def do_GET(self):
                hub.answer(self, self.server_name)

            def log_message(self, *_):
                pass

        server = Server(("127.0.0.1", 0), Handler)
        server.address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
    hub.address, hub.other = servers[0].address, servers[1]
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
