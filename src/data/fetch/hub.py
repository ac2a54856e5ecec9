"""Requests to the hub. The token is sent only to the hub: not on a redirect to another host."""

import email.utils
import http.client
import json
import re
import socket
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from errors import INPUT, INTEGRITY, IO, FetchError

TIMEOUT = 30        # seconds without a byte
MOST_TRIES = 5      # per request, without progress in between
MOST_PAUSE = 60     # seconds
LONGEST_WAIT = 300  # seconds, the limit of the hub's Retry-After
MOST_REDIRECTS = 5
MOST_LIST_BYTES = 64 << 20
KEPT = "what has been fetched so far: the next start resumes there"


@dataclass(frozen=True)
class File:
    name: str
    size: int
    hash: str  # SHA-256 of large files, git's hash of the others: the file's name in the cache


@dataclass(frozen=True)
class Revision:
    commit: str
    files: list


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None  # the caller follows it without the token


class Retry(Exception):
    """A transient failure; `wait` in seconds, None: unknown; `answered`: the network works."""

    def __init__(self, what, wait=None, answered=False):
        super().__init__(what)
        self.wait, self.answered = wait, answered


def _origin(url):
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _context():
    """The system's certificates, or those of the environment if there are none."""
    context = ssl.create_default_context()
    try:
        import certifi
        context.load_verify_locations(certifi.where())
    except (ImportError, OSError):
        pass
    return context


def _wait_of(headers):
    text = headers.get("Retry-After", "")
    if text.isdigit():
        return int(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


class Hub:
    def __init__(self, request):
        self.name, self.kind, self.asked = request["name"], request["kind"], request["revision"]
        self.endpoint = request["endpoint"].rstrip("/")
        self.token, self.token_from = request.get("token", ""), request.get("token_from", "")
        self.pause = request.get("pause", 1)
        if _origin(self.endpoint)[0] not in ("http", "https") or not _origin(self.endpoint)[1]:
            raise FetchError(10, "HF_ENDPOINT is not the address of a hub", self.endpoint, "set it to https://HOST, or unset it")
        self.opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=_context()))
        self.page = f"{self.endpoint}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    def open(self, url, headers=None):
        """The response to a GET, after redirects. Raises Retry for transient failures."""
        for _ in range(MOST_REDIRECTS + 1):
            sent = {"User-Agent": "lmlaunch", "Accept-Encoding": "identity", **(headers or {})}
            if self.token and _origin(url) == _origin(self.endpoint):
                sent["Authorization"] = f"Bearer {self.token}"
            try:
                return self.opener.open(urllib.request.Request(url, headers=sent), timeout=TIMEOUT)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in (301, 302, 303, 307, 308) or "Location" not in error.headers:
                        raise self._failure(error, url) from None
                    url = self._redirected(url, error.headers["Location"])
            except ssl.SSLError as error:
                raise self._untrusted(error, url) from None
            except urllib.error.URLError as error:
                if isinstance(error.reason, ssl.SSLCertVerificationError):
                    raise self._untrusted(error.reason, url) from None
                raise Retry(f"{urllib.parse.urlsplit(url).netloc}: {error.reason}") from None
            except (OSError, http.client.HTTPException) as error:
                raise Retry(f"{urllib.parse.urlsplit(url).netloc}: {error or type(error).__name__}") from None
        raise FetchError(IO, f"more than {MOST_REDIRECTS} redirects", url, "look at HF_ENDPOINT", KEPT)

    def _redirected(self, url, location):
        there = urllib.parse.urljoin(url, location)
        scheme = urllib.parse.urlsplit(there).scheme
        if scheme not in ("http", "https") or (url.startswith("https:") and scheme != "https"):
            raise FetchError(IO, f"the hub redirects to an address that is not safe ({scheme}:)", url, "look at HF_ENDPOINT", KEPT)
        return there

    def _untrusted(self, error, url):
        return FetchError(IO, f"the certificate is not trusted: {getattr(error, 'verify_message', '') or error}",
                          urllib.parse.urlsplit(url).netloc, "install ca-certificates, or name a file of them in SSL_CERT_FILE", KEPT)

    def _failure(self, error, url):
        place, code = self.page, error.headers.get("X-Error-Code", "")
        if _origin(url) != _origin(self.endpoint) and error.code in (401, 403, 404, 410):
            return Retry(f"{urllib.parse.urlsplit(url).netloc}, where the hub redirects, answers {error.code}")  # such links expire
        login = "log in with `hf auth login` (or set HF_TOKEN)"
        if error.code == 401 and self.token:
            return FetchError(INPUT, f"the hub does not accept the token of {self.token_from} (401)", place, login)
        if error.code == 401:
            return FetchError(INPUT, f"the hub asks for a login (401): {self.name} is behind a licence, private, or does not exist", place,
                              f"look at {self.page}, accept its licence there, then {login}")
        if error.code == 403:
            return FetchError(INPUT, f"the hub refuses access to {self.name} (403): its licence is not accepted by this login", place,
                              f"accept the licence at {self.page}, or {login}: another account, or a token that may read it")
        if error.code == 404:
            what = f"no revision {self.asked!r} of {self.name}" if code == "RevisionNotFound" else f"no {self.kind} {self.name}"
            return FetchError(INPUT, f"the hub has {what} (404)", url if code == "EntryNotFound" else place,
                              "check the name and the revision; a data set needs --data")
        if error.code == 429 or error.code >= 500 or error.code == 408:
            why = "too many requests" if error.code == 429 else "its own failure" if error.code >= 500 else "it was too slow"
            return Retry(f"the hub answers {error.code}: {why}", _wait_of(error.headers), True)
        if error.code == 416:
            return FetchError(INTEGRITY, "the hub has fewer bytes of this file than its list says (416)", url, "try again later")
        return FetchError(IO, f"the hub answers {error.code}", url, "try again later", KEPT)

    def repeat(self, action, progress=lambda: 0):
        """Runs `action`, retried after transient failures; counts consecutive ones without `progress`."""
        tries, before = 0, progress()
        while True:
            try:
                return action()
            except Retry as failure:
                tries = 1 if progress() > before else tries + 1
                before = progress()
                wait = min(self.pause * 2 ** (tries - 1), MOST_PAUSE) if failure.wait is None else failure.wait
                if tries >= MOST_TRIES or wait > LONGEST_WAIT:
                    again = (f"try again in {wait:.0f} s" if wait > LONGEST_WAIT else "try again later" if failure.answered else
                             "look at the network (HTTPS_PROXY, HF_ENDPOINT), try again later")
                    raise FetchError(IO, str(failure), self.page, again, KEPT) from None
                if wait >= 1:
                    print(f"lmlaunch: note HUB-37: {failure}; trying again in {wait:.0f} s", file=sys.stderr, flush=True)
                time.sleep(wait)

    def revision(self):
        """The commit that a branch, a tag or a commit names, and its files."""
        kind = "datasets" if self.kind == "dataset" else "models"
        url = f"{self.endpoint}/api/{kind}/{self.name}/revision/{urllib.parse.quote(self.asked, safe='')}?blobs=true"

        def ask():
            try:
                with self.open(url) as answer:
                    text = answer.read(MOST_LIST_BYTES + 1)
            except (socket.timeout, OSError, http.client.HTTPException) as error:
                raise Retry(str(error) or type(error).__name__) from None
            return text

        text = self.repeat(ask)
        try:
            listed = json.loads(text)
            commit = listed["sha"]
            files = [self._file(entry) for entry in listed["siblings"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FetchError(INTEGRITY, "the hub's list of files is invalid", url, "look at HF_ENDPOINT") from None
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise FetchError(INTEGRITY, "the hub's list of files names no commit", url, "look at HF_ENDPOINT")
        return Revision(commit, [file for file in files if file])

    @staticmethod
    def _file(entry):
        """None for a file without a hash: it is not selected, or reported as missing."""
        name, large = entry["rfilename"], entry.get("lfs")
        size, digest = (large["size"], large["sha256"]) if large else (entry.get("size"), entry.get("blobId"))
        good = isinstance(name, str) and isinstance(size, int) and size >= 0 and isinstance(digest, str)
        return File(name, size, digest) if good and re.fullmatch(r"[0-9a-f]{64}" if large else r"[0-9a-f]{40}", digest) else None

    def content_url(self, commit, name):
        return f"{self.page}/resolve/{commit}/{urllib.parse.quote(name)}"
