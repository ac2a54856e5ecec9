"""The same program under mpirun: the same bits as --ranks, one console, one exit code; nobody else loads MPI."""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
from counts import some_of

import mpi
from limits import memory_limit
from test_ranks import ON_DISK, prepared, result, run as run_ranks
from test_run import BIN, filled, lmlaunch, rows

pytestmark = pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (openmpi-bin)")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("mpi"), layers=3)


def compare(work, ranks, stage, placement, method, micro_batch):
    changes = dict(zero__stage=stage, model__dtype="bf16", train__micro_batch=micro_batch, **placement)
    prepared(work, "forked", method, **changes)
    run_ranks(work, "forked", ranks)
    prepared(work, "launched", method, **changes)
    mpi.run(work, "launched", ranks)
    assert result(work, "launched", method) == result(work, "forked", method)
    for rank in range(1, ranks):
        assert (work / "runs" / "launched" / f"log.rank{rank}.txt").exists()


@pytest.mark.parametrize("ranks, stage, placement, method, micro_batch", [
    (2, 1, {}, "full", 1), (3, 3, {}, "full", 3), (4, 2, {}, "lora", 1), (2, 1, ON_DISK, "full", 3)])
def test_the_bits_of_ranks(work, ranks, stage, placement, method, micro_batch):
    compare(work, ranks, stage, placement, method, micro_batch)


ALL = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), ({}, {"offload__optimizer": "nvme", "offload__paths": ["."]}, ON_DISK),
                             ("full", "lora"), (1, 3)))


@pytest.mark.long
@pytest.mark.parametrize("ranks, stage, placement, method, micro_batch", random.Random(14).sample(ALL, 32))
def test_the_bits_of_ranks_everywhere(work, ranks, stage, placement, method, micro_batch):
    compare(work, ranks, stage, placement, method, micro_batch)


def test_what_mpirun_binds_changes_no_bit(work):
    """Threads are the run's to choose: mpirun binds each of two processes to a core, --ranks none."""
    prepared(work, "forked", run__threads="auto")
    run_ranks(work, "forked", 2)
    prepared(work, "launched", run__threads="auto")
    mpi.run(work, "launched", 2, options=["--bind-to", "core"])
    numerics = [json.loads((work / "runs" / name / "numerics.json").read_text()) for name in ("forked", "launched")]
    assert numerics[0] == numerics[1]
    assert result(work, "launched") == result(work, "forked")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for machines with boot ids of their own")
def test_machines_add_up_their_own_ranks_first(work):
    """Machines that are imitated. A run keeps the order of its sums: it goes on with the same bits on one machine."""
    steps = dict(train__steps=100, train__eval_every=0, checkpoint__every=0)
    prepared(work, "two", zero__stage=3, **steps)
    mpi.run(work, "two", 4, machine_ranks=2)
    directory = work / "runs" / "two"
    assert json.loads((directory / "numerics.json").read_text())["machine_ranks"] == 2
    assert json.loads((directory / "plan.json").read_text())["nodes"] == 2
    prepared(work, "flat", zero__stage=3, **steps)
    run_ranks(work, "flat", 4)
    assert result(work, "flat") != result(work, "two")
    losses = [[row["loss"] for row in rows(work, name) if "loss" in row] for name in ("flat", "two")]
    assert losses[0][:5] == pytest.approx(losses[1][:5], rel=1e-6)
    prepared(work, "moved", zero__stage=1, **steps)
    job, metrics = mpi.start(work, "moved", 4, machine_ranks=2), work / "runs" / "moved" / "metrics.jsonl"
    mpi.until(lambda: metrics.exists() and '"step":3,' in metrics.read_text() or job.poll() is not None, 60, "step 3")
    (metrics.parent / "STOP").touch()
    messages = job.communicate(timeout=60)[1]
    assert job.returncode == 75 and len(rows(work, "moved")) < 100, messages
    run_ranks(work, "moved", 4)
    assert result(work, "moved") == result(work, "two")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for machines with boot ids of their own")
@pytest.mark.parametrize("stage", some_of(3, 0, 1))
def test_bytes_go_once_to_each_other_machine_as_planned(work, stage):
    """Two machines of two, imitated. The first rank's shards, of 2, 2, 2 and 1 granules, are longer than the mean."""
    prepared(work, "once", zero__stage=stage, train__steps=4, train__eval_every=0, checkpoint__every=0)
    mpi.run(work, "once", 4, machine_ranks=2)
    traffic = json.loads((work / "runs" / "once" / "plan.json").read_text())["traffic"]
    planned = traffic["between_machines_share"] * sum(traffic[f"{kind}_bytes"] for kind in ("gradient", "weight", "vote"))
    last = [row for row in rows(work, "once") if "loss" in row][-1]
    assert planned <= last["between_machines_bytes"] < 1.25 * planned  # twice as much went to each rank there
    assert last["between_machines_bytes"] < last["sent_bytes"]


def maps(pid):
    return open(f"/proc/{pid}/maps").read()


def sockets(pid):
    out = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            out.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [link for link in out if link.startswith("socket:")]


@pytest.mark.parametrize("arguments", [["--gpus", "0"], ["--ranks", "1"], ["--ranks", "2"]])
def test_without_a_job_nothing_of_mpi_is_loaded(work, arguments):
    prepared(work, "plain", train__steps=1_000_000)
    cli = subprocess.Popen([BIN / "lmlaunch", *arguments, "plain.toml"], cwd=work, stderr=subprocess.DEVNULL)
    metrics = work / "runs" / "plain" / "metrics.jsonl"
    mpi.until(metrics.exists, 60, "metrics")
    try:
        for pid in [cli.pid, *mpi.processes(work).values()]:
            assert "libmpi" not in maps(pid) and "lmlaunch-mpi" not in maps(pid)
            assert not sockets(pid)
    finally:
        cli.kill()
        cli.wait()
    mpi.nothing_left(work)


def listening(pid):
    """Ports on which this process listens, of any address."""
    inodes = {link[len("socket:["):-1] for link in sockets(pid)}
    out = []
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/{pid}/net/{name}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                out.append(fields[1])
    return out


def test_in_a_job_the_ranks_load_it_and_listen_on_nothing(work):
    prepared(work, "loaded", train__steps=1_000_000)
    job = mpi.start(work, "loaded", 2)
    mpi.until((work / "runs" / "loaded" / "metrics.jsonl").exists, 60, "metrics")
    ranks = mpi.processes(work)
    try:
        assert sorted(ranks) == [0, 1]
        for pid in ranks.values():
            assert "libmpi" in maps(pid) and not listening(pid)
    finally:
        job.send_signal(signal.SIGUSR1)
        job.communicate(timeout=60)
    assert job.returncode == 75
    mpi.nothing_left(work)


def test_a_job_of_one_process_is_no_job(work):
    prepared(work, "alone")
    run_ranks(work, "alone", 1)
    wanted = result(work, "alone")
    prepared(work, "alone")
    mpi.run(work, "alone", 1)
    assert result(work, "alone") == wanted


def stop_lines(messages):
    return [line for line in messages.splitlines() if line.startswith("lmlaunch: stop ")]


@pytest.mark.parametrize("changes, arguments, code, said", [
    ({}, ["train.stepz=3"], 10, "stepz"),
    ({}, ["--ranks", "2"], 2, "--ranks inside an MPI job"),
    ({}, ["--rankz", "2"], 2, "--rankz"),
    ({}, ["--gpus", "1"], 2, "--gpus 1 inside an MPI job"),
    ({"run__device": "cuda"}, [], 12, "a GPU is asked for"),
    ({"train__global_batch": 2, "train__micro_batch": 1}, [], 10, "train.global_batch = 2"),
    ({"data__train": ["missing.jsonl"]}, [], 11, "missing.jsonl"),
    ({"model__path": "nowhere"}, [], 11, "model.path"),
])
def test_an_error_of_all_is_said_once(work, changes, arguments, code, said):
    prepared(work, "wrong", **changes)
    messages = mpi.run(work, "wrong", 3, *arguments, code=code)
    assert len(re.findall(r"lmlaunch: error ", messages)) == 1, messages
    assert said in messages
    stops = [f"lmlaunch: stop code={code} reason=error:"] if "--rankz" not in arguments else []  # that is no training yet
    assert len(stop_lines(messages)) == len(stops) and all(map(str.startswith, stop_lines(messages), stops)), messages
    mpi.nothing_left(work)


def test_who_is_not_the_first_leaves_an_error_to_it_and_gives_it_time(work):
    """mpirun ends all with the first process that ends with an error."""
    job = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    began = time.monotonic()
    done = subprocess.run([BIN / "lmlaunch", "a.toml", "--rankz", "2"], cwd=work, env={**os.environ, **job}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "" and time.monotonic() - began > 0.9, done



def test_a_directory_in_use_is_left_alone(work):
    prepared(work, "used", train__steps=1_000_000)
    cli = subprocess.Popen([BIN / "lmlaunch", "used.toml"], cwd=work, stderr=subprocess.DEVNULL)
    mpi.until((work / "runs" / "used" / "metrics.jsonl").exists, 60, "metrics")
    try:
        messages = mpi.run(work, "used", 2, code=13)
        assert messages.count("lmlaunch: error LOCK-30") == 1 and cli.poll() is None, messages
        assert not list((work / "runs" / "used").glob(".ended*"))
    finally:
        cli.kill()
        cli.wait()


def test_an_error_of_one_rank_ends_all_with_its_code(work):
    """The second rank finds its log's place taken."""
    prepared(work, "error", train__steps=1_000_000)
    (work / "runs" / "error" / "log.rank1.txt").mkdir(parents=True)
    messages = mpi.run(work, "error", 3, code=21)
    reason, aborted = "the rank's log cannot be written", "job has been aborted"
    assert reason in messages
    assert messages.index(reason) < messages.find(aborted) or aborted not in messages, messages  # a second later mpirun kills
    assert stop_lines(messages)[-1].startswith("lmlaunch: stop code=21 reason=error:"), messages
    mpi.nothing_left(work)


def test_another_configuration_on_another_machine_is_refused(work):
    """Each process reads its own file, as machines without a shared disk do."""
    prepared(work, "differs")
    text = (work / "differs.toml").read_text()
    for rank in (0, 1):
        (work / f"differs{rank}.toml").write_text(text.replace("0.01", f"0.0{rank + 1}"))
    shutil.rmtree(work / "runs" / "differs", ignore_errors=True)
    script = f'exec "{BIN}/lmlaunch" differs$OMPI_COMM_WORLD_RANK.toml run.dir=runs/differs'
    done = subprocess.run(["mpirun", "--oversubscribe", "-n", "2", "sh", "-c", script], cwd=work, env=mpi.environment(), capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 10, done.stderr
    assert "rank 1 has another configuration than rank 0" in done.stderr


def test_muon_steps_on_other_kinds_of_cpus_are_refused(work):
    """Each rank makes all products itself, and another CPU's may have other bits. The second one sees another /proc/cpuinfo."""
    if subprocess.run(["unshare", "-m", "mount", "--bind", "/proc/meminfo", "/proc/cpuinfo"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace here (root)")
    other = re.sub(r"(?m)^(model name\s*: ).*$", r"\1Another CPU", open("/proc/cpuinfo").read())
    (work / "cpuinfo").write_text(other)
    script = f'[ $OMPI_COMM_WORLD_RANK = 0 ] || mount --bind cpuinfo /proc/cpuinfo; exec "{BIN}/lmlaunch" kinds.toml'
    for rule, code in (("adamw", 0), ("muon", 10)):
        prepared(work, "kinds", optimizer__name=rule)
        shutil.rmtree(work / "runs" / "kinds", ignore_errors=True)
        done = subprocess.run(["mpirun", "--oversubscribe", "-n", "2", "unshare", "-m", "sh", "-c", script], cwd=work, env=mpi.environment(),
                              capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        assert ("rank 1 has another kind of CPU than rank 0" in done.stderr) == (rule == "muon"), done.stderr


def test_tasks_that_cannot_find_each_other_are_refused(work):
    prepared(work, "lonely")
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
    done = lmlaunch("lonely.toml", cwd=work, check=False, env={**os.environ, **slurm})
    assert done.returncode == 2 and "srun --mpi=pmix" in done.stderr, done.stderr
    quiet = lmlaunch("lonely.toml", cwd=work, check=False, env={**os.environ, **slurm, "SLURM_PROCID": "3"})
    assert quiet.returncode == 2 and not quiet.stderr
    assert not (work / "runs" / "lonely").exists()


def test_a_stop_is_agreed_on_and_the_job_goes_on(work):
    prepared(work, "whole", model__dtype="bf16", zero__stage=2, train__steps=60)
    mpi.run(work, "whole", 3)
    prepared(work, "stopped", model__dtype="bf16", zero__stage=2, train__steps=60)
    job = mpi.start(work, "stopped", 3)
    metrics = work / "runs" / "stopped" / "metrics.jsonl"
    mpi.until(lambda: job.poll() is not None or (metrics.exists() and '"step":3,' in metrics.read_text()), 60, "step 3")
    job.send_signal(signal.SIGUSR1)
    _, messages = job.communicate(timeout=60)
    assert job.returncode == 75, messages
    assert messages.count("SIGUSR1: finishing the step") == 1, messages
    assert stop_lines(messages)[0].startswith("lmlaunch: stop code=75 reason=signal:SIGUSR1"), messages
    assert json.loads((work / "runs" / "stopped" / "status.json").read_text())["state"] == "stopped"
    mpi.run(work, "stopped", 3)
    assert result(work, "stopped") == result(work, "whole")


def final_status(work, name):
    mpi.nothing_left(work)
    mpi.until(lambda: mpi.status(work, name)["state"] != "running", 60, f"the end of {mpi.status(work, name)}")
    return mpi.status(work, name)


def test_a_job_that_mpirun_ends_has_a_final_status(work):
    """mpirun passes SIGTERM on, and kills who is left a second later: the run, or what was to write its status."""
    prepared(work, "ended", train__steps=100000)
    job = mpi.start(work, "ended", 2)
    mpi.until(lambda: job.poll() is not None or mpi.status(work, "ended").get("step", 0) > 2, 60, "step 3")
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    status = final_status(work, "ended")
    assert (status["state"], status["exit_code"]) in (("stopped", 75), ("failed", 40)), status
    saved = sorted((work / "runs" / "ended" / "checkpoints").glob("step_????????"))
    assert status["state"] != "stopped" or status["checkpoint"].endswith(saved[-1].name), status


def test_mpirun_that_is_killed_is_no_bug_of_ours(work):
    prepared(work, "orphans", train__steps=100000)
    job = mpi.start(work, "orphans", 2)
    mpi.until(lambda: job.poll() is not None or mpi.status(work, "orphans").get("step", 0) > 2, 60, "step 3")
    job.kill()
    job.communicate(timeout=60)
    status = final_status(work, "orphans")
    assert (status["state"], status["exit_code"]) == ("failed", 40), status
    assert "BUG" not in (work / "runs" / "orphans" / "log.txt").read_text()


@pytest.mark.parametrize("arguments", [[], ["--gpus", "0"]])
def test_one_process_plans_for_all(work, arguments):
    prepared(work, "planned")
    process = mpi.start(work, "planned", 2, "--dry-run", *arguments)
    out, messages = process.communicate(timeout=60)
    assert process.returncode == 0, messages

    def memory(text):  # but what is measured: times, the libraries, and what may be used beside others
        rows = [line for line in text.splitlines() if re.match(r"  [a-zA-Z].* [KMG]iB  ", line)]
        return [line for line in rows if not re.match("  (libraries|peak) ", line)]

    assert memory(out) == memory(lmlaunch("plan", "planned.toml", "--ranks", "2", cwd=work).stdout)
    assert memory(out) != memory(lmlaunch("plan", "planned.toml", "--ranks", "1", cwd=work).stdout) != []


def test_few_cores_are_said(work):
    cores = len(os.sched_getaffinity(0))
    prepared(work, "few", train__steps=1, train__global_batch=cores + 1)
    messages = mpi.run(work, "few", cores + 1)
    assert f"{cores + 1} ranks share {cores} cores" in messages


def start_apart(work, name, places):
    """Each process with a directory of its own, as machines without a common disk."""
    command = ["mpirun", "--oversubscribe"]
    for place in places:
        command += [":"] * (place != places[0]) + ["-wdir", str(place), "-n", "1", str(BIN / "lmlaunch"), str(work / f"{name}.toml")]
    return subprocess.run(command, cwd=work, env=mpi.environment(), capture_output=True, text=True, timeout=120)


def apart(work, name, **changes):
    """A run whose text, model and cache are looked for where each process is, and two places with both."""
    places = [work / f"{name}{i}" for i in range(2)]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(work / "model", place / "model")
        for text in work.glob("*.jsonl"):
            shutil.copy(text, place)
    prepared(work, name, run__dir=str(work / "runs" / name), train__steps=2, train__global_batch=2, **changes)
    return places


def test_other_training_text_on_one_rank_ends_the_run(work):
    places = apart(work, "texts")
    for text in places[1].glob("*.jsonl"):
        text.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
    done = start_apart(work, "texts", places)
    assert "error RANK-32 (exit 10): rank 1 has another training text than rank 0" in done.stderr, done.stderr
    assert done.returncode == 10 and mpi.status(work, "texts")["exit_code"] == 10


def test_another_model_on_one_rank_ends_the_run(work):
    places = apart(work, "models")
    config = json.loads((places[1] / "model" / "config.json").read_text())
    (places[1] / "model" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5, "num_hidden_layers": 2}))
    done = start_apart(work, "models", places)
    assert "error RANK-32 (exit 10): rank 1 has another plan than rank 0" in done.stderr, done.stderr
    assert done.returncode == 10


def test_machines_without_a_common_cache_tokenise_each_for_itself(work):
    places = apart(work, "caches")
    done = start_apart(work, "caches", places)
    assert done.returncode == 0, done.stderr
    made = [sorted(path.name for path in (place / "cache").rglob("*") if path.is_file()) for place in places]
    assert made[0] == made[1] != []


def test_little_memory_for_each_is_said(work):
    prepared(work, "little", train__steps=1, train__global_batch=2)
    with memory_limit(int(1.5 * 2**30), group_only=True) as under:
        done = subprocess.run([BIN / "lmlaunch", "--ranks", "2", "little.toml"], cwd=work, capture_output=True, text=True, preexec_fn=under)
    assert "2 ranks share 1.50 GiB of memory, less than 1 GiB each; start fewer" in done.stderr, done.stderr


# Where files differ between ranks: the second one's process is given a view of its own.
OTHER_VIEW = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="not root, or no unshare")
@pytest.mark.parametrize("what, code", some_of(("model", 11), ("checkpoints", 14), ("missing", 11), short=2))
def test_what_one_rank_alone_cannot_read_ends_all_with_one_code(work, what, code):
    prepared(work, "view", zero__stage=3, train__steps=1000, train__eval_every=0)
    seen, other = work / "model", work / "other"
    shutil.rmtree(other, ignore_errors=True)
    if what == "checkpoints":
        job = mpi.start(work, "view", 2)
        mpi.until(lambda: job.poll() is not None or list((work / "runs" / "view" / "checkpoints").glob("step_*3")), 60, "a checkpoint")
        job.send_signal(signal.SIGUSR1)
        job.communicate(timeout=60)
        assert job.returncode == 75
        seen = work / "runs" / "view" / "checkpoints"
    shutil.copytree(seen, other)
    for file in other.rglob("*.safetensors"):
        if what == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-100 if what == "model" else -1] + b"?" * (what == "checkpoints"))
    program = [str(BIN / "lmlaunch"), "view.toml"]
    job = subprocess.Popen(["mpirun", "--oversubscribe", "-n", "1", *program, ":", "-n", "1", *OTHER_VIEW, str(other), str(seen), *program],
                           cwd=work, env=mpi.environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    said = list(job.stderr)
    assert job.wait() == code == mpi.status(work, "view")["exit_code"], "".join(said)
    assert "no heartbeat" not in "".join(said), "".join(said)
    errors = [line for line in said if line.startswith("lmlaunch: error")]
    assert errors and all(f"(exit {code})" in line for line in errors) and "rank 1" in "".join(said), "".join(said)
    mpi.nothing_left(work)


def test_doctor_says_which_open_mpi(work):
    checks = json.loads(lmlaunch("doctor", "--json", cwd=work).stdout)["checks"]
    version = re.search(r"\d+\.\d+\.\d+", subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout)[0]
    assert [check["value"] for check in checks if check["name"] == "open mpi"] == [f"Open MPI v{version}"]
