"""changed.py, with dependency lists that are made up: what a change selects, and which suites of a program."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import changed  # noqa: E402

# Two libraries: low.cpp is used by high.cpp (which includes low.h), tests include what they test. registry.cpp has no header.
FILES = {
    **dict.fromkeys(["src/low.h", "src/low.cpp", "src/high.h", "src/high.cpp", "src/alone.h", "src/alone.cpp", "src/registry.cpp",
                     "src/main.cpp", "src/shared.h", "src/rank.cpp", "src/warm.cpp", "src/unbuilt.cpp", "src/prepare/split.py",
                     "configs/tiny.toml", "configs/models/tiny.json"], ""),
    "tests/t/low_test.cpp": "TEST(Low, Reads) {}\nTEST_F(LowFile, Opens) {}\n", "tests/t/high_test.cpp": "TEST_P(High, Adds) {}\n",
    "tests/t/alone_test.cpp": "  TEST(Alone, Is) {}\n", "tests/t/helper.h": "", "tests/t/table.txt": "",
    "tests/e2e/test_run.py": "from helper import go\nPROGRAM = 'bin/lmlaunch'\n", "tests/e2e/helper.py": "import other\n",
    "tests/e2e/test_tool.py": "TOOL = 'read_tool'\nSIZES = 'models'\n", "tests/e2e/test_docs.py": "README = 'README.md'\n",
    "tests/e2e/test_emulator.py": "HERE = 'emulator/bin'\n", "tests/elsewhere/other.py": "", "tests/conftest.py": "", "tests/pytest.ini": "",
    "tests/support/warm_pytest.py": "", "tests/layering_test.py": "",
    "README.md": "", "docs/page.md": "", "CMakeLists.txt": "", "LICENSE": "",
}
NINJA = """
build lib.a: AR low.o high.o alone.o registry.o
build low.o: CXX {root}/src/low.cpp || order
build high.o: CXX {root}/src/high.cpp
build alone.o: CXX {root}/src/alone.cpp
build registry.o: CXX {root}/src/registry.cpp
build low_test.o: CXX {root}/tests/t/low_test.cpp
build high_test.o: CXX {root}/tests/t/high_test.cpp
build alone_test.o: CXX {root}/tests/t/alone_test.cpp
build a$ text.cpp: TEXT {root}/configs/tiny.toml
build text.o: CXX a$ text.cpp
build prepare.stamp: COPY {root}/src/prepare/split.py
build main.o: CXX {root}/src/main.cpp
build rank.o: CXX {root}/src/rank.cpp
build bin/big_test: LINK low_test.o $
  high_test.o alone_test.o | lib.a
build bin/lmlaunch: LINK main.o text.o | lib.a || prepare.stamp
build bin/lmlaunch-cpu: LINK rank.o high.o
build bin/read_tool: LINK alone.o
build emulator/bin/lmlaunch-cuda: LINK registry.o
build warm.o: CXX {root}/src/warm.cpp
build warm/bin/server: LINK warm.o
build phony: phony bin/big_test bin/lmlaunch
"""
READ = {"low.o": "low.h", "high.o": "high.h low.h", "alone.o": "alone.h",
        "low_test.o": "low.h", "high_test.o": "high.h ../tests/t/helper.h", "alone_test.o": "alone.h shared.h",
        "main.o": "high.h", "text.o": "", "registry.o": "shared.h", "rank.o": "high.h"}
DEPS = "".join(f"{one}: #deps 3, deps mtime 1 (VALID)\n    /usr/include/stdio.h\n" +
               "".join(f"    ../src/{name}\n" for name in names.split()) + "\n" for one, names in READ.items())


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "build").mkdir()
    return tmp_path


def pytest_entry(name, file):
    return {"name": name, "command": ["/usr/bin/python", "tests/support/warm_pytest.py", "-q", f"tests/e2e/{file}"], "properties": []}


def selection(root):
    entries = [
        {"name": "big_test", "command": [f"{root}/build/bin/big_test"], "properties": []},
        {"name": "big_of_mpi", "command": ["/usr/bin/mpiexec", "-n", "2", f"{root}/build/bin/big_test"], "properties": []},
        pytest_entry("e2e_run", "test_run.py"), pytest_entry("e2e_tool", "test_tool.py"), pytest_entry("e2e_docs", "test_docs.py"),
        pytest_entry("e2e_emulator", "test_emulator.py"), {"name": "layering_test", "command": ["/usr/bin/python", "tests/layering_test.py"]},
    ]
    return changed.Selection(root, entries, changed.Build(root, root / "build", NINJA.format(root=root), DEPS))


ALL = {"big_test", "big_of_mpi", "e2e_run", "e2e_tool", "e2e_docs", "e2e_emulator"}


@pytest.mark.parametrize("file, expected", [
    ("src/alone.cpp", {"big_test": {"Low", "LowFile", "High"}, "big_of_mpi": None, "e2e_run": None, "e2e_tool": None}),
    ("src/low.h", {"big_test": {"Alone"}, "big_of_mpi": None, "e2e_run": None}),
    ("src/low.cpp", {"big_test": {"Alone"}, "big_of_mpi": None, "e2e_run": None}),  # high.cpp calls it
    ("src/high.cpp", {"big_test": {"Low", "LowFile", "Alone"}, "big_of_mpi": None, "e2e_run": None}),
    ("src/registry.cpp", {"big_test": None, "big_of_mpi": None, "e2e_run": None, "e2e_emulator": None}),
    ("src/shared.h", {"big_test": None, "big_of_mpi": None, "e2e_run": None, "e2e_emulator": None}),  # read by what has no header
    ("src/main.cpp", {"e2e_run": None}),
    ("src/rank.cpp", {"e2e_run": None}),  # lmlaunch starts it
    ("src/warm.cpp", {"e2e_run": None}),
    ("src/unbuilt.cpp", {}),
    ("tests/t/low_test.cpp", {"big_test": {"High", "Alone"}, "big_of_mpi": None}),
    ("tests/t/helper.h", {"big_test": {"Low", "LowFile", "Alone"}, "big_of_mpi": None}),
    ("tests/t/table.txt", {"big_test": None, "big_of_mpi": None}),  # beside a test
    ("configs/tiny.toml", {"e2e_run": None}),  # compiled in
    ("src/prepare/split.py", {"e2e_run": None}),
    ("configs/models/tiny.json", {"e2e_tool": None}),  # it names the folder
    ("tests/e2e/test_tool.py", {"e2e_tool": None}),
    ("tests/elsewhere/other.py", {"e2e_run": None}),  # imported by what it imports
    ("tests/conftest.py", {"e2e_run": None, "e2e_tool": None, "e2e_docs": None, "e2e_emulator": None}),
    ("README.md", {"e2e_docs": None}),
    ("docs/page.md", {"e2e_docs": None}),
    ("CMakeLists.txt", dict.fromkeys(ALL)),
    ("LICENSE", dict.fromkeys(ALL)),
])
def test_what_a_change_selects(root, file, expected):
    assert selection(root).select([file]) == {**expected, "layering_test": None}


def test_changes_are_put_together(root):
    chosen = selection(root).select(["src/high.cpp", "src/alone.cpp"])
    assert chosen["big_test"] == {"Low", "LowFile"}
    assert selection(root).select(["src/alone.cpp", "src/registry.cpp"])["big_test"] is None
    assert selection(root).select(["src/registry.cpp", "src/alone.cpp"])["big_test"] is None
    assert selection(root).select(["CMakeLists.txt", "src/alone.cpp"])["big_test"] is None
    assert selection(root).select([]) == {}


@pytest.mark.parametrize("file, note", [("LICENSE", "LICENSE may concern everything"), ("src/low.h", ""),
                                        ("src/unbuilt.cpp", "src/unbuilt.cpp: nothing that was built depends on it")])
def test_what_is_not_certain_is_said(root, file, note):
    chooses = selection(root)
    chooses.select([file])
    assert "".join(chooses.notes) == note


def test_suites_are_left_out_on_top_of_the_filter_that_an_entry_has(root):
    without = "S.*:*/S.*:S/*:*/S/*"
    for command, environment, expected in [
            (["x"], [], (["x"], [f"GTEST_FILTER=-{without}"])),
            (["x", "--gtest_filter=A*:B*"], ["C=1"], (["x", f"--gtest_filter=A*:B*-{without}"], ["C=1"])),
            (["x"], ["GTEST_FILTER=-A*"], (["x"], [f"GTEST_FILTER=-A*:{without}"]))]:
        entry = changed.Entry({"name": "x", "command": command, "properties": [{"name": "ENVIRONMENT", "value": environment}]},
                              changed.Scripts(root), None)
        assert changed.filtered(entry, {"S"}) == expected


def git(root, *words):
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *settings, *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def test_what_differs_from_where_the_branch_left(root):
    git(root, "init")
    (root / ".gitignore").write_text("build\n")
    git(root, "add", ".")
    git(root, "commit", "-m", "landed")
    landed = git(root, "rev-parse", "HEAD")
    (root / "src/low.h").write_text("int low();\n")
    assert changed.base_of(root) == landed  # without origin/main: HEAD
    git(root, "update-ref", "refs/remotes/origin/main", landed)
    git(root, "commit", "-am", "work")
    assert changed.base_of(root) == landed and changed.base_of(root, "HEAD") != landed
    (root / "README.md").write_text("more\n")
    (root / "src/new.cpp").write_text("")
    (root / "LICENSE").unlink()
    (root / "build" / "made").write_text("")
    assert changed.differing(root, landed) == ["LICENSE", "README.md", "src/low.h", "src/new.cpp"]
    with pytest.raises(SystemExit):
        changed.base_of(root, "no_such_commit")
