"""The wheel of `./dev package`: installed with its dependencies into a fresh virtual environment it trains, answers and exports, with
nothing of the clone on its way. Downloads torch: long."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_run import BIN, config, filled

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60 << 20


@pytest.fixture(scope="module")
def wheel():
    subprocess.run([sys.executable, "-B", ROOT / "cmake" / "package.py", BIN.parent], check=True)
    [found] = (BIN.parent / "package").glob("*.whl")
    return found


def test_the_wheel_is_small_and_lists_all_that_is_in_it(wheel):
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith("/WHEEL"))
        recorded = {line.split(",")[0] for line in files.read(f"{info}/RECORD").decode().splitlines()}
        bill = json.loads(files.read(f"{info}/sboms/lmlaunch.cdx.json"))
        metadata = files.read(f"{info}/METADATA").decode()
    assert names == recorded
    assert {"lmlaunch/bin/lmlaunch", "lmlaunch/bin/lmlaunch-cpu", "lmlaunch/share/lmlaunch/prepare/prepare.py", f"{info}/licenses/LICENSE"} <= names
    assert "Requires-Dist: torch==" in metadata
    parts = {part["name"]: part for part in bill["components"]}
    libraries = {name.split("/")[-1].split(".")[0] for name in names if name.startswith("lmlaunch/lib/")}
    assert libraries and all(any(library in part for part in parts) for library in ({"libz": "zlib1g"}.get(x, x) for x in libraries))
    for name, part in parts.items():
        assert part["version"] and re.fullmatch(r"pkg:(deb/debian|pypi)/[\w.-]+@\S+", part["purl"]), part
        assert "licenses" in part or part["purl"].startswith("pkg:pypi/"), part
        if part["purl"].startswith("pkg:deb"):
            assert f"{info}/licenses/{name}" in names


def test_no_executable_of_the_wheel_looks_where_it_was_built(wheel):
    for program in (wheel.parent / "lmlaunch" / "bin").iterdir():
        path = re.search(r"RUNPATH.*\[(.*)\]", subprocess.run(["readelf", "-d", program], capture_output=True, text=True).stdout)
        assert path and all(part.startswith("$ORIGIN/") for part in path[1].split(":")), path


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """A function that runs a command in a new virtual environment with the wheel, and without this one's variables."""
    environment = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "-q", "--disable-pip-version-check", wheel], check=True)
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    variables = {**kept, "PATH": f"{environment}/bin:/usr/bin:/bin", "XDG_CACHE_HOME": str(environment.parent / "cache")}

    def run(*arguments, cwd):
        done = subprocess.run(["lmlaunch", *arguments], cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    shutil.rmtree(environment)  # 5 GB


def test_a_fresh_environment_trains_and_exports(fresh, tmp_path):
    work = filled(tmp_path, layers=2)
    assert fresh("--version", cwd=work).startswith("lmlaunch ")
    fresh(config(work, "full"), cwd=work)
    losses = [row["loss"] for row in map(json.loads, open(work / "runs" / "full" / "metrics.jsonl")) if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    fresh(config(work, "lora", train__method="lora"), cwd=work)
    fresh("export", "runs/lora", "--merge", "-o", "merged", cwd=work)
    assert json.loads(fresh("verify", "merged", "--json", cwd=work))["ok"] is True


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb here")
def test_the_debian_package_installs_and_says_its_version(wheel, tmp_path):
    subprocess.run([sys.executable, "-B", ROOT / "packaging" / "deb.py", BIN.parent], check=True)
    [package] = wheel.parent.glob("*.deb")
    fields = subprocess.run(["dpkg-deb", "--field", package], capture_output=True, text=True, check=True).stdout
    version = re.search(r"Version: (\S+)", fields)[1]
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path], check=True)
    start = tmp_path / "usr" / "bin" / "lmlaunch"
    start.write_text(start.read_text().replace("/usr/lib", f"{tmp_path}/usr/lib"))  # as if that were the root
    said = subprocess.run([start, "--version"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert (said.returncode, said.stdout) == (0, f"lmlaunch {version}\n"), said.stderr
    assert "optimizer" in subprocess.run([start, "presets", "quickstart"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}).stdout
    needs = subprocess.run([start, "generate", "x", "--prompt", "y"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert needs.returncode == 12 and "lmlaunch-setup" in needs.stderr
    assert (tmp_path / "usr" / "lib" / "lmlaunch" / wheel.name).read_bytes() == wheel.read_bytes()
