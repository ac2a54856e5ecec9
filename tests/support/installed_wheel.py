"""The wheel of `./dev package`, and environments that pip installs it into as its users do: torch comes from PyPI, 5 GB of it."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def built():
    subprocess.run([ROOT / "dev", "package"], check=True, stdin=subprocess.DEVNULL)
    [found] = (ROOT / "build" / "package").glob("*.whl")
    return found


@contextmanager
def installed(wheel, directory):
    """Variables of a shell in a new virtual environment that has the wheel and nothing of this one's."""
    environment = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "-q", "--disable-pip-version-check", wheel], check=True)
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    yield {**kept, "PATH": f"{environment}/bin:/usr/bin:/bin", "XDG_CACHE_HOME": str(directory / "cache")}
    shutil.rmtree(environment)
