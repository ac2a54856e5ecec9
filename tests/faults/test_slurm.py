"""Under a real Slurm of one node, started here: --signal, the end of the job's time, requeue and scancel. Each saves, exits with 75,
and the run that goes on gives the undisturbed one's bits. Skipped, visibly, where Slurm cannot be started."""

import re

import pytest

from cluster import eventually, slurm  # noqa: F401
from runs import Report, Run, make_work, resumed_at

# Some ten seconds of steps.
LONGER = ["train.steps=600", "checkpoint.every=50", "train.eval_every=0", 'optimizer.schedule="cosine"']
ENDLESS = ["train.steps=100000000", "checkpoint.every=1000", "train.eval_every=0", 'optimizer.schedule="constant"', "optimizer.warmup=0", "optimizer.lr=1e-6"]


@pytest.fixture(scope="module")
def work(tmp_path_factory, slurm):
    return make_work(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def undisturbed(work):
    run = Run(work, "undisturbed", "full", "resident", *LONGER)
    run.finish()
    return run.result()


@pytest.fixture(scope="module")
def report(slurm):
    out = Report("slurm", "F27: Slurm", "one node: --signal=B:USR1, the end of the job's time, scontrol requeue, scancel")
    yield out
    out.write()


class Job:
    """A run as a batch job, once it has made some steps."""

    def __init__(self, slurm, run, *options, first=""):
        arguments = " ".join(f"'{argument}'" for argument in run.arguments)
        script = run.work / f"{run.name}.sh"
        script.write_text(f"#!/bin/sh\necho restart=$SLURM_RESTART_COUNT >>'{run.name}.restarts'\n{first}\nexec {run.program} {arguments}\n")
        self.run, self.output = run, run.work / f"{run.name}.out"
        self.id = re.search(r"\d+", slurm("sbatch", f"--chdir={run.work}", f"--output={self.output}", "--open-mode=append", "--export=ALL",
                                          *options, script))[0]
        eventually("the first steps", 60, lambda: run.steps_done() >= 5)

    def expect_stopped(self, reason, seconds):
        status = eventually(f"the job's end by {reason}", seconds, lambda: self.run.status() if self.run.status().get("state") == "stopped" else None)
        self.run.wait_until_free()
        assert (status["exit_code"], status["reason"], status["repeat"]) == (75, reason, 0), self.output.read_text()
        assert self.run.checkpoints()[-1] == f"step_{status['step']:08}"


def goes_on(run, undisturbed, report, outcome):
    messages = run.finish()
    assert resumed_at(messages) > 0 and run.result() == undisturbed and not run.leftovers()
    report.count(outcome, tries=1)


def test_a_cancelled_job_has_saved(slurm, work, undisturbed, report):
    job = Job(slurm, Run(work, "cancelled", "full", "resident", *LONGER))
    slurm("scancel", job.id)
    job.expect_stopped("signal:SIGTERM", 15)
    goes_on(job.run, undisturbed, report, "scancel: 75, then equal bits")


def test_a_requeued_job_goes_on(slurm, work, undisturbed, report):
    job = Job(slurm, Run(work, "requeued", "full", "resident", *LONGER), "--requeue")
    slurm("scontrol", "requeue", job.id)
    eventually("the job in the queue again", 30, lambda: "JobState=PENDING" in slurm("scontrol", "show", "job", job.id))
    slurm("scontrol", "update", f"JobId={job.id}", "StartTime=now")  # Slurm itself waits two minutes
    eventually("the second start", 150, lambda: "restart=1" in (work / "requeued.restarts").read_text())
    eventually("the end", 120, job.run.done)
    job.run.wait_until_free()
    messages = job.output.read_text()
    assert "stop code=75 reason=signal:SIGTERM" in messages and resumed_at(messages) >= 5, messages
    assert job.run.result() == undisturbed and not job.run.leftovers()
    report.count("requeue: 75, SLURM_RESTART_COUNT=1 goes on, equal bits", tries=1)


def test_a_job_that_asked_for_a_signal_saves_at_it(slurm, work, report):
    job = Job(slurm, Run(work, "asked", "full", "resident", *ENDLESS), "--time=2", "--signal=B:USR1@60")
    job.expect_stopped("signal:SIGUSR1", 130)
    report.count("--signal=B:USR1@60: 75", tries=1)


# Slurm sets it since 23.02.
END_TIME = 'export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s)}'


def test_a_job_whose_time_is_over_has_saved(slurm, work, report):
    """Before the end where the job knows it, else at Slurm's SIGTERM; both jobs at once, since Slurm counts minutes."""
    told = Job(slurm, Run(work, "told", "full", "resident", *ENDLESS), "--time=1", first=END_TIME)
    untold = Job(slurm, Run(work, "untold", "full", "resident", *ENDLESS), "--time=1", first="unset SLURM_JOB_END_TIME")
    told.expect_stopped("time_limit", 70)
    assert "the Slurm job ends in" in told.output.read_text()
    report.count("SLURM_JOB_END_TIME: 75 before it", tries=1)
    untold.expect_stopped("signal:SIGTERM", 120)
    report.count("the job's time is over: SIGTERM, 75", tries=1)
