#!/usr/bin/env bash
# Checks this bundle on a machine that has a GPU, in at most 8 minutes: the program itself, every GPU test, parity with
# transformers, benchmarks, then transformers and peft beside ours. Needs a driver and a Python with torch 2.11 (LibTorch
# and the CUDA libraries come from there); the last, one with transformers and peft, too.
#
#   ./gpu_checks.sh [--bin DIR] [--seconds N] [--jobs N] [--list] [NAME|BLOCK[=SECONDS]...]
#
# NAME: only these of what --list names; BLOCK: those that --list gives it to (correct, products, slices, rows, host, kernels), each with
# its limit in seconds. Rows of whole models (`rows`) are run only so. --seconds: another limit than 480. --jobs: so many tests at once; otherwise one for
# two cores, at most 8. --bin: other executables than the bundle's. PYTHON=... names the interpreter.
#
# Ends with a table of what passed, failed and did not run; the exit status is 0 only if everything asked for ran and
# passed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checks=$here/checks
[ -e "$checks" ] || checks=$here/../tests/gpu # in the repository

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python /opt/*/.venv/bin/python3 /opt/*/bin/python3 /usr/local/bin/python3 /usr/bin/python3; do
    if "$candidate" -c 'import importlib.metadata as m, sys; sys.exit(not m.version("torch").startswith("2.11."))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

python=$(find_python) || { echo "gpu_checks: no Python with torch 2.11 here; name it: PYTHON=... $0" >&2; exit 2; }
site=$("$python" -c 'import importlib.util, os; print(os.path.dirname(os.path.dirname(importlib.util.find_spec("torch").origin)))')
libraries=$site/torch/lib
for directory in "$site"/nvidia/*/lib; do libraries=$libraries:$directory; done
export LD_LIBRARY_PATH=$libraries:$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LMLAUNCH_PYTHON=$python CUBLAS_WORKSPACE_CONFIG=:4096:8
echo "gpu_checks: torch of $python"
exec "$python" -B "$checks/checks.py" "$@"
