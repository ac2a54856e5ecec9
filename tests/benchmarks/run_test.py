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
EMPTY = "print('no figures')\n"
CRASHES = START + "figures.set('speed', 3)\nraise RuntimeError('on the way')\n"
CRASHES_LATE = START + "figures.set('speed', 3)\nprint(__import__('json').dumps(figures.rows()[0]))\nraise RuntimeError('late')\n"
MISSES_AND_EXITS_0 = START + "figures.set('speed', 1)\nsys.exit = lambda status: None\nfigures.finish()\n"
MEASURES_NOTHING = START + "figures.fail('nothing to measure with')\n"
IGNORES_IMPOSSIBLE = START + "figures.impossible = False\nfigures.set('speed', 3)\nfigures.finish()\n"
IGNORES_AND_IS_SLOW = START + "figures.impossible = False\nfigures.set('speed', 1)\nfigures.finish()\n"
MEETS_IMPOSSIBLE = START + "figures.met = lambda figure: True\nfigures.set('speed', 3)\nfigures.finish()\n"
SMOKE_IS_QUICKER = START + "figures.set('speed', 3 if options.smoke else 1)\nfigures.finish()\n"


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Runs run.py on benchmarks given as {name: text}; gives its exit status."""
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(run, "commit", lambda: "abc")

    def go(benchmarks, *words):
        for name, text in benchmarks.items():
            (tmp_path / name).write_text(text)
        (tmp_path / "benchmarks.txt").write_text("\n".join(benchmarks))
        monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "bin"), *words])
        with pytest.raises(SystemExit) as ended:
            run.main()
        return ended.value.code

    go.directory = tmp_path
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


@pytest.mark.parametrize("how", ["--smoke", "--impossible"])
@pytest.mark.parametrize("bad", [EMPTY, CRASHES, CRASHES_LATE, MISSES_AND_EXITS_0, MEASURES_NOTHING, IGNORES_IMPOSSIBLE,
                                 IGNORES_AND_IS_SLOW, MEETS_IMPOSSIBLE])
def test_impossible_targets_are_missed_by_figures_that_were_measured(runner, how, bad):
    assert runner({"b.py": bad, "c.py": GOOD}, how) == 1
    assert runner.runs("c.py") == 1


def test_impossible_targets_are_missed_by_quick_and_slow_ones(runner):
    assert runner({"a.py": GOOD, "b.py": SLOW}, "--impossible") == 0


def test_a_smoke_run_runs_each_benchmark_once_and_judges_no_figure(runner, capfd):
    assert runner({"a.py": SLOW, "b.py": SMOKE_IS_QUICKER}, "--smoke") == 0
    assert runner.runs("a.py") == runner.runs("b.py") == 1
    out = capfd.readouterr().out
    assert "a.py: speed  1.00x  at least 2.00x" in out and "b.py: speed  3.00x" in out and "MISSED" not in out


def test_a_smoke_run_names_what_it_has_no_time_for(runner, capfd):
    assert runner({"a.py": GOOD, "b.py": CRASHES, "c.py": GOOD}, "--smoke", "--minutes", "-3") == 0
    assert "NOT RUN, for want of time: b.py, c.py\n" in capfd.readouterr().out
    assert runner({"d.py": GOOD, "e.py": CRASHES}, "--smoke", "--minutes", "1") == 1
    assert runner({"f.py": GOOD, "g.py": SLOW}, "--minutes", "-3") == 1


def test_a_full_run_believes_a_miss_at_once(runner):
    assert runner({"a.py": SLOW}) == 1
    assert runner.runs("a.py") == 1


def test_an_unknown_name_is_an_error(runner):
    assert "no benchmark z.py" in runner({"a.py": GOOD}, "z.py")


@pytest.mark.parametrize("words", [("--impossible", "a.py"), ("a.py", "--impossible"), ("--impossible", "a")])
def test_names_stand_before_or_behind_flags(runner, words):
    assert runner({"a.py": GOOD, "b.py": CRASHES}, *words) == 0


@pytest.mark.parametrize("flag", ["--smoke", "--impossible"])
def test_smoke_and_impossible_runs_keep_nothing(runner, flag):
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
