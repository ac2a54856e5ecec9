"""Makes BUILD/bundle: everything gpu_checks.sh needs on a machine that has a driver and a Python with the same torch.

Run: python cmake/bundle.py BUILD. Executables are stripped into bin/, shared libraries that come neither with torch nor with
every Linux go into lib/, the Python of the checks into checks/. Fails when the whole is over 60 MiB: more is not carried there.
"""

import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

MAX_MIB, MAX_CHECKS_MIB = 60, 5
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
    for name in ("gpu/checks", "gpu/smoke", "gpu/parity", "parity/bounds", "parity/reference", "parity/tiny_models", "parity/tool"):
        shutil.copy(root / "tests" / f"{name}.py", checks)
    subprocess.run([sys.executable, "-B", checks / "parity.py", "--make", checks / "fixtures"], check=True,
                   stderr=subprocess.DEVNULL)
    size = sum(file.stat().st_size for file in checks.rglob("*") if file.is_file()) / 2**20
    if size > MAX_CHECKS_MIB:
        sys.exit(f"{checks}: {size:.1f} MiB, more than {MAX_CHECKS_MIB}")


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
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file()) / 2**20
    print(f"{bundle}: {size:.1f} MiB of at most {MAX_MIB}, {len(list((bundle / 'bin').iterdir()))} executables, "
          f"{len((bundle / 'gpu_tests.txt').read_text().split())} GPU tests")
    return 0 if size <= MAX_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
