"""gpu_checks.sh with programs that do as they are told: its table, its order, its deadline and its exit status."""

import json
import os
import random
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "cmake")]
import bundle as bundle_maker  # noqa: E402
import checks  # noqa: E402
import parity  # noqa: E402
import peers  # noqa: E402
import smoke  # noqa: E402

PASSES = 'echo "[  PASSED  ] 3 tests."'


@pytest.fixture
def bundle(tmp_path):
    """A bin directory; bundle(name, what the program does)."""
    (tmp_path / "bin").mkdir()

    def add(name, body):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    add.bin = tmp_path / "bin"
    return add


def run(bundle, *arguments):
    """(exit status, {name: (result, figure)} in the table's order, output)."""
    done = subprocess.run(["bash", HERE.parents[1] / "cmake" / "gpu_checks.sh", "--bin", bundle.bin, *map(str, arguments)],
                          capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHON": sys.executable})
    table = done.stdout.partition("\nname ")[2].splitlines()[1:]
    cells = [[cell.strip() for cell in line.split("|")] for line in table if line.count("|") == 3]
    return done.returncode, {name: (result, figure) for name, result, _, figure in cells}, done.stdout


def test_what_passes_is_counted_with_its_figure(bundle):
    bundle("model_gpu_test", PASSES)
    bundle("bench_copies", "echo figure: 55 GB/s")
    status, table, out = run(bundle, "model_gpu_test", "bench_copies")
    assert status == 0
    assert table["model_gpu_test"] == ("passed", "3 tests passed") and table["bench_copies"] == ("passed", "55 GB/s")
    assert "gpu_checks: 2 passed, 0 failed: none, 0 not run: none" in out and "gpu_checks: no run here shows" in out


def test_what_was_not_asked_for_stands_in_the_table(bundle):
    bundle("model_gpu_test", PASSES)
    _, table, _ = run(bundle, "model_gpu_test")
    assert table["smoke"][0] == table["peers"][0] == "NOT RUN: not asked for"


def test_a_block_is_run_alone_with_its_limit(bundle):
    bundle("bench_gpu_steps", "echo figure: $*; sleep 30")
    bundle("bench_gpu_kernels", "echo figure: 1 us")
    status, table, _ = run(bundle, "slices=3", "kernels")
    assert table["bench_gpu_kernels"] == ("passed", "1 us")
    for name in ("slices of 1B", "slices of 7B", "slices of 8B"):
        assert table[name][0] == "NOT RUN to its end: stopped after 1 s"
    assert status == 1 and table["smoke"][0] == table["row 8b-lora"][0] == "NOT RUN: not asked for"


def test_rows_of_whole_models_are_run_where_they_are_asked_for(bundle):
    bundle("bench_gpu_steps", "echo figure: $*")
    names = ["row 8b-lora", "row 8b-lora-4k", "row 8b-lora-32k", "row 8b", "row 7b", "row 8b-qlora"]
    status, table, _ = run(bundle, "rows")
    assert status == 0
    for name in names:
        assert table[name] == ("passed", f"--steps 2 {name.removeprefix('row ')}")
    known = {item.name: item for item in checks.all_items(bundle.bin)}
    assert checks.asked_for(["rows=120"], known.values()) == ({name: 20 for name in names}, set())
    assert checks.asked_for(["nothing=5", "smoke"], known.values()) == ({"smoke": None}, {"nothing"})


@pytest.mark.parametrize("body,result", [
    ("exit 3", "failed(3)"),
    ("kill -SEGV $$", "failed(-11)"),
    (f"echo '[  SKIPPED ] Gpu.Test (0 ms)'; {PASSES}", "skipped tests: 1"),
    ("echo no CUDA device", "failed(nothing measured or tested)"),
])
def test_what_fails_or_shows_nothing_fails_the_checks(bundle, body, result):
    bundle("gpu_kernels_test", body)
    bundle("model_gpu_test", PASSES)
    status, table, out = run(bundle, "gpu_kernels_test", "model_gpu_test")
    assert status == 1 and table["gpu_kernels_test"][0] == result and table["model_gpu_test"][0] == "passed"
    assert "1 passed, 1 failed: gpu_kernels_test, 0 not run" in out


def test_a_program_that_is_missing_was_not_run(bundle):
    status, table, _ = run(bundle, "model_gpu_test")
    assert status == 1 and table["model_gpu_test"][0].startswith("NOT RUN: no model_gpu_test in ")


def test_the_deadline_ends_what_runs_and_names_what_did_not(bundle):
    bundle("gpu_kernels_test", "sleep 100 & sleep 100")
    bundle("state_gpu_test", PASSES)
    status, table, out = run(bundle, "--seconds", 6, "gpu_kernels_test", "state_gpu_test")
    assert status == 1
    assert re.fullmatch(r"NOT RUN to its end: stopped after \d+ s", table["gpu_kernels_test"][0])
    assert table["state_gpu_test"][0] == "NOT RUN: no time left"
    assert "2 not run: gpu_kernels_test, state_gpu_test" in out


def test_tests_run_side_by_side_and_their_output_does_not_mix(bundle):
    names = ["gpu_kernels_test", "pairwise_gpu_test", "state_gpu_test"]
    for name in names:  # passes only while all three run
        bundle(name, f"""echo {name} begins; touch "$0.there"; cd "$(dirname "$0")"
for i in $(seq 100); do [ $(ls | grep -c there) = 3 ] && {PASSES} && echo {name} ends && exit; sleep 0.1; done; exit 1""")
    status, table, out = run(bundle, "--jobs", 4, *names)
    assert status == 0 and [table[name] for name in names] == [("passed", "3 tests passed")] * 3
    for name in names:
        assert re.search(f"^== {name}\n{name} begins\n.*PASSED.*\n{name} ends\n== {name}: passed, . s$", out, re.M), out


def test_what_measures_runs_alone_and_before_or_after_all_others(bundle):
    tests, alone = ["gpu_kernels_test", "pairwise_gpu_test", "state_gpu_test", "new_gpu_test"], ["model_gpu_test", "bench_copies", "bench_new"]
    (bundle.bin.parent / "gpu_tests.txt").write_text("new_gpu_test\n")
    (bundle.bin.parent / "gpu_benchmarks.txt").write_text("bench_new\n")
    for name in tests + alone:
        bundle(name, f"""cd "$(dirname "$0")"; touch {name}.runs; sleep 0.3; {'ls *.runs' if name in alone else 'ls'} | grep -c runs
rm {name}.runs; {PASSES}""")
    status, _, out = run(bundle, "--jobs", 4, *tests, *alone)
    assert status == 0
    for name in alone:
        assert re.search(f"^== {name}\n1\n", out, re.M), out
    order = re.findall(r"^== (\w+): passed", out, re.M)
    assert order[0] == "model_gpu_test" and order[-2:] == ["bench_copies", "bench_new"]


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def long_programs(bundle):
    """Three that run side by side and their children, (their names, a function that gives the processes)."""
    names = ["gpu_kernels_test", "pairwise_gpu_test", "state_gpu_test"]
    for name in names:
        bundle(name, 'sleep 100 & echo $$ $! >"$0.pids"; wait')
    return names, lambda: [pid for file in bundle.bin.glob("*.pids") for pid in file.read_text().split()]


def test_the_deadline_ends_all_that_run_side_by_side(bundle):
    names, pids = long_programs(bundle)
    status, table, _ = run(bundle, "--jobs", 2, "--seconds", 6, *names)
    assert status == 1
    assert all(table[name][0].startswith("NOT RUN to its end: stopped after") for name in names[:2])
    assert table[names[2]][0] == "NOT RUN: no time left"
    assert len(pids()) == 4 and not any(map(is_running, pids()))


def test_who_stops_the_checks_stops_all_that_run(bundle):
    names, pids = long_programs(bundle)
    process = subprocess.Popen([sys.executable, "-B", HERE / "checks.py", "--bin", bundle.bin, "--jobs", "3", *names], stdout=subprocess.DEVNULL)
    while len(pids()) < 6 and process.poll() is None:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 128 + 15
    time.sleep(0.2)
    assert len(pids()) == 6 and not any(map(is_running, pids()))


def test_the_longest_tests_are_shared_by_processes_where_several_run_at_once(bundle):
    bundle("gpu_ranks_test", f'echo shard $GTEST_SHARD_INDEX of $GTEST_TOTAL_SHARDS.; {PASSES}')
    status, table, out = run(bundle, "--jobs", 2, "gpu_ranks_test")
    assert status == 0 and table["gpu_ranks_test 1/2"][0] == table["gpu_ranks_test 2/2"][0] == "passed"
    assert "shard 0 of 2." in out and "shard 1 of 2." in out and "2 passed" in out
    status, table, out = run(bundle, "--jobs", 1, "gpu_ranks_test")
    assert status == 0 and table["gpu_ranks_test"][0] == "passed" and "shard of ." in out


def test_the_order_is_the_program_what_measures_memory_tests_copies_products_slices_kernels_rows_and_peers():
    items = checks.items()
    names = [item.name for item in items]
    assert names[:2] == ["smoke", "model_gpu_test"]
    assert [name for name in names[-14:] if not name.startswith("row ")] == [
        "bench_copies", "bench_gpu_attention", "bench_gpu_gemm", "slices of 8B", "slices of 1B", "slices of 7B", "bench_gpu_kernels", "peers"]
    assert [item.together for item in items] == [False] * 2 + [True] * (len(items) - 16) + [False] * 14
    # What runs without being named has 8 minutes; the rows of whole models have a block of their own.
    assert sum(item.budget_s for item in items if item.block == "rows") <= 270


def test_everything_that_the_build_made_is_run(bundle):
    (bundle.bin.parent / "gpu_tests.txt").write_text("model_gpu_test\nnew_gpu_test\n")
    (bundle.bin.parent / "gpu_benchmarks.txt").write_text("bench_gpu_steps\nbench_new\n")
    names = [item.name for item in checks.all_items(bundle.bin)]
    assert names[-2:] == ["bench_new", "peers"] and names.index("new_gpu_test") == names.index("bench_copies") - 1
    assert names.count("model_gpu_test") == 1 and "bench_gpu_steps" not in names


def test_an_unknown_name_is_refused(bundle):
    assert run(bundle, "model_gpu_tests")[0] == 2


# ---- the smoke test's and parity's own comparisons


def test_losses_that_differ_memory_that_is_missing_and_runs_that_fail_are_problems(tmp_path):
    def problems(gpu, cpu, planned="2.00 GiB", device_bytes=1 << 20, code=0):
        for device, losses in (("cuda", gpu), ("cpu", cpu)):
            (tmp_path / "runs" / f"x-{device}").mkdir(parents=True, exist_ok=True)
            rows = "".join(f'{{"loss": {loss}, "device_bytes": {device_bytes}}}\n' for loss in losses)
            (tmp_path / "runs" / f"x-{device}" / "metrics.jsonl").write_text(rows)
        err = f"peak resident memory 1 GiB, of the GPU's 1.00 GiB (planned {planned})"
        return " ".join(smoke.compare(tmp_path, "x", "fp32", {"cuda": (code, err), "cpu": (0, "")})[0])

    learnt = [5.0, 4.8, 4.6, 4.4, 4.2]
    assert problems(learnt, learnt) == ""
    assert "losses differ" in problems([5.0, 4.8, 4.6, 4.4, 4.202], learnt)
    assert "losses differ" in problems([5.0, 4.8, 4.6, 4.4, "NaN"], learnt)
    assert "nothing was learnt" in problems([5.0] * 5, [5.0] * 5)
    assert "4 and 5 losses" in problems(learnt[1:], learnt)
    assert "device_bytes" in problems(learnt, learnt, device_bytes=0)
    assert "planned" in problems(learnt, learnt, planned="0.50 GiB")
    assert "exit status 30" in problems(learnt, learnt, code=30)


def test_tensors_are_read_and_written_as_safetensors_does(tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = {"a": torch.randn(3, 5), "b.c": torch.randn(7).bfloat16(), "n": torch.arange(4, dtype=torch.int32)}
    parity.write_tensors(tensors, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")
    for read in (load_file(tmp_path / "ours"), parity.read_tensors(tmp_path / "theirs")):
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items()) and len(read) == 3


def test_results_beyond_the_bounds_do_not_agree():
    theirs = {"logits": torch.randn(4, 9), "loss": torch.tensor([2.0]), "losses": torch.tensor([2.0, 1.9]),
              "grad.w": torch.randn(5), "weight.w": torch.randn(5)}
    parity.compare("fp32", theirs, theirs)
    for name, value in theirs.items():
        with pytest.raises(AssertionError):
            parity.compare("fp32", {**theirs, name: value * 1.001}, theirs)
    with pytest.raises(AssertionError):
        parity.compare("fp32", {name: value for name, value in theirs.items() if name != "grad.w"}, theirs)


# ---- others' programs beside ours


OURS = 'echo ours $1 >>"$0.log"; sleep 0.2; echo \'{"benchmark":"gpu_steps","tokens_per_s":300,"device_bytes":1073741824}\''


@pytest.fixture
def beside(bundle, monkeypatch, capsys):
    """beside(what a peer does, {case: what it does instead}): (status, lines, what ran in order)."""
    log = bundle.bin / "bench_gpu_steps.log"

    def go(body, others={}, cases=peers.TINY, seconds=60, ours=OURS):
        bundle("bench_gpu_steps", ours)
        result = {"tokens_per_s": 200, "step_s": 0.5, "peak_allocated": 2**31, "peak_reserved": 2**31, "recompute": False}
        monkeypatch.setattr(peers, "worker_command", lambda case, _: [
            "sh", "-c", f"read go; echo peer {case.setting} >>{log}; echo noise; " +
            others.get(case.name, body).replace("MEASURED", json.dumps({"peer": case.name, **result}))])
        status = peers.run(cases, bundle.bin, "cpu", seconds)
        return status, capsys.readouterr().out.splitlines(), log.read_text().splitlines() if log.exists() else []

    return go


def test_a_peer_and_ours_take_turns_and_are_compared(beside):
    status, lines, order = beside("echo 'MEASURED'", cases=peers.TINY[:2])
    assert status == 0 and order == ["ours tiny", "peer bf16", "ours tiny", "peer fp32 master"]
    assert lines[-1] == "figure: tiny bf16 1.50x, tiny fp32 master 1.50x"
    assert "ours 300 and 300: 1.50x tokens/s, 0.50x memory" in lines[0]
    row = json.loads(lines[1])
    assert (row["row"], row["setting"], row["speed"], row["memory"], row["ours_tokens_per_s"]) == ("tiny", "bf16", 1.5, 0.5, [300, 300])
    assert checks.judge(0, lines, 150) == ("passed", "tiny bf16 1.50x, tiny fp32 master 1.50x")


@pytest.mark.parametrize("body,why", [
    ("echo Error: a reason; exit 1", "exit status 1: Error: a reason"),
    ("""echo '{"peer": cut'""", """exit status 0: {"peer": cut"""),
    ("exec sleep 100", "stopped after 1 s"),
])
def test_a_peer_that_fails_does_not_stop_the_others(beside, monkeypatch, body, why):
    monkeypatch.setattr(peers, "CASE_S", 1)
    monkeypatch.setattr(peers, "START_S", 0)
    status, lines, _ = beside("echo 'MEASURED'", {"tiny bf16": body})
    assert status == 1 and [line for line in lines if "failed" in line] == [f"{'tiny bf16':24} failed: {why}"]
    assert lines[-1] == "figure: tiny fp32 master 1.50x, tiny-lora bf16 adapters 1.50x, tiny-lora fp32 adapters 1.50x"


def test_where_ours_fails_or_time_runs_out_the_checks_fail(beside):
    status, lines, order = beside("echo 'MEASURED'", seconds=peers.LEAST_S)
    assert status == 1 and order == [] and len(lines) == 4 and all("no time left" in line for line in lines)
    status, lines, _ = beside("echo 'MEASURED'", cases=peers.TINY[:1], ours="echo no memory; exit 3")
    assert status == 1 and "failed: exit status 3: no memory" in lines[0] and lines[-1] == "figure: tiny bf16 200 tokens/s"


def test_rows_of_peers_are_rows_of_ours_with_their_shapes():
    source = (HERE.parents[1] / "benchmarks" / "gpu_steps.cpp").read_text()
    shapes = {"k" + name: json.loads(text.replace("\n", "")) for name, text in re.findall(r'k(\w+) =\s+R"\((.*?)\)"', source, re.S)}
    for case in peers.CASES:
        shape, layers, lora = re.search(rf'{{"{case.row}", (\w+), (\d+), (\w+),', source).groups()
        theirs = peers.SHAPES[case.shape]
        assert {name: shapes[shape][name] for name in theirs} == theirs
        assert (case.layers, case.lora, case.sequences, case.length) == (int(layers), lora == "true", 8, 2048)


@pytest.mark.parametrize("case", peers.TINY, ids=lambda case: case.name)
def test_a_peer_measures_and_recomputes_where_it_does_not_fit_otherwise(case, monkeypatch):
    attempt, tried = peers.attempt, []

    def small(model, case, device, recompute):
        tried.append(recompute)
        if not recompute:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        calls = []
        layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn"))
        layer.register_forward_hook(lambda *_: calls.append(1))
        result = attempt(model, case, device, recompute)
        assert len(calls) == 2 * (peers.WARM + peers.TIMED)
        return result

    monkeypatch.setattr(peers, "attempt", small)
    monkeypatch.setattr(peers, "TIMED", 2)
    result = peers.measure(case, "cpu")
    assert tried == [False, True] and result["recompute"] and result["out_of_memory"] == 1
    assert result["tokens_per_s"] > 0 and 5 < result["loss"] < 7
    monkeypatch.setattr(peers, "attempt", lambda *_: (_ for _ in ()).throw(RuntimeError("another reason")))
    with pytest.raises(RuntimeError, match="another reason"):
        peers.measure(case, "cpu")


# ---- the bundle's archive


def test_the_archive_keeps_once_what_executables_share(tmp_path):
    draw = random.Random(1)
    shared, other = draw.randbytes(2 << 20), draw.randbytes(9 << 20)  # further apart than any preset's own window looks back
    (tmp_path / "made" / "bin").mkdir(parents=True)
    for name, body in (("a", shared), ("b", other), ("c", shared)):
        (tmp_path / "made" / "bin" / name).write_bytes(body)
    (tmp_path / "made" / "bin" / "c").chmod(0o755)
    bundle_maker.pack(tmp_path / "made", tmp_path / "made.tar.xz")
    assert 11 < bundle_maker.size_mib(tmp_path / "made.tar.xz") < 11.5 and bundle_maker.size_mib(tmp_path / "made") == 13
    with tarfile.open(tmp_path / "made.tar.xz") as tar:
        assert tar.getmember("made/bin/c").mode & 0o111 and not tar.getmember("made/bin/a").mode & 0o111
        assert tar.extractfile("made/bin/c").read() == shared and tar.getmember("made").uid == 0


@pytest.mark.parametrize("ours, status", [(2000, 0), (1099, 1)])
def test_a_peer_that_is_as_fast_fails_the_item(monkeypatch, ours, status):
    class Peer:
        def __init__(self, case, device):
            pass

        def ask(self, left):
            return {"tokens_per_s": 1000, "step_s": 1, "peak_allocated": 1, "peak_reserved": 1, "recompute": False}, ""

    monkeypatch.setattr(peers, "Peer", Peer)
    monkeypatch.setattr(peers, "run_ours", lambda *_: ({"tokens_per_s": ours, "device_bytes": 1}, ""))
    case = peers.Case("1b", "bf16", "1b", fp32=False)
    assert peers.run([case], Path("bin"), "cuda", 100) == status
