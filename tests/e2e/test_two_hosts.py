"""mpirun over two hosts, which are network namespaces of this machine: training, a cable that is pulled for good, and for a second."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import mpi
from test_ranks import prepared, result, run as run_ranks
from test_run import BIN, filled, rows
from test_emulator import H100, EMULATOR

SHELL = Path(__file__).parent / "host_shell.sh"
NAME = f"lm{os.getpid()}"
SILENCE = 4  # seconds; mpirun by itself would wait for ever
NETWORK = "10.77.0.0/24"


@pytest.fixture(scope="module")
def hosts():
    if os.getuid() != 0 or not shutil.which("ip") or not shutil.which("mpirun"):
        pytest.skip("needs root, ip (iproute2) and mpirun (openmpi-bin)")
    up = subprocess.run([SHELL, "--up", NAME], capture_output=True, text=True)
    if up.returncode != 0:
        subprocess.run([SHELL, "--down", NAME], capture_output=True)
        pytest.skip(f"no network namespaces here: {up.stderr.strip()}")
    yield
    subprocess.run([SHELL, "--down", NAME], check=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory, hosts):
    return filled(tmp_path_factory.mktemp("hosts"), layers=3)


def start(work, name, processes=None, **variables):
    """`processes`: mpirun's arguments from the first -n on."""
    processes = processes or ["-n", "2", str(BIN / "lmlaunch"), f"{name}.toml"]
    command = ["ip", "netns", "exec", f"{NAME}A", "mpirun", "--mca", "plm_rsh_agent", str(SHELL), "--mca", "oob_tcp_if_include", NETWORK,
               "--mca", "btl_tcp_if_include", NETWORK, "-H", "10.77.0.1:1,10.77.0.2:1", *processes]
    log = open(work / f"{name}.console", "w")
    return subprocess.Popen(command, cwd=work, env=mpi.environment(LM_HOSTS=NAME, LMLAUNCH_SILENCE=SILENCE, **variables), stdout=log,
                            stderr=log, start_new_session=True)


def console(work, name):
    return (work / f"{name}.console").read_text()


def cable(state):
    subprocess.run(["ip", "-n", f"{NAME}A", "link", "set", "vA", state], check=True)


def steps(work, name):
    return len(rows(work, name)) if (work / "runs" / name / "metrics.jsonl").exists() else 0


@pytest.fixture(scope="module")
def wanted(work):
    prepared(work, "forked", zero__stage=3, train__steps=400, train__eval_every=0, checkpoint__every=0)
    run_ranks(work, "forked", 2)
    return result(work, "forked")


def test_two_hosts_give_the_bits_of_one(work, wanted):
    prepared(work, "hosts", zero__stage=3, train__steps=400, train__eval_every=0, checkpoint__every=0)
    job = start(work, "hosts")
    assert job.wait(timeout=120) == 0, console(work, "hosts")
    assert result(work, "hosts") == wanted
    mpi.nothing_left(work)


@pytest.mark.skipif(not (EMULATOR / "bin" / "lmlaunch-mpi.so").exists(), reason="no emulator with Open MPI")
def test_a_host_has_its_own_gpus_and_nccl_the_interface_between_them(work):
    """With GPUs, which are the emulator's: what a rank's NCCL finds in its environment."""
    prepared(work, "gpus", zero__stage=3, train__steps=1_000_000, train__eval_every=0, checkpoint__every=0, run__device="auto")
    lmlaunch = [str(EMULATOR / "bin" / "lmlaunch"), "gpus.toml"]
    emulator = {"LD_PRELOAD": str(EMULATOR / "lib" / "libemulator_devices.so"), "LD_LIBRARY_PATH": str(EMULATOR / "lib"), "EMULATOR_GPUS": f"{H100}:80,{H100}:80"}
    told = [part for item in emulator.items() for part in ("-x", "=".join(item))]
    # Each host counts its GPUs from its own first one; both are rank 0 of their host.
    process = [["-n", "1", *told, "-x", f"CUDA_VISIBLE_DEVICES={seen}", *lmlaunch] for seen in ("0,1", "1,0")]
    job = start(work, "gpus", [*process[0], ":", *process[1]])
    try:
        mpi.until(lambda: steps(work, "gpus") >= 1 or job.poll() is not None, 60, "steps")
        ranks = mpi.processes(work)
        assert sorted(ranks) == [0, 1], console(work, "gpus")
        for rank, name in enumerate(["vA", "vB"]):
            environment = Path(f"/proc/{ranks[rank]}/environ").read_text().split("\0")
            assert f"NCCL_SOCKET_IFNAME=={name}" in environment and "NCCL_RAS_ENABLE=0" in environment
            assert environment[max(i for i, text in enumerate(environment) if text.startswith("CUDA_VISIBLE_DEVICES="))][-2:] == f"={rank}"
    finally:
        job.terminate()
        job.wait(60)
        mpi.nothing_left(work)


def test_a_cable_that_is_out_for_a_second_changes_nothing(work, wanted):
    prepared(work, "flap", zero__stage=3, train__steps=400, train__eval_every=0, checkpoint__every=0)
    job = start(work, "flap")
    mpi.until(lambda: steps(work, "flap") >= 5 or job.poll() is not None, 60, "steps")
    cable("down")
    before = steps(work, "flap")
    time.sleep(1)
    cable("up")
    assert before < 400, "over before the cable was out"
    assert job.wait(timeout=120) == 0, console(work, "flap")
    assert result(work, "flap") == wanted
    mpi.nothing_left(work)


def test_a_cable_that_stays_out_ends_both_hosts(work):
    prepared(work, "cut", zero__stage=3, train__steps=1_000_000, train__eval_every=0, checkpoint__every=0)
    job = start(work, "cut")
    mpi.until(lambda: steps(work, "cut") >= 5 or job.poll() is not None, 60, "steps")
    try:
        cable("down")
        mpi.nothing_left(work)
        mpi.until(lambda: mpi.status(work, "cut").get("state") == "failed", 60, "the status")
        assert mpi.status(work, "cut")["exit_code"] == 41
        said = console(work, "cut")
        assert re.search(r"error HANG-09 \(exit 41\): no heartbeat from rank 1 on \S+ for \d.*it was last in \"\w[^\"]*\" \(collective \d",
                         said), said
        # mpirun by itself would wait for the other host for ever.
        mpi.until(lambda: job.poll() is not None, 60, "mpirun's end")
    finally:
        cable("up")
        if job.poll() is None:
            subprocess.run(["kill", "-9", "--", f"-{job.pid}"], check=False)
        job.wait()
