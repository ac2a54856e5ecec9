"""`lmlaunch --ranks N`: several processes that share a run give what one gives, end together, and go on at any number."""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest
from counts import some_of
from transformers import LlamaConfig, LlamaForCausalLM

import mpi
from stuck import Stuck
from test_run import BIN, VOCAB, config, filled, lmlaunch, rows

STEPS = 9
ON_DISK = {"offload__optimizer": "nvme", "offload__weights": "nvme", "offload__gradients": "nvme", "offload__paths": ["."]}
MODEL_FILE = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("ranks"), layers=5)


def prepared(work, name, method="full", **changes):
    """A fresh run of STEPS steps, of which the last has fewer sequences than there may be ranks."""
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    settings = {"train__method": method, "train__steps": STEPS, "train__eval_every": 4, "train__global_batch": 9, "train__micro_batch": 1,
                "model__dtype": "fp32", "optimizer__schedule": "cosine", "checkpoint__every": 3, **changes}
    return config(work, name, **settings)


def curve(work, name):
    """What a run's rows say of its numbers, as text."""
    return [tuple((key, row[key]) for key in ("step", "loss", "grad_norm", "lr", "eval_loss", "target_tokens", "tokens") if key in row)
            for row in rows(work, name)]


def result(work, name, method="full"):
    return curve(work, name), (work / "runs" / name / "model" / MODEL_FILE[method]).read_bytes()


def run(work, name, ranks, *arguments):
    return lmlaunch("--ranks", ranks, f"{name}.toml", *arguments, cwd=work)


def started(work, name, ranks, step, *arguments, **variables):
    """A run that has done `step` steps: the CLI process, and the ranks' process ids."""
    cli = subprocess.Popen([BIN / "lmlaunch", "--ranks", str(ranks), f"{name}.toml", *arguments], cwd=work, stderr=subprocess.PIPE, text=True,
                            start_new_session=True, env={**os.environ, **variables})
    metrics = work / "runs" / name / "metrics.jsonl"
    while cli.poll() is None and not (metrics.exists() and f'"step":{step},' in metrics.read_text()):
        time.sleep(0.002)
    return cli, [int(pid) for pid in subprocess.run(["pgrep", "-P", str(cli.pid), "lmlaunch"], capture_output=True, text=True).stdout.split()]


def gone(pids):
    mpi.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 60, f"the end of {pids}")


@pytest.mark.parametrize("method", MODEL_FILE)
def test_ranks_give_what_one_process_gives(work, method):
    prepared(work, "alone", method)
    lmlaunch("alone.toml", "--gpus", "0", cwd=work)
    prepared(work, "ranks_1", method)
    run(work, "ranks_1", 1)
    assert result(work, "ranks_1", method) == result(work, "alone", method)
    one = rows(work, "alone")
    for ranks in (2, 3, 4):
        prepared(work, f"ranks_{ranks}", method)
        run(work, f"ranks_{ranks}", ranks)
        many = rows(work, f"ranks_{ranks}")
        assert [row["step"] for row in many] == [row["step"] for row in one]
        for a, b in zip(many, one):
            key = "eval_loss" if "eval_loss" in a else "loss"
            assert a[key] == pytest.approx(b[key], rel=1e-6)
            assert a["token_accuracy"] == pytest.approx(b["token_accuracy"], abs=1.5 / a["target_tokens"])  # a near tie
            assert a.get("tokens") == b.get("tokens") and a["target_tokens"] == b["target_tokens"]


@pytest.mark.parametrize("stage", some_of(3, 1))
def test_a_save_of_ranks_rides_on_the_next_step(work, stage):
    """State on disk is read for no save; a run that goes on from one has the bits of the run that made it."""
    # An evaluation completes the updates that a save rides on.
    settings = {"zero__stage": stage, "train__eval_every": STEPS, "checkpoint__keep": 9, "offload__optimizer": "nvme", "offload__paths": ["."]}

    def read_bytes(name):
        return [row["read_bytes"] for row in rows(work, name) if "loss" in row]

    prepared(work, "unsaved", **{**settings, "checkpoint__every": 0})
    run(work, "unsaved", 2)
    prepared(work, "saved", **{**settings, "checkpoint__every": 1})
    run(work, "saved", 2)
    # What is fetched for the updates after the last row may be in it or not; each of eight saves would read as much.
    assert abs(sum(read_bytes("saved")) - sum(read_bytes("unsaved"))) <= max(read_bytes("unsaved")) > 0
    whole = result(work, "saved")
    assert whole == result(work, "unsaved")
    first, *later = sorted((work / "runs" / "saved" / "checkpoints").iterdir())
    assert first.name == "step_00000001" and len(later) >= 7
    for directory in (*later, work / "runs" / "saved" / "model"):
        shutil.rmtree(directory)
    (work / "runs" / "saved" / "status.json").unlink()
    run(work, "saved", 2)
    assert result(work, "saved") == whole


@pytest.mark.parametrize("method, ranks", some_of(("full", 2), ("lora", 3), ("full", 3), ("lora", 2), short=2))
def test_stages_and_tiers_give_the_same_bits(work, method, ranks):
    wanted, hashes = None, set()
    for stage, place in [(0, {}), (1, {}), (1, ON_DISK), (2, {}), (3, {}), (3, {"offload__optimizer": "nvme", "offload__paths": ["."]}),
                         (2, {"train__recompute": "block", **ON_DISK}), (3, {"train__recompute": "block", **ON_DISK})]:
        prepared(work, "same", method, zero__stage=stage, model__dtype="bf16", **place)
        run(work, "same", ranks)
        wanted = wanted or result(work, "same", method)
        assert result(work, "same", method) == wanted, (stage, place)
        checkpoint = max((work / "runs" / "same" / "checkpoints").glob("step_*"))  # of weights, however they were saved
        hashes.add(json.loads(lmlaunch("verify", checkpoint, "--json", cwd=work).stdout)["weights_hash"])
    assert len(hashes) == 1


def common_memory(pid):
    """Bytes of the memory that a rank has in common with others of its machine: resident in it, and its part of them."""
    out, here = {"Rss": 0, "Pss": 0}, False
    for line in open(f"/proc/{pid}/smaps"):
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = "/memfd:lmlaunch-base" in line
            assert not here or line.rstrip().endswith("(deleted)"), "it has a name"
        elif here and (key := line.split(":")[0]) in out:
            out[key] += int(line.split()[1]) << 10
    return out["Rss"], out["Pss"]


def test_ranks_of_a_machine_have_one_copy_of_the_frozen_base(work):
    """Measured as it was planned. A kill leaves nothing of it: it has no name, and its processes are gone."""
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(work / "wide")
    shutil.copy(work / "model" / "chat_template.jinja", work / "wide")
    base = 4 * sum(parameter.numel() for parameter in model.parameters())
    prepared(work, "one_copy", "lora", model__path="wide", train__steps=1_000_000, train__eval_every=0, checkpoint__every=0)
    plan = json.loads(lmlaunch("plan", "--ranks", 3, "one_copy.toml", "--json", cwd=work).stdout)
    planned = [row["bytes"] for tier in plan["tiers"] for row in tier["classes"] if row["name"] == "frozen weights"]
    assert sum(planned) == pytest.approx(base / 3, rel=0.03)
    cli, ranks = started(work, "one_copy", 3, 2)
    try:
        measured = [common_memory(pid) for pid in ranks]
    finally:
        os.killpg(cli.pid, signal.SIGKILL)
        cli.wait()
    gone(ranks)
    assert len(measured) == 3
    for resident, part in measured:
        assert resident == pytest.approx(base, rel=0.03)
        assert part == pytest.approx(sum(planned), rel=0.03)
    assert "one copy for the 3 ranks of a machine" in (work / "runs" / "one_copy" / "plan.txt").read_text()


def open_files(pid):
    """What the descriptors of a process name; some are closed meanwhile."""
    out = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            out.append(os.readlink(descriptor))
        except FileNotFoundError:
            pass
    return out


def test_ranks_that_write_into_their_embedding_have_no_memory_in_common(work):
    """Trained rows of tokens are written into the frozen table, so that each rank has its own, and none asks the others for theirs."""
    prepared(work, "rows", "lora", lora__tokens=[5, 7], train__steps=1_000_000, train__eval_every=0, checkpoint__every=0)
    cli, ranks = started(work, "rows", 2, 1)
    try:
        names = [name for pid in ranks for name in open_files(pid)]
        mapped = [common_memory(pid) for pid in ranks]
    finally:
        os.killpg(cli.pid, signal.SIGKILL)
        cli.wait()
    gone(ranks)
    assert len(ranks) == 2 and any("memfd:" in name for name in names), names  # the region in which they meet
    assert not any("lmlaunch-base" in name for name in names), names
    assert mapped == [(0, 0), (0, 0)]


def test_ranks_of_a_machine_whose_frozen_weights_are_all_off_memory(work):
    """Blocks alone are frozen here, and each rank has a shard of them, or fetches them: none is left to have in common."""
    settings = {"train__only": ["embed_tokens", "model.norm"]}
    prepared(work, "blocks_frozen", **settings, zero__stage=1)
    run(work, "blocks_frozen", 2)
    wanted = result(work, "blocks_frozen")
    for changes in ({"zero__stage": 3}, {"offload__weights": "nvme", "offload__paths": ["."]}):
        prepared(work, "blocks_frozen", **settings, **changes)
        run(work, "blocks_frozen", 2)
        assert result(work, "blocks_frozen") == wanted, changes


@pytest.mark.parametrize("rule, method", some_of(("adafactor", "full"), ("muon", "lora"), ("muon", "full"), ("adafactor", "lora"), short=2))
def test_shards_of_whole_matrices_give_the_same_bits(work, rule, method):
    """And a run that was in shards goes on as it would have, in others: each matrix then has another rank."""
    settings = {"optimizer__name": rule, "train__recompute": "block", "checkpoint__keep": 9}
    prepared(work, "matrices", method, zero__stage=0, **settings)
    run(work, "matrices", 3)
    wanted = result(work, "matrices", method)
    for stage, place in [(1, {}), (3, {}), (3, ON_DISK)]:
        prepared(work, "matrices", method, zero__stage=stage, **settings, **place)
        run(work, "matrices", 3)
        assert result(work, "matrices", method) == wanted, (stage, place)
    directory = work / "runs" / "matrices"
    for checkpoint in sorted((directory / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(checkpoint)
    (directory / "status.json").unlink()
    shutil.rmtree(directory / "model")
    told = run(work, "matrices", 3, "zero.stage=1", *[f"offload.{state}=none" for state in ("optimizer", "weights", "gradients")]).stderr
    assert "resumes from" in told
    assert result(work, "matrices", method) == wanted


@pytest.mark.parametrize("method", some_of("full", "lora"))
def test_shards_on_disk_resume_with_any_number_of_ranks_and_in_any_tier(work, method):
    """The same bits at one number of ranks, wherever the state goes on; at another one what rounding allows."""
    prepared(work, "shards", method, train__steps=10_000, checkpoint__every=0, zero__stage=3, train__recompute="block", **ON_DISK)
    cli, ranks = started(work, "shards", 2, 5)
    cli.send_signal(signal.SIGUSR1)
    assert cli.wait(timeout=60) == 75
    gone(ranks)
    last = rows(work, "shards")[-1]["step"]
    saved = work / "runs" / "shards_saved"
    shutil.rmtree(saved, ignore_errors=True)
    shutil.copytree(work / "runs" / "shards", saved)

    def further(ranks, *places):
        shutil.rmtree(work / "runs" / "shards")
        shutil.copytree(saved, work / "runs" / "shards")
        run(work, "shards", ranks, *places, f"train.steps={last + 3}", "--override", "train.steps")
        return [(row["loss"], row["grad_norm"]) for row in rows(work, "shards") if "loss" in row and row["step"] > last]

    near = [f"offload.{state}=none" for state in ("optimizer", "weights", "gradients")]
    wanted = further(2)
    assert len(wanted) == 3
    for stage, places in [(3, near), (1, near), (2, []), (1, [])]:
        assert further(2, f"zero.stage={stage}", *places) == wanted, (stage, places)
    for ranks in (1, 3, 4):
        for got, want in zip(further(ranks), wanted, strict=True):
            assert got == pytest.approx(want, rel=1e-5), ranks


@pytest.mark.parametrize("method", some_of("full", "lora"))
def test_a_killed_run_of_ranks_goes_on_bit_for_bit(work, method):
    prepared(work, "whole", method, model__dtype="bf16")
    run(work, "whole", 3)
    prepared(work, "killed", method, model__dtype="bf16", train__steps=STEPS)
    cli, ranks = started(work, "killed", 3, 5)
    os.killpg(cli.pid, signal.SIGKILL)
    cli.wait()
    gone(ranks)
    if json.loads((work / "runs" / "killed" / "status.json").read_text())["state"] != "done":  # else it was over before
        told = run(work, "killed", 3).stderr
        assert "resumes from runs/killed/checkpoints/step_00000003" in told or "step_00000006" in told
    assert result(work, "killed", method) == result(work, "whole", method)


@pytest.mark.parametrize("rule", some_of("adamw_8bit", "adamw"))
def test_another_number_of_ranks_goes_on(work, rule):
    """The first step after a resume is that of the uninterrupted run, whoever makes it: its loss knows all weights, its norm all gradients."""
    prepared(work, "base", train__steps=10_000, checkpoint__every=0, optimizer__name=rule)
    cli, ranks = started(work, "base", 2, 5)
    cli.send_signal(signal.SIGUSR1)
    assert cli.wait(timeout=60) == 75
    gone(ranks)
    last = rows(work, "base")[-1]["step"]
    saved = work / "runs" / f"base_{last}"
    shutil.rmtree(saved, ignore_errors=True)
    shutil.copytree(work / "runs" / "base", saved)
    after = {}
    for ranks in (1, 2, 3, 5):
        shutil.rmtree(work / "runs" / "base")
        shutil.copytree(saved, work / "runs" / "base")
        told = run(work, "base", ranks, f"train.steps={last + 3}", "--override", "train.steps").stderr
        assert ("this run began with 2" in told) == (ranks != 2)
        new = [row for row in rows(work, "base") if "loss" in row and row["step"] > last]
        assert [row["step"] for row in new] == [last + 1, last + 2, last + 3]
        after[ranks] = [(row["loss"], row["grad_norm"]) for row in new]
    for ranks, numbers in after.items():
        for got, wanted in zip(numbers, after[2]):
            assert got == pytest.approx(wanted, rel=1e-5), ranks


@pytest.mark.parametrize("name", some_of("SIGSEGV", "SIGKILL", "SIGABRT"))
def test_the_death_of_a_rank_ends_all_and_is_named(work, name):
    prepared(work, "dies", train__steps=1_000_000, checkpoint__every=5)
    cli, ranks = started(work, "dies", 3, 7)
    os.kill(ranks[1], getattr(signal, name))
    _, messages = cli.communicate(timeout=60)
    assert cli.returncode == 40, messages
    assert re.search(rf"error PEER-08 \(exit 40\): the worker was killed by signal \d+ \({name}\).* at rank 1, step \d+", messages), messages
    last = messages.rstrip().splitlines()[-1]
    assert last.startswith(f"lmlaunch: stop code=40 reason=killed:{name} step=") and "checkpoint=runs/dies/checkpoints/step_" in last
    gone(ranks)
    assert json.loads((work / "runs" / "dies" / "status.json").read_text())["exit_code"] == 40


def test_a_rank_that_is_stuck_in_a_step_ends_all_and_is_named(work):
    """Its other threads live on, and say so: only its operations stand still. (tests/faults/test_ends.py has the first rank, and mpirun.)"""
    rank = 1
    prepared(work, "stuck", train__steps=1_000_000, train__eval_every=0, checkpoint__every=0)
    cli, ranks = started(work, "stuck", 3, 7, LMLAUNCH_SILENCE="5")
    try:
        held = Stuck(mpi.processes(work)[rank])
        mpi.until(held.has_ended, 90, "the end of the rank that is stuck")
        _, messages = cli.communicate(timeout=60)
    finally:
        if cli.poll() is None:
            cli.kill()  # its ranks go with it
    assert cli.returncode == 41, messages
    said = re.findall(r'error HANG-09 \(exit 41\): rank (\d) on (\S+) has made no progress for [\d.]+ s: it is stuck in "(\w[^"]*)" of step \d+', messages)
    assert [(int(number), host) for number, host, _ in said] == [(rank, socket.gethostname())], messages
    assert messages.count("lmlaunch: error") == 1, messages
    gone(ranks)
    assert json.loads((work / "runs" / "stuck" / "status.json").read_text())["exit_code"] == 41


def test_a_stop_is_agreed_on(work):
    prepared(work, "undisturbed", model__dtype="bf16")
    run(work, "undisturbed", 2)
    prepared(work, "stopped", model__dtype="bf16")
    cli, ranks = started(work, "stopped", 2, 4)
    cli.send_signal(signal.SIGTERM)
    _, messages = cli.communicate(timeout=60)
    gone(ranks)
    if cli.returncode == 75:  # else it was over before
        assert "to resume: lmlaunch stopped.toml --ranks 2\n" in messages
        run(work, "stopped", 2)
    assert result(work, "stopped") == result(work, "undisturbed")


def test_an_error_of_one_rank_is_told_once_and_ends_all(work):
    """The second rank finds its log's place taken."""
    prepared(work, "error", train__steps=1_000_000)
    cli, ranks = started(work, "error", 2, 4)
    os.killpg(cli.pid, signal.SIGKILL)
    cli.wait()
    gone(ranks)
    log = work / "runs" / "error" / "log.rank1.txt"
    log.unlink()
    log.mkdir()
    done = lmlaunch("--ranks", "2", "error.toml", cwd=work, check=False)
    assert done.returncode == 21, done.stderr
    assert "the rank's log cannot be written" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("lmlaunch: stop code=21 reason=error:")


def test_more_ranks_than_sequences_is_refused_before_anything(work):
    prepared(work, "many", train__global_batch=2)
    done = lmlaunch("--ranks", "3", "many.toml", cwd=work, check=False)
    assert done.returncode == 10, done.stderr
    assert "train.global_batch" in done.stderr


def test_more_ranks_than_sequences_are_refused_with_what_is_possible(work):
    """Where they are to go on from a checkpoint that three have saved, too."""
    prepared(work, "idle", train__global_batch=3, train__steps=1000)
    cli, _ = started(work, "idle", 3, 4)
    cli.terminate()
    cli.communicate(timeout=60)
    assert cli.returncode == 75
    for arguments in (["--ranks", 4, "idle.toml"], ["plan", "--ranks", 4, "idle.toml"]):
        done = lmlaunch(*arguments, cwd=work, check=False)
        assert done.returncode == 10, done.stderr
        assert done.stderr.count("4 ranks share train.global_batch = 3 sequences") == 1, done.stderr
        assert "use at most 3 ranks" in done.stderr


def test_doctor_says_the_version_of_the_nccl_beside_torch(work):
    libraries = [path for path in (Path(sysconfig.get_path("purelib")) / "nvidia" / "nccl" / "lib").glob("libnccl.so.2")]
    if not libraries:
        pytest.skip("LibTorch came without NCCL")
    code = ctypes.c_int()
    assert ctypes.CDLL(libraries[0]).ncclGetVersion(ctypes.byref(code)) == 0
    version = f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"
    checks = json.loads(lmlaunch("doctor", "--json", cwd=work).stdout)["checks"]
    assert [(check["ok"], check["value"]) for check in checks if check["name"] == "nccl"] == [(True, version)]
