"""lmlaunch diff: the first step and the first tensor in which two runs differ, their settings, and what to run where no checkpoint tells."""

import ctypes
import json
import re
import shlex
import shutil
import struct
import subprocess

import pytest
from test_run import config, filled, lmlaunch, rows, warm_program

STEPS = 6


def prepared(work, name, **changes):
    """A configuration of STEPS steps, which saves after every second one and keeps all of these."""
    return config(work, name, **{"train__steps": STEPS, "checkpoint__every": 2, "checkpoint__keep": 3, "model__dtype": "bf16", **changes})


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = filled(tmp_path_factory.mktemp("diff"), layers=2)
    lmlaunch(prepared(work, "one"), cwd=work)
    return work


def copy(work, name, of="one"):
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    return shutil.copytree(work / "runs" / of, work / "runs" / name)


def text(work, a, b, code):
    done = lmlaunch("diff", f"runs/{a}", f"runs/{b}", "--gpus", "0", cwd=work, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def diff(work, a, b, code):
    done = lmlaunch("diff", f"runs/{a}", f"runs/{b}", "--json", cwd=work, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert list(found) == ["equal", "runs", "settings", "settings_without_effect", "recorded", "steps", "first_step", "columns", "checkpoints", "next"]
    assert found["equal"] == (code == 0)
    return found


def keys(differences):
    return {one["key"]: one["values"] for one in differences}


def xxh(bits, data):
    """XXH3 of the bytes, as the manifest has it."""
    library = ctypes.CDLL("libxxhash.so.0")
    if bits == 64:
        library.XXH3_64bits.restype = ctypes.c_uint64
        return f"{library.XXH3_64bits(data, ctypes.c_size_t(len(data))):016x}"

    class Both(ctypes.Structure):
        _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]

    library.XXH3_128bits.restype = Both
    both = library.XXH3_128bits(data, ctypes.c_size_t(len(data)))
    return f"{both.high:016x}{both.low:016x}"


def plant(checkpoint, array, element, change):
    """`change` replaces the bytes of an element of the array; every checksum of the checkpoint is made anew, so that it is valid."""
    path = checkpoint / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    place = next(one for one in manifest["arrays"] if one["name"] == array and one["first"] <= element < one["first"] + one["elements"])
    file = manifest["files"][place["file"]]
    size = {"F32": 4, "BF16": 2, "I16": 2}[place["dtype"]]
    data = bytearray((checkpoint / file["name"]).read_bytes())
    at = place["offset"] + (element - place["first"]) * size
    data[at:at + size] = change(bytes(data[at:at + size]))
    (checkpoint / file["name"]).write_bytes(data)
    begin = 0
    for chunk in file["chunks"]:
        chunk[1] = xxh(64, bytes(data[begin:begin + chunk[0]]))
        begin += chunk[0]
    file["hash"] = xxh(128, "".join(chunk[1] for chunk in file["chunks"]).encode())
    del manifest["checksum"]
    sealed = json.dumps(manifest)[:-1]
    path.write_text(f'{sealed},\n"checksum": "{xxh(128, sealed.encode())}"\n}}\n')


def add_one(element):
    """To a bf16 number, which then differs by exactly that where it is small."""
    value = struct.unpack("<f", b"\0\0" + element)[0]
    return struct.pack("<f", value + 64)[2:]


def tensors(work):
    return json.loads((work / "runs" / "one" / "checkpoints" / "step_00000004" / "MANIFEST.json").read_text())["tensors"]


def test_two_equal_runs_are_equal(work):
    lmlaunch(prepared(work, "two"), cwd=work)
    found = diff(work, "one", "two", 0)
    assert found["settings"] == found["recorded"] == found["columns"] == found["next"] == [] and found["first_step"] is None
    assert keys(found["settings_without_effect"])["run.dir"] == ['"runs/one"', '"runs/two"']
    assert found["steps"] == {"compared": STEPS, "differ": 0}
    assert [one["step"] for one in found["checkpoints"]] == [2, 4, 6]
    for one in found["checkpoints"]:
        assert one["weights"]["compared"] == len(tensors(work)) and one["weights"]["differ"] == one["optimizer"]["differ"] == 0
        assert one["optimizer"]["compared"] == 3 * len(tensors(work)) + 1  # two moments, the master's low half; the updates so far
    said = text(work, "one", "two", 0)
    assert f"metrics: equal in {STEPS} steps\n" in said and "checkpoint of step 6: weights equal" in said


def test_a_resumed_run_equals_the_one_that_was_not_interrupted(work):
    """Of the copy everything is gone that came after step 4."""
    resumed = copy(work, "resumed")
    shutil.rmtree(resumed / "checkpoints" / "step_00000006")
    shutil.rmtree(resumed / "model")
    (resumed / "status.json").unlink()
    lmlaunch("one.toml", "run.dir=runs/resumed", cwd=work)
    assert "resum" in (resumed / "log.txt").read_text()
    assert diff(work, "one", "resumed", 0)["checkpoints"][-1]["step"] == 6


def test_another_seed_and_another_rate_are_named_with_the_first_step(work):
    lmlaunch(prepared(work, "seed", run__seed=7), cwd=work)
    lmlaunch(prepared(work, "rate", optimizer__lr=2e-2), cwd=work)
    one, seed, rate = (next(row for row in rows(work, name) if "loss" in row) for name in ("one", "seed", "rate"))

    found = diff(work, "one", "seed", 1)
    assert keys(found["settings"]) == {"run.seed": ["42", "7"]} and found["first_step"] == 1
    first = found["columns"][0]
    assert first["name"] == "loss" and first["values"] == [one["loss"], seed["loss"]] and one["loss"] != seed["loss"]
    assert first["relative"] == pytest.approx(abs(one["loss"] - seed["loss"]) / max(one["loss"], seed["loss"]))

    found = diff(work, "one", "rate", 1)
    assert keys(found["settings"]) == {"optimizer.lr": ["0.01", "0.02"]}
    # The first step's loss is that of the same weights, over the same rows.
    assert found["first_step"] == 1 and [(c["name"], c["values"], c["relative"]) for c in found["columns"]] == [("lr", [0.01, 0.02], 0.5)]
    assert [c["step"] for c in found["checkpoints"]] == [2] and found["next"] == []
    weights = found["checkpoints"][0]["weights"]
    assert weights["differ"] > 0 and weights["first"]["name"] == tensors(work)[0]["name"] and 0 < weights["first"]["largest"] <= weights["largest"] < 0.2
    said = text(work, "one", "rate", 1)
    assert re.search(r"^  optimizer\.lr +0\.01 \| 0\.02$", said, re.M) and "the first step that differs is 1" in said and "relative 0.5" in said
    assert f"the first is {tensors(work)[0]['name']}" in said


def test_a_number_in_a_checkpoint_that_no_row_shows_is_found(work):
    flipped = copy(work, "flipped") / "checkpoints" / "step_00000004"
    tensor = tensors(work)[5]
    plant(flipped, f"block{tensor['block']}.weight", tensor["first"] + 3, add_one)
    found = diff(work, "one", "flipped", 1)
    assert found["first_step"] is None and [one["step"] for one in found["checkpoints"]] == [2, 4]
    weights = found["checkpoints"][1]["weights"]
    assert weights["differ"] == 1 and weights["first"]["name"] == tensor["name"] and weights["first"]["differ"] == 1
    assert weights["first"]["largest"] == weights["largest"] == pytest.approx(64, rel=0.01)
    assert found["checkpoints"][1]["optimizer"] is None
    said = text(work, "one", "flipped", 1)
    assert f"checkpoint of step 4: 1 of {len(tensors(work))} tensors of the weights differ, by 64 at most; the first is {tensor['name']}, 1 of" in said


def test_where_the_weights_are_equal_the_optimizer_state_is_compared(work):
    flipped = copy(work, "moment") / "checkpoints" / "step_00000006"
    tensor = tensors(work)[-1]
    arrays = {one["name"] for one in json.loads((flipped / "MANIFEST.json").read_text())["arrays"]}
    block = f"block{tensor['block']}."
    stream = next(name for name in sorted(arrays) if name.startswith(block) and name not in (f"{block}weight", f"{block}master"))
    plant(flipped, stream, tensor["first"], lambda _: struct.pack("<f", 5.0))
    found = diff(work, "one", "moment", 1)["checkpoints"][-1]
    assert found["weights"]["differ"] == 0 and found["optimizer"]["differ"] == 1
    assert found["optimizer"]["first"]["name"] == f"{tensor['name']} {stream[len(block):]}" and found["optimizer"]["first"]["largest"] == pytest.approx(5, abs=0.1)


def test_runs_of_different_ranks_are_compared_tensor_by_tensor(work):
    """Sums of two ranks are those of one but for the order, so that wrong places would show as large differences."""
    lmlaunch("--ranks", 2, prepared(work, "ranks", zero__stage=1), cwd=work)
    done = lmlaunch("diff", "runs/one", "runs/ranks", "--json", cwd=work, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["equal"] else 1) and keys(found["recorded"])["numerics.ranks"] == ["1", "2"]
    weights = found["checkpoints"][0]["weights"]
    assert found["checkpoints"][0]["step"] == 2 and weights["compared"] == len(tensors(work)) and weights["only_in"] == [0, 0]
    assert (weights["largest"] or 0) < 0.03  # a step takes 0.01 of it
    copied = copy(work, "ranks_copied", of="ranks")
    (copied / "metrics.jsonl").write_text("")
    assert diff(work, "ranks", "ranks_copied", 0)["steps"]["compared"] == 0


def test_rows_of_another_interval_are_compared_where_both_have_them(work):
    """And a row that is being written is none."""
    sparse = copy(work, "sparse")
    lines = (sparse / "metrics.jsonl").read_text().splitlines(keepends=True)
    even = [line for line in lines if json.loads(line)["step"] in (2, 4)]
    (sparse / "metrics.jsonl").write_text("".join(even) + lines[-1][:20])
    found = diff(work, "one", "sparse", 0)
    assert found["steps"] == {"compared": 2, "differ": 0} and [run["last_step"] for run in found["runs"]] == [6, 4]
    assert "one run is longer: the last steps are 6 and 4" in text(work, "one", "sparse", 0)
    (sparse / "metrics.jsonl").write_text("".join(even) + "no row\n")
    done = lmlaunch("diff", "runs/one", "runs/sparse", cwd=work, check=False)
    assert done.returncode == 11 and "metrics.jsonl:" in done.stderr


def test_times_and_bytes_make_no_difference_and_digits_do(work):
    changed = copy(work, "changed")
    metrics = [json.loads(line) for line in (changed / "metrics.jsonl").read_text().splitlines()]
    for row in metrics:
        row.update({key: 1 for key in row if key.endswith(("_ms", "_per_s", "_bytes", "_pct"))})
    (changed / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    assert diff(work, "one", "changed", 0)["steps"]["differ"] == 0
    last = next(row for row in reversed(metrics) if "loss" in row)
    last["grad_norm"] *= 1 + 2**-52
    (changed / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    found = diff(work, "one", "changed", 1)
    assert found["first_step"] == STEPS and [one["name"] for one in found["columns"]] == ["grad_norm"]
    # The newest checkpoint before it, and that of the step itself.
    assert [one["step"] for one in found["checkpoints"]] == [4, 6]


def test_without_checkpoints_of_that_step_it_says_what_to_run_again(work):
    for name in ("rate", "one"):
        shutil.rmtree(copy(work, f"bare_{name}", of=name) / "checkpoints")
    found = diff(work, "bare_one", "bare_rate", 1)
    assert found["checkpoints"] == [] and len(found["next"]) == 3
    assert found["next"][0] == "lmlaunch runs/bare_one/config.toml run.dir=runs/bare_one_again checkpoint.every=1"
    for command, code in zip(found["next"], (0, 0, 1)):
        done = subprocess.run([warm_program(), *shlex.split(command)[1:]], cwd=work, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        assert command in text(work, "bare_one", "bare_rate", 1)
    assert "tensors of the weights differ" in done.stdout


def test_what_is_no_run_is_refused(work):
    for arguments, code in ((["runs/one", "model"], 11), (["none", "runs/one"], 11), (["runs/one"], 2), (["runs/one", "runs/one", "--gpus", "1"], 2)):
        done = lmlaunch("diff", *arguments, cwd=work, check=False)
        assert done.returncode == code and done.stdout == "" and "next:" in done.stderr, done.stderr
    damaged = copy(work, "damaged") / "checkpoints" / "step_00000002"
    file = next(path for path in damaged.iterdir() if path.name != "MANIFEST.json")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert lmlaunch("diff", "runs/one", "runs/damaged", cwd=work, check=False).returncode == 22
