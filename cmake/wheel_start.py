"""lmlaunch: fine-tunes language models from one TOML file. This package is its executables; `main` starts them."""

import importlib.util
import os
import re
import sys
from pathlib import Path

TORCH = "@TORCH@"
DOES_NOT_FIT = 12
# Every other command plans, prints or looks, and needs no torch.
NEED_TORCH = ("train", "export", "generate", "chat", "eval", "verify", "diff", "serve", "merge")


def needs_torch(arguments):
    if not arguments or {"-h", "--help", "--version", "--dry-run"} & set(arguments):
        return False
    first = arguments[0]  # a configuration where it is no command's name
    return first in NEED_TORCH or first.startswith("-") or "/" in first or "." in first


def torch_directory():
    spec = importlib.util.find_spec("torch")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def torch_version(directory):
    """Without importing it, which takes seconds; "" where it does not say."""
    try:
        found = re.search(r"^__version__ = ['\"]([^'\"+]+)", (directory / "version.py").read_text(), re.M)
    except OSError:
        return ""
    return found[1] if found else ""


def refuse_torch(what, training):
    print(f"lmlaunch: error DEV-34 (exit {DOES_NOT_FIT}): {what}\n  next: {sys.executable} -m pip install torch=={TORCH}", file=sys.stderr)
    if training:
        print(f"lmlaunch: stop code={DOES_NOT_FIT} reason=error:DEV-34 step=0 checkpoint=none repeat=0", file=sys.stderr)
    sys.exit(DOES_NOT_FIT)


def main():
    package = Path(__file__).resolve().parent
    environment = dict(os.environ)
    environment.setdefault("LMLAUNCH_PYTHON", sys.executable)
    torch = torch_directory()
    if needs_torch(sys.argv[1:]):
        training = sys.argv[1] not in NEED_TORCH[1:]
        if torch is None:
            refuse_torch(f"torch is missing: this lmlaunch is linked against torch {TORCH}", training)
        version = torch_version(torch)
        if version != TORCH:
            refuse_torch(f"torch {version or 'of an unknown version'} is installed in {torch.parent}, and this lmlaunch is linked against torch {TORCH}",
                         training)
    if torch is not None and torch.parent != package.parent:  # installed in another place: the run paths inside the executables do not lead there
        places = [torch / "lib", *sorted((torch.parent / "nvidia").glob("*/lib"))]
        old = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = ":".join([*map(str, places), *([old] if old else [])])
    program = package / "bin" / "lmlaunch"
    os.execve(program, [str(program), *sys.argv[1:]], environment)
