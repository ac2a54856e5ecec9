"""A real Slurm of one node, which is this machine, started for a test and ended after it."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
SECONDS_TO_START = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(what, seconds, condition):
    """What condition() gives at last, by looks for so many seconds at least: they pass more slowly on a busy machine."""
    for _ in range(20 * seconds):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"never: {what}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Calls a command of Slurm's; gives what it prints."""
    programs = {name: shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") for name in PROGRAMS}
    missing = [name for name, path in programs.items() if not path]
    if missing or os.getuid() != 0:
        pytest.skip(f"Slurm cannot be started: {'not root' if os.getuid() else 'no ' + ', '.join(missing)}")
    directory = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (directory / name).mkdir()
    (directory / "key").touch(mode=0o400)
    (directory / "key").write_bytes(os.urandom(128))
    host = socket.gethostname().split(".")[0]
    text = (Path(__file__).parent / "slurm.conf").read_text()
    for name, value in [("HOST", host), ("DIRECTORY", directory), ("PORT1", free_port()), ("PORT2", free_port())]:
        text = text.replace(f"@{name}@", str(value))
    (directory / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    munge = ["--foreground", "--force", f"--socket={directory}/munge.socket", f"--key-file={directory}/key",
             f"--pid-file={directory}/munged.pid", f"--log-file={directory}/munged.log", f"--seed-file={directory}/munged.seed"]
    daemons = []

    def start(name, *arguments):
        with open(directory / f"{name}.out", "w") as out:
            daemons.append(subprocess.Popen([programs[name], *arguments], env=environment, stdout=out, stderr=subprocess.STDOUT))

    def call(name, *arguments):
        done = subprocess.run([programs[name], *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def idle():
        done = subprocess.run([programs["sinfo"], "-h", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() == "idle"

    try:
        start("munged", *munge)
        eventually("munged's socket", SECONDS_TO_START, (directory / "munge.socket").exists)
        start("slurmctld", "-D")
        start("slurmd", "-D")
        with contextlib.suppress(AssertionError):
            eventually("an idle node", SECONDS_TO_START, idle)
        if not idle():
            said = [line for path in sorted(directory.glob("*.out")) for line in path.read_text().splitlines()[-3:]]
            pytest.skip("Slurm does not start here: " + " / ".join(said))
        yield call
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
