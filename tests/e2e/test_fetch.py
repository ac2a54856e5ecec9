"""`lmlaunch fetch` against a hub on the loopback, and what training and planning do with a model that is not here: on a terminal
they offer to fetch it, elsewhere they end with the command to type. What the transfer itself withstands: tests/data/fetch_test.py."""

import json
import os
import pty
import signal
import subprocess
import threading

import pytest
from hub import serving
from test_run import BIN, config, filled, lmlaunch, warm_program

NAME = "org/tiny"


def files_of(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The small model, and an adapter for it from a run that has fetched it."""
    made = filled(tmp_path_factory.mktemp("fetch"), layers=1)
    with serving({NAME: {"main": files_of(made / "model")}}) as hub:
        env = environment(hub, made)
        lmlaunch("fetch", NAME, cwd=made, env=env)
        lmlaunch(config(made, "first", model__path=NAME, train__method="lora", train__steps=1), cwd=made, env=env)
    return made


@pytest.fixture
def hub(made):
    v1 = {**files_of(made / "model"), "tokenizer_config.json": b'{"of": "v1"}'}
    data = {"data/train.jsonl": (made / "train.jsonl").read_bytes(), "README.md": b""}
    repositories = {NAME: {"main": files_of(made / "model"), "v1": v1}, "org/adapter": {"main": files_of(made / "runs" / "first" / "model")},
                    "datasets/org/set": {"main": data}}
    with serving(repositories) as hub:
        yield hub


@pytest.fixture
def work(made, tmp_path):
    for name in ("train.jsonl", "eval.jsonl"):
        os.symlink(made / name, tmp_path / name)
    return tmp_path


def environment(hub, work, **more):
    ours = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**ours, "HF_HOME": str(work / "hf"), "HF_ENDPOINT": hub.address, **more}


def refused(work, env, code, *arguments):
    done = lmlaunch(*arguments, cwd=work, env=env, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr


def on_a_terminal(work, env, answer, *arguments):
    """(exit code, what it says): `answer` is typed where it asks."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(work)
        os.execve(warm_program(), [str(warm_program()), *arguments], env)
    said = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # its end is closed
            piece = b""
        if not piece:
            break
        said += piece
        if answer is not None and b"[y/N]" in said:
            os.write(terminal, answer)
            answer = None
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode()


def recorded(run):
    return json.loads((run / "base_model.json").read_text())


def test_the_run_and_its_adapter_say_which_revision_they_are_of(made):
    run = made / "runs" / "first"
    record = recorded(run)
    assert record["name"] == NAME and (made / "hf" / "hub" / "models--org--tiny" / "snapshots" / record["revision"]).is_dir()
    lmlaunch("export", run, "-o", made / "exported", cwd=made, env={**os.environ, "HF_HOME": str(made / "hf")})
    for directory in (run / "model", made / "exported"):
        adapter = json.loads((directory / "adapter_config.json").read_text())
        assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, record["revision"])
        card = (directory / "README.md").read_text()
        assert f'base_model: "{NAME}"' in card and f"{NAME}, revision {record['revision']}" in card
    assert f"model: {NAME}, revision {record['revision']}" in (run / "log.txt").read_text()


def test_one_object_says_what_was_fetched(hub, work):
    said = json.loads(lmlaunch("fetch", NAME, "--json", cwd=work, env=environment(hub, work)).stdout)
    assert (said["name"], said["revision"]) == (NAME, hub.commits[NAME, "main"]) and said["bytes"] == said["fetched_bytes"] > 0
    assert said["directory"].startswith(str(work / "hf" / "hub")) and {"name", "size", "hash"} == set(said["files"][0])


def test_elsewhere_than_on_a_terminal_they_end_with_the_command(hub, work):
    toml, env = config(work, "plain", model__path="org/tiny@v1", train__steps=1), environment(hub, work)
    for arguments in (["plan", toml], [toml], ["eval", toml, "--gpus", "0"]):
        said = refused(work, env, 11, *arguments)
        assert "next: fetch it: lmlaunch fetch org/tiny@v1, or give a directory" in said
    assert hub.log == [] and not (work / "hf").exists()


def test_a_plan_on_a_terminal_fetches_config_json_alone(hub, work):
    toml, env = config(work, "planned", model__path=NAME), environment(hub, work)
    code, said = on_a_terminal(work, env, b"n\n", "plan", toml)
    assert code == 11 and f"Fetch its config.json, which a plan is made from, from {hub.address} now?" in said and hub.log == []
    code, said = on_a_terminal(work, env, b"y\n", "plan", toml)
    assert code == 0 and "org/tiny is in the cache: 1 files" in said
    assert hub.asked("resolve") == [f"/{NAME}/resolve/{hub.commits[NAME, 'main']}/config.json"]
    lmlaunch("plan", toml, cwd=work, env=env)
    # Training needs more than that.
    assert "next: fetch the rest: lmlaunch fetch org/tiny@" in refused(work, env, 11, toml)


def test_for_a_path_that_is_wrong_nothing_is_offered(hub, work):
    (work / "runs").mkdir()
    toml = config(work, "wrong", model__path="runs/tiny")
    code, said = on_a_terminal(work, environment(hub, work), None, "plan", toml)
    assert code == 11 and "[y/N]" not in said and hub.log == []


def test_training_on_a_terminal_offers_to_fetch_all(hub, work):
    toml, env = config(work, "typed", model__path="org/tiny@v1", train__steps=1), environment(hub, work)
    code, said = on_a_terminal(work, env, b"y\n", toml)
    assert code == 0 and f"org/tiny@v1 was not found locally. Fetch it from {hub.address} now? [y/N]" in said
    assert recorded(work / "runs" / "typed") == {"name": NAME, "revision": hub.commits[NAME, "v1"]}


def test_offline_nothing_is_asked_for_and_nothing_offered(hub, work):
    toml = config(work, "offline", model__path=NAME)
    for value in ("1", "true"):
        env = environment(hub, work, HF_HUB_OFFLINE=value)
        assert "HF_HUB_OFFLINE forbids the network" in refused(work, env, 10, "fetch", NAME)
        code, said = on_a_terminal(work, env, None, "plan", toml)
        assert code == 11 and "[y/N]" not in said
    assert hub.log == []
    lmlaunch("fetch", NAME, cwd=work, env=environment(hub, work, HF_HUB_OFFLINE="0"))


def test_the_token_is_that_of_the_variable_or_of_the_stored_login(hub, work):
    hub.token = "hf_stored"
    said = refused(work, environment(hub, work), 11, "fetch", NAME)
    assert "(401)" in said and "hf auth login" in said and f"{hub.address}/{NAME}" in said
    (work / "hf").mkdir(exist_ok=True)
    (work / "hf" / "token").write_text("hf_stored\n")
    said = refused(work, environment(hub, work, HF_TOKEN="hf_other"), 11, "fetch", NAME)
    assert "token of HF_TOKEN (401)" in said and "hf_other" not in said
    hub.refused = True
    assert "(403)" in refused(work, environment(hub, work), 11, "fetch", NAME)
    hub.refused = False
    lmlaunch("fetch", NAME, cwd=work, env=environment(hub, work))


def test_faults_have_their_exit_codes(hub, work):
    env = environment(hub, work)
    hub.fails, hub.headers = {"revision": [500, "-"]}, {"Retry-After": "0"}
    assert "the hub answers 500" in refused(work, env, 21, "fetch", NAME)
    hub.fails, hub.wrong = {}, {"model.safetensors"}
    assert "not those of the hub's list" in refused(work, env, 22, "fetch", NAME)
    hub.wrong, hub.lies = set(), {"model.safetensors": 1 << 60}
    assert "are free" in refused(work, env, 20, "fetch", NAME)
    for name in ("tiny", "org/tiny@", "../tiny", "org/tiny@../main"):
        assert "write ORG/NAME" in refused(work, env, 2, "fetch", name)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_fetch_that_is_stopped_goes_on(hub, work, sent):
    env = environment(hub, work)
    process = subprocess.Popen([BIN / "lmlaunch", "fetch", NAME], cwd=work, env=env, stderr=subprocess.PIPE, text=True)
    ended = threading.Event()

    def on_piece():
        hub.on_piece = ended.wait  # the weights are more than one piece
        process.send_signal(sent)

    hub.on_piece = on_piece
    _, said = process.communicate(timeout=60)
    hub.on_piece = lambda: None
    ended.set()
    if sent == signal.SIGINT:
        assert process.returncode == 75 and "goes on there" in said
    assert not list((work / "hf").rglob("snapshots"))
    lmlaunch("fetch", NAME, cwd=work, env=env)


def test_an_adapter_is_fetched_and_gone_on_with(hub, work):
    env = environment(hub, work)
    said = lmlaunch("fetch", "org/adapter", cwd=work, env=env).stderr
    assert "it is an adapter of org/tiny, which was not found locally: lmlaunch fetch org/tiny" in said
    toml = config(work, "more", model__path="org/adapter", train__method="lora", train__steps=1)
    assert "next: fetch it: lmlaunch fetch org/tiny@" in refused(work, env, 11, "plan", toml)
    lmlaunch("fetch", NAME, cwd=work, env=env)
    lmlaunch(toml, cwd=work, env=env)
    assert recorded(work / "runs" / "more")["revision"] == hub.commits[NAME, "main"]
    lmlaunch("eval", "org/adapter", 'data.eval=["eval.jsonl"]', "model.dtype=fp32", "--gpus", "0", cwd=work, env=env)


def test_a_data_set_is_fetched_and_trained_on(hub, work):
    env = environment(hub, work)
    lmlaunch("fetch", NAME, cwd=work, env=env)
    toml = config(work, "set", model__path=NAME, data__train=["org/set"], train__steps=1)
    assert "next: fetch it: lmlaunch fetch org/set --data" in refused(work, env, 11, toml)
    lmlaunch("fetch", "org/set", "--data", cwd=work, env=env)
    lmlaunch(toml, cwd=work, env=env)


def test_of_a_cluster_the_first_process_fetches(hub, work):
    for rank in "10":
        env = environment(hub, work, OMPI_COMM_WORLD_RANK=rank, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_SIZE="1")
        lmlaunch("fetch", NAME, cwd=work, env=env)
        assert (hub.log == []) == (rank == "1")
