"""Runs that are interrupted and go on: what comes out equals, as text and byte for byte, the run that nobody interrupted."""

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest
from counts import some_of
from test_faults import swap_file
from test_run import BIN, config, filled, lmlaunch, rows

STEPS = 8
PLACES = {
    "resident": {},
    "on_disk": {"offload__optimizer": "nvme", "offload__weights": "nvme", "offload__gradients": "nvme", "offload__paths": ["."]},
}
# First one of each kind of state: plain, coded, factored, whole matrices.
RULES = ["adamw", "adamw_8bit", "adafactor", "muon", "adamw_4bit", "adamw_fp8", "adafactor_lowmem", "sgd", "lion", "lion_8bit", "adamw_bf16",
         "adamw_anyprecision"]
MODEL_FILE = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}


def prepared(work, name, method="full", place="resident", **changes):
    """A configuration of STEPS steps that saves after each third and the last, and keeps all of these."""
    settings = {"train__method": method, "train__steps": STEPS, "train__eval_every": 2, "model__dtype": "bf16", "optimizer__schedule": "cosine",
                "checkpoint__every": 3, "checkpoint__keep": 3, **PLACES[place], **changes}
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    return config(work, name, **settings)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """More layers than there are slots: with state on disk every step reads."""
    return filled(tmp_path_factory.mktemp("resume"), layers=5)


@pytest.fixture(scope="module")
def undisturbed(work):
    """What a run of each method gives when nothing happens to it: its rows and its model."""
    out = {}
    for method in MODEL_FILE:
        lmlaunch(prepared(work, f"undisturbed_{method}", method), cwd=work)
        out[method] = result(work, f"undisturbed_{method}", method)
    return out


def result(work, name, method):
    curve = [tuple((key, row[key]) for key in ("step", "loss", "grad_norm", "lr", "eval_loss", "target_tokens") if key in row)
             for row in rows(work, name)]
    return curve, (work / "runs" / name / "model" / MODEL_FILE[method]).read_bytes()


def hash_of(work, what):
    return json.loads(lmlaunch("verify", what, "--json", cwd=work).stdout)["weights_hash"]


def checkpoints(work, name):
    return sorted(path.name for path in (work / "runs" / name / "checkpoints").iterdir())


def interrupt(work, name, at, how, *arguments, ends_it=True):
    """Starts the run, and `how(process)` once its row `at` is written; gives exit code and messages. A run that had not begun, and
    has come to its end before `how` could end it (a step takes some ms), begins once more."""
    again = ends_it and not (work / "runs" / name).exists()
    for attempt in range(5 if again else 1):
        if attempt > 0:
            shutil.rmtree(work / "runs" / name)
        code, messages = interrupt_once(work, name, at, how, *arguments)
        if code != 0:
            break
    return code, messages


def interrupt_once(work, name, at, how, *arguments):
    process = subprocess.Popen([BIN / "lmlaunch", f"{name}.toml", *arguments], cwd=work, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = work / "runs" / name / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and f'"step":{at},' in metrics.read_text()):
        time.sleep(0.002)
    how(process)
    try:
        _, messages = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return process.returncode, messages


def kill(process):
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, signal.SIGKILL)


def done(work, name):
    status = work / "runs" / name / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "done"


def signal_of(number):
    return lambda process: process.send_signal(number)


@pytest.mark.parametrize("method, place", some_of(("full", "on_disk"), ("lora", "resident"), ("full", "resident"), ("lora", "on_disk"), short=2))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(work, undisturbed, method, place):
    name = f"killed_{method}_{place}"
    prepared(work, name, method, place)
    for at in (4, 6):
        if not done(work, name):
            code, _ = interrupt(work, name, at, kill)
            assert code in (-signal.SIGKILL, 0)
    if not done(work, name):
        lmlaunch(f"{name}.toml", cwd=work)
    assert result(work, name, method) == undisturbed[method]


@pytest.mark.parametrize("rule", some_of(*RULES, short=4))
def test_every_rule_goes_on_as_if_nothing_had_happened(work, rule):
    """Half of it in memory, the other half, which goes on from the same checkpoint, on disk."""
    whole, halves = f"whole_{rule}", f"halves_{rule}"
    lmlaunch(prepared(work, whole, optimizer__name=rule), cwd=work)
    prepared(work, halves, optimizer__name=rule)
    code, _ = interrupt(work, halves, 4, kill)
    assert code in (-signal.SIGKILL, 0)
    if not done(work, halves):
        config(work, halves, **{"train__steps": STEPS, "train__eval_every": 2, "model__dtype": "bf16", "optimizer__schedule": "cosine",
                                "checkpoint__every": 3, "optimizer__name": rule, **PLACES["on_disk"]})
        lmlaunch(f"{halves}.toml", cwd=work)
    assert result(work, halves, "full") == result(work, whole, "full")


def test_a_save_of_state_on_disk_reads_nothing(work):
    moved = {}
    for every in (0, 1, 3):
        name = f"reads_{every}"
        lmlaunch(prepared(work, name, place="on_disk", checkpoint__every=every, train__eval_every=0), cwd=work)
        moved[every] = [(row["read_bytes"], row["written_bytes"]) for row in rows(work, name) if "loss" in row]
        assert len(moved[every]) == STEPS
    # A transfer counts for the step in which it ends, which may be either of two.
    for every in (1, 3):
        for way in (0, 1):
            assert sum(row[way] for row in moved[every][:-1]) == pytest.approx(sum(row[way] for row in moved[0][:-1]), rel=0.05)
    assert moved[0][2][0] > 0


def test_a_save_is_of_its_own_step_though_it_is_committed_in_the_next(work, undisturbed):
    metrics = (work / "runs" / "undisturbed_full" / "metrics.jsonl").read_bytes()
    log = (work / "runs" / "undisturbed_full" / "log.txt").read_text()
    assert checkpoints(work, "undisturbed_full") == ["step_00000003", "step_00000006", "step_00000008"]
    for step in (3, 6):
        manifest = json.loads((work / "runs" / "undisturbed_full" / "checkpoints" / f"step_{step:08}" / "MANIFEST.json").read_text())
        trainer = manifest["run"]["trainer"]
        assert (manifest["step"], trainer["step"], manifest["numbers"]["optimizer.t"]) == (step, step, step)
        before = [json.loads(line)["step"] for line in metrics[:manifest["run"]["metrics_bytes"]].splitlines()]
        assert max(before) == step and before.count(step) == len([line for line in metrics.splitlines() if json.loads(line)["step"] == step])
        assert len(re.findall(rf"^COMMITTED step {step} \(\d+\.\d\d s; training waited \d+\.\d\d s\)$", log, re.M)) == 1


@pytest.mark.parametrize("number", some_of(signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, short=2))
def test_a_signal_saves_and_exits_with_75(work, undisturbed, number):
    name = f"signal_{number}"
    prepared(work, name, checkpoint__every=0)
    code, messages = interrupt(work, name, 2, signal_of(number))
    assert code == 75, messages
    step = json.loads((work / "runs" / name / "status.json").read_text())["step"]
    last = messages.rstrip().splitlines()[-1]
    assert last == f"lmlaunch: stop code=75 reason=signal:{number.name} step={step} checkpoint=runs/{name}/checkpoints/step_{step:08} repeat=0"
    assert f"to resume: lmlaunch {name}.toml" in messages
    lmlaunch(f"{name}.toml", cwd=work)
    assert result(work, name, "full") == undisturbed["full"]


def test_a_stop_before_the_first_step_waits_for_no_evaluation_and_no_sample(work):
    """The time is up from the start."""
    name = "at_once"
    ended = lmlaunch(prepared(work, name), "run.time_limit=1s", cwd=work, check=False)
    assert ended.returncode == 75 and "stopped after step 0 of" in ended.stderr, ended.stderr
    assert "eval loss" not in ended.stderr and rows(work, name) == []
    lmlaunch(f"{name}.toml", cwd=work)
    assert rows(work, name)[0]["eval_loss"] > 0


def test_a_stop_file_and_a_time_limit_save_and_exit_with_75(work, undisturbed):
    prepared(work, "stop_file", train__steps=100000)
    code, messages = interrupt(work, "stop_file", 2, lambda process: (work / "runs" / "stop_file" / "STOP").touch())
    assert code == 75 and "reason=stop_file" in messages and "repeat=0" in messages
    prepared(work, "time_limit", train__steps=100000)
    ended = lmlaunch("time_limit.toml", "run.time_limit=3s", cwd=work, check=False)
    assert ended.returncode == 75 and "reason=time_limit" in ended.stderr and "repeat=0" in ended.stderr
    ended = lmlaunch("time_limit.toml", cwd=work, check=False, env={**os.environ, "SLURM_JOB_END_TIME": str(int(time.time()) + 8)})
    assert ended.returncode == 75 and "reason=time_limit" in ended.stderr and "the Slurm job ends in" in ended.stderr


def test_a_checkpoint_that_is_not_whole_is_said_and_passed_over(work, undisturbed):
    name = "damaged"
    prepared(work, name)
    lmlaunch(f"{name}.toml", cwd=work)
    run = work / "runs" / name
    for damage in ("bytes", "manifest", "absent"):
        shutil.rmtree(run / "checkpoints" / "step_00000008")
        shutil.rmtree(run / "model", ignore_errors=True)
        (run / "status.json").unlink(missing_ok=True)
        newest = run / "checkpoints" / "step_00000006"
        file = newest / ("MANIFEST.json" if damage == "manifest" else "rank00000.safetensors")
        if damage == "absent":
            file.unlink()
        else:
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 4
            file.write_bytes(raw)
        found = lmlaunch("verify", f"runs/{name}/checkpoints/step_00000006", cwd=work, check=False)
        said = int(re.search(r"\(exit (\d+)\)", found.stderr)[1])
        assert found.returncode == said and (said == 22) == (damage != "absent"), found.stderr
        (run / "checkpoints" / "step_00000009.tmp-00").mkdir()
        ended = lmlaunch(f"{name}.toml", cwd=work)
        assert "warning CKPT-02" in ended.stderr and "step_00000006" in ended.stderr, damage
        assert "resumes from runs/damaged/checkpoints/step_00000003" in ended.stderr, damage
        assert "note CKPT-01" in ended.stderr and "step_00000009.tmp-00" in ended.stderr
        assert result(work, name, "full") == undisturbed["full"]
        assert [c for c in checkpoints(work, name) if "damaged" not in c] == ["step_00000003", "step_00000006", "step_00000008"], damage
    for path in (run / "checkpoints").iterdir():
        (path / "MANIFEST.json").unlink(missing_ok=True)
    (run / "status.json").unlink()
    ended = lmlaunch(f"{name}.toml", cwd=work, check=False)
    assert ended.returncode == 14 and "no checkpoint is valid" in ended.stderr and "step_00000003" in ended.stderr


def test_which_checkpoint_is_taken_and_which_are_kept(work, undisturbed):
    name = "choice"
    prepared(work, name, checkpoint__every=1, checkpoint__keep=3)
    lmlaunch(f"{name}.toml", cwd=work)
    assert checkpoints(work, name) == ["step_00000006", "step_00000007", "step_00000008"]
    (work / "runs" / name / "status.json").unlink()
    refused = lmlaunch(f"{name}.toml", "checkpoint.resume=never", cwd=work, check=False)
    assert refused.returncode == 14 and "never" in refused.stderr
    refused = lmlaunch(f"{name}.toml", "checkpoint.resume=step_00000004", cwd=work, check=False)
    assert refused.returncode == 14 and "step_00000006: valid" in refused.stderr
    refused = lmlaunch(f"{name}.toml", "checkpoint.resume=latest", cwd=work, check=False)
    assert refused.returncode == 10 and "checkpoint.resume" in refused.stderr
    ended = lmlaunch(f"{name}.toml", "checkpoint.resume=step_00000006", "checkpoint.every=0", cwd=work)
    assert "resumes from runs/choice/checkpoints/step_00000006" in ended.stderr
    assert checkpoints(work, name) == ["step_00000006", "step_00000007.later", "step_00000008.later"]
    assert result(work, name, "full") == undisturbed["full"]


def test_the_best_by_held_out_loss_is_kept(work):
    name = "best"
    prepared(work, name, checkpoint__every=1, checkpoint__keep=1, checkpoint__keep_best=True, optimizer__lr=0.3, optimizer__schedule="linear",
             optimizer__warmup=7)
    lmlaunch(f"{name}.toml", cwd=work)
    losses = {row["step"]: row["eval_loss"] for row in rows(work, name) if "eval_loss" in row and 0 < row["step"] < STEPS}
    best = min(losses, key=losses.get)
    assert checkpoints(work, name) == sorted({f"step_{best:08}", "step_00000008"})


@pytest.mark.parametrize("method", MODEL_FILE)
def test_the_last_step_is_saved_and_nothing_is_repeated(work, method):
    name = f"last_{method}"
    ended = lmlaunch(prepared(work, name, method, checkpoint__every=5), cwd=work)
    last = f"runs/{name}/checkpoints/step_00000008"
    assert ended.stderr.rstrip().endswith(f"reason=done step=8 checkpoint={last} repeat=0"), ended.stderr
    assert json.loads(lmlaunch("verify", last, "--json", cwd=work).stdout)["ok"]


def test_a_start_keeps_no_more_checkpoints_than_it_is_to(work):
    """As after starts that each died between a save and what is deleted after it."""
    name = "crash_loop"
    prepared(work, name, checkpoint__every=1, checkpoint__keep=9)
    code, messages = interrupt(work, name, 5, kill)
    assert code in (-signal.SIGKILL, 0) and len(checkpoints(work, name)) > 2, messages
    if not done(work, name):
        newest = [path for path in checkpoints(work, name) if ".tmp" not in path][-2:]
        lmlaunch(f"{name}.toml", "checkpoint.every=0", "checkpoint.keep=2", cwd=work)
        assert checkpoints(work, name) == newest


def test_a_status_that_is_stale_can_be_told(work):
    """A CLI process that is killed leaves a final one; it says by whom, where and when it was written."""
    name = "front"
    prepared(work, name, train__steps=100000, checkpoint__every=2)
    process = subprocess.Popen([BIN / "lmlaunch", f"{name}.toml"], cwd=work, stderr=subprocess.DEVNULL, start_new_session=True)
    path = work / "runs" / name / "status.json"
    while process.poll() is None and not (path.exists() and json.loads(path.read_text())["step"] > 4):
        time.sleep(0.005)
    status = json.loads(path.read_text())
    assert (status["state"], status["host"], status["pid"]) == ("running", socket.gethostname(), process.pid)
    written = datetime.datetime.fromisoformat(status["updated_at"].replace("Z", "+00:00")).timestamp()
    assert abs(written - path.stat().st_mtime) < 60
    process.kill()  # it alone: its rank ends with it
    process.wait()
    for _ in range(6000):
        if (status := json.loads(path.read_text()))["state"] != "running":
            break
        time.sleep(0.01)
    assert (status["state"], status["exit_code"], status["reason"], status["pid"]) == ("failed", 40, "killed:lmlaunch", process.pid)
    # The last that its rank had said to be safe: one more may have been renamed just before the kill.
    named = int(status["checkpoint"].rpartition("step_")[2])
    newest = [int(path.removeprefix("step_")) for path in checkpoints(work, name) if ".tmp" not in path][-1]
    assert named in (newest - 2, newest) and status["step"] == named + status["repeat"], status


@pytest.mark.parametrize("method", MODEL_FILE)
def test_a_checkpoint_is_exported_evaluated_verified_and_asked(work, undisturbed, method):
    """At step 6 of the undisturbed run: the export is what a run of six steps writes, and evaluates as it did."""
    name = f"undisturbed_{method}"
    checkpoint = f"runs/{name}/checkpoints/step_00000006"
    # The same six steps, the last of them saved as the model.
    prepared(work, f"six_{method}", method)
    interrupt(work, f"six_{method}", 6, signal_of(signal.SIGTERM), "checkpoint.every=6")
    lmlaunch("export", checkpoint, "-o", f"exported_{method}", cwd=work)
    lmlaunch("export", f"runs/six_{method}/checkpoints/step_00000006", "-o", f"six_{method}_exported", cwd=work)
    exported = (work / f"exported_{method}" / MODEL_FILE[method]).read_bytes()
    assert exported == (work / f"six_{method}_exported" / MODEL_FILE[method]).read_bytes()
    wanted = [row["eval_loss"] for row in rows(work, name) if row["step"] == 6 and "eval_loss" in row]
    for what in (checkpoint, f"{checkpoint}/"):
        assert [json.loads(lmlaunch("eval", what, "--json", cwd=work).stdout)["eval_loss"]] == wanted
    # The same weights, the same hash, whatever they are in; a run without a model yet is its newest checkpoint.
    for one, same in ((checkpoint, f"exported_{method}"), (f"runs/six_{method}", f"six_{method}_exported"), (f"runs/{name}", f"runs/{name}/model")):
        assert hash_of(work, one) == hash_of(work, same), one
    if method == "lora":
        lmlaunch("export", checkpoint, "-o", "merged_checkpoint", "--merge", cwd=work)
        assert (work / "merged_checkpoint" / "model.safetensors").exists()
    # A run without a model yet is taken at its newest checkpoint.
    told = lmlaunch("eval", f"runs/six_{method}", "--json", cwd=work)
    assert "taking its newest checkpoint" in told.stderr


def damaged(work):
    """What changes every chunk of the run's swap file while the run stands still."""
    def damage(process):
        rank = int(subprocess.run(["pgrep", "-P", str(process.pid), "lmlaunch"], capture_output=True, text=True).stdout.split()[0])
        os.kill(rank, signal.SIGSTOP)
        swap = swap_file(rank, work / "swap")
        for offset in range(100, os.fstat(swap).st_size, 8192):
            byte = os.pread(swap, 1, offset)
            os.pwrite(swap, bytes([byte[0] ^ 4]), offset)
        os.close(swap)
        os.kill(rank, signal.SIGCONT)

    return damage


@pytest.mark.parametrize("method", some_of("full", "lora"))
def test_damage_on_a_disk_sends_the_run_back_to_its_checkpoint(work, method):
    """It meets a chunk that was changed and ends as if nothing had been."""
    steps = {"train__steps": 160, "train__eval_every": 0, "checkpoint__every": 60, "log__every": 50}
    lmlaunch(prepared(work, f"sound_{method}", method, "on_disk", **steps), cwd=work)
    name = f"damaged_swap_{method}"
    (work / "swap").mkdir(exist_ok=True)
    prepared(work, name, method, "on_disk", **{**steps, "offload__paths": ["swap"]})
    code, messages = interrupt(work, name, 70, damaged(work), ends_it=False)
    assert code == 0, messages
    assert "restoring from" in messages and "are not what was written" in messages, messages
    assert result(work, name, method) == result(work, f"sound_{method}", method)


@pytest.mark.parametrize("method", some_of("lora", "full"))
def test_damage_while_a_save_is_under_way_drops_it(work, method):
    """Every step carries the save of the one before it, and one of them fails."""
    steps = {"train__steps": 80, "train__eval_every": 0, "checkpoint__every": 1, "log__every": 100}
    lmlaunch(prepared(work, f"sound_each_{method}", method, "on_disk", **{**steps, "checkpoint__every": 0}), cwd=work)
    name = f"damaged_each_{method}"
    (work / "swap").mkdir(exist_ok=True)
    prepared(work, name, method, "on_disk", **{**steps, "offload__paths": ["swap"]})
    code, messages = interrupt(work, name, 30, damaged(work), ends_it=False)
    assert code == 0, messages
    assert "restoring from" in messages and "are not what was written" in messages, messages
    said = [int(step) for step in re.findall(r"COMMITTED step (\d+) ", messages)]
    assert said == list(range(1, 81)), messages
    assert checkpoints(work, name) == ["step_00000078", "step_00000079", "step_00000080"]
    assert result(work, name, method) == result(work, f"sound_each_{method}", method)


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_completes_the_save_that_is_under_way(work, undisturbed, place):
    name = f"stop_{place}"
    prepared(work, name, place=place, checkpoint__every=1, checkpoint__keep=9, train__eval_every=0)  # which would flush before the save
    code, messages = interrupt(work, name, 2, signal_of(signal.SIGTERM))
    step = json.loads((work / "runs" / name / "status.json").read_text())["step"]
    assert code == 75 and "repeat=0" in messages, messages
    assert [int(s) for s in re.findall(r"COMMITTED step (\d+) ", messages)] == list(range(1, step + 1)), messages
    assert checkpoints(work, name) == [f"step_{s:08}" for s in range(1, step + 1)]
    lmlaunch(f"{name}.toml", cwd=work)
    assert result(work, name, "full")[1] == undisturbed["full"][1]


LONGER = {"train__steps": 80, "train__eval_every": 0, "checkpoint__every": 30, "log__every": 40}
# Where state lies and how it gets there, before and after.
MOVES = {"to_disk": ("resident", {}, "on_disk", {}), "from_disk": ("on_disk", {}, "resident", {}),
         "ring_to_threads": ("on_disk", {"io__engine": "uring"}, "on_disk", {"io__engine": "threads"}),
         "threads_to_ring": ("on_disk", {"io__engine": "threads"}, "on_disk", {"io__engine": "uring"}),
         "tiles_and_blocks": ("on_disk", {}, "on_disk", {"io__tile": "64KiB", "io__block": "4KiB", "io__depth": 2}),
         "update_threads": ("on_disk", {"optimizer__threads": 1}, "on_disk", {"optimizer__threads": 2}),
         "some_classes": ("on_disk", {}, "on_disk", {"offload__weights": "none", "offload__gradients": "none"})}


@pytest.fixture(scope="module")
def longer(work):
    out = {}
    for method in MODEL_FILE:
        lmlaunch(prepared(work, f"longer_{method}", method, **LONGER), cwd=work)
        out[method] = result(work, f"longer_{method}", method)
    return out


# Each way to and from a disk, each method and each setting of transfers once.
@pytest.mark.parametrize("move, method", some_of(("to_disk", "full"), ("from_disk", "lora"), ("ring_to_threads", "full"), ("tiles_and_blocks", "full"),
                                               ("update_threads", "full"), ("to_disk", "lora"), ("from_disk", "full"), ("threads_to_ring", "full"),
                                               ("some_classes", "full"), short=5))
def test_a_run_goes_on_elsewhere_with_the_same_bits(work, longer, move, method):
    before, settings, after, others = MOVES[move]
    name = f"{move}_{method}"
    prepared(work, name, method, before, **{**LONGER, **settings})
    code, messages = interrupt(work, name, 35, signal_of(signal.SIGTERM))
    assert code == 75, messages
    plan = (work / "runs" / name / "plan.txt").read_text()
    kept = shutil.copytree(work / "runs" / name, work / "kept", dirs_exist_ok=True)
    prepared(work, name, method, after, **{**LONGER, **others})
    shutil.move(kept, work / "runs" / name)
    ended = lmlaunch(f"{name}.toml", cwd=work)
    assert f"resumes from runs/{name}/checkpoints/step_" in ended.stderr
    assert result(work, name, method) == longer[method]
    if {before, after} == {"resident", "on_disk"}:
        assert (work / "runs" / name / "plan.txt").read_text() != plan


def test_a_save_that_the_time_is_too_short_for_is_left_out(work, longer):
    """The run stands still until its time is over: it leaves with the checkpoint that it has."""
    name = "too_late"
    prepared(work, name, **LONGER)

    def stand_still(process):
        rank = int(subprocess.run(["pgrep", "-P", str(process.pid), "lmlaunch"], capture_output=True, text=True).stdout.split()[0])
        os.kill(rank, signal.SIGSTOP)
        time.sleep(9)
        os.kill(rank, signal.SIGCONT)

    code, messages = interrupt(work, name, 35, stand_still, "run.time_limit=8s")
    assert code == 75, messages
    last = re.search(r"stop code=75 reason=time_limit step=(\d+) checkpoint=(\S+) repeat=(\d+)$", messages.rstrip())
    assert last and (last[2], int(last[3])) == (f"runs/{name}/checkpoints/step_00000030", int(last[1]) - 30), messages
    assert int(last[3]) > 0 and checkpoints(work, name) == ["step_00000030"]
    lmlaunch(f"{name}.toml", cwd=work)
    assert result(work, name, "full") == longer["full"]
