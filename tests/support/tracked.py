"""What the real trackers have stored, printed as JSON: {"wandb": [[step, {tag: value}], ...], "trackio": the same}. Started by
tests/e2e/test_trackers.py with their libraries: tracked.py DIR TRACKIO_RUN, DIR being where wandb's offline files lie."""

import json
import struct
import sys
from pathlib import Path

BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(data):
    """The records of a .wandb file: a header of 7 bytes, then blocks of parts {checksum 4, length 2, kind 1, bytes}."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7:at + 7 + length]
        at += 7 + length
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            yield whole


def of_wandb(directory):
    from wandb.proto import wandb_internal_pb2
    for path in sorted(Path(directory).rglob("*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                yield record.history.step.num, {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def of_trackio(run):
    from trackio.sqlite_storage import SQLiteStorage
    for row in SQLiteStorage.get_logs("lmlaunch", run):
        yield row["step"], row


if __name__ == "__main__":
    print(json.dumps({"wandb": list(of_wandb(sys.argv[1])), "trackio": list(of_trackio(sys.argv[2]))}, default=str))
