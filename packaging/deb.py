"""Makes BUILD/package/lmlaunch_VERSION_amd64.deb out of the wheel that cmake/package.py has made there.

Run: python packaging/deb.py BUILD. The package has the program, the wheel and two commands: `lmlaunch`, of which everything that needs
no LibTorch works at once, and `lmlaunch-setup`, which installs the wheel with LibTorch (from PyPI) for all users.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "cmake"))

from package import version  # noqa: E402

HOME = "usr/lib/lmlaunch"
BILL = "lmlaunch.cdx.json"  # of materials, as cmake/package.py writes it

CONTROL = """Package: lmlaunch
Version: {version}
Architecture: amd64
Maintainer: the lmlaunch project
Depends: libc6 (>= 2.36), libstdc++6 (>= 12), libgomp1, python3 (>= 3.11), python3-venv
Installed-Size: {kib}
Suggests: openmpi-bin
Section: science
Priority: optional
Description: fine-tunes language models from one TOML file
 Exact, fast fine-tuning of language models that need not fit into memory.
 Run lmlaunch-setup once: it installs LibTorch from PyPI (about 5 GB).
"""

# An upgrade leaves what lmlaunch-setup has made, 5 GB of it from PyPI, and puts this version's program into it. Should that need
# another LibTorch, the program says so.
INSTALL = """#!/bin/sh
[ "$1" = configure ] && [ -x /{home}/venv/bin/pip ] || exit 0
/{home}/venv/bin/pip install --quiet --no-input --no-index --no-deps --force-reinstall /{home}/{wheel} ||
  echo "lmlaunch: the program beside LibTorch could not be renewed; next: sudo lmlaunch-setup" >&2
"""

# Planning, presets, init, fetch and help need no LibTorch; what does says how to get it.
START = """#!/bin/sh
[ -x /{home}/venv/bin/lmlaunch ] && exec /{home}/venv/bin/lmlaunch "$@"
case "$1" in
  --version | --help | -h | help | presets | init | fetch | plan | report | doctor | completions) exec /{home}/lmlaunch/bin/lmlaunch "$@" ;;
esac
echo "lmlaunch: LibTorch is not installed yet; next: sudo lmlaunch-setup" >&2
exit 12
"""

SETUP = """#!/bin/sh
set -e
python3 -m venv /{home}/venv
/{home}/venv/bin/pip install --no-input /{home}/{wheel}
"""

# What lmlaunch-setup has made, of a package that goes: dpkg says "upgrade" where another version follows.
REMOVE = """#!/bin/sh
[ "$1" != remove ] || rm -rf /{home}/venv
"""


def write(path, text, mode=0o755):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def main():
    out = Path(sys.argv[1]).resolve() / "package"
    [wheel] = out.glob("*.whl")
    tree = out / "deb"
    shutil.rmtree(tree, ignore_errors=True)
    home = tree / HOME
    home.mkdir(parents=True)
    shutil.copytree(out / "lmlaunch", home / "lmlaunch")
    shutil.copy(wheel, home)
    write(tree / "usr/bin/lmlaunch", START.format(home=HOME))
    write(tree / "usr/sbin/lmlaunch-setup", SETUP.format(home=HOME, wheel=wheel.name))
    write(tree / "usr/share/doc/lmlaunch/copyright", (ROOT / "LICENSE").read_text(), 0o644)
    shutil.copy(out / BILL, tree / "usr/share/doc/lmlaunch" / BILL)
    kib = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file()) // 1024
    write(tree / "DEBIAN/control", CONTROL.format(version=version(), kib=kib), 0o644)
    write(tree / "DEBIAN/postinst", INSTALL.format(home=HOME, wheel=wheel.name))
    write(tree / "DEBIAN/prerm", REMOVE.format(home=HOME))
    package = out / f"lmlaunch_{version()}_amd64.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, package], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(tree)
    print(f"{package}: {package.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
