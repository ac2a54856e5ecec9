"""What starts the program of a wheel, and what dpkg runs at an upgrade: with stand-ins for torch and pip, in moments. (test_package.py
installs the packages.)"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_run import BIN

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "cmake" / "wheel_start.py"
WANTED = "2.11.0"


def of_file(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


@pytest.fixture
def installed(tmp_path):
    """A function that calls the wheel's command beside a torch of that version (None: none); its program says what it is given."""
    site = tmp_path / "site-packages"
    (site / "lmlaunch" / "bin").mkdir(parents=True)
    (site / "lmlaunch" / "__init__.py").write_text(START.read_text().replace("@TORCH@", WANTED))
    program = site / "lmlaunch" / "bin" / "lmlaunch"
    program.write_text('#!/bin/sh\necho "started $*"\n')
    program.chmod(0o755)

    def run(torch, *arguments):
        if torch is not None:
            (site / "torch").mkdir(exist_ok=True)
            (site / "torch" / "__init__.py").write_text("raise ImportError('nobody may import it')\n")
            (site / "torch" / "version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{torch}'\n")
        return subprocess.run([sys.executable, "-S", "-c", "import lmlaunch; lmlaunch.main()", *arguments], env={"PYTHONPATH": str(site)},
                              capture_output=True, text=True)

    return run


@pytest.mark.parametrize("torch", ["2.10.0", "2.10.0+cpu", "2.12.0", None])
def test_beside_another_torch_the_wheel_says_which_it_needs(installed, torch):
    for arguments in (["c.toml"], ["--gpus", "1", "c.toml"], ["runs/configuration"], ["train", "c"], ["generate", "m", "--prompt", "x"], ["verify", "m"]):
        done = installed(torch, *arguments)
        assert done.returncode == 12 and "started" not in done.stdout, (arguments, done.stderr)
        assert f"linked against torch {WANTED}" in done.stderr and f"pip install torch=={WANTED}" in done.stderr, done.stderr
        assert "torch is missing" in done.stderr if torch is None else f"torch {torch.split('+')[0]} is installed in" in done.stderr
        training = arguments[0] not in ("generate", "verify")
        assert done.stderr.rstrip().splitlines()[-1].startswith("lmlaunch: stop code=12 ") == training


def test_no_executable_asks_for_symbols_that_the_wheels_tag_does_not_promise():
    """Of the build's own, which are linked as the wheel's are."""
    package = of_file(ROOT / "cmake" / "package.py")
    names = [name for name in ("lmlaunch", "lmlaunch-cpu", "lmlaunch-cuda", "lmlaunch-mpi.so") if (BIN / name).exists()]
    assert len(names) >= 2 and {name: package.too_new(BIN / name) for name in names} == {name: [] for name in names}
    tag = re.search(r"manylinux_(\d+)_(\d+)_", package.TAG)
    assert package.NEWEST["GLIBC"] == f"{tag[1]}.{tag[2]}"
    package.NEWEST["GLIBC"] = "2.16"  # what would be found
    assert "GLIBC_2.34" in package.too_new(BIN / "lmlaunch")


@pytest.mark.parametrize("torch", ["2.10.0", None])
def test_what_computes_nothing_needs_no_torch(installed, torch):
    for arguments in (["presets"], ["--help"], ["--version"], ["plan", "c.toml"], ["init", "m", "d"], ["c.toml", "--dry-run"], ["generate", "--help"],
                      ["doctor"], ["report", "runs/x"], ["completions"], ["fetch", "a/b"], [], ["pressets"]):
        done = installed(torch, *arguments)
        assert (done.returncode, done.stdout) == (0, " ".join(["started", *arguments]).rstrip() + "\n" if arguments else "started \n"), done.stderr


def test_beside_its_own_torch_the_wheel_starts(installed):
    for torch in (WANTED, f"{WANTED}+cpu"):
        assert installed(torch, "c.toml").stdout == "started c.toml\n"


def test_the_wheel_knows_which_commands_need_torch():
    """Those that the rank's executable carries out."""
    source = (ROOT / "launcher" / "command_table.cpp").read_text()
    start = of_file(START)
    help_text = subprocess.run([BIN / "lmlaunch", "--help"], capture_output=True, text=True, check=True).stdout
    commands = [line.split()[0] for line in help_text.split("\n\n")[2].splitlines()]
    assert {"plan", "presets", "verify", "train"} <= set(commands), commands
    alone = {command for command in commands if not start.needs_torch([command])}
    assert alone == {"fetch", "init", "plan", "report", "doctor", "presets", "completions", "help"}
    assert set(start.NEED_TORCH) == set(commands) - alone and all(f'"{command}"' in source for command in commands)


def scripts(tmp_path):
    """What dpkg would run, with the root in `tmp_path`; pip of lmlaunch-setup's environment writes down what it is told."""
    deb = of_file(ROOT / "packaging" / "deb.py")
    venv = tmp_path / deb.HOME / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "pip").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/pip\n')
    (venv / "pip").chmod(0o755)
    home = f"{tmp_path}/{deb.HOME}".lstrip("/")

    def run(script, *arguments):
        subprocess.run(["sh", "-c", script.format(home=home, wheel="w.whl"), "script", *arguments], check=True)

    return deb, venv.parent, run


def test_an_upgrade_of_the_debian_package_leaves_libtorch_and_removing_takes_it(tmp_path):
    deb, venv, run = scripts(tmp_path)
    run(deb.REMOVE, "upgrade", "0.2.0")
    assert (venv / "bin" / "pip").exists()
    run(deb.INSTALL, "configure", "0.1.0")
    told = (tmp_path / "pip").read_text()
    assert told.startswith("install ") and "--no-deps" in told and "--no-index" in told and told.rstrip().endswith("w.whl"), told
    run(deb.REMOVE, "remove")
    assert not venv.exists()
    run(deb.INSTALL, "configure")  # the first installation: nothing to renew
    assert (tmp_path / "pip").read_text() == told
