"""The program that follows a run (src/data/follow), with stand-ins of the trackers' libraries (tests/support/trackers) and a webhook on
the loopback: each row once, whatever is repeated, cut back or killed, and what hangs or dies is left behind."""

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "src" / "data" / "follow" / "follow.py"
STAND_INS = ROOT / "tests" / "support" / "trackers"
CONFIG = '[train]\nsteps = 12\n[log]\nwebhook = "http://secret"\n'
DONE = {"state": "done", "exit_code": 0, "reason": "done", "step": 3}
EACH = pytest.mark.parametrize("target", ["wandb", "mlflow", "trackio"])


def step_row(step, **more):
    return {"step": step, "epoch": step / 8, "loss": 1 / step, "token_accuracy": 0.25, "grad_norm": 0.5, "lr": 1e-3, "step_ms": 1.5, **more}


ROWS = [{"step": 0, "eval_loss": 3.5, "target_tokens": 7}, step_row(1), step_row(2), {"step": 2, "eval_loss": 3.25, "target_tokens": 7},
        {"step": 2, "eval_loss/code": 3.0, "target_tokens": 4, "accuracy/code": 0.5}, {"step": 2, "prompt": "a?", "answer": "b"},
        {"step": 2, "prompt": "c?", "answer": "d"}, step_row(3, skipped=True)]
# What a tracker gets of them: (step, tags).
SENT = [(0, {"eval/loss": 3.5, "eval/target_tokens": 7}),
        *[(n, {"train/epoch": n / 8, "train/loss": 1 / n, "train/token_accuracy": 0.25,
               "train/grad_norm": 0.5, "train/learning_rate": 1e-3, "run/step_ms": 1.5}) for n in (1, 2)],
        (2, {"eval/loss": 3.25, "eval/target_tokens": 7}), (2, {"eval/code_loss": 3.0, "eval/target_tokens": 4, "eval/code_accuracy": 0.5}),
        (3, {"train/epoch": 3 / 8, "train/loss": 1 / 3, "train/token_accuracy": 0.25,
             "train/grad_norm": 0.5, "train/learning_rate": 1e-3, "run/step_ms": 1.5, "run/skipped": 1})]


class Followed:
    """A run's directory, and the program beside it."""

    def __init__(self, run):
        self.run, self.calls_file = run / "run", run / "calls.jsonl"
        (self.run / "follow").mkdir(parents=True)

    def write(self, *rows, mode="a"):
        with open(self.run / "metrics.jsonl", mode) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def start(self, *to, webhook="", fault="", end_seconds=30, gone_seconds=30):
        request = {"run": str(self.run), "name": "run", "to": to, "webhook": webhook, "config": CONFIG, "end_seconds": end_seconds,
                   "gone_seconds": gone_seconds}
        env = {**os.environ, "PYTHONPATH": str(STAND_INS), "STAND_IN": str(self.calls_file), "STAND_IN_FAULT": fault, "no_proxy": "*"}
        with open(self.run / "follow" / "log.txt", "a") as log:
            self.process = subprocess.Popen([sys.executable, "-B", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env)
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def end(self, status=DONE):
        """What the program has said of its workers. `status` None: lmlaunch was killed."""
        said, _ = self.process.communicate(b"" if status is None else json.dumps(status).encode() + b"\n", timeout=60)
        return said.decode()

    def calls(self, name):
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [call for call in map(json.loads, lines) if call["call"] == name]

    def scalars(self):
        return [(call["step"], call["values"]) for call in self.calls("log") if all(isinstance(v, float) for v in call["values"].values())]

    def until(self, holds):
        for _ in range(6000):
            if holds():
                return
            assert self.process.poll() is None, (self.run / "follow" / "log.txt").read_text()
            time.sleep(0.01)
        raise AssertionError("it has not come")


@pytest.fixture
def followed(tmp_path):
    out = Followed(tmp_path)
    yield out
    with contextlib.suppress(AttributeError):
        out.process.kill()
        out.process.wait()


@EACH
def test_a_tracker_gets_each_row_once(followed, target):
    followed.write(*ROWS[:3])
    followed.start(target)
    followed.until(lambda: len(followed.scalars()) == 3)
    followed.write(*ROWS[3:])
    assert followed.end() == ""
    assert followed.scalars() == SENT
    assert len(followed.calls("init")) == len(followed.calls("finish")) == 1
    config = next(call["config"] for call in followed.calls("params") + followed.calls("init") if "config" in call)
    assert config == {"train.steps": "12" if target == "mlflow" else 12}, "the address of a webhook is a secret"


@EACH
def test_samples_reach_a_tracker(followed, target):
    followed.write(*ROWS)
    followed.start(target)
    followed.end()
    texts = [json.dumps(call) for call in followed.calls("text") + followed.calls("log")]
    assert [sum(word in text for text in texts) for word in ("a?", "c?")] == [1, 1]


@EACH
def test_a_resumed_run_goes_on_where_it_was(followed, target):
    """Its first start was killed behind row 2; the second repeats step 2."""
    followed.write(*ROWS[:5])
    followed.start(target)
    followed.until(lambda: len(followed.scalars()) == 5)
    (followed.run / "status.json").write_text(json.dumps({"state": "failed", "reason": "killed:lmlaunch", "step": 2}))
    assert followed.end(None) == ""
    followed.start(target)
    followed.write(*ROWS[:2], mode="w")
    followed.write(*ROWS[2:])
    followed.end()
    assert followed.scalars() == SENT
    first, second = followed.calls("init")
    assert first["id"] == second["id"] and second["resume"]


def test_rows_that_a_resumed_run_repeats_at_once_are_not_sent_again(followed):
    """The file is cut, and is longer than before when it is looked at again: row 3 now lies where row 2 was."""
    followed.write(ROWS[0], step_row(1, note="x" * 90), step_row(2, note="x" * 90))
    followed.start("wandb")
    followed.until(lambda: len(followed.scalars()) == 3)
    with open(followed.run / "metrics.jsonl", "r+") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS))
    followed.end()
    assert followed.scalars() == SENT


def is_waited_for(lock):
    """"1: -> FLOCK ADVISORY WRITE 4711 08:01:523 0 EOF": process 4711 waits for the file with that inode."""
    waits = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " -> " in line]
    return any(words[6].endswith(f":{lock.stat().st_ino}") for words in waits)


def test_a_start_waits_for_the_last_rows_of_the_one_before(followed, tmp_path):
    """lmlaunch was killed, and nobody has written yet how the run ended: the first worker is still there."""
    followed.write(*ROWS[:3])
    followed.start("wandb")
    followed.until(lambda: len(followed.scalars()) == 3)
    first = followed.process
    first.stdin.close()
    followed.start("wandb")
    followed.until(lambda: is_waited_for(followed.run / "follow" / "wandb.lock") or len(followed.calls("init")) == 2)
    followed.write(*ROWS[3:])
    (followed.run / "status.json").write_text(json.dumps(DONE))
    followed.end()
    first.wait(timeout=60)
    assert followed.scalars() == SENT
    assert [call["call"] for call in followed.calls("init") + followed.calls("finish")] == ["init", "init", "finish", "finish"]
    order = [json.loads(line)["call"] for line in followed.calls_file.read_text().splitlines()]
    assert order.index("finish") < len(order) - 1 - order[::-1].index("init")


def test_half_a_row_waits_for_its_end(followed):
    followed.write(ROWS[0])
    line = json.dumps(ROWS[1]) + "\n"
    with open(followed.run / "metrics.jsonl", "a") as file:
        file.write(line[:20])
    followed.start("wandb")
    followed.until(lambda: len(followed.scalars()) == 1)
    with open(followed.run / "metrics.jsonl", "a") as file:
        file.write(line[20:])
    followed.end()
    assert followed.scalars() == SENT[:2]


def test_a_place_that_cannot_be_read_begins_anew(followed):
    (followed.run / "follow" / "wandb.json").write_text("{")
    followed.write(*ROWS)
    followed.start("wandb")
    assert followed.end() == "" and followed.scalars() == SENT


@pytest.mark.parametrize("state, codes", [("done", (0, "FINISHED")), ("stopped", (0, "KILLED")), ("failed", (1, "FAILED"))])
def test_a_tracker_is_told_how_the_run_ended(followed, state, codes):
    followed.start("wandb", "mlflow")
    followed.end({**DONE, "state": state})
    told = {call["library"]: call for call in followed.calls("finish")}
    assert (told["wandb"]["exit_code"], told["mlflow"]["status"]) == codes


def test_one_that_dies_is_named_and_holds_up_no_other(followed):
    followed.write(*ROWS)
    followed.start("wandb", "mlflow", fault="die")
    assert followed.end() == "wandb ended by signal 11\n"
    assert followed.scalars() == SENT and {call["library"] for call in followed.calls("log")} == {"mlflow"}


def test_one_that_hangs_is_left_behind(followed):
    followed.write(*ROWS)
    followed.start("wandb", fault="hang", end_seconds=1)
    followed.until(lambda: followed.calls("init"))
    assert followed.end() == "wandb has not taken the last rows in time\n"


def test_one_that_hangs_does_not_outlive_a_killed_lmlaunch(followed):
    followed.write(*ROWS)
    followed.start("wandb", fault="hang", gone_seconds=1)
    followed.until(lambda: followed.calls("init"))
    assert followed.end(None) == "wandb has not taken the last rows in time\n"


def test_no_worker_outlives_its_keeper(followed):
    followed.write(*ROWS)
    followed.start("wandb", fault="hang")
    followed.until(lambda: followed.calls("init"))
    worker = int(Path(f"/proc/{followed.process.pid}/task/{followed.process.pid}/children").read_text().split()[0])
    followed.process.send_signal(signal.SIGKILL)
    followed.process.wait()
    while Path(f"/proc/{worker}").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        time.sleep(0.01)


def test_it_is_second_in_line_for_cores_and_first_where_memory_runs_out(followed):
    followed.start("wandb")
    followed.until(lambda: followed.calls("init"))
    assert os.getpriority(os.PRIO_PROCESS, followed.process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
    assert Path(f"/proc/{followed.process.pid}/oom_score_adj").read_text() == "1000\n"
    followed.end()


def missing(names, path):
    done = subprocess.run([sys.executable, "-B", PROGRAM], input=json.dumps({"check": names}) + "\n", capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(path)})
    return json.loads(done.stdout)["missing"]


def test_missing_libraries_are_named(tmp_path):
    (tmp_path / "no_library").mkdir()  # such as the folder in which wandb keeps its files
    assert missing(["wandb", "trackio", "no_library", "nowhere"], f"{STAND_INS}:{tmp_path}") == ["no_library", "nowhere"]


class Hook:
    """A webhook on the loopback: keeps what it gets, and answers with these codes, 200 after the last."""

    def __init__(self, *codes):
        self.codes, self.got = list(codes), []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(handler):
                self.got.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
                handler.send_response(self.codes.pop(0) if self.codes else 200)
                handler.send_header("Location", "/elsewhere")
                handler.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/services/SECRET"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize("state, event", [("done", "end"), ("stopped", "end"), ("failed", "failure")])
def test_a_webhook_hears_of_start_and_end(followed, state, event):
    log = followed.run / "log.txt"
    log.write_text("lmlaunch: error OLD-01 (exit 20): of an earlier start\n")
    with Hook() as hook:
        followed.start(webhook=hook.address)
        followed.until(lambda: hook.got)
        with open(log, "a") as file:
            file.write("lmlaunch: error NUM-12 (exit 50): the loss is nan\n  next: lower optimizer.lr\n")
        assert followed.end({"state": state, "exit_code": 50, "reason": "error:NUM-12", "step": 7}) == ""
    start, end = hook.got
    assert (start["event"], start["run"]) == ("start", "run")
    assert (end["event"], end["step"], end["reason"]) == (event, 7, "error:NUM-12")
    assert end["message"] == ("NUM-12 (exit 50): the loss is nan" if state == "failed" else "")
    assert end["text"] == end["content"] and ("the loss is nan" in end["text"]) == (state == "failed")


def test_an_earlier_starts_error_is_not_this_ones(followed):
    """A run that ends without a word, such as one that the kernel has killed."""
    (followed.run / "log.txt").write_text("lmlaunch: error OLD-01 (exit 20): of an earlier start\n")
    with Hook() as hook:
        followed.start(webhook=hook.address)
        followed.until(lambda: hook.got)
        assert followed.end({"state": "failed", "exit_code": 40, "reason": "killed:9", "step": 7}) == ""
    assert (hook.got[-1]["reason"], hook.got[-1]["message"]) == ("killed:9", "")


def test_a_webhook_hears_of_a_killed_lmlaunch(followed):
    with Hook() as hook:
        followed.start(webhook=hook.address)
        followed.until(lambda: hook.got)
        (followed.run / "status.json").write_text(json.dumps({"state": "failed", "exit_code": 40, "reason": "killed:lmlaunch", "step": 7}))
        followed.end(None)
    assert hook.got[-1]["event"] == "failure" and hook.got[-1]["reason"] == "killed:lmlaunch"


def test_a_webhook_that_fails_for_a_moment_is_asked_again(followed):
    with Hook(503, 200, 429) as hook:
        followed.start(webhook=hook.address)
        followed.until(lambda: len(hook.got) == 2)
        assert followed.end() == ""
    assert [got["event"] for got in hook.got] == ["start", "start", "end", "end"]


@pytest.mark.parametrize("code", [302, 404])
def test_a_webhook_that_refuses_is_named_without_its_address(followed, code):
    with Hook(code, code, code, code) as hook:
        followed.start(webhook=hook.address)
        followed.until(lambda: hook.got)
        assert followed.end() == "webhook ended with status 1\n"
    assert len(hook.got) == 2
    log = (followed.run / "follow" / "log.txt").read_text()
    assert f"webhook: end: {code}" in log and "SECRET" not in log
