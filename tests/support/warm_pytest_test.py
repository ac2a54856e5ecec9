"""warm_pytest.py gives what pytest gives, with a server and without one, and leaves nothing running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("warm_pytest.py")
# What the server has imported, and what belongs to the process that asks.
TESTS = """
import os, sys
def test_passes(): assert os.environ["WORD"] == "said" and os.getcwd() == os.path.dirname(__file__) and sys.path[0] == os.getcwd()
def test_is_warm(): assert ("colorsys" in sys.modules) == (os.environ["WARM"] == "yes")
def test_fails():
    print("printed")
    assert False
def test_waits():
    import signal, subprocess
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    program = subprocess.Popen(["sleep", "300"])
    with open("pids", "w") as file: file.write(f"{os.getpid()} {program.pid}\\n")
    program.wait()
def test_dies(): os.kill(os.getpid(), 9)
"""


@pytest.fixture(params=["yes", "no"])
def warm(request, tmp_path):
    """The environment of who asks."""
    (tmp_path / "test_drawn.py").write_text(TESTS)
    environment = {**os.environ, "WORD": "said", "WARM": request.param, "LM_WARM_PYTEST": str(tmp_path / "socket")}
    if request.param == "no":
        yield environment
        return
    # As a shell starts it: with SIGINT ignored.
    server = subprocess.Popen([sys.executable, "-B", SCRIPT, "serve", tmp_path / "socket", "colorsys"],
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    while not (tmp_path / "socket").exists():
        time.sleep(0.01)
    yield environment
    assert server.poll() is None
    server.kill()
    server.wait()


def start(environment, which, cwd):
    command = [sys.executable, "-B", SCRIPT, "-q", "-p", "no:cacheprovider", "test_drawn.py", "-k", which]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("which, code, said", [("passes or is_warm", 0, "2 passed"), ("fails", 1, "printed"), ("none", 5, "deselected")])
def test_it_ends_as_pytest_does(warm, tmp_path, which, code, said):
    several = [start(warm, which, tmp_path) for _ in range(2)]  # at once
    for process in several:
        out = process.communicate(timeout=60)[0]
        assert process.returncode == code and said in out, out


def test_a_child_that_dies_is_a_failure(warm, tmp_path):
    process = start(warm, "dies", tmp_path)
    process.communicate(timeout=60)
    assert process.returncode in (128 + 9, -9)


def wait_until(condition):
    for _ in range(3000):  # for a minute at least
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("warm", ["yes"], indirect=True)
def test_who_is_killed_takes_its_tests_along(warm, tmp_path):
    process = start(warm, "waits", tmp_path)
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    process.kill()
    process.wait()
    wait_until(lambda: not any(lives(pid) for pid in pids.read_text().split()))
