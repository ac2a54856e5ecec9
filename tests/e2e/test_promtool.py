"""Prometheus' own tool checks what a run exports (its form and values: tests/launcher/prometheus_test.cpp, test_operations.py)."""

import shutil
import subprocess

import pytest

from test_run import config, lmlaunch, work  # noqa: F401


@pytest.fixture
def promtool(tmp_path):
    """Prometheus' tool: the one here, or Debian's, unpacked and not installed, since its package starts a server."""
    if found := shutil.which("promtool"):
        return found
    if not shutil.which("apt-get"):
        pytest.skip("no promtool, and no apt-get to download it with")
    done = subprocess.run(["apt-get", "download", "prometheus"], cwd=tmp_path, capture_output=True, text=True)
    packages = list(tmp_path.glob("prometheus_*.deb"))
    if done.returncode != 0 or not packages:
        pytest.skip(f"no promtool, and apt has no package prometheus: {done.stderr.strip()}")
    subprocess.run(["dpkg-deb", "-x", packages[0], tmp_path / "prometheus"], check=True)
    return tmp_path / "prometheus" / "usr" / "bin" / "promtool"


def test_promtool_accepts_the_exported_metrics(work, promtool):
    lmlaunch(config(work, "checked", log__prometheus="checked.prom", train__eval_every=6, checkpoint__every=4), cwd=work)
    text = (work / "checked.prom").read_bytes()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    # It does read what it is given.
    wrong = subprocess.run([promtool, "check", "metrics"], input=text.replace(b"# TYPE lmlaunch_step gauge", b"# TYPE lmlaunch_step lmlaunch"),
                           capture_output=True)
    assert wrong.returncode != 0
