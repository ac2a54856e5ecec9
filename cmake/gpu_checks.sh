#!/usr/bin/env bash
# Runs every GPU test and then every GPU benchmark of this bundle, in at most 8 minutes, on a machine that has a driver
# and a Python with torch 2.11 (LibTorch and the CUDA libraries come from there).
#
#   ./gpu_checks.sh [NAME...]    only these tests and benchmarks; PYTHON=... names the interpreter
#
# The last line counts what passed, failed and did not run; the exit status is 0 only if everything ran and passed.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
deadline=$(($(date +%s) + 480))

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
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "gpu_checks: nvidia-smi failed" >&2

log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=() failed=() late=() skipped=0 # tests skip where they find no device: here that is a failure
# run NAME: prints its output, at most until the deadline.
run() {
  local name=$1 left=$((deadline - $(date +%s))) started=$SECONDS status
  if [ "$left" -lt 5 ]; then late+=("$name"); return; fi
  echo "== $name"
  timeout -k 5 "$left" "$here/bin/$name" | tee "$log"
  status=${PIPESTATUS[0]}
  skipped=$((skipped + $(grep -c '^\[  SKIPPED \] .*ms)$' "$log")))
  echo "== $name: status $status, $((SECONDS - started)) s"
  if [ $status = 0 ]; then passed+=("$name"); elif [ $status = 124 ]; then late+=("$name"); else failed+=("$name($status)"); fi
}

for name in $(cat "$here/gpu_tests.txt" "$here/gpu_benchmarks.txt"); do
  if [ $# = 0 ] || [[ " $* " == *" $name "* ]]; then run "$name"; fi
done
echo "gpu_checks: ${#passed[@]} passed, ${#failed[@]} failed: ${failed[*]:-none}, ${#late[@]} out of time: ${late[*]:-none}, $skipped tests skipped"
[ ${#failed[@]} = 0 ] && [ ${#late[@]} = 0 ] && [ $skipped = 0 ]
