"""What mutations.py decides: which verdicts still hold, how parts are dealt out, and which tier finds a mistake."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import verdicts  # noqa: E402
from mistakes import ListError, Mistake, misfit, needs, python_files, read_list, read_lists, shard, words_of  # noqa: E402
from planting import matches, failed_names  # noqa: E402
from tiers import Entry, finds, holds, report  # noqa: E402

ONE = Mistake("list", "one", "src/a.cpp", "a + b", "a - b", "a_test Sums.*", "a sum is a difference")


def test_a_line_has_six_fields_with_escapes(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("# a comment\nname | a.cpp | x \\| y;\\n | z | pytest tests/a.py -k b | what it is\n")
    assert read_list(path) == [Mistake("some", "name", "a.cpp", "x | y;\n", "z", "pytest tests/a.py -k b", "what it is")]
    path.write_text("name | a.cpp | x | z | pytest tests/a.py\n")
    with pytest.raises(ListError, match="5 fields instead of 6"):
        read_list(path)


def test_a_mistake_fits_where_its_text_stands_once(tmp_path):
    (tmp_path / "src").mkdir()
    assert "is not there" in misfit(ONE, tmp_path)
    for text, why in (("a + b", ""), ("a * b", "stands 0 times"), ("a + b; a + b", "stands 2 times")):
        (tmp_path / "src" / "a.cpp").write_text(text)
        assert misfit(ONE, tmp_path).startswith(why and "OLD " + why)
    (tmp_path / "src" / "a.cpp").write_text("a + b")
    assert misfit(replace(ONE, new=ONE.old), tmp_path) == "NEW is OLD"
    for test in ("e2e_router_loss", "pytest tests/none.py -k a"):
        assert misfit(replace(ONE, test=test), tmp_path).endswith("is no test")


def test_a_test_in_python_depends_on_what_it_imports_and_mentions():
    files = python_files("tests/e2e/test_resume.py")
    assert {"tests/conftest.py", "tests/e2e/test_run.py", "tests/e2e/limits.py"} <= set(files)
    assert not any(name.startswith("tests/mutations/lists/") for name in files)
    assert needs("pytest tests/parity/test_sampling.py")[0] == ("parity_tool", "sampling_tool")
    assert needs("pytest tests/benchmarks/run_test.py")[0] == ()
    assert needs("EMULATOR_LAZY=1 emulator_model_gpu_test *Agree")[0] == ("emulator_model_gpu_test",)
    assert needs("pytest tests/e2e/test_gpus.py -k told")[0] == ("emulator",)


def test_parts_are_all_mistakes_once_and_keep_a_program_together():
    everything = read_lists()
    parts = [shard(everything, number, 8) for number in range(1, 9)]
    assert sorted(m.name for part in parts for m in part) == sorted(m.name for m in everything)
    assert max(map(len, parts)) <= 2 * min(map(len, parts))
    assert sum(any(words_of(m.test).program == "plan_test" for m in part) for part in parts) == 1
    assert shard(everything[::-1], 2, 8)[0].name and {m.name for m in shard(everything[::-1], 2, 8)} == {m.name for m in parts[1]}


class Sources:
    """A build directory whose ninja says what the test wants."""

    def __init__(self, root, monkeypatch):
        self.root, self.build = root, root / "build"
        (root / "src").mkdir()
        self.build.mkdir()
        for name, text in (("src/a.cpp", "a + b"), ("src/a.h", "int a;"), ("src/a_test.cpp", "TEST"), ("src/other.cpp", "")):
            (root / name).write_text(text)
        (self.build / "CMakeCache.txt").write_text("CMAKE_MAKE_PROGRAM:FILEPATH=ninja\n")
        self.flags("-O3")
        self.said = {"deps": ["a.o: #deps 2, deps mtime 1 (VALID)", "    ../src/a.cpp", f"    {root}/src/a.h", "    /usr/include/c.h", "",
                              "a_test.o: #deps 1, deps mtime 1 (VALID)", "    ../src/a_test.cpp"],
                     "inputs": [str(root / "src/a.cpp"), "a.o", "a_test.o", "liba.a"]}
        monkeypatch.setattr(verdicts.Dependencies, "ask", lambda _, *words: self.said[words[1]])

    def flags(self, flags):
        command = f"c++ {flags} -I{self.root}/src -o a.o -c {self.root}/src/a.cpp"
        (self.build / "compile_commands.json").write_text(f'[{{"output": "a.o", "command": "{command}"}}]')

    def key(self, mistake=ONE):
        return verdicts.Dependencies(self.root, self.build).key(mistake)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    return Sources(tmp_path, monkeypatch)


def test_a_verdict_holds_while_nothing_that_it_depends_on_changes(sources):
    key = sources.key()
    assert key and key == sources.key()
    (sources.root / "src" / "other.cpp").write_text("int other;")
    assert sources.key() == key
    for name in ("src/a.cpp", "src/a.h", "src/a_test.cpp"):
        text = (sources.root / name).read_text()
        (sources.root / name).write_text(text + "\n")
        assert sources.key() != key, name
        (sources.root / name).write_text(text)
    for change in ({"old": "a"}, {"new": "a * b"}, {"test": "a_test Other.*"}, {"file": "src/other.cpp"}):
        assert sources.key(replace(ONE, **change)) != key, change
    assert sources.key(replace(ONE, what="said otherwise", name="two")) == key
    sources.flags("-O2")
    assert sources.key() != key


def test_what_was_never_built_has_no_key(sources):
    sources.said["inputs"].append("never_built.o")
    assert sources.key() is None


def test_verdicts_are_kept_by_mistake_and_key(tmp_path):
    kept = verdicts.Kept(tmp_path / "kept")
    assert kept.get("list--one", "k") is None
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: kept.put(f"list--{i}", "k", {"verdict": "caught", "i": i}), range(50)))
    assert all(kept.get(f"list--{i}", "k")["i"] == i for i in range(50))
    for key in "abcdef":
        kept.put("list--0", key, {"verdict": "MISSED"})
    assert list(kept.read("list--0")) == list("cdef")
    kept.put("list--1", None, {"verdict": "caught"})
    assert list(kept.read("list--1")) == ["k"]
    kept.path("list--1").write_text("{")
    assert kept.get("list--1", "k") is None


def test_filters_match_as_googletest_has_them():
    assert matches("*Lazy*", "A.IsLazyHere/3") and matches("B.*:A.?s", "A.Is") and matches("*Of*/1", "A.OfAll/1")
    assert not matches("A.I", "A.Is") and not matches("*Of*/1", "A.OfAll/11")


def test_the_failed_names_are_known_by_name():
    assert failed_names("[ RUN      ] A.B/2\nx: Failure\n[  FAILED  ] A.B/2 (1 ms)\n[  FAILED  ] A.B/2\n") == ["A.B/2"]
    assert failed_names("[ RUN      ] A.B\n[       OK ] A.B (0 ms)\n[ RUN      ] A.C\nAborted") == ["A.C"]
    assert failed_names("FAILED tests/e2e/test_a.py::test_b[x] - assert 1\n") == ["tests/e2e/test_a.py::test_b[x]"]
    assert failed_names("nothing") == []


def gtest(name="entry", command="build/bin/a_test", labels=(), **variables):
    return Entry(name, tuple(command.split()), variables, labels)


@pytest.mark.parametrize("entry, test, failed, found", [
    (gtest(), "a_test Sums.*", ["Sums.Add"], True),
    (gtest(command="build/bin/b_test"), "a_test Sums.*", ["Sums.Add"], False),
    (gtest(), "EMULATOR_LAZY=1 a_test", ["Sums.Add"], False),
    (gtest(EMULATOR_LAZY="1", EMULATOR_RACES="2"), "EMULATOR_LAZY=1 a_test", ["Sums.Add"], True),
    (gtest(command="a_test --gtest_filter=*Add*"), "a_test", ["Sums.Take", "Sums.Add"], True),
    (gtest(command="a_test --gtest_filter=*Add*"), "a_test", ["Sums.Take"], False),
    (gtest(command="a_test --gtest_filter=*Add*"), "a_test", [], False),
    (gtest(GTEST_FILTER="-*Add*"), "a_test", ["Sums.Add"], False),
    (gtest("fuzz_json", "python fuzz.py"), "ctest -R ^fuzz_json$", [], True),
    (gtest("fuzz_jsonl", "python fuzz.py"), "ctest -R ^fuzz_json$", [], False),
    (gtest(command="python tests/e2e/test_docs.py -k fine-tune"), "pytest tests/e2e/test_docs.py", ["test_docs.py::test_a"], False),
    (gtest(command="python tests/e2e/test_docs.py"), "pytest tests/e2e/test_docs.py -k a", ["test_docs.py::test_a"], True),
    (gtest(command="python tests/e2e/test_docs.py -m long"), "pytest tests/e2e/test_docs.py", ["test_docs.py::test_a"], False),
    (gtest(command="python tests/e2e/test_docs.py -k x"), "pytest tests/e2e/test_docs.py -k a", [], False)])
def test_an_entry_finds_what_its_filter_lets_through(entry, test, failed, found):
    assert finds(entry, words_of(test), failed) == found


def test_expressions_of_names_are_read_as_pytest_reads_them():
    assert holds("not every_command or fine-tune", "test_a") and holds("(a or b) and not c", "test_b")
    assert not holds("a and b", "test_a") and not holds("not A", "test_a")


def test_a_mistake_counts_for_the_tier_whose_entry_finds_it():
    names = ("short", "long", "missed", "earlier", "never")
    mistakes = [replace(ONE, name=name, test=f"a_test {name.title()}.*") for name in names]
    found = {"short": {"verdict": "caught", "failed": ["Short.A"]}, "long": {"verdict": "caught", "failed": ["Long.A"]},
             "missed": {"verdict": "MISSED", "failed": []}}
    listed = [gtest(GTEST_FILTER="-Long.*"), gtest(labels=("long",)), gtest(labels=("faults", "faults_full"))]
    lines = report(mistakes, found, {"earlier"}, listed)
    assert lines[1].split() == ["list", "5", "2", "1", "1", "2", "1"] and lines[2].split()[0] == "all"
    assert lines[3:5] == ["caught by ./dev test --full alone: list/long: a_test Long.*", "MISSED: list/missed: a_test Missed.*"]
    assert lines[5].startswith("2 of 5 caught, 1 of them (50%) by ./dev test; 1 missed, 2 not tried (1 of them")
