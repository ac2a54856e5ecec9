"""Makes BUILD/package: a wheel of lmlaunch that pip installs beside torch's wheel, with the bill of materials inside it and beside it.

Run: python cmake/package.py BUILD, after `./dev build`. The wheel has the executables, the libraries that come neither with torch
nor with every Linux, the program that prepares data, and a command `lmlaunch`. Fails when it is over 60 MB.
"""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from bundle import ON_THE_MACHINE, shared_libraries

MAX_BYTES = 60_000_000
ROOT = Path(__file__).resolve().parent.parent
# What the tag promises of a machine: glibc 2.34 and the C++ library of GCC 11 (RHEL 9; Ubuntu 22.04 has later ones).
TAG = "py3-none-manylinux_2_34_x86_64"
NEWEST = {"GLIBC": "2.34", "GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "7.0.0"}
RUN_TIME = ("torch", "tokenizers", "jinja2", "numpy", "pyarrow")
# Compiled in or copied: the Debian package it comes from, and its licence.
COMPILED_IN = {"libcli11-dev": "BSD-3-Clause", "libfmt-dev": "MIT", "libtomlplusplus-dev": "MIT", "nlohmann-json3-dev": "MIT"}
COPIED = {"liburing2": "LGPL-2.1-or-later OR MIT", "libxxhash0": "BSD-2-Clause", "zlib1g": "Zlib"}

# What `lmlaunch` of the wheel starts with.
MAIN = (ROOT / "cmake" / "wheel_start.py").read_text()


def said(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def version():
    return re.search(r"project\(lmlaunch VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def requirements():
    """{name: version} of what an installed lmlaunch needs, as this repository pins it."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.M))
    return {name: pins[name] for name in RUN_TIME}


def requires_dist(name, pinned):
    # The executables are linked against this very torch, whose C++ interface each release changes; of the others any later one
    # of the same major version does.
    return f"{name}=={pinned}" if name == "torch" else f"{name}>={pinned},<{int(pinned.split('.')[0]) + 1}"


def programs(package):
    """Without the plugin for Open MPI: that library is the machine's, of the version that its mpirun has."""
    return sorted(file for file in (package / "bin").iterdir() if file.suffix != ".so")


def number(version):
    return tuple(int(part) for part in version.split("."))


def too_new(program):
    """The versions of symbols that it asks of a machine's libraries and that the tag does not promise."""
    asked = re.findall(r"Name: (\w+?)_([\d.]+) ", said("readelf", "--version-info", "--wide", program))
    return sorted({f"{name}_{version}" for name, version in asked if name in NEWEST and number(version) > number(NEWEST[name])})


def fill(build, package):
    """The package's files, as site-packages/lmlaunch has them."""
    said(Path(sys.executable).parent / "cmake", "--install", build, "--prefix", package, "--component", "lmlaunch", "--strip")
    (package / "lib").mkdir()
    for program in programs(package):
        for name, path in shared_libraries(build / "bin" / program.name):
            if path and not ON_THE_MACHINE.match(name):
                shutil.copy(path, package / "lib" / name)
    shutil.copytree(build / "share", package / "share")
    (package / "__init__.py").write_text(MAIN.replace("@TORCH@", requirements()["torch"]))


def debian_package(library):
    """Of a copied library; on a merged /usr, dpkg may know it by the path before the merge."""
    for path in (library, library.removeprefix("/usr")):
        found = subprocess.run(["dpkg-query", "-S", path], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.split(":")[0]
    sys.exit(f"{library}: no Debian package has it: name its origin in cmake/package.py")


def debian_version(name):
    return said("dpkg-query", "-W", "-f", "${source:Upstream-Version}", name)


def copied_packages(build, package):
    """Of the libraries in lib/. Fails for one whose licence nobody has looked at."""
    found = set()
    for program in programs(package):
        for name, path in shared_libraries(build / "bin" / program.name):
            if (package / "lib" / name).exists():
                found.add(debian_package(str(Path(path).resolve())))
    if unknown := found - set(COPIED):
        sys.exit(f"{', '.join(sorted(unknown))}: add the licence to COPIED in cmake/package.py")
    return sorted(found)


def bill_of_materials(copied):
    """CycloneDX 1.6: what is inside, and what pip brings."""
    def component(name, of_version, purl, licence=None, scope="required"):
        out = {"type": "library", "name": name, "version": of_version, "purl": f"pkg:{purl}@{of_version}", "bom-ref": name, "scope": scope}
        return {**out, "licenses": [{"expression": licence}]} if licence else out

    inside = [component(name, debian_version(name), f"deb/debian/{name}", licence)
              for name, licence in sorted({**COMPILED_IN, **COPIED}.items()) if name in COMPILED_IN or name in copied]
    by_pip = [component(name, pinned, f"pypi/{name}") for name, pinned in sorted(requirements().items())]
    name = {"type": "application", "name": "lmlaunch", "version": version(), "bom-ref": "lmlaunch", "licenses": [{"expression": "Apache-2.0"}],
            "purl": f"pkg:pypi/lmlaunch@{version()}"}
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": name}, "components": inside + by_pip,
            "dependencies": [{"ref": "lmlaunch", "dependsOn": [part["bom-ref"] for part in inside + by_pip]}]}


def wheel_name():
    return f"lmlaunch-{version()}-{TAG}.whl"


def metadata():
    lines = ["Metadata-Version: 2.4", "Name: lmlaunch", f"Version: {version()}", "Summary: Fine-tunes language models from one TOML file",
             "License-Expression: Apache-2.0", "License-File: LICENSE", "Requires-Python: >=3.11,<3.15", "Description-Content-Type: text/markdown",
             *(f"Requires-Dist: {requires_dist(*one)}" for one in requirements().items())]
    return "\n".join(lines) + "\n\n" + (ROOT / "packaging" / "description.md").read_text()


def write_wheel(path, package, bill, copied):
    info = f"lmlaunch-{version()}.dist-info"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        def add(name, data, executable=False):
            entry = zipfile.ZipInfo(name)  # its default date, so that the same build gives the same wheel
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow([name, f"sha256={digest}", len(data)])

        for file in sorted(package.rglob("*")):
            if file.is_file():
                add(f"lmlaunch/{file.relative_to(package)}", file.read_bytes(), file.parent.name == "bin")
        add(f"{info}/METADATA", metadata().encode())
        add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: lmlaunch\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode())
        add(f"{info}/entry_points.txt", b"[console_scripts]\nlmlaunch = lmlaunch:main\n")
        add(f"{info}/licenses/LICENSE", (ROOT / "LICENSE").read_bytes())
        for name in sorted({*COMPILED_IN, *copied}):
            add(f"{info}/licenses/{name}", Path(f"/usr/share/doc/{name}/copyright").read_bytes())
        add(f"{info}/sboms/lmlaunch.cdx.json", bill)
        rows.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record.getvalue())


def main():
    build = Path(sys.argv[1]).resolve()
    out = build / "package"
    shutil.rmtree(out, ignore_errors=True)
    package = out / "lmlaunch"
    package.mkdir(parents=True)
    fill(build, package)
    for file in [*(package / "bin").iterdir(), *(package / "lib").iterdir()]:
        if found := too_new(file):
            sys.exit(f"{file.name} needs {', '.join(found)}, which {TAG} does not promise: launcher/older_library.cpp says how to ask for older ones")
    copied = copied_packages(build, package)
    bill = json.dumps(bill_of_materials(copied), indent=1).encode()
    wheel = out / wheel_name()
    write_wheel(wheel, package, bill, copied)
    (out / "lmlaunch.cdx.json").write_bytes(bill)
    size = wheel.stat().st_size
    print(f"{wheel}: {size / 1e6:.1f} MB of at most {MAX_BYTES / 1e6:.0f}")
    return 0 if size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
