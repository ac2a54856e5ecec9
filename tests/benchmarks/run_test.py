"""The runner of benchmarks believes no exit status alone, and keeps results only of runs that are worth keeping."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import run  # noqa: E402

START = """
import sys
from pathlib import Path
from figures import Figure, Figures, common_options
options = common_options("A benchmark.").parse_args()
count = Path(__file__).with_suffix(".count")
runs = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(runs))
figures = Figures(options, [Figure("speed", "x", "the peer", at_least=2)])
"""
GOOD = START + "figures.set('speed', 3)\nfigures.finish()\n"
SLOW = START + "figures.set('speed', 1)\nfigures.finish()\n"
SLOW_AT_FIRST = START + "figures.set('speed', 3 if runs > 4 else 1)\nfigures.finish()\n"
TWO = START.replace('at_least=2)]', 'at_least=2), Figure("size", "x", "the peer", at_least=2)]')
TAKE_TURNS = TWO + "figures.set('speed', 3 if runs == 1 else 1)\nfigures.set('size', 3 if runs == 3 else 1)\nfigures.finish()\n"
NEVER_THE_SECOND = TWO + "figures.set('speed', 3 if runs == 1 else 1)\nfigures.set('size', 1)\nfigures.finish()\n"
EMPTY = "print('no figures')\n"
CRASHES = START + "figures.set('speed', 3)\nraise RuntimeError('on the way')\n"
CRASHES_LATE = START + "figures.set('speed', 3)\nprint(__import__('json').dumps(figures.rows()[0]))\nraise RuntimeError('late')\n"
MISSES_AND_EXITS_0 = START + "figures.set('speed', 1)\nsys.exit = lambda status: None\nfigures.finish()\n"
MEASURES_NOTHING = START + "figures.fail('nothing to measure with')\n"
IGNORES_IMPOSSIBLE = START + "figures.impossible = False\nfigures.set('speed', 3)\nfigures.finish()\n"


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Runs run.py on benchmarks given as {name: text}; gives its exit status."""
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "commit", lambda: "abc")
    monkeypatch.setattr(run, "kind_is_known", lambda: True)
    pauses = []
    monkeypatch.setattr(run.time, "sleep", lambda seconds: seconds and pauses.append(seconds))

    def go(benchmarks, *words):
        for name, text in benchmarks.items():
            (tmp_path / name).write_text(text)
        (tmp_path / "benchmarks.txt").write_text("\n".join(benchmarks))
        monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "bin"), *words])
        with pytest.raises(SystemExit) as ended:
            run.main()
        return ended.value.code

    go.directory, go.pauses = tmp_path, pauses
    go.runs = lambda name: int((tmp_path / name).with_suffix(".count").read_text())
    return go


def results(runner):
    [path] = (runner.directory / "results").glob("*.json")
    return json.loads(path.read_text())


def test_good_figures_are_success(runner):
    assert runner({"a.py": GOOD, "b.py": GOOD}) == 0


@pytest.mark.parametrize("bad", [SLOW, EMPTY, CRASHES, CRASHES_LATE, MISSES_AND_EXITS_0, MEASURES_NOTHING])
def test_one_bad_benchmark_is_failure(runner, bad):
    assert runner({"a.py": GOOD, "b.py": bad, "c.py": GOOD}) == 1
    assert runner.runs("c.py") == 1


@pytest.mark.parametrize("bad", [EMPTY, CRASHES, CRASHES_LATE, MISSES_AND_EXITS_0, MEASURES_NOTHING, IGNORES_IMPOSSIBLE])
def test_impossible_targets_are_missed_by_figures_that_were_measured(runner, bad):
    assert runner({"a.py": GOOD, "b.py": SLOW}, "--impossible") == 0
    assert runner({"a.py": GOOD, "b.py": bad}, "--impossible") == 1


def test_a_short_run_believes_a_miss_the_fifth_time(runner):
    assert runner({"a.py": SLOW_AT_FIRST}, "--short") == 0
    assert runner.runs("a.py") == 5 and len(runner.pauses) == 4
    assert runner({"b.py": SLOW}, "--short") == 1
    assert runner.runs("b.py") == 5


def test_a_short_run_on_an_unknown_kind_of_machine_names_what_it_misses(runner, monkeypatch, capfd):
    monkeypatch.setattr(run, "kind_is_known", lambda: False)
    assert runner({"a.py": SLOW}, "--short") == 0
    assert runner.runs("a.py") == 1 and not runner.pauses
    out = capfd.readouterr().out
    assert "NOT JUDGED" in out and "a.py: speed is 1.00x, at least 1.50x wanted" in out
    for bad in (EMPTY, CRASHES, MISSES_AND_EXITS_0, MEASURES_NOTHING):
        assert runner({"b.py": bad}, "--short") == 1
    assert runner({"c.py": SLOW}) == 1


def test_a_short_run_names_what_it_has_no_time_for_where_nothing_is_judged(runner, monkeypatch, capfd):
    assert runner({"a.py": GOOD, "b.py": SLOW}, "--short", "--minutes", "0") == 1
    assert "NOT RUN" not in capfd.readouterr().out
    monkeypatch.setattr(run, "kind_is_known", lambda: False)
    assert runner({"c.py": GOOD, "d.py": CRASHES, "e.py": GOOD}, "--short", "--minutes", "-3") == 0
    assert "NOT RUN, for want of time: d.py, e.py\n" in capfd.readouterr().out
    assert runner({"f.py": GOOD, "g.py": CRASHES}, "--short", "--minutes", "1") == 1


def test_the_kind_of_a_machine_is_known_by_its_results(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert not run.kind_is_known()
    run.results_file(run.machine()).write_text("{}")
    assert run.kind_is_known()


def test_a_figure_that_was_met_once_in_a_short_run_stays_met(runner):
    assert runner({"a.py": TAKE_TURNS}, "--short") == 0
    assert runner.runs("a.py") == 3
    assert runner({"b.py": NEVER_THE_SECOND}, "--short") == 1
    assert runner.runs("b.py") == 5


def test_a_full_run_believes_a_miss_at_once(runner):
    assert runner({"a.py": SLOW_AT_FIRST}) == 1
    assert runner.runs("a.py") == 1


def test_a_crash_is_not_noise(runner):
    assert runner({"a.py": CRASHES}, "--short") == 1
    assert runner.runs("a.py") == 1


def test_an_unknown_name_is_an_error(runner):
    assert "no benchmark z.py" in runner({"a.py": GOOD}, "z.py")


@pytest.mark.parametrize("words", [("--short", "a.py"), ("a.py", "--short")])
def test_names_stand_before_or_behind_flags(runner, words):
    assert runner({"a.py": GOOD, "b.py": SLOW}, *words) == 0


@pytest.mark.parametrize("flag", ["--short", "--impossible"])
def test_short_and_impossible_runs_keep_nothing(runner, flag):
    assert runner({"a.py": GOOD}, flag) == 0
    assert not (runner.directory / "results").exists()


def test_results_name_machine_commit_figure_and_ceiling(runner):
    runner({"a.py": GOOD, "b.py": SLOW})
    kept = results(runner)
    assert set(kept["machine"]) == {"cpu", "cores", "memory_gib", "kernel"}
    assert [(row["benchmark"], row["value"], row["met"], row["commit"]) for row in kept["rows"]] == [
        ("a.py", 3, True, "abc"), ("b.py", 1, False, "abc")]
    [text] = (runner.directory / "results").glob("*.md")
    assert "| a.py | speed | 3.00x | at least 2.00x | the peer | met |" in text.read_text()


def test_a_run_by_name_replaces_its_rows_alone(runner, monkeypatch):
    runner({"a.py": GOOD, "b.py": GOOD})
    monkeypatch.setattr(run, "commit", lambda: "later")
    runner({"a.py": GOOD, "b.py": SLOW}, "b.py")
    assert [(row["benchmark"], row["value"], row["commit"]) for row in results(runner)["rows"]] == [
        ("a.py", 3, "abc"), ("b.py", 1, "later")]


def test_the_results_file_is_named_by_cpu_and_cores():
    kind = {"cpu": "Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", "cores": 8}
    assert run.results_file(kind).name == "intel-xeon-platinum-8480-8-cores.json"
    assert run.results_file({"cpu": "AMD EPYC family 26", "cores": 2}).name == "amd-epyc-family-26-2-cores.json"


@pytest.mark.parametrize("name, family, model, flags, kind", [
    ("AMD EPYC", 25, 1, "fpu avx2", "AMD EPYC family 25 Zen 3"), ("AMD EPYC", 25, 17, "avx2 avx512f", "AMD EPYC family 25 Zen 4"),
    ("AMD EPYC", 26, 2, "avx512f", "AMD EPYC family 26"),
    ("Intel(R) Xeon(R) Processor", 6, 143, "avx512f", "Intel(R) Xeon(R) Processor model 143")])
def test_generations_of_processors_with_one_name_are_kinds_of_their_own(name, family, model, flags, kind):
    first = f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: {name}\nflags\t\t: {flags}\n"
    assert run.cpu_name(first + "\nprocessor\t: 1\n") == kind
    assert run.cpu_name("")
