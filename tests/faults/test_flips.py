"""Damaged checkpoints: a flipped bit anywhere, files cut short, exchanged, or of another checkpoint. Each is said, the checkpoint
before it is used, and the run ends with the undisturbed one's bits; with one checkpoint alone the start ends with 14."""

import json
import shutil
import time

import pytest

from runs import FULL, Report, Run, Undisturbed, kill, make_work, resumed_at, wait

FLIPS = 20 if FULL else 6
NEWEST, BEFORE = "step_00000006", "step_00000003"
SHARD, MANIFEST = "rank00000.safetensors", "MANIFEST.json"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(make_work(tmp_path_factory.mktemp("flips")))


@pytest.fixture(scope="module")
def report():
    out = Report("flips", "F07: damaged checkpoints", "the newest of two with a random bit flipped (in the shard, then in the manifest, by "
                 "turns), cut short, with chunks exchanged, or with files of the other one")
    yield out
    out.write()


@pytest.fixture(scope="module")
def dead(undisturbed):
    """A run that was killed after step 6, with the checkpoints of steps 3 and 6."""
    run = Run(undisturbed.work, "dead")
    for _ in range(5):
        shutil.rmtree(run.directory, ignore_errors=True)
        process = run.start("checkpoint.keep=100")
        while process.poll() is None and NEWEST not in run.checkpoints():
            time.sleep(0.001)
        kill(process)
        wait(process)
        run.wait_until_free()
        if not run.done():  # else the kill came too late
            break
    for name in run.checkpoints():
        if name not in (NEWEST, BEFORE):
            shutil.rmtree(run.directory / "checkpoints" / name)
    assert run.checkpoints() == [BEFORE, NEWEST]
    return run


def copy_of(dead, name):
    run = Run(dead.work, name)
    shutil.copytree(dead.directory, run.directory)
    return run, run.directory / "checkpoints" / NEWEST, run.directory / "checkpoints" / BEFORE


def flip(path, random):
    raw = bytearray(path.read_bytes())
    raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
    path.write_bytes(raw)


def expect_the_one_before(run, undisturbed, why=""):
    messages = run.finish()
    assert "warning CKPT-02" in messages and NEWEST in messages and why in messages, messages
    assert resumed_at(messages) == 3, messages
    assert run.result() == undisturbed("full")


def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(undisturbed, report, dead):
    for i in range(FLIPS):
        run, newest, _ = copy_of(dead, f"flip_{i}")
        flip(newest / (SHARD if i % 2 == 0 else MANIFEST), report.random(i))
        expect_the_one_before(run, undisturbed)
        report.count("flip found, the one before used", tries=1)


def test_a_flipped_bit_in_the_only_checkpoint_ends_with_14(undisturbed, report, dead):
    for i, name in enumerate((SHARD, MANIFEST)):
        run, newest, before = copy_of(dead, f"only_{i}")
        shutil.rmtree(before)
        flip(newest / name, report.random("only", i))
        messages = run.finish(code=14)
        assert "no checkpoint is valid" in messages and NEWEST in messages and not (run.directory / "model").exists(), messages
        report.count("flip found in the only one: 14", tries=1)


def chunks(checkpoint):
    """(offset, bytes) of the shard's chunks."""
    out, offset = [], 0
    for bytes, _ in json.loads((checkpoint / MANIFEST).read_text())["files"][0]["chunks"]:
        out.append((offset, bytes))
        offset += bytes
    return out


def cut(name, to):
    def damage(newest, before):
        raw = (newest / name).read_bytes()
        (newest / name).write_bytes(raw[:to(len(raw))])

    return damage


def header_bit(newest, before):
    """Of the tensors' names: what the run reads is as it was."""
    raw = bytearray((newest / SHARD).read_bytes())
    raw[raw.index(b"block0")] ^= 1
    (newest / SHARD).write_bytes(raw)


def two_chunks_exchanged(newest, before):
    raw = (newest / SHARD).read_bytes()
    places = [place for place in chunks(newest) if place[0] > 0]
    (a, size), (b, _) = next((p, q) for p in places for q in places if p[0] < q[0] and p[1] == q[1] and
                             raw[p[0]:p[0] + p[1]] != raw[q[0]:q[0] + q[1]])
    assert a + size <= b
    (newest / SHARD).write_bytes(raw[:a] + raw[b:b + size] + raw[a + size:b] + raw[a:a + size] + raw[b + size:])


def chunk_of_the_older(newest, before):
    raw, old = (newest / SHARD).read_bytes(), (before / SHARD).read_bytes()
    at, size = next(place for place in chunks(newest) if raw[place[0]:sum(place)] != old[place[0]:sum(place)])
    (newest / SHARD).write_bytes(raw[:at] + old[at:at + size] + raw[at + size:])


def file_of_the_older(name):
    return lambda newest, before: shutil.copy(before / name, newest / name)


def all_of_the_older(newest, before):
    shutil.rmtree(newest)
    shutil.copytree(before, newest)


DAMAGE = {
    "shard cut by a byte": cut(SHARD, lambda size: size - 1), "shard cut to a page": cut(SHARD, lambda size: 4096),
    "shard empty": cut(SHARD, lambda size: 0), "manifest cut by a byte": cut(MANIFEST, lambda size: size - 1),
    "manifest cut by half": cut(MANIFEST, lambda size: size // 2), "manifest empty": cut(MANIFEST, lambda size: 0),
    "a bit of the shard's header": header_bit, "two chunks exchanged": two_chunks_exchanged,
    "a chunk of the older": chunk_of_the_older, "the shard of the older": file_of_the_older(SHARD),
    "the manifest of the older": file_of_the_older(MANIFEST), "all of the older": all_of_the_older,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(undisturbed, report, dead, what):
    run, newest, before = copy_of(dead, "damaged_" + what.replace(" ", "_").replace("'", ""))
    DAMAGE[what](newest, before)
    expect_the_one_before(run, undisturbed, "of step 3" if "older" in what and what.startswith(("all", "the manifest")) else "")
    report.count(what, tries=1)


def test_what_a_dead_run_was_writing_goes_at_the_next_start(undisturbed, dead):
    """Also where that start saves nothing. (The run was killed at any moment, so it may have left some by itself.)"""
    run, newest, _ = copy_of(dead, "leftovers")
    planted = [newest.parent / "step_00000009.tmp-00", run.directory / "model.tmp-1-0", run.directory / "status.json.tmp-1-1"]
    for path in planted[:2]:
        path.mkdir()
    for path in (planted[0] / "rank00000.safetensors", planted[1] / "config.json", planted[2]):
        path.write_text("{")
    assert set(planted) <= set(run.leftovers())
    messages = run.finish("checkpoint.every=0")
    assert "note CKPT-01" in messages and "step_00000009.tmp-00" in messages and resumed_at(messages) == 6, messages
    assert run.result() == undisturbed("full") and not run.leftovers()
