"""The program that fetches (src/data/fetch), against a hub on the loopback: what lies in the cache, each fault's message and exit
code, and that nothing half-written is under its name."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from counts import FULL
from hub import blob_hash, serving, tiny_model

PROGRAM = Path(__file__).resolve().parents[2] / "src" / "data" / "fetch" / "fetch.py"
NAME = "org/name"
WANTED = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json", "config.json",
          "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"}
PART = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub():
    with serving({NAME: {"main": tiny_model(), "v1": tiny_model(1000, seed=2)}}) as hub:
        yield hub


def start(hub, cache, command=(PROGRAM,), **changes):
    request = {"name": NAME, "revision": "main", "kind": "model", "only": "all", "cache": str(cache), "endpoint": hub.address, "token": "",
               "token_from": "HF_TOKEN", "pause": 0, **changes}
    process = subprocess.Popen([sys.executable, "-I", "-B", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps(request))
    process.stdin.close()
    return process


def fetch(hub, cache, **changes):
    process = start(hub, cache, **changes)
    answer, said = process.stdout.read(), process.stderr.read()
    process.wait(timeout=60)
    answer = json.loads(answer)
    assert process.returncode == answer.get("error", {}).get("exit", 0), said
    return answer


def refused(hub, cache, **changes):
    error = fetch(hub, cache, **changes)["error"]
    assert error["area"] == "HUB-37" and error["what"] and error["next"]
    check_names(cache)
    return error


def check_names(cache):
    """Whatever has a name is whole: blobs by their hash, links by their blob, and a model has all of its files."""
    for repository in Path(cache).glob("models--*"):
        for blob in (repository / "blobs").iterdir():
            if not blob.name.endswith(".lmlaunch.incomplete"):
                content = blob.read_bytes()
                assert blob.name in (hashlib.sha256(content).hexdigest(), blob_hash(content))
        for snapshot in (repository / "snapshots").glob("*"):
            links = {str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if not p.is_dir()}
            assert all((snapshot / link).exists() for link in links)
            assert "config.json" not in links or WANTED <= links
        for ref in (p for p in (repository / "refs").rglob("*") if p.is_file()):
            assert (repository / "snapshots" / ref.read_text() / "config.json").exists()


def snapshot(cache, revision="main", name=NAME):
    repository = Path(cache) / f"models--{name.replace('/', '--')}"
    return repository / "snapshots" / (repository / "refs" / revision).read_text()


def is_whole(hub, cache, revision="main"):
    there = snapshot(cache, revision)
    assert there.name == hub.commits[NAME, revision]
    assert {str(p.relative_to(there)) for p in there.rglob("*") if not p.is_dir()} == WANTED
    for file in WANTED:
        assert (there / file).read_bytes() == hub.repositories[NAME][revision][file]
    assert not list(Path(cache).rglob("*.incomplete")) and not list(Path(cache).rglob(".lmlaunch-*"))
    check_names(cache)
    return True


def test_safetensors_tokenizer_configuration_and_templates_come_and_nothing_else(hub, tmp_path):
    answer = fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path)
    assert {file["name"] for file in answer["files"]} == WANTED and answer["directory"] == str(snapshot(tmp_path))
    assert answer["fetched_bytes"] == answer["bytes"] == sum(len(hub.repositories[NAME]["main"][f]) for f in WANTED)
    # One list, each file once, its redirect: no other request.
    paths = [path for server, path, _ in hub.log if server == "hub"]
    assert len(paths) == len(set(paths)) == 1 + len(WANTED) and paths[0].startswith("/api/models/org/name/revision/main")
    assert len(hub.log) == len(paths) + 2


def test_a_second_fetch_compares_what_is_here_and_moves_nothing(hub, tmp_path):
    fetch(hub, tmp_path)
    hub.log.clear()
    assert fetch(hub, tmp_path)["fetched_bytes"] == 0 and len(hub.log) == 1
    blob = (snapshot(tmp_path) / "tokenizer.json").resolve()
    blob.write_bytes(bytes(blob.stat().st_size))  # as another program may have left it
    assert fetch(hub, tmp_path)["fetched_bytes"] == blob.stat().st_size and is_whole(hub, tmp_path)


def test_a_revision_by_name_or_commit_lies_beside_main(hub, tmp_path):
    fetch(hub, tmp_path)
    assert fetch(hub, tmp_path, revision="v1")["revision"] == hub.commits[NAME, "v1"]
    assert is_whole(hub, tmp_path) and is_whole(hub, tmp_path, "v1")
    assert fetch(hub, tmp_path, revision=hub.commits[NAME, "v1"])["fetched_bytes"] == 0
    assert sorted(p.name for p in (tmp_path / "models--org--name" / "refs").iterdir()) == ["main", "v1"]


def test_killed_at_random_times_it_goes_on_where_it_was(hub, tmp_path):
    kills, noise = 20 if FULL else 5, random.Random(7)
    total = sum(len(hub.repositories[NAME]["main"][f]) for f in WANTED)
    named = set()
    for kill in range(kills):
        process = start(hub, tmp_path)
        until = hub.sent + noise.randrange(1, max(2, total // (kills + 2)))

        def on_piece():
            if hub.sent >= until:
                process.send_signal(signal.SIGKILL)

        hub.on_piece = on_piece
        assert process.wait(timeout=60) == -signal.SIGKILL
        hub.on_piece = lambda: None
        check_names(tmp_path)
        # What had its name before this start was not asked for by it.
        asked = {path.rsplit("/", 1)[1] for server, path, _ in hub.log if "/resolve/" in path}
        assert not asked & named
        whole = {p.name for p in (tmp_path / "models--org--name" / "blobs").iterdir() if not p.name.endswith(".incomplete")}
        content = hub.repositories[NAME]["main"]
        named = {f for f in WANTED if {blob_hash(content[f]), hashlib.sha256(content[f]).hexdigest()} & whole}
        hub.log.clear()
    left = list((tmp_path / "models--org--name" / "blobs").glob("*.incomplete"))
    answer = fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path) and not {path.rsplit("/", 1)[1] for path in hub.asked("/resolve/")} & named
    assert answer["fetched_bytes"] < total
    if left:  # half of a file: the rest of it is asked for
        half = next(f for f in WANTED if left[0].name.split(".")[0] in (blob_hash(content[f]), hashlib.sha256(content[f]).hexdigest()))
        assert hub.starts(half)[0] > 0


def test_config_json_is_named_last(hub, tmp_path):
    """Of a snapshot: whoever looks for a model looks for that file. A process that ends on its way to it leaves no model."""
    code = ("import os, sys, runpy\n"
            "link = os.symlink\n"
            "def until(to, new, **more):\n"
            "    if new.endswith('tokenizer.json'): os._exit(3)\n"
            "    link(to, new, **more)\n"
            "os.symlink = until\n"
            f"sys.argv = [{str(PROGRAM)!r}]\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')")
    process = start(hub, tmp_path, command=["-c", code])
    assert process.wait(timeout=60) == 3
    assert {p.name for p in next((tmp_path / "models--org--name" / "snapshots").iterdir()).iterdir()} - {"config.json"}
    check_names(tmp_path)
    assert fetch(hub, tmp_path)["fetched_bytes"] == 0 and is_whole(hub, tmp_path)


def test_half_of_an_earlier_revision_does_not_stay(hub, tmp_path):
    hub.cuts = [100_000] + [0] * 20
    refused(hub, tmp_path)
    hub.cuts = []
    assert list(tmp_path.rglob("*.incomplete"))
    fetch(hub, tmp_path, revision="v1")
    assert is_whole(hub, tmp_path, "v1")


def test_a_transfer_that_is_cut_goes_on_in_the_same_fetch(hub, tmp_path):
    hub.cuts = [1000, 100_000, 0, 200_000, 70_000, 30_000, 40_000, 20_000, 10]
    fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path) and hub.cuts == []


def test_a_hub_that_always_cuts_ends_the_fetch(hub, tmp_path):
    hub.cuts = [0] * 100
    error = refused(hub, tmp_path)
    assert error["exit"] == 21 and "was cut after 0 of" in error["what"] and "resumes there" in error["kept"]
    hub.cuts = []
    fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path)


def test_a_hub_without_ranges_sends_the_whole_again(hub, tmp_path):
    hub.ignores_ranges, hub.cuts = True, [200_000]
    fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path)


def test_wrong_bytes_get_no_name(hub, tmp_path):
    for file in ("tokenizer.json", PART):  # by git's hash, and by SHA-256
        hub.wrong = {file}
        error = refused(hub, tmp_path)
        assert error["exit"] == 22 and error["place"] == file and "not those of the hub's list" in error["what"]
    hub.wrong = set()
    fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path)


def test_what_a_power_cut_has_left_is_fetched_again(hub, tmp_path):
    content = hub.repositories[NAME]["main"][PART]
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(content).hexdigest()}.lmlaunch.incomplete").write_bytes(bytes(len(content) // 2))
    fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path) and hub.starts(PART) == [len(content) // 2, 0]


def test_a_lie_about_a_size_ends_the_fetch(hub, tmp_path):
    size = len(hub.repositories[NAME]["main"][PART])
    for lie in (size - 1, size + 1):
        hub.lies = {PART: lie}
        error = refused(hub, tmp_path)
        assert error["exit"] == 22 and f"the hub sends {size} bytes, its list says {lie}" in error["what"]
    hub.lies, hub.longer = {}, 5
    assert "sends more than the" in refused(hub, tmp_path)["what"]


def test_room_on_the_disk_is_asked_for_first(hub, tmp_path):
    hub.lies = {PART: 1 << 60}
    error = refused(hub, tmp_path)
    assert error["exit"] == 20 and "are free" in error["what"] and "HF_HOME" in error["next"]
    assert not hub.asked(r"\.safetensors$")


def test_the_token_goes_to_the_hub_and_not_where_it_redirects(hub, tmp_path):
    hub.token = "hf_secret"
    fetch(hub, tmp_path, token="hf_secret")
    assert is_whole(hub, tmp_path)
    for server, _, headers in hub.log:
        assert headers.get("Authorization") == ("Bearer hf_secret" if server == "hub" else None)


def test_an_endless_or_unsafe_redirect_ends_the_fetch(hub, tmp_path):
    hub.location = f"{hub.address}/{NAME}/resolve/{hub.commits[NAME, 'main']}/{PART}"
    error = refused(hub, tmp_path)
    assert error["exit"] == 21 and "more than 5 redirects" in error["what"]
    hub.location = "file:///etc/passwd"
    assert "not safe (file:)" in refused(hub, tmp_path)["what"]


def test_without_access_the_licence_page_and_the_login_are_named(hub, tmp_path):
    hub.token = "hf_secret"
    error = refused(hub, tmp_path)
    assert (error["exit"], error["place"]) == (11, f"{hub.address}/{NAME}")
    assert "(401)" in error["what"] and f"{hub.address}/{NAME}" in error["next"] and "hf auth login" in error["next"]
    error = refused(hub, tmp_path, token="hf_other")
    assert "does not accept the token of HF_TOKEN (401)" in error["what"] and "hf auth login" in error["next"]
    hub.refused = True
    error = refused(hub, tmp_path, token="hf_secret")
    assert error["exit"] == 11 and "(403)" in error["what"]
    assert f"accept the licence at {hub.address}/{NAME}" in error["next"] and "hf auth login" in error["next"]
    assert "hf_secret" not in json.dumps(error)


def test_a_link_that_has_expired_is_asked_for_again(hub, tmp_path):
    hub.fails = {r"\.safetensors$": [None, 403]}  # by the second server
    fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path) and len(hub.asked(r"\.safetensors$")) == 6


@pytest.mark.parametrize("code, why", [(429, "too many requests"), (500, "its own failure"), (503, "its own failure")])
def test_a_busy_hub_is_asked_again_and_then_given_up(hub, tmp_path, code, why):
    hub.headers = {"Retry-After": "0"}
    hub.fails = {"revision": [code, code], r"\.safetensors": [code]}
    fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path)
    hub.fails = {"revision": [code, "-"]}
    error = refused(hub, tmp_path)
    assert error["exit"] == 21 and f"the hub answers {code}: {why}" in error["what"] and error["next"] == "try again later" and len(hub.asked("revision")) == 3 + 5
    hub.headers = {"Retry-After": "4000"}
    assert "try again in 4000 s" in refused(hub, tmp_path)["next"] and len(hub.asked("revision")) == 3 + 5 + 1


def test_what_the_hub_does_not_have_is_named(hub, tmp_path):
    assert "no revision 'v9' of org/name (404)" in refused(hub, tmp_path, revision="v9")["what"]
    assert "no model org/other (404)" in refused(hub, tmp_path, name="org/other")["what"]
    assert "no dataset org/name (404)" in refused(hub, tmp_path, kind="dataset")["what"]


def test_a_hub_that_does_not_answer_is_named(hub, tmp_path):
    error = refused(hub, tmp_path, endpoint="http://127.0.0.1:1")
    assert error["exit"] == 21 and "127.0.0.1:1" in error["what"] and "HF_ENDPOINT" in error["next"]
    assert fetch(hub, tmp_path, endpoint="huggingface")["error"]["exit"] == 10


def test_a_repository_without_safetensors_is_refused_before_anything_moves(tmp_path):
    with serving({NAME: {"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}, "none": {"README.md": b""}}}) as hub:
        error = refused(hub, tmp_path)
        assert error["exit"] == 11 and "pytorch_model.bin" in error["what"] and "pickle" in error["what"]
        assert "no config.json" in refused(hub, tmp_path, revision="none")["what"] and not hub.asked("resolve")


def test_an_index_that_leaves_the_repository_is_refused(tmp_path):
    index = json.dumps({"weight_map": {"a": "../../../../escape"}}).encode()
    with serving({NAME: {"main": {"config.json": b"{}", "model.safetensors.index.json": index, "../../../../escape": b"x"}}}) as hub:
        assert "which the repository does not have" in refused(hub, tmp_path / "cache")["what"]


def test_config_json_alone_is_what_a_plan_needs(hub, tmp_path):
    answer = fetch(hub, tmp_path, only="config")
    assert [file["name"] for file in answer["files"]] == ["config.json"]
    assert [p.name for p in snapshot(tmp_path).iterdir()] == ["config.json"]
    fetch(hub, tmp_path)
    assert is_whole(hub, tmp_path)


def test_an_adapter_is_fetched_and_names_its_model(tmp_path):
    config = json.dumps({"base_model_name_or_path": "org/base"}).encode()
    with serving({NAME: {"main": {"adapter_config.json": config, "adapter_model.safetensors": b"x" * 100, "README.md": b""}}}) as hub:
        answer = fetch(hub, tmp_path)
        assert answer["base"] == "org/base" and {file["name"] for file in answer["files"]} == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_data_set_is_its_data(tmp_path):
    files = {"data/train-00000-of-00001.parquet": b"x" * 5000, "extra/test.jsonl": b"{}", "dataset_infos.json": b"{}", "load.py": b"", "README.md": b""}
    with serving({f"datasets/{NAME}": {"main": files}}) as hub:
        answer = fetch(hub, tmp_path, kind="dataset")
        there = Path(answer["directory"])
        assert there.parent.parent.name == "datasets--org--name"
        assert {str(p.relative_to(there)) for p in there.rglob("*") if not p.is_dir()} == {"data/train-00000-of-00001.parquet", "extra/test.jsonl"}


def test_two_fetches_of_one_model_move_each_file_once(hub, tmp_path):
    both = [start(hub, tmp_path) for _ in range(2)]
    answers = [json.loads(process.stdout.read()) for process in both]
    assert [process.wait(timeout=60) for process in both] == [0, 0] and is_whole(hub, tmp_path)
    assert sorted(answer["fetched_bytes"] for answer in answers) == [0, answers[0]["bytes"]]


def test_progress_says_how_far_it_is(hub, tmp_path):
    process = start(hub, tmp_path, progress=0)
    process.stdout.read()
    lines = [line for line in process.stderr.read().splitlines() if line.startswith("fetching: ")]
    process.wait(timeout=60)
    assert lines and all(re.fullmatch(r"fetching: \d+ % of 1.7 MB, \S+ \w+/s(, \d+ (s|min) left)?", line) for line in lines)
    assert lines[-1].startswith("fetching: 100 %")


def test_the_library_reads_what_was_fetched(hub, tmp_path):
    fetch(hub, tmp_path)
    code = ("from huggingface_hub import snapshot_download, scan_cache_dir\n"
            f"print(snapshot_download({NAME!r}, cache_dir={str(tmp_path)!r}, local_files_only=True))\n"
            f"print(len(scan_cache_dir({str(tmp_path)!r}).warnings))")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(snapshot(tmp_path)), "0"], done.stderr
