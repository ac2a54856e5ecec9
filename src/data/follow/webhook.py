"""POSTs one JSON object at a run's start and at its end: {event: "start" | "end" | "failure", run, host, time, step, and of an end
state, exit_code, reason, message: the last error of log.txt}. `text` and `content` are a sentence for Slack, Mattermost and
Discord. Nothing of the data or the model is sent, and redirects are not followed."""

import http.client
import json
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request

TRIES = 3
PAUSE = 1    # seconds
TIMEOUT = 5  # seconds without an answer
MOST_LOG = 1 << 16


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


def _context():
    """The system's certificates, or certifi's if there are none."""
    context = ssl.create_default_context()
    try:
        import certifi
        context.load_verify_locations(certifi.where())
    except (ImportError, OSError):
        pass
    return context


def last_error(path, begin):
    """The last error that this start has logged; "" none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(begin, os.fstat(file.fileno()).st_size - MOST_LOG))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    found = re.findall(r"^lmlaunch: error (.*)$", text, re.M)
    return found[-1] if found else ""


class Webhook:
    def __init__(self, request):
        self.url, self.run, self.name = request["webhook"], request["run"], request["name"]
        self.opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=_context()))
        self.log = os.path.join(self.run, "log.txt")
        self.begin = os.path.getsize(self.log) if os.path.exists(self.log) else 0

    def start(self):
        """If this fails, the end is still sent."""
        self._post("start", f"lmlaunch: {self.name} has started on {os.uname().nodename}", {})

    def end(self, status):
        failed = status.get("state") == "failed"
        step, code, reason = status.get("step", 0), status.get("exit_code"), status.get("reason", "")
        message = last_error(self.log, self.begin) if failed else ""
        text = f"lmlaunch: {self.name} {'has failed' if failed else 'is done' if status.get('state') == 'done' else 'was stopped'} at step {step}"
        text += f": exit code {code}, {reason}" if failed else ""
        self._post("failure" if failed else "end", text + (f": {message}" if message else ""),
                   {"step": step, "state": status.get("state"), "exit_code": code, "reason": reason, "message": message}, must=True)

    def _post(self, event, text, more, must=False):
        body = {"event": event, "run": self.name, "host": os.uname().nodename,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **more, "text": text, "content": text}
        for attempt in range(TRIES):
            try:
                request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json", "User-Agent": "lmlaunch"})
                with self.opener.open(request, timeout=TIMEOUT):
                    return
            except (OSError, ValueError, http.client.HTTPException) as error:
                # Omits the address: it is a secret, and this is a file of the run.
                print(f"webhook: {event}: {getattr(error, 'code', '') or type(error).__name__}", file=sys.stderr, flush=True)
                if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429:
                    break
            if attempt + 1 < TRIES:
                time.sleep(PAUSE)
        if must:
            sys.exit(1)
