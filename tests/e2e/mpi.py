"""lmlaunch under mpirun, and what is left of it."""

import json
import os
import subprocess
import time

from test_run import BIN

# A sanitized lmlaunch would tell what Open MPI does not free.
OPEN_MPI_LEAKS = {"ASAN_OPTIONS": "detect_leaks=0"}
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def environment(**more):
    return {**os.environ, **ROOT_MAY, **OPEN_MPI_LEAKS, **{key: str(value) for key, value in more.items()}}


def start(work, name, ranks, *arguments, options=(), machine_ranks=None, dealt=False, **variables):
    """mpirun with `ranks` CLI processes, in a session of its own; on machines of so many each, which differ in the kernel's boot id. `dealt`: in turn."""
    cli = [str(BIN / "lmlaunch")]
    if machine_ranks:
        place = f"% {ranks // machine_ranks}" if dealt else f"/ {machine_ranks}"
        for machine in range(ranks // machine_ranks):
            (work / f"boot{machine}").write_text(f"00000000-0000-0000-0000-{machine:012}\n")
        cli = ["unshare", "--mount", "sh", "-c", f'mount --bind "boot$((OMPI_COMM_WORLD_RANK {place}))" '
                '/proc/sys/kernel/random/boot_id && exec "$@"', "sh", *cli]
    command = ["mpirun", "--oversubscribe", *options, "-n", str(ranks), *cli, f"{name}.toml", *arguments]
    return subprocess.Popen(command, cwd=work, env=environment(**variables), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            start_new_session=True)


def run(work, name, ranks, *arguments, code=0, **more):
    """To its end; what it said."""
    process = start(work, name, ranks, *arguments, **more)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == code, f"exit {process.returncode} instead of {code}\n{messages}"
    return messages


def until(condition, seconds, what):
    """What condition() gives at last, by looks for so many seconds at least: they pass more slowly on a busy machine."""
    for _ in range(200 * seconds):
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError(f"never: {what}")


def processes(work):
    """{rank: process id} of the ranks that work in this directory."""
    out = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            argv = open(f"/proc/{entry}/cmdline").read().split("\0")
            if os.path.basename(argv[0]).startswith("lmlaunch-c") and os.path.samefile(f"/proc/{entry}/cwd", work):
                rank = int(argv[argv.index("--rank") + 1]) if "--rank" in argv else 0
                if state(entry) not in "ZX":
                    out[rank] = int(entry)
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
    return out


def state(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]


def nothing_left(work):
    until(lambda: not processes(work), 60, f"the end of {processes(work)}")


def status(work, name):
    path = work / "runs" / name / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}
