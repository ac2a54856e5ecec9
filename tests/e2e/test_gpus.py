"""`lmlaunch --gpus N` on the emulator (tests/emulator), whose libnccl is a stand-in: ranks are processes with a card each, and every
stage and tier gives the same bits at one number of GPUs, close to those of as many processes on the CPU. `-m long` has the
rest of the combinations."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mpi
from test_experts import MODELS
from test_ranks import common_memory, gone
from test_run import VOCAB, config, filled
from test_emulator import H100, EMULATOR, finish, lmlaunch, rows, start, emulator_environment

STEPS = 4
long = pytest.mark.long
MODEL_FILE = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}


def cards(count):
    return ",".join([f"{H100}:80"] * count)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("gpus"), layers=5)


def prepared(work, name, method="full", **changes):
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    settings = {"train__method": method, "train__steps": STEPS, "train__eval_every": 2, "train__global_batch": 5, "train__micro_batch": 1,
                "train__recompute": "block", "run__device": "auto", "model__dtype": "fp32", "optimizer__eps": 1e-5, **changes}
    config(work, name, **settings)
    return f"{name}.toml"


def result(work, name, method="full"):
    curve = [tuple((key, row[key]) for key in ("step", "loss", "grad_norm", "lr", "eval_loss", "target_tokens") if key in row)
             for row in rows(work, name)]
    return curve, (work / "runs" / name / "model" / MODEL_FILE[method]).read_bytes()


def train(work, name, gpus, *arguments, method="full", code=0, variables=None, **changes):
    file = prepared(work, name, method, **changes)
    err = lmlaunch("--gpus", gpus, file, *arguments, cwd=work, code=code, EMULATOR_GPUS=cards(max(gpus, 1)), **(variables or {}))[1]
    return result(work, name, method) if code == 0 else err


def train_on_cpu(work, name, ranks, method="full", **changes):
    file = prepared(work, name, method, **changes)
    lmlaunch("--ranks", ranks, file, cwd=work, on="cpu")
    return result(work, name, method)


def expect_close(gpu, cpu, rel):
    for ours, theirs in zip(gpu[0], cpu[0], strict=True):
        for (key, a), (other, b) in zip(ours, theirs, strict=True):
            assert key == other and a == pytest.approx(b, rel=rel), (key, a, b)


def check_one_result(work, gpus, method, ways):
    first = None
    for i, (changes, variables) in enumerate(ways):
        got = train(work, f"way{i}", gpus, method=method, variables=variables, **changes)
        first = first or got
        assert got == first, (changes, variables)
    return first


HOST = {f"offload__{name}": "host" for name in ("optimizer", "weights", "gradients", "activations")}
STAGES = [({"zero__stage": stage}, {}) for stage in (0, 1, 2, 3)]
# What must not matter: where state lives, how late streams are, what order they take.
QUICK = [*STAGES, ({"zero__stage": 3, "offload__optimizer": "host"}, {"EMULATOR_RACES": "2"}), ({"zero__stage": 1, **HOST}, {}),
         ({"zero__stage": 2}, {"EMULATOR_LAZY": "1"}), ({"zero__stage": 3, **HOST}, {"EMULATOR_RACES": "2"})]


def test_stages_and_tiers_give_the_same_bits_on_two_gpus_and_are_close_to_the_cpus(work):
    gpu = check_one_result(work, 2, "full", QUICK)
    expect_close(gpu, train_on_cpu(work, "cpu", 2, zero__stage=3), 2e-5)


def test_a_frozen_base_in_shards_of_two_gpus(work):
    ways = [({"zero__stage": 0}, {}), ({"zero__stage": 3}, {"EMULATOR_RACES": "2"}),
            ({"zero__stage": 3, "offload__weights": "host"}, {"EMULATOR_RACES": "2"})]
    gpu = check_one_result(work, 2, "lora", ways)
    expect_close(gpu, train_on_cpu(work, "cpu", 2, "lora", zero__stage=3), 2e-5)


@pytest.fixture(scope="module")
def mixture(work):
    torch.manual_seed(4)
    model = MODELS["qwen3_moe"](VOCAB)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.normal_(std=0.3)
    model.save_pretrained(work / "mixture")
    return {"model__path": "mixture"}


def test_two_gpus_balance_the_loads_of_all_of_a_steps_tokens(work, mixture):
    """The cards gather what each one's routers have chosen; the second has a micro-batch fewer."""
    same = {**mixture, "train__router_aux_loss": 0.5}
    gpu = check_one_result(work, 2, "full", [({"zero__stage": stage, **same}, {"EMULATOR_RACES": "2"}) for stage in (0, 3)])
    expect_close(gpu, train_on_cpu(work, "cpu_mixture", 2, zero__stage=3, **same), 1e-4)
    ours, theirs = ([row for row in rows(work, name) if "loss" in row][0] for name in ("way1", "cpu_mixture"))
    for key in ("router_aux_loss", "expert_load_max", "expert_load_min", "router_entropy"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-6)


def test_two_gpus_have_half_of_the_experts_each(work, mixture):
    """The rows of tokens pass between the cards. The second has a micro-batch fewer, and its experts have the first one's rows all the same."""
    same = {**mixture, "zero__experts": "parallel", "lora__experts": True, "lora__dropout": 0.0}
    gpu = check_one_result(work, 2, "lora", [({"zero__stage": stage, **same}, variables) for stage, variables in
                                             ((0, {}), (2, {"EMULATOR_RACES": "2"}), (1, {"EMULATOR_LAZY": "1"}))])
    expect_close(gpu, train_on_cpu(work, "cpu_divided", 2, "lora", zero__stage=2, **same), 1e-4)


IN_HOST = {"zero__stage": 1, "offload__weights": "host"}


def test_one_copy_of_a_base_in_host_memory_gives_the_same_bits_on_two_gpus(work):
    """Also where a driver registers no read-only memory, or none: then the log says what that costs."""
    ways = [({"zero__stage": 1}, {}), (IN_HOST, {"EMULATOR_RACES": "2"}), (IN_HOST, {"EMULATOR_NO_READ_ONLY": "1", "EMULATOR_LAZY": "1"}),
            (IN_HOST, {"EMULATOR_NO_PIN": "1"})]
    check_one_result(work, 2, "lora", ways)
    for way, told in enumerate((False, False, False, True)):
        log = (work / "runs" / f"way{way}" / "log.txt").read_text()
        assert ("of host memory for frozen weights of the machine's ranks could not be locked" in log) == told, log
        assert ("one copy for the 2 ranks of a machine" in (work / "runs" / f"way{way}" / "plan.txt").read_text()) == (way > 0)


@pytest.fixture(scope="module")
def base(work):
    """Bytes of a model whose embedding is not the head's matrix, too."""
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1,
                                         eos_token_id=2))
    model.save_pretrained(work / "wide")
    shutil.copy(work / "model" / "chat_template.jinja", work / "wide")
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def test_two_gpus_have_one_copy_of_a_base_in_host_memory(work, base):
    """Measured as it was planned, with an embedding that both read where it lies. A kill leaves nothing of it."""
    prepared(work, "one_copy", "lora", **IN_HOST, model__path="wide", train__steps=100_000, train__eval_every=100_000)
    cli, ranks = started(work, "one_copy", 2, 1)
    try:
        measured = [common_memory(pid) for pid in ranks]
    finally:
        cli.kill()  # its ranks go with it
        cli.wait()
    gone(ranks)
    assert len(measured) == 2, cli.stderr.read()
    host = json.loads((work / "runs" / "one_copy" / "plan.json").read_text())["tiers"][1]
    planned = sum(row["bytes"] for row in host["classes"] if row["name"] in ("frozen weights", "embedding"))
    assert planned == pytest.approx(base / 2, rel=0.03)
    for resident, part in measured:
        assert resident == pytest.approx(base, rel=0.03)
        assert part == pytest.approx(planned, rel=0.03)


def test_a_base_that_gpus_cannot_read_in_place_is_refused_once(work, base):
    file = prepared(work, "refused", "lora", **IN_HOST, model__path="wide", train__steps=1)
    err = lmlaunch("--gpus", 2, file, cwd=work, code=31, EMULATOR_GPUS=cards(2), EMULATOR_NO_PIN="1")[1]
    assert err.count("lmlaunch: error") == 1 and "MEM-17" in err and "ulimit -l" in err, err


def test_four_gpus_add_bf16_gradients_in_the_order_of_ranks(work):
    same = {"train__gradients": "bf16", "model__dtype": "bf16", "train__steps": 2}
    gpu = check_one_result(work, 4, "full", [({"zero__stage": stage, **same}, {}) for stage in (0, 3)])
    expect_close(gpu, train_on_cpu(work, "cpu", 4, zero__stage=1, **same), 2e-2)


@long
@pytest.mark.parametrize("gpus", [2, 3, 4])
@pytest.mark.parametrize("method", MODEL_FILE)
@pytest.mark.parametrize("clip", ["global", "block"])
def test_every_combination(work, gpus, method, clip):
    placements = [{}, HOST, {"offload__optimizer": "host"}, {"offload__weights": "host"},
             {"offload__optimizer": "nvme", "offload__paths": ["."]}]
    ways = [({"zero__stage": stage, "optimizer__clip": clip, **placement}, {"EMULATOR_RACES": "2"} if (stage + i) % 3 == 0 else {"EMULATOR_DELAY": f"{i}:300"})
            for stage in (0, 1, 2, 3) for i, placement in enumerate(placements)]
    gpu = check_one_result(work, gpus, method, ways)
    expect_close(gpu, train_on_cpu(work, "cpu", gpus, method, zero__stage=3, optimizer__clip=clip), 5e-5)


def test_a_run_goes_on_with_as_many_gpus_bit_for_bit_and_with_one(work):
    steps = {"train__steps": 12, "train__eval_every": 50, "zero__stage": 3}
    whole = train(work, "whole", 2, **steps)
    file = prepared(work, "parts", **steps)
    cli, _ = started(work, "parts", 2, 2)
    cli.send_signal(signal.SIGUSR1)
    err = cli.communicate(timeout=120)[1]
    assert cli.returncode == 75, err
    shutil.copytree(work / "runs" / "parts", work / "runs" / "one")
    lmlaunch("--gpus", 2, file, cwd=work, EMULATOR_GPUS=cards(2))
    assert result(work, "parts") == whole
    lmlaunch("--gpus", 1, file, "run.dir=runs/one", cwd=work, EMULATOR_GPUS=cards(1))
    expect_close(result(work, "one"), whole, 1e-4)


def test_an_elastic_run_continues_without_a_gpu_that_is_gone(work):
    settings = {"train__steps": 12, "train__eval_every": 50, "zero__stage": 3, "checkpoint__every": 2}
    whole, lost = train(work, "three", 3, **settings), work / "lost"
    prepared(work, "gone", **settings)
    cli, ranks = started(work, "gone", 3, 4, "--restarts", 1, "--elastic", EMULATOR_LOST=str(lost))
    assert len(ranks) == 3, cli.stderr.read() if cli.poll() is not None else ranks
    lost.write_text("1\n")
    os.kill(ranks[1], signal.SIGKILL)
    err = finish(cli)[1]
    assert "; with 2 of 3 ranks: GPU-22222222-2222-2222-2222-222222222222 gone\n" in err, err
    assert "this run began with 3, and losses differ in rounding" in err
    expect_close(result(work, "gone"), whole, 1e-4)
    status = json.loads((work / "runs" / "gone" / "status.json").read_text())
    assert (status["state"], status["ranks"], status["ranks_asked"]) == ("done", 2, 3)


def test_a_save_of_gpus_rides_on_the_next_step(work):
    """State on disk is read for no save; a run that goes on from one has the bits of the run that made it."""
    # An evaluation completes the updates that a save rides on.
    settings = {"zero__stage": 2, "train__steps": 5, "train__eval_every": 5, "checkpoint__keep": 9, "offload__optimizer": "nvme",
                "offload__paths": ["."]}

    def read_bytes(name):
        return [row["read_bytes"] for row in rows(work, name) if "loss" in row]

    plain = train(work, "unsaved", 2, **settings, checkpoint__every=0)
    whole = train(work, "saved", 2, variables={"EMULATOR_RACES": "2"}, **settings, checkpoint__every=1)
    assert whole == plain
    # What is fetched for the updates after the last row may be in it or not; each of four saves would read as much.
    assert abs(sum(read_bytes("saved")) - sum(read_bytes("unsaved"))) <= max(read_bytes("unsaved")) > 0
    first, *later = sorted((work / "runs" / "saved" / "checkpoints").iterdir())
    assert first.name == "step_00000001" and len(later) >= 3
    for directory in (*later, work / "runs" / "saved" / "model"):
        shutil.rmtree(directory)
    (work / "runs" / "saved" / "status.json").unlink()
    lmlaunch("--gpus", 2, "saved.toml", cwd=work, EMULATOR_GPUS=cards(2))
    assert result(work, "saved") == whole


def test_ranks_have_a_card_each_of_those_that_are_shown(work):
    uuids = [f"GPU-{d * 8}-{d * 4}-{d * 4}-{d * 4}-{d * 12}" for d in "1234"]
    file = prepared(work, "shown", train__steps=1)
    two = f"{H100}:80,{H100}:40"
    err = lmlaunch("--gpus", 2, file, cwd=work, EMULATOR_GPUS=f"{two},{two.replace('40', '80')}", CUDA_VISIBLE_DEVICES=f"{uuids[3]},{uuids[1]}")[1]
    assert "of the GPU; 36.00 GiB may be used" in err  # the smaller one decides
    assert uuids[3] in err and uuids[1] in (work / "runs" / "shown" / "log.rank1.txt").read_text()
    err = lmlaunch("--gpus", 3, file, cwd=work, code=12, EMULATOR_GPUS=cards(4), CUDA_VISIBLE_DEVICES="0,1")[1]
    assert "3 GPUs are asked for, and 2 are visible here" in err


def test_ranks_run_on_the_nodes_of_their_gpus(work):
    """The second card's node has one core, of a third one none is ours. CUDA shows the cards the other way round."""
    core = min(os.sched_getaffinity(0))
    for node, cores in (("0", f"{core}-1023"), ("1", f"{core}"), ("2", "1023")):
        (work / "nodes" / f"node{node}").mkdir(parents=True, exist_ok=True)
        (work / "nodes" / f"node{node}" / "cpulist").write_text(cores + "\n")
    mounts = "mount --bind nodes /sys/devices/system/node && mount --bind devices /sys/bus/pci/devices"
    (work / "devices").mkdir(exist_ok=True)
    if subprocess.run(["unshare", "-m", "sh", "-c", mounts], cwd=work, capture_output=True).returncode != 0:
        pytest.skip("no mount namespace here (root)")
    uuids = [f"GPU-{d * 8}-{d * 4}-{d * 4}-{d * 4}-{d * 12}" for d in "12"]
    file = prepared(work, "nodes_of_cards", train__steps=1)
    for second, said in (("1", f"on NUMA node 1, that of its GPU: cores {core}\n"),
                         ("2", "warning RANK-16: this rank may use none of the cores 1023 of NUMA node 2, that of its GPU")):
        for address, node in (("0000:10:00.0", "0"), ("0000:11:00.0", second)):
            (work / "devices" / address).mkdir(exist_ok=True)
            (work / "devices" / address / "numa_node").write_text(node + "\n")
        shutil.rmtree(work / "runs" / "nodes_of_cards", ignore_errors=True)
        environment = emulator_environment(EMULATOR_GPUS=cards(2), CUDA_VISIBLE_DEVICES=f"{uuids[1]},{uuids[0]}")
        done = subprocess.run(["unshare", "-m", "sh", "-c", f'{mounts} && exec "{EMULATOR}/bin/lmlaunch" --gpus 2 {file}'], cwd=work,
                              env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        other = (work / "runs" / "nodes_of_cards" / "log.rank1.txt").read_text()
        assert said in done.stderr and f"on NUMA node 0, that of its GPU: cores {core}-1023\n" in other, done.stderr + other


def test_nccl_without_room_in_shared_memory_ends_before_the_model_is_loaded(work):
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace here (root)")
    file = prepared(work, "no_shm", train__steps=1)

    def run(command):
        return subprocess.run(["unshare", "-m", "sh", "-c", f'{mount} && exec "{EMULATOR}/bin/lmlaunch" {command}'], cwd=work,
                              env=emulator_environment(EMULATOR_GPUS=cards(2)), capture_output=True, text=True, timeout=300)

    done = run(f"--gpus 2 {file}")
    assert done.returncode == 12, done.stderr
    assert 'error NCCL-34 (exit 12): NCCL has failed in "start"' in done.stderr and "--shm-size=1g" in done.stderr
    assert not (work / "runs" / "no_shm" / "metrics.jsonl").exists()
    checks = {row["name"]: row for row in json.loads(run("doctor --json").stdout)["checks"]}
    assert not checks["shared memory"]["ok"] and "64.00 KiB free" in checks["shared memory"]["value"], checks["shared memory"]


def came_to(work, name, step):
    metrics = work / "runs" / name / "metrics.jsonl"
    return metrics.exists() and f'"step":{step},' in metrics.read_text()


def started(work, name, gpus, step, *arguments, **variables):
    cli = start("--gpus", gpus, f"{name}.toml", *arguments, cwd=work, on="emulator", EMULATOR_GPUS=cards(gpus), **variables)
    while cli.poll() is None and not came_to(work, name, step):
        time.sleep(0.01)
    pids = subprocess.run(["pgrep", "-P", str(cli.pid), "lmlaunch"], capture_output=True, text=True).stdout.split()
    return cli, [int(pid) for pid in pids]


@pytest.mark.parametrize("how, code, said", [(signal.SIGKILL, 40, "was killed by signal 9"),
                                             (signal.SIGSTOP, 41, "no heartbeat from rank 1 for ")])
def test_a_rank_that_is_lost_ends_all(work, how, code, said):
    prepared(work, "lost", train__steps=100000, zero__stage=3)
    cli, ranks = started(work, "lost", 2, 2, LMLAUNCH_SILENCE="2")
    assert len(ranks) == 2, cli.stderr.read() if cli.poll() is not None else ranks
    os.kill(ranks[1], how)
    err = cli.communicate(timeout=60)[1]
    assert cli.returncode == code, err
    assert said in err and "rank 1" in err, err
    assert err.strip().splitlines()[-1].startswith(f"lmlaunch: stop code={code} ")
    gone(ranks)


def test_a_rank_that_is_lost_while_the_others_wait_for_its_rows_ends_all(work, mixture):
    """The host waits for a layer's routers in the middle of a step."""
    prepared(work, "lost_rows", "lora", train__steps=100000, zero__experts="parallel", **mixture)
    cli, ranks = started(work, "lost_rows", 2, 2, LMLAUNCH_SILENCE="2")
    assert len(ranks) == 2, cli.stderr.read() if cli.poll() is not None else ranks
    os.kill(ranks[1], signal.SIGKILL)
    err = cli.communicate(timeout=60)[1]
    assert cli.returncode == 40 and "was killed by signal 9" in err and "rank 1" in err, err
    gone(ranks)


def test_an_error_of_nccl_ends_the_run_with_its_name(work):
    err = train(work, "failed", 2, code=40, train__steps=50, variables={"EMULATOR_NCCL": "fail:1:30"})
    assert "error NCCL-10 (exit 40): NCCL has failed in " in err and "remote process exited" in err and " at rank 1 on " in err, err


def test_doctor_says_which_nccl_there_is(work):
    out = subprocess.run([EMULATOR / "bin" / "lmlaunch", "doctor", "--json"], cwd=work, capture_output=True, text=True).stdout
    assert any(check["name"] == "nccl" and check["ok"] for check in json.loads(out)["checks"]), out


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_one_gpu_opens_no_socket_and_knows_nothing_of_mpi(work):
    file = prepared(work, "alone")
    train(work, "tokens", 1)  # text is prepared by Python, once
    variables = [part for item in {**emulator_environment(EMULATOR_GPUS=cards(1))}.items() if item[0].startswith(("LD_", "EMULATOR_")) for part in ("-E", "=".join(item))]
    done = subprocess.run(["strace", "-f", "-qq", "-o", work / "calls", "-e", "trace=network,openat,execve", *variables,
                           EMULATOR / "bin" / "lmlaunch", "--gpus", "1", file], cwd=work, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    calls = (work / "calls").read_text()
    assert "lmlaunch-cuda" in calls and "libemulator_cudart" in calls
    for name in ("socket(", "connect(", "bind(", "listen("):
        assert name not in calls, [line for line in calls.splitlines() if name in line][:5]
    assert "lmlaunch-mpi" not in calls and "libmpi" not in calls


no_mpi = pytest.mark.skipif(shutil.which("mpirun") is None or not (EMULATOR / "bin" / "lmlaunch-mpi.so").exists(), reason="no Open MPI")


def mpirun(work, file, ranks, **variables):
    # Bound to one core each, products on the emulator would be those of one thread.
    return subprocess.Popen(["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), EMULATOR / "bin" / "lmlaunch", file], cwd=work,
                            env={**emulator_environment(), **mpi.ROOT_MAY, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            start_new_session=True)


@no_mpi
def test_mpirun_gives_what_one_cli_gives(work):
    wanted = train(work, "cli", 2, zero__stage=3)
    file = prepared(work, "mpi", zero__stage=3)
    finish(mpirun(work, file, 2, EMULATOR_GPUS=cards(2)))
    assert result(work, "mpi") == wanted
    shutil.rmtree(work / "runs" / "mpi")
    err = finish(mpirun(work, file, 2, EMULATOR_GPUS=cards(1)), 12)[1]
    assert "ranks 0 and 1 were given the same GPU" in err and "--gpus 0" in err, err
