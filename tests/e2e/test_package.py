"""The wheel of `./dev package`: installed with its dependencies into a fresh virtual environment it trains, answers and exports, with
nothing of the clone on its way. Downloads torch: long."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from installed_wheel import built, installed
from test_run import BIN, config, filled

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "cmake"))

import gpu_code  # noqa: E402
import package  # noqa: E402

RELEASE = ROOT / "build-release"
MOST_BYTES = 60_000_000
DEBIAN, UBUNTU = "http://deb.debian.org/debian", "http://archive.ubuntu.com/ubuntu"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
OURS = "machine-certificates.crt"  # in a root, where no package writes over them
A_DEBIAN_ROOT = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("debootstrap") is None, reason="making a Debian root needs root and debootstrap")


@pytest.fixture(scope="module")
def wheel():
    return built()


def test_every_packaged_executable_has_code_for_every_card_that_can_train(wheel):
    """Also of each .cu file that it compiles for all of them."""
    program = wheel.parent / "lmlaunch" / "bin" / "lmlaunch-cuda"
    if not program.exists():
        pytest.skip("this build has no GPU code")
    machine_code, ptx = gpu_code.architectures(program)
    assert set(machine_code) >= {80, 86, 89, 90, 100, 120} and 120 in ptx, (machine_code, ptx)


def test_the_wheel_is_small_and_lists_all_that_is_in_it(wheel):
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith("/WHEEL"))
        recorded = {line.split(",")[0] for line in files.read(f"{info}/RECORD").decode().splitlines()}
        bill = json.loads(files.read(f"{info}/sboms/lmlaunch.cdx.json"))
        metadata = files.read(f"{info}/METADATA").decode()
    assert names == recorded
    for optional in ("lmlaunch-cuda", "lmlaunch-mpi.so"):  # as this build has them
        assert (f"lmlaunch/bin/{optional}" in names) == (BIN / optional).exists(), optional
    assert not [name for name in names if "/lib/libmpi" in name or "/lib/libopen-" in name]  # the machine's own
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
        if program.suffix == ".so" and path is None:
            continue  # what it needs is the machine's
        assert path and all(part.startswith("$ORIGIN/") for part in path[1].split(":")), path


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """A function that runs a command in a new virtual environment with the wheel, and without this one's variables."""
    with installed(wheel, tmp_path_factory.mktemp("fresh")) as variables:
        def run(*arguments, cwd):
            done = subprocess.run(["lmlaunch", *arguments], cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield run


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
    subprocess.run([sys.executable, "-B", ROOT / "packaging" / "deb.py", RELEASE], check=True)
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
    bill = json.loads((tmp_path / "usr" / "share" / "doc" / "lmlaunch" / "lmlaunch.cdx.json").read_text())
    assert bill["metadata"]["component"]["version"] == version and {"torch", "nlohmann-json3-dev"} <= {part["name"] for part in bill["components"]}


@pytest.fixture(scope="module")
def debian(wheel):
    """The package."""
    subprocess.run([sys.executable, "-B", ROOT / "packaging" / "deb.py", RELEASE], check=True)
    [package] = wheel.parent.glob("*.deb")
    return package


@contextmanager
def root_of(root, suite, mirror, *words):
    """A function that runs a command in a new root of a Debian or Ubuntu. `words`: for debootstrap."""
    (root / "proc").mkdir()
    if subprocess.run(["mount", "--bind", "/proc", root / "proc"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("nothing can be mounted here")
    subprocess.run(["umount", root / "proc"], check=True)
    subprocess.run(["debootstrap", "--variant=minbase", *words, suite, root, mirror], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["mount", "--bind", "/proc", root / "proc"], check=True)

    for file, target in (("etc/resolv.conf", "etc/resolv.conf"), ("etc/hosts", "etc/hosts"), (CERTIFICATES, OURS)):  # how this machine reaches PyPI
        if Path("/", file).exists():
            shutil.copy(Path("/", file), root / target)
    network = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy") or name in ("PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT")}
    variables = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "PIP_CERT": f"/{OURS}", **network}

    def run(*command, cwd="/"):
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', cwd, *map(str, command)]
        return subprocess.run(["chroot", root, *inside], capture_output=True, text=True, env=variables)

    run.root = root
    yield run
    subprocess.run(["umount", root / "proc"], check=True)
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def bookworm(debian, tmp_path_factory):
    """A function that runs a command in a new root, which has of Debian 12 what every machine has and what the package depends on."""
    depends = subprocess.run(["dpkg-deb", "--field", debian, "Depends"], capture_output=True, text=True, check=True).stdout
    needed = ",".join(one.split()[0] for one in depends.split(","))
    with root_of(tmp_path_factory.mktemp("bookworm"), "bookworm", DEBIAN, f"--include={needed}") as run:
        yield run


@A_DEBIAN_ROOT
def test_debian_installs_the_package_runs_it_and_removes_it(debian, bookworm):
    shutil.copy(debian, bookworm.root / "tmp" / debian.name)
    installed = bookworm("dpkg", "-i", f"/tmp/{debian.name}")
    assert installed.returncode == 0, installed.stderr
    version = bookworm("lmlaunch", "--version")
    assert version.stdout == f"lmlaunch {debian.name.split('_')[1]}\n", version.stderr
    planned = bookworm("lmlaunch", "plan", "smollm2-135m-lora", "--gpu-memory", "8GiB", "--host-memory", "16GiB")
    assert planned.returncode == 0 and "of the GPU" in planned.stdout + planned.stderr, planned.stderr
    made = bookworm.root / "usr/lib/lmlaunch/venv/lib"  # as lmlaunch-setup would
    made.mkdir(parents=True)
    again = bookworm("dpkg", "-i", f"/tmp/{debian.name}")
    assert again.returncode == 0 and made.exists(), again.stderr
    removed = bookworm("dpkg", "-r", "lmlaunch")
    assert removed.returncode == 0, removed.stderr
    assert not [path for path in ("usr/bin/lmlaunch", "usr/sbin/lmlaunch-setup", "usr/lib/lmlaunch") if (bookworm.root / path).exists()]


def trains(root, run, home):
    """In the root's directory `home`, with `run`: a small model, from start to end."""
    work = filled(root / home.lstrip("/"), layers=2)
    toml = config(work, "full")
    done = run(toml, cwd=home)
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in map(json.loads, open(work / "runs" / "full" / "metrics.jsonl")) if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]


@A_DEBIAN_ROOT
def test_lmlaunch_setup_installs_what_training_needs_and_removing_takes_it_away(debian, bookworm):
    shutil.copy(debian, bookworm.root / "tmp" / debian.name)
    assert bookworm("dpkg", "-i", f"/tmp/{debian.name}").returncode == 0
    made = bookworm("lmlaunch-setup")
    assert made.returncode == 0, made.stderr
    (bookworm.root / "home" / "someone").mkdir()
    trains(bookworm.root, lambda *words, cwd: bookworm("lmlaunch", *words, cwd=cwd), "/home/someone")
    removed = bookworm("dpkg", "-r", "lmlaunch")
    assert removed.returncode == 0 and not (bookworm.root / "usr" / "lib" / "lmlaunch").exists(), removed.stderr


@A_DEBIAN_ROOT
def test_on_ubuntu_22_04_pip_installs_the_wheel_and_it_trains(wheel, tmp_path_factory):
    """Its libraries are older than those of the machine that made the wheel."""
    # Ubuntu's keys are not here, and nothing of this root stays.
    with root_of(tmp_path_factory.mktemp("jammy"), "jammy", UBUNTU, "--no-check-gpg", "--components=main,universe") as jammy:
        def done(*command):
            ended = jammy(*command)
            assert ended.returncode == 0, ended.stderr

        with open(jammy.root / "etc/apt/sources.list", "a") as sources:  # its Python 3.11 came later
            sources.write(f"deb {UBUNTU} jammy-updates main universe\n")
        done("apt-get", "update", "-q")
        done("apt-get", "install", "-y", "-q", "--no-install-recommends", "python3.11-venv")
        shutil.copy(wheel, jammy.root / "tmp" / wheel.name)
        done("python3.11", "-m", "venv", "/opt/venv")
        done("/opt/venv/bin/pip", "install", "-q", "--no-input", f"/tmp/{wheel.name}")
        trains(jammy.root, lambda *more, cwd: jammy("/opt/venv/bin/lmlaunch", *more, cwd=cwd), "/root")


def container_lines():
    return [line.split(None, 1) for line in (ROOT / "packaging" / "Containerfile").read_text().splitlines() if line and line[0] != "#"]


@A_DEBIAN_ROOT
def test_the_container_files_lines_make_a_root_that_trains(wheel, bookworm):
    """What docker would do, in a root of the image's Debian; the image's Python, which has its pip in /usr/local, is Debian's here."""
    assert bookworm("python3", "-m", "venv", "/usr/local").returncode == 0
    where = "/"
    for kind, words in container_lines():
        if kind == "COPY":
            pattern, target = words.split()
            for file in wheel.parent.glob(pattern):  # build/package is the context
                shutil.copy(file, bookworm.root / target.lstrip("/"))
        elif kind == "RUN":
            done = bookworm("sh", "-c", words, cwd=where)
            assert done.returncode == 0, done.stderr
        elif kind == "WORKDIR":
            where = words
            (bookworm.root / words.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif kind == "ENTRYPOINT":
            trains(bookworm.root, lambda *more, cwd: bookworm(*json.loads(words), *more, cwd=cwd), where)
        else:
            assert kind == "FROM", kind
    assert not list((bookworm.root / "tmp").glob("lmlaunch-*.whl"))
    shutil.rmtree(bookworm.root / "usr" / "local" / "lib")  # 5 GB


def test_the_container_file_copies_the_wheel_and_starts_its_command():
    """There is no docker here: its lines, against what packaging makes."""
    lines = container_lines()
    kinds = [kind for kind, _ in lines]
    assert kinds[0] == "FROM" and kinds.count("FROM") == 1 and kinds[-1] == "ENTRYPOINT"
    python, debian = re.fullmatch(r"python:3\.(\d+)-slim-(\w+)", lines[0][1]).groups()
    lowest, beyond = re.search(r"Requires-Python: >=3\.(\d+),<3\.(\d+)", package.metadata()).groups()
    assert int(lowest) <= int(python) < int(beyond)
    # The wheel needs the C library of that release.
    assert debian == "bookworm" and package.number(package.NEWEST["GLIBC"]) <= (2, 36)
    pattern, target = dict(lines)["COPY"].split()
    assert fnmatch.fnmatch(package.wheel_name(), pattern) and fnmatch.fnmatch(f"{target}{package.wheel_name()}", f"{target}{pattern}")
    assert f"pip install --no-cache-dir {target}{pattern}" in dict(lines)["RUN"] and f"rm {target}{pattern}" in dict(lines)["RUN"]
    assert json.loads(dict(lines)["ENTRYPOINT"]) == ["lmlaunch"]
