"""Training whose state lives on disk, as its users start it: the same numbers as a resident run, nothing left behind
however it ends, clear refusals, less memory, and a machine without io_uring."""

import bisect
import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from counts import some_of
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from limits import memory_counts, memory_limit
from test_run import BIN, warm_program

VOCAB = 97
EVERYTHING = [f"offload.{name}=nvme" for name in ("optimizer", "weights", "gradients", "activations")]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("offload")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)).save_pretrained(work / "model")
    # 38 million parameters, of which only the shape is told: the run makes random ones.
    LlamaConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
                vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
                architectures=["LlamaForCausalLM"]).save_pretrained(work / "large")
    generator = torch.Generator().manual_seed(2)
    for name, count in [("train", 48), ("eval", 6)]:
        with open(work / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                start, length = (int(torch.randint(*r, (1,), generator=generator)) for r in [(0, VOCAB), (5, 30)])
                file.write(json.dumps({"input_ids": [(start + 3 * i) % VOCAB for i in range(length)]}) + "\n")
    (work / "c.toml").write_text(
        'run.device = "cpu"\nrun.threads = 1\nmodel.path = "model"\nmodel.dtype = "bf16"\n'
        '[data]\ntrain = ["train.jsonl"]\neval = ["eval.jsonl"]\nmax_length = 32\ncache_dir = "cache"\n'
        '[train]\nsteps = 6\nglobal_batch = 4\nmicro_batch = 2\nrecompute = "block"\n'
        '[optimizer]\nlr = 1e-2\nschedule = "constant"\n')
    (work / "swap").mkdir()
    return work


def environment(work):
    return {**os.environ, "XDG_CACHE_HOME": str(work / "user-cache")}  # measured rates are kept there


def lmlaunch(work, *arguments, check=True, **more):
    """With anything else to say of the process it is a real one (test_run.warm_program)."""
    done = subprocess.run([BIN / "lmlaunch" if more else warm_program(), *map(str, arguments)], cwd=work, env=environment(work), capture_output=True, text=True,
                          timeout=300, **more)
    assert not check or done.returncode == 0, done.stderr
    return done


def train(work, name, *changes, **more):
    return lmlaunch(work, "c.toml", f"run.dir=runs/{name}", *changes, **more)


def on_disk(path):
    return [f'offload.paths=["{path}"]', *EVERYTHING]


def rows(work, name):
    """The rows of metrics.jsonl with every number as the text it was written as."""
    return [json.loads(line, parse_float=str, parse_int=str) for line in open(work / "runs" / name / "metrics.jsonl")]


def numbers(work, name):
    kept = ("step", "loss", "grad_norm", "lr", "target_tokens", "eval_loss")
    return [{key: row[key] for key in kept if key in row} for row in rows(work, name)]


def weights_hash(work, name):
    return json.loads(lmlaunch(work, "verify", f"runs/{name}", "--json").stdout)["weights_hash"]


def skip_without(engine):
    """A test that names io_uring has one, or is seen to be skipped."""
    io_uring_setup = 425
    parameters = ctypes.create_string_buffer(120)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(io_uring_setup, 1, parameters) if engine == "uring" else None
    if descriptor == -1:
        pytest.skip(f"io_uring is refused here: {errno.errorcode[ctypes.get_errno()]}")
    if descriptor is not None:
        os.close(descriptor)


def runs_on(engine, stderr):
    """Whether a run says that this engine moves its bytes, and no other one in its place."""
    names = {"uring": "io_uring, depth ", "threads": "pread/pwrite on "}
    return re.search(r"^offload: (.*)", stderr, re.M)[1].startswith(names[engine])


LORA = ["train.method=lora", "lora.r=4", "lora.dropout=0.1", "optimizer.lr=3e-2"]


@pytest.fixture(scope="module")
def resident(work):
    train(work, "full")
    train(work, "lora", *LORA)
    return {name: (numbers(work, name), weights_hash(work, name)) for name in ("full", "lora")}


@pytest.mark.parametrize("recompute", ['"none"', '"attention"', "2"])
def test_what_blocks_keep_may_be_on_disk(work, resident, recompute):
    name = "kept_" + recompute.strip('"')
    train(work, name, f"train.recompute={recompute}", "offload.activations=nvme", f'offload.paths=["{work / "swap"}"]')
    assert numbers(work, name) == resident["full"][0]
    assert weights_hash(work, name) == resident["full"][1]
    assert all(int(row["read_bytes"]) > 0 for row in rows(work, name) if "loss" in row)


@pytest.mark.parametrize("method, engine", some_of(("full", "uring"), ("lora", "threads"), ("full", "threads"), ("lora", "uring"), short=2))
def test_where_state_lives_changes_no_bit(work, resident, method, engine):
    skip_without(engine)
    name = f"{method}_{engine}"
    done = train(work, name, *on_disk(work / "swap"), f"io.engine={engine}", *(LORA if method == "lora" else []))
    assert runs_on(engine, done.stderr)
    assert numbers(work, name) == resident[method][0]
    assert weights_hash(work, name) == resident[method][1]
    for row in rows(work, name):
        if "loss" in row:
            assert int(row["read_bytes"]) > 0 and 0 <= float(row["hidden_pct"]) <= 100
    assert not list((work / "swap").iterdir())


@pytest.fixture(scope="module")
def wide(work):
    """A vocabulary of two segments and a bit, with a head of its own."""
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=17000,
        max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)).save_pretrained(work / "wide")
    return ["model.path=wide", "train.steps=3", "data.eval_fraction=0.1", "data.eval=[]"]


@pytest.mark.parametrize("method", some_of("full", "lora"))
def test_a_head_of_its_own_leaves_in_segments_and_changes_no_bit(work, wide, method):
    wide = wide + (LORA if method == "lora" else [])
    train(work, f"wide_{method}", *wide)
    train(work, f"wide_{method}_disk", *wide, *on_disk(work / "swap"), "--trace", f"wide_{method}.json")
    assert numbers(work, f"wide_{method}_disk") == numbers(work, f"wide_{method}")
    # Loaded from the files and written to them segment by segment.
    assert weights_hash(work, f"wide_{method}_disk") == weights_hash(work, f"wide_{method}")
    names = {event["name"] for event in json.loads((work / f"wide_{method}.json").read_text())["traceEvents"]}
    for segment in range(3):
        assert f"weights of head, segment {segment}" in names
        assert f"backward head, segment {segment}, micro-batch 1" in names
    assert ("gradient of head, segment 0" in names) == (method == "full")  # the last one never left its slot
    resident, off_device = (json.loads(lmlaunch(work, "eval", "c.toml", "--json", *wide, *more).stdout)["eval_loss"]
                 for more in ([], on_disk(work / "swap")))
    assert resident == off_device
    plan = json.loads(lmlaunch(work, "plan", "c.toml", "--json", *wide, *on_disk(work / "swap")).stdout)
    pool = plan["placement"]["pools"]["weights"]
    assert (pool["arrays"], pool["off_device"]) == (4 + 3, 2 + 3)


def test_a_disk_is_measured_once(work, resident):
    """In its turn the run above has measured it; a plan then knows the rates."""
    train(work, "measured", *on_disk(work / "swap"), "train.steps=1")
    again = lmlaunch(work, "plan", "c.toml", *on_disk(work / "swap"))
    assert "measuring" not in again.stderr and "no disk was measured" not in again.stdout
    shutil.rmtree(work / "user-cache")
    said = lmlaunch(work, "plan", "c.toml", *on_disk(work / "swap")).stderr
    assert f"measuring the disk of {work / 'swap'}: 2 s" in said
    rates, file = re.search(r" reads (\S+ GB/s and writes \S+) GB/s; cached for a week in (\S+)", said).groups()
    kept = json.loads(Path(file).read_text())
    assert Path(file).is_relative_to(work / "user-cache") and kept["path"] == str((work / "swap").resolve())
    assert rates == f"{kept['read_bytes_per_s'] / 1e9:.2f} GB/s and writes {kept['write_bytes_per_s'] / 1e9:.2f}"
    shutil.rmtree(work / "user-cache")
    (work / "user-cache").write_text("")  # no directory can be made there
    assert "not cached" in lmlaunch(work, "plan", "c.toml", *on_disk(work / "swap")).stderr
    (work / "user-cache").unlink()
    # An imagined machine is not measured, and need not have the directory.
    imagined = lmlaunch(work, "plan", "c.toml", *on_disk("/nowhere"), "--host-memory", "8GiB")
    assert "measuring" not in imagined.stderr


# No litter.

class NameWatch:
    """Says whether a name ever appeared in a directory."""

    def __init__(self, directory):
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        created, moved_to = 0x100, 0x80
        assert libc.inotify_add_watch(self.descriptor, str(directory).encode(), created | moved_to) >= 0

    def names(self):
        out = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.descriptor, 65536):
                while data:
                    length = struct.unpack_from("iIII", data)[3]
                    out.append(data[16:16 + length].rstrip(b"\0").decode())
                    data = data[16 + length:]
        return out

    def close(self):
        os.close(self.descriptor)


@contextlib.contextmanager
def loop_disk(directory, megabytes):
    """An ext4 of its own; skips where there is no root or no loop device."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    image, mount = directory / f"disk{megabytes}.img", directory / f"disk{megabytes}"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(megabytes << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], capture_output=True, text=True)
    mounted = made.returncode == 0 and subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, text=True)
    if not mounted or mounted.returncode != 0:
        pytest.skip(f"no loop-mounted ext4 here: {made.stderr}{mounted.stderr if mounted else ''}")
    try:
        yield mount
    finally:
        for _ in range(50):  # the kernel takes a killed rank's ring apart a moment later
            if subprocess.run(["umount", mount], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        assert not os.path.ismount(mount)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    with loop_disk(tmp_path_factory.mktemp("loop"), 64) as mount:
        yield mount


def used_blocks(path):
    info = os.statvfs(path)
    return info.f_blocks - info.f_bfree


def wait_for(condition, what):
    for _ in range(3000):  # for a minute at least
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(what)


def children_of(pid):
    """Without the one that waits for the CLI's end (launcher/cli/status_keeper.cpp)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if Path(f"/proc/{child}/comm").read_text() != "lm-status\n"]


def start_and_end(work, disk, name, end):
    """Starts a run that would last for hours, and ends it by `end(CLI process, rank)` once it trains. Its exit code."""
    before = used_blocks(disk)
    with open(work / f"{name}.err", "w") as err:
        cli = subprocess.Popen([BIN / "lmlaunch", "c.toml", f"run.dir=runs/{name}", *on_disk(disk), "train.steps=1000000"], cwd=work,
                                env=environment(work), stderr=err)
    status = work / "runs" / name / "status.json"
    wait_for(lambda: cli.poll() is not None or status.exists() and json.loads(status.read_text())["step"] >= 2, "no second step")
    assert cli.poll() is None, (work / f"{name}.err").read_text()
    rank = children_of(cli.pid)[0]
    assert used_blocks(disk) > before
    end(cli.pid, rank)
    code = cli.wait(timeout=30)
    wait_for(lambda: not Path(f"/proc/{rank}").exists(), "the rank lives on")
    return code


def fails_with(done, code):
    assert done.returncode == code, f"exit {done.returncode}\n{done.stderr[-2000:]}"
    return True


ENDINGS = {
    "success": lambda work, disk: train(work, "success", *on_disk(disk)).returncode == 0,
    "error": lambda work, disk: fails_with(train(work, "error", *on_disk(disk), "optimizer.lr=1e6", "train.steps=50", check=False), 50),
    "SIGTERM": lambda work, disk: start_and_end(work, disk, "term", lambda cli, rank: os.kill(cli, signal.SIGTERM)) == 75,
    "kill -9 of the rank": lambda work, disk: start_and_end(work, disk, "rank", lambda cli, rank: os.kill(rank, signal.SIGKILL)) == 40,
    "kill -9 of the CLI process": lambda work, disk: start_and_end(work, disk, "cli", lambda cli, rank: os.kill(cli, signal.SIGKILL)) == -9,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_stays_on_the_disk_however_a_run_ends(work, disk, ending):
    before, watch = used_blocks(disk), NameWatch(disk)
    try:
        assert ENDINGS[ending](work, disk)
        wait_for(lambda: used_blocks(disk) == before, f"{used_blocks(disk) - before} blocks are lost")
        assert watch.names() == []
        (disk / "seen").touch()  # the watch does see names
        assert watch.names() == ["seen"]
    finally:
        (disk / "seen").unlink(missing_ok=True)
        watch.close()


# Refusals.

def refusal(done, code, *words):
    assert done.returncode == code, done.stderr
    errors = re.findall(r"^lmlaunch: error .*", done.stderr, re.M)
    assert len(errors) == 1 and all(word in errors[0] for word in words), done.stderr
    assert re.search(r"^  next: \S", done.stderr, re.M)
    assert done.stderr.rstrip().splitlines()[-1].startswith(f"lmlaunch: stop code={code} ")


def test_a_missing_path_is_refused_by_the_cli(work):
    done = train(work, "missing", *on_disk("/nowhere/at/all"), check=False)
    refusal(done, 12, "/nowhere/at/all", "ENOENT")
    assert not (work / "runs" / "missing").exists()
    refused = lmlaunch(work, "plan", "c.toml", *on_disk("/nowhere/at/all"), check=False)
    assert refused.returncode == 12 and "/nowhere/at/all" in refused.stderr


def test_a_path_without_permission_is_refused_by_the_cli(work):
    if os.geteuid() != 0:
        pytest.skip("becoming nobody needs root")
    # Where nobody may read: the CLI process beside something that has the rank's name; it never comes to start it.
    place = Path(tempfile.mkdtemp(prefix="lmlaunch-nobody-"))
    try:
        for name in ("lmlaunch", "lmlaunch-cpu"):
            shutil.copy(BIN / "lmlaunch", place / name)
        shutil.copytree(work / "model", place / "model")
        shutil.copy(work / "c.toml", place / "c.toml")
        (place / "locked").mkdir()
        for path in [place, *place.rglob("*")]:
            path.chmod(path.stat().st_mode | stat.S_IRGRP | stat.S_IROTH | (stat.S_IXGRP | stat.S_IXOTH if path.is_dir() else 0))
        done = subprocess.run([place / "lmlaunch", "c.toml", *on_disk(place / "locked")], cwd=place, user=65534, group=65534,
                              extra_groups=[], capture_output=True, text=True, timeout=60)
        refusal(done, 12, "locked", "EACCES")
        assert not (place / "runs").exists()
    finally:
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with loop_disk(tmp_path_factory.mktemp("small"), 16) as mount:
        yield mount


def too_small(work, name, small):
    before = used_blocks(small)
    done = train(work, name, *on_disk(small), "model.path=large", "model.init=random", check=False)
    assert used_blocks(small) == before and [path.name for path in small.iterdir()] == ["lost+found"]
    assert {path.name for path in (work / "runs" / name).iterdir()} <= {".lock", "status.json"}
    return done


def test_a_disk_too_small_is_refused_before_anything_is_loaded(work, small):
    refusal(too_small(work, "small", small), 12, "does not fit", "13.")


def test_the_refusal_of_a_small_disk_says_disk(work, small):
    refusal(too_small(work, "small_disk", small), 12, "disk")


def test_a_full_disk_is_an_error_that_names_it(work, small):
    # Free space of 0 tells a plan nothing; what reserves the space finds out.
    try:
        with open(small / "filler", "wb", buffering=0) as file:
            for piece in (1 << 16, 1 << 10):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(piece))
                        os.fsync(file.fileno())
        done = train(work, "full_disk", *on_disk(small), check=False)
    finally:
        (small / "filler").unlink()
    refusal(done, 20, "ENOSPC", str(small))


# Less memory.

@memory_counts
def test_a_run_trains_in_half_the_memory(work):
    large = ["model.path=large", "model.init=random", "train.steps=2", "data.eval=[]"]
    peak = {name: json.loads(lmlaunch(work, "plan", "c.toml", "--json", *large, *more).stdout)["peak"]["host_bytes"]
            for name, more in [("resident", []), ("on disk", [*on_disk(work / "swap"), "offload.host_memory=370MiB"])]}
    train(work, "large", *large, stdin=subprocess.DEVNULL)
    taken = max(int(row["host_bytes"]) for row in rows(work, "large"))
    limit = min(taken, peak["resident"]) // 2
    assert peak["on disk"] <= limit, peak
    with memory_limit(limit) as enter:
        refused = train(work, "large_refused", *large, check=False, preexec_fn=enter)
        assert refused.returncode in (12, 31), refused.stderr
        train(work, "large_on_disk", *large, *on_disk(work / "swap"), "offload.host_memory=370MiB", preexec_fn=enter)
    assert numbers(work, "large_on_disk") == numbers(work, "large")
    assert weights_hash(work, "large_on_disk") == weights_hash(work, "large")


@memory_counts
def test_what_offload_may_take_changes_no_loss_or_is_said_to(work):
    """With everything automatic: a limit of memory moves state to disk and recomputes; the micro-batch, and with it every bit, stays
    what it is without the limit, until nothing else fits, which the log says."""
    automatic = ["model.path=large", "model.init=random", "train.steps=2", "train.global_batch=16", "train.micro_batch=auto",
                 "train.recompute=auto", "data.eval=[]"]

    def micro_batch(*settings):
        """Planned; None where nothing fits."""
        done = lmlaunch(work, "plan", "c.toml", "--json", *automatic, *settings, check=False)
        return json.loads(done.stdout)["numerics"]["micro_batch"] if done.returncode == 0 else None

    limited = lambda mib: [f'offload.paths=["{work / "swap"}"]', f"offload.host_memory={mib}MiB"]  # noqa: E731
    free = micro_batch()

    def least(wanted):
        """MiB of the smallest limit whose micro-batch is wanted: how many differs by what the libraries take on a processor."""
        return bisect.bisect_left(range(400), True, lo=200, key=lambda mib: wanted(micro_batch(*limited(mib))))

    train(work, "as_it_fits", *automatic)
    same, fits = least(lambda sequences: sequences == free), least(lambda sequences: sequences is not None)
    assert fits < same <= 340
    train(work, "limited", *automatic, *limited(same))
    train(work, "followed", *automatic, *limited(fits))
    said = {name: "losses differ in rounding" in (work / "runs" / name / "log.txt").read_text()
            for name in ("as_it_fits", "limited", "followed")}
    assert numbers(work, "limited") == numbers(work, "as_it_fits")
    assert weights_hash(work, "limited") == weights_hash(work, "as_it_fits")
    assert said == {"as_it_fits": False, "limited": False, "followed": True}
    assert numbers(work, "followed") != numbers(work, "as_it_fits")


# No io_uring.

def forbid_io_uring():
    """For the child: a filter under which io_uring_setup fails with EPERM, as in most containers."""
    libc = ctypes.CDLL(None, use_errno=True)
    load_number, jump_if_equal, give = 0x20, 0x15, 0x06
    program = [(load_number, 0, 0, 0), (jump_if_equal, 0, 1, 425), (give, 0, 0, 0x00050000 | errno.EPERM), (give, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, filter_) == 0


def test_without_io_uring_threads_do_the_same(work, resident):
    done = train(work, "forbidden", *on_disk(work / "swap"), preexec_fn=forbid_io_uring)
    told = re.search(r"^offload: .*", done.stderr, re.M)[0]
    assert "io_uring unavailable (EPERM: seccomp or kernel.io_uring_disabled)" in told and "threads" in told
    assert numbers(work, "forbidden") == resident["full"][0]
    assert not runs_on("uring", done.stderr)
    named = train(work, "named", *on_disk(work / "swap"), "io.engine=uring", check=False, preexec_fn=forbid_io_uring)
    refusal(named, 10, "io_uring", "EPERM")
    assert not (work / "runs" / "named").exists()


# The trace.

def test_a_trace_shows_what_ran_beside_what(work):
    train(work, "traced", *on_disk(work / "swap"), "--trace", "trace.json", "io.tile=64KiB")
    events = json.loads((work / "trace.json").read_text())["traceEvents"]
    row_names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    lanes = {name: [] for name in row_names.values()}
    for event in events:
        if event["ph"] == "X":
            lanes[row_names[event["tid"]]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert set(lanes) == {"compute", "disk reads", "disk writes"} and all(lanes.values())
    for spans in lanes.values():
        spans.sort()
        assert all(start <= end for start, end, _ in spans)
        assert all(first[1] <= second[0] + 1e-3 for first, second in zip(spans, spans[1:]))
    kinds = {name.split()[0] for _, _, name in lanes["compute"]}
    assert {"forward", "head", "recompute", "backward", "check", "update", "wait"} <= kinds
    assert sum(name == "check" for _, _, name in lanes["compute"]) == 3  # steps 2 to 4
    # Whatever a block computes with has come before: no read of its weights is under way while they are used.
    reads = [(event["ts"] + event["dur"] - event["args"]["under_way_us"], event["ts"] + event["dur"], event["name"])
             for event in events if event["ph"] == "X" and row_names[event["tid"]] == "disk reads"]
    for block in {name.split(",")[0].split()[1] for _, _, name in lanes["compute"] if name.startswith("forward layers")}:
        uses = [(start, end) for start, end, name in lanes["compute"] if re.match(rf"(forward|recompute|backward) {re.escape(block)},", name)]
        mine = [(start, end) for start, end, name in reads if name == f"weights of {block}"]
        assert mine and uses and not [(use, read) for use in uses for read in mine if use[0] < read[1] and read[0] < use[1]]
