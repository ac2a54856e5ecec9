"""Several processes under a real Slurm of one node: srun --mpi=pmix, and configs/slurm/train.sbatch with its time limit, requeue,
preemption and scancel. What comes out is what --ranks gives, bit for bit. Skipped, visibly, where Slurm or Open MPI is missing."""

import os
import re
import shutil
import signal
import sys

import pytest

from cluster import eventually, slurm  # noqa: F401
from runs import BIN, ROOT, Report, Run, make_work, resumed_at

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import mpi  # noqa: E402

pytestmark = pytest.mark.skipif(not shutil.which("mpirun"), reason="no Open MPI (openmpi-bin)")
RANKS = 2
SHORT = ["train.eval_every=0", 'optimizer.schedule="cosine"', "zero.stage=2", "train.global_batch=4"]
SLOWLY = [*SHORT, "optimizer.lr=1e-3"]  # at the quick rates of short runs so many steps diverge on some CPUs
# Longer than Slurm takes to make place for another job, and than the half minute until its signal.
LONGER = [*SLOWLY, "train.steps=4000", "checkpoint.every=1000"]
LONGEST = [*SLOWLY, "train.steps=12000", "checkpoint.every=2000"]


@pytest.fixture(scope="module")
def work(tmp_path_factory, slurm):  # noqa: F811
    return make_work(tmp_path_factory.mktemp("jobs"))


def undisturbed(work, arguments, name="undisturbed"):
    run = Run(work, name, "full", "resident", *arguments)
    run.finish("--ranks", str(RANKS))
    return run.result()


@pytest.fixture(scope="module")
def longer(work):
    return undisturbed(work, LONGER, "undisturbed_longer")


@pytest.fixture(scope="module")
def report(slurm):  # noqa: F811
    out = Report("slurm_ranks", "F27: Slurm, several processes", f"one node, {RANKS} processes: srun --mpi=pmix; the sample script's time limit, requeue, preemption and scancel")
    yield out
    out.write()


def submit(slurm, run, *options):  # noqa: F811
    """The sample script, with this build's lmlaunch; the job's number and its output."""
    output = run.work / f"{run.name}.out"
    output.unlink(missing_ok=True)
    path = f"{BIN}:{os.environ['PATH']}"
    said = slurm("sbatch", f"--chdir={run.work}", f"--output={output}", f"--export=ALL,PATH={path},OMPI_MCA_btl_vader_single_copy_mechanism=none",
                 f"--ntasks={RANKS}", *options, ROOT / "configs" / "slurm" / "train.sbatch", *run.arguments)
    return re.search(r"\d+", said)[0], output


def queued_again(slurm, job, restarts):  # noqa: F811
    said = slurm("scontrol", "show", "job", job)
    return "JobState=PENDING" in said and int(re.search(r"Restarts=(\d+)", said)[1]) >= restarts


def start_soon(slurm, job):  # noqa: F811
    """Slurm itself waits two minutes; a start within the second of the end is taken for one of before it, and revoked."""
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now+3")


def test_srun_gives_the_bits_of_ranks(slurm, work, report):  # noqa: F811
    wanted = undisturbed(work, SHORT)
    run = Run(work, "srun", "full", "resident", *SHORT)
    slurm("srun", "--mpi=pmix", "-n", RANKS, f"--chdir={work}", run.program, *run.arguments)
    assert run.result() == wanted and run.done()
    report.count("srun: the bits of --ranks", tries=1)


def test_srun_without_pmix_is_refused(slurm, work):  # noqa: F811
    run = Run(work, "lonely", "full", "resident", *SHORT)
    with pytest.raises(AssertionError, match="srun --mpi=pmix"):
        slurm("srun", "--mpi=none", "-n", RANKS, f"--chdir={work}", run.program, *run.arguments)
    assert not run.directory.exists()


def test_a_job_at_its_time_limit_saves_and_goes_on_after_its_requeue(slurm, work, report):  # noqa: F811
    run = Run(work, "limit", "full", "resident", *LONGEST)
    job, output = submit(slurm, run, "--time=2", "--signal=USR1@105")
    eventually("the job in the queue again", 100, lambda: queued_again(slurm, job, 1))
    first = output.read_text()
    assert "stop code=75 reason=signal:SIGUSR1" in first and run.status()["state"] == "stopped", first
    start_soon(slurm, job)
    eventually("the end", 180, lambda: run.done() or "stop code=75" in output.read_text()[len(first):])
    messages = output.read_text()
    assert f"lmlaunch job {job}, restart 1" in messages and resumed_at(messages) > 0, messages
    if not run.done():  # a slow machine: this start took its time limit, too, and the rest needs no Slurm
        slurm("scancel", job)
        run.wait_until_free()
        run.finish("--ranks", str(RANKS))
    run.wait_until_free()
    assert run.result() == undisturbed(work, LONGEST, "undisturbed_longest") and not run.leftovers()
    report.count("time limit: 75, SLURM_RESTART_COUNT=1 goes on, equal bits", tries=1)


def test_a_preempted_job_saves_and_goes_on_when_it_is_its_turn_again(slurm, work, longer, report):  # noqa: F811
    run = Run(work, "preempted", "full", "resident", *LONGER)
    job, output = submit(slurm, run)
    eventually("the first steps", 60, lambda: run.steps_done() >= 5)
    took = work / "urgent.out"
    slurm("sbatch", "--partition=urgent", f"--ntasks={RANKS}", f"--output={took}", f"--chdir={work}", "--wrap", "echo urgent")
    eventually("the job in the queue again", 60, lambda: queued_again(slurm, job, 1))
    first = output.read_text()
    assert "stop code=75 reason=signal:SIGTERM" in first and run.status()["state"] == "stopped" and run.status()["repeat"] == 0, first
    eventually("the other job", 60, lambda: took.exists() and took.read_text() == "urgent\n")
    start_soon(slurm, job)
    eventually("the end", 180, lambda: run.done() or "stop code=75" in output.read_text()[len(first):])
    messages = output.read_text()
    assert f"lmlaunch job {job}, restart 1" in messages and resumed_at(messages) >= 5, messages
    run.wait_until_free()
    assert run.result() == longer and not run.leftovers()
    report.count("preemption: 75, SLURM_RESTART_COUNT=1 goes on, equal bits", tries=1)


def test_a_cancelled_job_has_saved(slurm, work, longer, report):  # noqa: F811
    run = Run(work, "cancelled", "full", "resident", *LONGER)
    job, output = submit(slurm, run)
    eventually("the first steps", 60, lambda: run.steps_done() >= 5)
    slurm("scancel", job)
    eventually("the end", 60, lambda: run.status().get("state") == "stopped")
    run.wait_until_free()
    assert run.status()["exit_code"] == 75 and run.status()["repeat"] == 0, output.read_text()
    messages = run.finish("--ranks", str(RANKS))
    assert resumed_at(messages) > 0 and run.result() == longer
    report.count("scancel: 75, then equal bits", tries=1)


def test_a_rank_that_is_killed_ends_the_job(slurm, work, report):  # noqa: F811
    run = Run(work, "killed", "full", "resident", *SHORT, "train.steps=1000000", "checkpoint.every=0")
    job, output = submit(slurm, run)
    eventually("the first steps", 60, lambda: run.steps_done() >= 5)
    os.kill(mpi.processes(work)[1], signal.SIGKILL)
    eventually("the end", 60, lambda: run.status().get("state") == "failed")
    mpi.nothing_left(work)
    assert run.status()["exit_code"] == 40 and run.status()["reason"] == "killed:SIGKILL", output.read_text()
    assert re.search(r"error PEER-08 \(exit 40\): the worker was killed by signal 9 \(SIGKILL\).* at rank 1 on ", output.read_text())
    # 40 puts the job back into the queue, as 75 does.
    eventually("the requeue", 30, lambda: queued_again(slurm, job, 1))
    slurm("scancel", job)
    eventually("the job's end", 30, lambda: f"{job}" not in slurm("squeue", "-h", "-o", "%i"))
    report.count("SIGKILL of a rank: 40, all gone, queued again", tries=1)
