"""Sends a run's rows to trackers, and its start and end to a webhook: a separate process, started by `lmlaunch` beside the workers.
Reads one JSON line from stdin, either

  {"check": ["wandb", ...]}: prints {"missing": [those that cannot be imported]}, or
  {"run": DIR, "name": NAME, "to": ["wandb", ...], "webhook": URL or "", "config": TOML, "end_seconds": S, "gone_seconds": S}

and then, once the run has ended, a second line with its final status. Stdin that ends without one means that lmlaunch was killed:
then status.json has the end.

This process only monitors. Each target has its own process, so that none can delay another. One that dies is reported by one line
on stdout, for lmlaunch to print; the libraries' output goes to stderr, DIR/follow/log.txt. `end_seconds` after the run's end, or
`gone_seconds` after lmlaunch was killed, the remaining ones are killed.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import sys
import time
import traceback

MOST_LOG_BYTES = 4 << 20
LOOK_SECONDS = 1
PR_SET_PDEATHSIG = 1


def missing(names):
    """A folder with that name on the path is not a library: its spec has no origin."""
    def here(name):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return False
        return spec is not None and spec.origin is not None
    return [name for name in names if not here(name)]


def yield_to_the_run():
    """Lowers the priority to a third of a busy core (with less, importing a library would take minutes), and makes this process the
    first victim if memory runs out. Continues if a limit forbids it."""
    with contextlib.suppress(OSError):
        os.nice(5)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


class Worker:
    """A forked process that serves one target. `end` passes the run's last line to it."""

    def __init__(self, target, request, others):
        read, self.pipe = os.pipe()
        keeper = os.getpid()
        self.target, self.pid = target, os.fork()
        if self.pid == 0:
            status = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                for pipe in [self.pipe, 0, *(other.pipe for other in others)]:
                    os.close(pipe)  # an inherited one would hide the end of the others
                os.open("/dev/null", os.O_RDONLY)  # takes the place of stdin
                os.dup2(2, 1)
                if os.getppid() == keeper:
                    from worker import follow
                    follow(target, request, read)
                    status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.close(read)
        self.handle = os.pidfd_open(self.pid)

    def end(self, line):
        with contextlib.suppress(OSError):
            os.write(self.pipe, line)
        os.close(self.pipe)

    def reap(self):
        """How it ended; "" for success."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.handle)
        code = os.waitstatus_to_exitcode(status)
        return "" if code == 0 else f"ended by signal {-code}" if code < 0 else f"ended with status {code}"


def say(target, text):
    with contextlib.suppress(OSError):  # no reader is left
        os.write(1, f"{target} {text}\n".encode())


def trim_log():
    """Truncates the log: a library that prints endlessly must not fill the run's disk."""
    with contextlib.suppress(OSError):
        if os.fstat(2).st_size > MOST_LOG_BYTES:
            os.ftruncate(2, 0)


def keep_watch(request):
    workers = []
    for target in [*request["to"], *(["webhook"] if request["webhook"] else [])]:
        workers.append(Worker(target, request, workers))
    line, ended, kill_at = b"", False, None
    while workers:
        inputs = [worker.handle for worker in workers] + ([] if ended else [0])
        wait = LOOK_SECONDS if kill_at is None else max(0, min(LOOK_SECONDS, kill_at - time.monotonic()))
        ready, _, _ = select.select(inputs, [], [], wait)
        trim_log()
        if 0 in ready:
            got = os.read(0, 65536)
            line += got
            if not got or line.endswith(b"\n"):
                ended, line = True, line if line.endswith(b"\n") else b""
                kill_at = time.monotonic() + request["end_seconds" if line else "gone_seconds"]
                for worker in workers:
                    worker.end(line)
        late = kill_at is not None and time.monotonic() >= kill_at
        for worker in list(workers):
            if worker.handle not in ready and not late:
                continue
            if worker.handle not in ready:
                os.kill(worker.pid, signal.SIGKILL)
            text = worker.reap()
            workers.remove(worker)
            if not ended:
                os.close(worker.pipe)
            if late and text:
                text = "has not taken the last rows in time"
            if text:
                say(worker.target, text)


def first_line():
    """Read byte by byte, since the rest of stdin is read with os.read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return json.loads(line)


def main():
    request = first_line()
    if "check" in request:
        print(json.dumps({"missing": missing(request["check"])}))
        return
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    yield_to_the_run()
    keep_watch(request)


if __name__ == "__main__":
    main()
