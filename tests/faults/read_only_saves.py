"""A file system that turns read-only while a run saves to it: the run goes on, says so (CKPT-03) and tries again
when the next save is due. What was saved before is untouched, and
once the file system can be written again the run's next save succeeds.

  read_only_saves.py [--short]

It is remounted between two saves; or it turns by itself in the middle of one (ext4, errors=remount-ro, an error made by the kernel's
own trigger while strace holds the save), after which it has to be mounted anew. Root. --short: each once."""

import argparse
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from full_disk_saves import FAILED, begin, disk, goes_on, hashes, held, must, prepare, saved_once, sh
from rows import Row


def remount(at, way):
    """Not while a save has its files open."""
    deadline = time.monotonic() + 30
    while sh("mount", "-o", f"remount,{way}", at).returncode:
        assert time.monotonic() < deadline, f"cannot remount {at} {way}"
        time.sleep(0.02)


def committed_again(run):
    run.wait_for("COMMITTED", len(re.findall("COMMITTED", run.text())) + 1)
    run.stop()


def right_words(text):
    failed = [line for line in text.splitlines() if re.search(FAILED, line)]
    assert failed and all("EROFS" in line for line in failed), text[-3000:]
    assert "free space" not in text, text[-3000:]


def for_a_while(run, at):
    remount(at, "ro")
    before = hashes(at)
    run.wait_for(FAILED, 2)
    right_words(run.text())
    assert hashes(at) == before and before and not list(at.glob("*.tmp-*"))
    remount(at, "rw")
    committed_again(run)


def in_a_save(run, at):
    device = must("findmnt", "-no", "SOURCE", at).stdout.strip()
    before, deadline = hashes(at), time.monotonic() + 60
    while not list(at.glob("*.tmp-*/*")):
        before = hashes(at)
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.002)
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("a test's error")
    run.wait_for(FAILED)
    right_words(run.text())
    assert hashes(at) == before and before
    image = must("losetup", "-nO", "BACK-FILE", device).stdout.strip()
    while sh("umount", at).returncode:  # the save's last file closes a moment later
        assert time.monotonic() < deadline, f"{at} is busy"
        time.sleep(0.02)
    must("mount", "-o", "loop,errors=remount-ro", image, at)
    assert hashes(at) == before
    committed_again(run)


SCENARIOS = [("tmpfs", "for a while", for_a_while, ()), ("ext4", "in a save", in_a_save, held("delay_exit=3s")), ("ext4", "for a while", for_a_while, ())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    scenarios = SCENARIOS[:2] if parser.parse_args().short else SCENARIOS
    row = Row("read_only_saves", "a file system turns read-only at a save",
              "tmpfs and ext4 remounted between saves, ext4 by an error of its own under one; through lmlaunch")
    if os.geteuid() != 0:
        row.skip("mounting a file system needs root")
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        for system, name, scenario, strace in scenarios:
            run_name = f"{system}-{name.replace(' ', '_')}"
            at = work / "runs" / run_name / "checkpoints"
            row.row["tries"] += 1
            begin(work, run_name)
            with disk(system, work, at):
                run = None
                try:
                    run = saved_once(work, run_name, strace=strace)
                    scenario(run, at)
                    goes_on(work, run_name, at)
                    row.count("as specified")
                    print(f"{system}, {name}: as specified", flush=True)
                except (AssertionError, RuntimeError, OSError, subprocess.TimeoutExpired) as what:
                    row.count("wrong")
                    wrong.append(f"{system}, {name}: {what}")
                finally:
                    if run is not None:
                        run.kill()
    row.write()
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
