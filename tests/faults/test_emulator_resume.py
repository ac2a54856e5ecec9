"""Resume on the emulated GPU (tests/emulator): a run there that is killed or stopped, and goes on, equals the one that nobody disturbed,
in full and with LoRA, with its state on the device, on the host and on disk."""

import signal
import time

import pytest

from runs import FULL, METHODS, Report, Run, kill, make_work, ready, wait

STEPS = 12
CLASSES = ("optimizer", "weights", "gradients", "activations")
PLACEMENTS = {"device": [], "host": [f"offload.{name}=host" for name in CLASSES],
         "disk": [f"offload.{name}=nvme" for name in ("optimizer", "weights", "gradients")] + ['offload.paths=["swap/disk"]']}
INTERRUPTIONS = 2 if FULL else 1


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return make_work(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="module")
def report():
    out = Report("emulator_resume", "F01 F27: kill -9 and SIGTERM on the emulated GPU", "after a random step, then again; state on device, host "
                 "and disk")
    yield out
    out.write()


def run_on_emulator(work, name, method, placement):
    (work / "swap" / "disk").mkdir(parents=True, exist_ok=True)
    return Run(work, name, method, "device", f"train.steps={STEPS}", "train.recompute=block", "checkpoint.every=2",
               "data.packing=true", *PLACEMENTS[placement])


@pytest.fixture(scope="module")
def undisturbed(work):
    known = {}

    def result(method):
        if method not in known:
            run = run_on_emulator(work, f"undisturbed_{method}", method, "device")
            assert "NVIDIA H100" in run.finish()
            known[method] = run.result()
        return known[method]

    return result


def interrupt(run, at, how):
    process = run.start()
    assert ready(process)
    while process.poll() is None and run.steps_done() < at:
        time.sleep(0.005)
    how(process)
    code, messages = wait(process)
    assert code in (-signal.SIGKILL, 75), messages
    run.wait_until_free()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_interrupted_run_on_the_emulated_gpu_goes_on_bit_for_bit(work, report, undisturbed, method, placement):
    run, random = run_on_emulator(work, f"{method}_{placement}", method, placement), report.random(method, placement)
    for _ in range(INTERRUPTIONS):
        for how, name in ((kill, "killed"), (lambda process: process.send_signal(signal.SIGTERM), "75")):
            if run.steps_done() < STEPS // 2:  # a signal in the last steps may come too late
                interrupt(run, random.randint(max(run.steps_done(), 1), STEPS // 2), how)
                report.count(name, tries=1)
    run.finish()
    assert run.result() == undisturbed(method)
    assert not run.leftovers() and not list((work / "swap" / "disk").iterdir())
    report.count("runs that ended with the undisturbed one's rows and model")
