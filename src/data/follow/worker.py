"""Serves one target of a run: sends new rows once per second, until the run has ended."""

import fcntl
import json
import os
import select
import time

from place import Place
from rows import Tail
from trackers import TRACKERS
from webhook import Webhook

LOOK_SECONDS = 1
STATUS_SECONDS = 10  # after lmlaunch was killed, wait for the run's final status
PLACE_ROWS = 200     # between two saves of the progress, in a long file


class End:
    """The end of the run, read from the monitoring process's pipe."""

    def __init__(self, pipe, run):
        self.pipe, self.run, self.text = pipe, run, b""

    def wait(self, seconds):
        """The final status; None while the run continues."""
        if not select.select([self.pipe], [], [], seconds)[0]:
            return None
        while data := os.read(self.pipe, 65536):
            self.text += data
        return json.loads(self.text) if self.text else self._recorded()

    def _recorded(self):
        for _ in range(STATUS_SECONDS * 10):
            try:
                with open(os.path.join(self.run, "status.json"), encoding="utf-8") as file:
                    status = json.load(file)
                if status.get("state") != "running":
                    return status
            except (OSError, ValueError):
                pass
            time.sleep(0.1)
        return {"state": "failed", "reason": "killed:lmlaunch"}


def follow(target, request, pipe):
    end = End(pipe, request["run"])
    if target == "webhook":
        hook = Webhook(request)
        hook.start()
        while (status := end.wait(LOOK_SECONDS)) is None:
            pass
        return hook.end(status)
    # A worker of a killed start may still be sending its last rows.
    with open(os.path.join(request["run"], "follow", target + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        follow_rows(target, request, end)


def follow_rows(target, request, end):
    place = Place(os.path.join(request["run"], "follow", target + ".json"))
    tracker = TRACKERS[target](request, place)
    tail = Tail(os.path.join(request["run"], "metrics.jsonl"))
    status = None
    while True:
        send(tail, tracker, place)
        if status is not None:
            return tracker.finish(status.get("state", "failed"))
        status = end.wait(LOOK_SECONDS)


def send(tail, tracker, place):
    rows = 0
    for row in tail.new():
        if place.sent(row):
            continue
        if row.is_sample():
            tracker.sample(row.step, row.part, row.values["prompt"], row.values["answer"])
        else:
            tracker.scalars(row.step, row.scalars())
        place.add(row)
        rows += 1
        if rows % PLACE_ROWS == 0:
            place.write()
    if rows % PLACE_ROWS != 0:
        place.write()
