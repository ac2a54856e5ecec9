"""A file system that turns read-only, or goes, while a run saves to it: the run goes on, says so (CKPT-03) with the kernel's reason,
and tries again when the next save is due; after three failures in a row it ends with exit 21, its model, and words about that
reason. What was saved before is untouched, and once the file system can be written again saves succeed.

  read_only_saves.py [--short]

It is remounted between two saves, tmpfs and ext4; or an ext4 turns so by itself while a save is under way (errors=remount-ro, an
error made by the kernel's own trigger while strace holds the save), or is shut down, as by a controller that is lost; then only a
new mount helps, before which the run has ended: a save in between would find the directory below. Root. --short: some of this."""

import argparse
import fcntl
import os
import re
import struct
import tempfile
import time
from pathlib import Path

from full_disk_saves import FAILED, hashes, held, must, prepare, sh, try_scenario
from rows import Row

SHUT_DOWN = 0x8004587D  # _IOR('X', 125, __u32)
MODEL = r"kept: the model after step \d+, in \S+model"


def remount(at, way):
    """Not while a save has its files open."""
    deadline = time.monotonic() + 30
    while sh("mount", "-o", f"remount,{way}", at).returncode:
        assert time.monotonic() < deadline, f"cannot remount {at} {way}"
        time.sleep(0.02)


def mount_anew(at):
    """What has turned read-only by an error stays so until then."""
    device = must("findmnt", "-no", "SOURCE", at).stdout.strip()
    image = must("losetup", "-nO", "BACK-FILE", device).stdout.strip()
    deadline = time.monotonic() + 30
    while sh("umount", at).returncode:  # the run's last file closes a moment later
        assert time.monotonic() < deadline, f"{at} is busy"
        time.sleep(0.02)
    must("mount", "-o", "loop,errors=remount-ro", image, at)


def failures(text):
    return [line for line in text.splitlines() if re.search(FAILED, line)]


def right_words(text, cause):
    failed = failures(text)
    assert failed and all(f"{cause}:" in line for line in failed), text[-3000:]
    assert "free space" not in text, text[-3000:]


def gives_up(run, cause, after):
    """The third failure in a row is the last one: what is told, and the words that are about the cause."""
    text = run.ended(21)
    right_words(text, cause)
    last = text[text.rindex("(exit 21)"):]
    assert len(failures(text)) == 2 and "cannot be saved" in last and f"{cause}:" in last, text[-3000:]
    assert re.search(MODEL, text) and re.search(f"next: .*{after}.*set run.dir", last) and "offload.paths" not in last, text[-3000:]
    assert (run.work / "runs" / run.name / "model" / "model.safetensors").stat().st_size > 0


# Each gets a run that has just committed a checkpoint, and the file system; and ends the run.

def for_a_while(run, at):
    remount(at, "ro")
    before = hashes(at)
    run.wait_for(FAILED, 2)
    right_words(run.text(), "EROFS")
    assert hashes(at) == before and before
    remount(at, "rw")
    run.wait_for("COMMITTED", len(re.findall("COMMITTED", run.text())) + 1)
    run.stop()


def for_good(run, at):
    remount(at, "ro")
    before = hashes(at)
    gives_up(run, "EROFS", "dmesg.*read-only.*writable")
    assert hashes(at) == before and before and not list(at.glob("*.tmp-*"))
    remount(at, "rw")


def under_a_save(hurt, cause, after):
    """strace holds each save where it has just reserved its shard, or could not, for seconds."""
    def scenario(run, at):
        before, deadline = hashes(at), time.monotonic() + 60
        while not list(at.glob("*.tmp-*/*")):
            before = hashes(at)
            assert time.monotonic() < deadline, run.text()
            time.sleep(0.002)
        hurt(at)
        gives_up(run, cause, after)
        mount_anew(at)
        assert hashes(at) == before and before
    return scenario


def error_of_its_own(at):
    device = must("findmnt", "-no", "SOURCE", at).stdout.strip()
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("a test's error")


def shut_down(at):
    directory = os.open(at, os.O_RDONLY)
    try:
        fcntl.ioctl(directory, SHUT_DOWN, struct.pack("I", 2))  # nothing more is written, the journal neither
    finally:
        os.close(directory)


SCENARIOS = [("tmpfs", "read-only for a while", for_a_while, ()),
             ("ext4", "read-only for good", for_good, ()),
             ("ext4", "an error under a save", under_a_save(error_of_its_own, "EROFS", "dmesg.*read-only.*writable"), held("delay_exit=3s")),
             ("ext4", "shut down under a save", under_a_save(shut_down, "EIO", "dmesg"), held("delay_exit=3s")),
             ("ext4", "read-only for a while", for_a_while, ()),
             ("tmpfs", "read-only for good", for_good, ()),
             ("ext4", "an error before a shard is written", under_a_save(error_of_its_own, "EROFS", "dmesg.*read-only.*writable"),
              held("error=EOPNOTSUPP:delay_exit=3s"))]
SHORT = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    scenarios = SCENARIOS[:SHORT] if parser.parse_args().short else SCENARIOS
    row = Row("read_only_saves", "a file system turns read-only at a save",
              "tmpfs and ext4 remounted between saves, ext4 by an error of its own and shut down under one; through lmlaunch")
    if os.geteuid() != 0:
        row.skip("mounting a file system needs root")
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        for system, name, scenario, strace in scenarios:
            wrong += try_scenario(work, row, system, name, scenario, strace)
    row.write()
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
