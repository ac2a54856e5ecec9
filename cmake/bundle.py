"""Makes BUILD/bundle, everything gpu_checks.sh needs on a machine that has a driver and a Python with the same torch, and
BUILD/bundle.tar.xz, as which it travels (there: python3 -m tarfile -e bundle.tar.xz).

Run: python cmake/bundle.py BUILD. Executables are stripped into bin/, shared libraries that come neither with torch nor with
every Linux go into lib/, the Python of the checks into checks/. Fails when the archive is over 30 MiB: more is not carried
there.
"""

import lzma
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

MAX_MIB, MAX_CHECKS_MIB = 30, 5  # of the archive, of checks/ unpacked
# Every executable holds the same libraries of ours once more, so what shrinks them is a window that reaches back over many of
# them: 208 MiB become 13.9 in 12 s. Other presets with this window: 3 makes 13.7 MiB in 24 s, 6 makes 12.7 in 104 s.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 128 << 20}]
# Beside the tests and benchmarks that gpu_checks.sh runs.
PROGRAMS = ["lmlaunch", "lmlaunch-cpu", "lmlaunch-cuda", "parity_tool_gpu"]
# Part of every Linux, or of torch and the CUDA wheels beside it: taken from the machine, since two copies of a run-time
# library in one process are worse than an older one.
ON_THE_MACHINE = re.compile(r"^(ld-linux|libc\.|libm\.|libdl\.|librt\.|libpthread\.|libresolv\.|libutil\.|libstdc\+\+|libgcc_s|"
                            r"libgomp|libtorch|libc10|libcu|libnv|libnccl|libshm|libaoti|linux-vdso)")


def shared_libraries(executable):
    """Paths of the libraries that `executable` loads, as this machine resolves them."""
    out = subprocess.run(["ldd", executable], capture_output=True, text=True, check=True).stdout
    for line in out.splitlines():
        match = re.match(r"\s*(\S+)(?: => (\S+))? \(0x", line)
        if match:
            yield Path(match[1]).name, match[2]


def copy_checks(root, checks):
    """The Python beside the executables, and models with transformers' results for where that is not installed."""
    checks.mkdir()
    for name in ("gpu/checks", "gpu/smoke", "gpu/parity", "gpu/peers", "gpu/resume", "parity/bounds", "parity/reference", "parity/expert_files",
                 "parity/tiny_families", "parity/tiny_models", "parity/tool"):
        shutil.copy(root / "tests" / f"{name}.py", checks)
    subprocess.run([sys.executable, "-B", checks / "parity.py", "--make", checks / "fixtures"], check=True,
                   stderr=subprocess.DEVNULL)
    size = size_mib(checks)
    if size > MAX_CHECKS_MIB:
        sys.exit(f"{checks}: {size:.1f} MiB, more than {MAX_CHECKS_MIB}")


def size_mib(path):
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()) / 2**20


def pack(directory, archive):
    """The directory under its name; of no user, since who unpacks it is another one."""

    def of_nobody(info):
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with lzma.open(archive, "wb", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w|") as tar:
        tar.add(directory, directory.name, filter=of_nobody)


def main():
    build = Path(sys.argv[1])
    root = Path(__file__).resolve().parent.parent
    bundle = build / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    (bundle / "bin").mkdir(parents=True)
    (bundle / "lib").mkdir()
    lists = ("gpu_tests.txt", "gpu_benchmarks.txt")
    for program in PROGRAMS + [name for file in lists for name in (build / file).read_text().split()]:
        file = build / "bin" / program
        for name, path in shared_libraries(file):
            if path and not ON_THE_MACHINE.match(name):
                shutil.copy(path, bundle / "lib" / name)
        subprocess.run(["strip", "-s", "-o", bundle / "bin" / program, file], check=True)
    for name in lists:
        shutil.copy(build / name, bundle / name)
    shutil.copytree(build / "share", bundle / "share")  # the program that prepares data
    copy_checks(root, bundle / "checks")
    script = bundle / "gpu_checks.sh"
    shutil.copy(root / "cmake" / "gpu_checks.sh", script)
    script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    archive = build / "bundle.tar.xz"
    pack(bundle, archive)
    size = size_mib(archive)
    print(f"{bundle}: {size_mib(bundle):.1f} MiB, {len(list((bundle / 'bin').iterdir()))} executables, "
          f"{len((bundle / 'gpu_tests.txt').read_text().split())} GPU tests; {archive}: {size:.1f} MiB of at most {MAX_MIB}")
    return 0 if size <= MAX_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
