"""What a person sees of a run: TensorBoard's own reader reads the event files; lines, commands, cards. test_page.py has the page."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest
from counts import some_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_first_hour import first_hour, model, through_pipes  # noqa: F401
from test_resume import interrupt, kill
from test_run import BIN, config, eval_losses, filled, lmlaunch, rows, work  # noqa: F401
from transformers.integrations.integration_utils import rewrite_logs
from transformers.trainer_utils import speed_metrics

# What transformers' Trainer logs, and what a row of ours calls it; and the token accuracy.
LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "epoch": "epoch", "token_accuracy": "token_accuracy",
          "train_tokens_per_second": "tokens_per_s"}


def scalars(work, name):
    """{tag: [(step, value), ...]} of a run's directory, as TensorBoard shows them."""
    reader = EventAccumulator(str(work / "runs" / name / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def assert_told(work, name):
    """TensorBoard shows each row of metrics.jsonl once, in float32."""
    told, metrics = scalars(work, name), rows(work, name)
    steps, evals = [row for row in metrics if "loss" in row], [row for row in metrics if "eval_loss" in row]
    names = rewrite_logs(LOGGED)
    assert set(told) == {*names, *rewrite_logs({"eval_loss": 0, "eval_token_accuracy": 0})}
    for tag, key in names.items():
        assert [step for step, _ in told[tag]] == [row["step"] for row in steps]
        assert [value for _, value in told[tag]] == pytest.approx([row[key] for row in steps], rel=1e-6)
    for tag, key in {"eval/loss": "eval_loss", "eval/token_accuracy": "token_accuracy"}.items():
        assert told[tag] == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in evals]


def test_tensorboard_shows_the_rows_of_metrics(work):
    lmlaunch(config(work, "curves", log__to=["tensorboard"], train__eval_every=5), cwd=work)
    assert_told(work, "curves")
    assert "train_tokens_per_second" in speed_metrics("train", 0, num_tokens=1)
    # 64 examples, 8 of them a step.
    assert [row["epoch"] for row in rows(work, "curves") if "loss" in row] == [step / 8 for step in range(1, 13)]


def test_tensorboard_names_evaluation_sets_as_transformers_does(work):
    lmlaunch(config(work, "curves_of_sets", log__to=["tensorboard"], train__steps=2), 'data.eval={b = ["eval.jsonl"], a = ["eval.jsonl"]}', cwd=work)
    told, losses = scalars(work, "curves_of_sets"), [row["eval_loss/a"] for row in rows(work, "curves_of_sets") if "eval_loss/a" in row]
    names = set(rewrite_logs({"eval_a_loss": 0, "eval_b_loss": 0}))
    assert names < set(told) and not {"eval/loss"} & set(told)
    assert len(losses) == 2 and all([value for _, value in told[name]] == pytest.approx(losses, rel=1e-6) for name in names)


def test_nobody_who_did_not_ask_gets_event_files(work):
    lmlaunch(config(work, "no_curves", train__steps=2), cwd=work)
    assert not (work / "runs" / "no_curves" / "tensorboard").exists()


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(work):
    toml = config(work, "again", log__to=["tensorboard"], train__steps=400, checkpoint__every=10)
    interrupt(work, "again", 150, kill)
    lmlaunch(toml, cwd=work)
    assert len(list((work / "runs" / "again" / "tensorboard").iterdir())) == 2
    assert [row["step"] for row in rows(work, "again") if "loss" in row] == list(range(1, 401))
    assert_told(work, "again")


def test_a_run_without_room_for_event_files_trains_all_the_same(work):
    blocked = work / "runs" / "blocked"
    lmlaunch(config(work, "blocked", train__steps=1), cwd=work)
    shutil.rmtree(blocked)
    blocked.mkdir()
    (blocked / "tensorboard").write_text("")
    done = lmlaunch(config(work, "blocked", train__steps=3, log__to=["tensorboard"]), cwd=work)
    assert "warning IO-05" in done.stderr and len([row for row in rows(work, "blocked") if "loss" in row]) == 3


@pytest.fixture(scope="module")
def seen(work):
    (work / "swap").mkdir()
    (work / "deep").mkdir()
    filled(work / "deep", layers=8)  # more of them than there are slots
    off = {"model__path": "deep/model", "offload__optimizer": "nvme", "offload__weights": "nvme", "offload__gradients": "nvme",
           "offload__paths": [str(work / "swap")], "io__tile": "64KiB"}
    for name, changes in {"page": {"checkpoint__every": 4}, "page_off": off}.items():
        done = lmlaunch(config(work, name, train__eval_every=4, **changes), cwd=work)
    return done.stderr


def test_a_report_of_what_is_no_run_says_so(work):
    done = lmlaunch("report", "model", cwd=work, check=False)
    assert done.returncode == 11 and "not a run directory" in done.stderr


def test_the_page_is_there_while_the_run_goes_on(work):
    toml = config(work, "live", train__steps=1000000, log__every=1000)
    process = subprocess.Popen([BIN / "lmlaunch", toml], cwd=work, stderr=subprocess.DEVNULL)
    page = work / "runs" / "live" / "report.html"
    try:
        while not (page.exists() and '"state":"running"' in page.read_text()):
            assert process.poll() is None
            time.sleep(0.2)
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert '"state":"stopped"' in page.read_text()


@pytest.mark.parametrize("method, result, names", [("full", "model", ["generate", "report", "verify"]), ("lora", "adapter", ["generate", "report", "export"])])
def test_the_end_of_a_run_names_the_result_and_three_commands_that_work(model, tmp_path, method, result, names):  # noqa: F811
    first_hour(tmp_path, model)
    code, said = through_pipes(tmp_path, f"{BIN}/lmlaunch c.toml train.method={method} train.steps=2 run.dir='runs/a b'")
    assert code == 0 and f"the trained {result} is in runs/a b/model; next:" in said, said
    commands = re.findall(r"^  (lmlaunch .*?)(?:    |$)", said, re.M)
    assert [command.split()[1] for command in commands] == names
    for command in commands:
        code, said = through_pipes(tmp_path, f"PATH={BIN}:$PATH\n{command}")
        assert code == 0, f"{command}\n{said}"
    assert (tmp_path / "runs" / "a b" / "report.html").exists() and (tmp_path / "DIR" / "model.safetensors").exists() == (method == "lora")


def test_one_line_at_the_start_explains_the_others(work, seen):
    assert seen.count("progress: `% utilization`") == 1


def completed(*words):
    """What bash offers for the last of the words."""
    script = f"""PATH={BIN}:$PATH; eval "$(lmlaunch completions)"; COMP_WORDS=({" ".join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}
    _lmlaunch; printf '%s\\n' "${{COMPREPLY[@]}}" """
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_flags_and_keys():
    assert completed("lmlaunch", "re") == ["report"]
    assert completed("lmlaunch", "generate", "--m") == ["--max-tokens"]
    assert completed("lmlaunch", "c.toml", "--dry") == ["--dry-run"]
    assert completed("lmlaunch", "c.toml", "log.t") == ["log.to="]
    assert not [word for word in completed("lmlaunch", "c.toml", "--") if word.endswith("-fd")]  # between CLI process and rank


def zsh_line(typed):
    """The line that stands at zsh's prompt when somebody has typed that, tabs included."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                               env={**os.environ, "TERM": "dumb", "PATH": f"{BIN}:{os.environ['PATH']}"})
    os.close(theirs)

    def read_until(pattern):
        said = ""
        while not re.search(pattern, said):
            assert select.select([ours], [], [], 60)[0], said
            said += os.read(ours, 65536).decode(errors="replace")
        return re.search(pattern, said)

    try:
        os.write(ours, b"autoload -Uz compinit; compinit -u -D; eval \"$(lmlaunch completions)\"; PS1='rea''dy> '\n")
        read_until("ready> ")
        os.write(ours, typed.encode() + b"\x01echo '[\x05]'\n")  # from its beginning to its end, in quotes
        return read_until(r"(?m)^\[(.*)\]\r?$")[1]
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
@pytest.mark.parametrize("typed, completed", [
    ("re\t", "report"), ("generate --max\t", "generate --max-tokens"), ("c.toml log.t\t", "c.toml log.to="),
    ("c.toml log.t\twandb", "c.toml log.to=wandb")])
def test_zsh_completes_them_too(typed, completed):
    assert zsh_line(f"lmlaunch {typed}") == f"lmlaunch {completed}"


def seconds_of(text):
    return sum(int(part) * 60**i for i, part in enumerate(reversed(text.split(":"))))


def test_the_time_left_of_a_resumed_run_is_that_of_its_own_steps(work):
    """The first thousand steps took the second process no time: counted in, they would make a step seem fifteen times as fast."""
    config(work, "eta", train__steps=30000, train__global_batch=2, train__micro_batch=2, checkpoint__every=500, log__every=1000)
    interrupt(work, "eta", 1000, kill)
    _, said = interrupt(work, "eta", rows(work, "eta")[-1]["step"] + 100, lambda process: process.terminate(), "log.every=10")
    begun = int(re.search(r"resumes from \S+/step_(\d+)", said)[1])
    left = [(int(step), seconds_of(time)) for step, time in re.findall(r"^step (\d+)/30000 .* left ([\d:]+)$", said, re.M)]
    step, first = left[5]
    steps = [row for row in rows(work, "eta") if "loss" in row and begun < row["step"] <= step]
    expected = sum(row["step_ms"] for row in steps) / 1e3 / len(steps) * (30000 - step)
    assert 0.2 * expected - 1 < first < 5 * expected + 1


@pytest.mark.parametrize("every", [20_000_000, "30min"])
def test_the_line_says_when_the_next_evaluation_and_the_next_save_come(work, every):
    """In a run of a hundred million steps, whose times are told in seconds."""
    name = f"next_{every}"
    config(work, name, train__steps=100_000_000, train__eval_every=40_000_000, checkpoint__every=every, log__every=50)
    _, said = interrupt(work, name, 250, lambda process: process.terminate())
    lines = re.findall(r"^step (\d+)/100000000 .*  eval ([\d:]+)  save ([\d:]+)  left ([\d:]+)$", said, re.M)
    assert len(lines) >= 4, said
    for step, *times in lines:
        evaluation, save, left = map(seconds_of, times)
        second = left / (100_000_000 - int(step))  # of a step, in the mean so far
        assert evaluation == pytest.approx(second * (40_000_000 - int(step)), abs=2)
        if every == "30min":
            assert 1500 < save <= 1800
        else:
            assert save == pytest.approx(second * (20_000_000 - int(step)), abs=2)


def test_a_model_has_a_card_with_its_data_settings_and_figures(work, seen):
    for directory, library in {"page": "transformers", "card_lora": "peft"}.items():
        if directory == "card_lora":
            lmlaunch(config(work, directory, train__method="lora"), cwd=work)
        card = (work / "runs" / directory / "model" / "README.md").read_text()
        for part in (f"library_name: {library}", "base_model: \"model\"", "steps: 12", "train: 64 rows, ", "optimizer.lr = 0.01"):
            assert part in card, part
        before, after = re.search(r"eval loss: (\S+) before, (\S+) after", card).groups()
        assert (float(before), float(after)) == pytest.approx((eval_losses(work, directory)[0], eval_losses(work, directory)[-1]), rel=1e-5)
    lmlaunch("export", "runs/card_lora", "--merge", "-o", "card_merged", cwd=work)
    assert "library_name: transformers" in (work / "card_merged" / "README.md").read_text()


@pytest.mark.parametrize("method", some_of("lora", "full"))
def test_a_run_its_model_and_what_it_exports_are_the_same_to_every_command(work, method):
    lmlaunch(config(work, f"same_{method}", train__method=method), cwd=work)
    run = f"runs/same_{method}"
    losses = {json.loads(lmlaunch("eval", what, "--json", cwd=work).stdout)["eval_loss"] for what in (run, f"{run}/model")}
    assert losses == {eval_losses(work, f"same_{method}")[-1]}
    hashes = set()
    for what, copy in ((run, "copy_of_run"), (f"{run}/model", "copy_of_model")):
        lmlaunch("export", what, "-o", f"{copy}_{method}", cwd=work)
        hashes.add(json.loads(lmlaunch("verify", f"{copy}_{method}", "--json", cwd=work).stdout)["weights_hash"])
    assert hashes == {json.loads(lmlaunch("verify", f"{run}/model", "--json", cwd=work).stdout)["weights_hash"]}
