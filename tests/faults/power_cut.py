"""A checkpoint that was seen is a checkpoint that is kept: a save is killed at every one of its system calls, then the power of
its file system is cut, and what a start finds afterwards is judged.

  power_cut.py [--short]

For each of ext4 and XFS (on loop devices; root), with and without its journal, for each engine, and for each kind of save: of the
next checkpoint, of one that takes the place of an earlier one of its step, and of a run's first, in a runs/ that did not exist.
After each cut: every checkpoint that has a name verifies, one that was reported COMMITTED is there, there always is one where there
was one before, and the next save succeeds and leaves no litter. --short: the next checkpoint's save through one engine, and every
mistake; of a run's first the order of calls alone.

The suite also shows that it would see a mistake: a call that makes something durable is skipped (strace answers in its place), or
the earlier checkpoint goes first. The order of calls is judged apart from file systems, too, by what POSIX promises: that a
directory must be synced for its names to last, ext4 and XFS do not show."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import BIN, Row

TOOL = str(BIN / "save_tool")
CALLS = "mkdir,open,openat,fallocate,ftruncate,io_uring_setup,io_uring_enter,pwrite64,fdatasync,fsync,write,rename,renameat,renameat2,unlink,unlinkat,rmdir,close"
STRACE = ["strace", "-f", "-y", "-qq", "-e", "signal=none", "-e", "trace=" + CALLS]
IMAGES = {"ext4": "24M", "xfs": "320M"}
CUTS = ["drop-journal", "keep-journal"]
# What is on the disk before, the step that is saved, and the steps and seeds that may be there afterwards.
KINDS = {
    "next": {"before": [(1, 10)], "save": (2, 20)},
    "again": {"before": [(1, 10)], "save": (1, 20)},
    "first": {"before": [], "save": (1, 20), "directory": "runs/new/checkpoints"},
}
# Calls that are answered without being made, or words for the tool.
MISTAKES = {
    "shard not synced": {"skip": "fdatasync:retval=0", "mode": "buffered"},
    "manifest not synced": {"skip": "fsync:retval=0:when=1"},
    "name not synced": {"skip": "fsync:retval=0:when=3"},
    "earlier checkpoint deleted first": {"words": ["delete-first"]},
}


def sh(*argv):
    return subprocess.run([str(word) for word in argv], capture_output=True, text=True)


def must(*argv):
    done = sh(*argv)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {done.stdout}{done.stderr}")
    return done


class Disk:
    """An image in memory, made once for what lies on it before a save, and copied for each try."""

    def __init__(self, work, system):
        self.work, self.system, self.mounted = work, system, False
        self.mount_point = work / "mount"
        self.checkpoints = self.mount_point / "checkpoints"

    def prepare(self, kind):
        self.checkpoints = self.mount_point / KINDS[kind].get("directory", "checkpoints")

    def base(self, kind):
        self.prepare(kind)
        image = self.work / f"{self.system}-{kind}.img"
        if not image.exists():
            must("truncate", "-s", IMAGES[self.system], image)
            must(f"mkfs.{self.system}", "-q", image)
            self.mount(image)
            for step, seed in KINDS[kind]["before"]:
                must(TOOL, "save", self.checkpoints, step, seed, "uring", "direct")
            self.unmount()
        return image

    def fresh(self, kind):
        image = self.work / "now.img"
        must("cp", "--sparse=auto", self.base(kind), image)
        self.mount(image)

    def mount(self, image=None):
        must("mount", "-o", "loop", image or self.work / "now.img", self.mount_point)
        self.mounted = True

    def unmount(self):
        device = must("findmnt", "-no", "SOURCE", self.mount_point).stdout.strip()
        for _ in range(1000):  # a killed owner of a ring keeps the mount busy for some milliseconds
            done = sh("umount", self.mount_point)
            if done.returncode == 0:
                self.mounted = False
                return self.wait_for_detach(device)
            time.sleep(0.01)
        raise RuntimeError(done.stderr)

    @staticmethod
    def wait_for_detach(device):
        """The kernel lets go of a loop device some time after its mount; a mount that takes over such a device gets EIO."""
        for _ in range(1000):
            if sh("losetup", device).returncode != 0:
                return
            time.sleep(0.01)
        raise RuntimeError(f"{device} stays attached")

    def cut_power(self, how):
        must(TOOL, "cut", self.mount_point, how)
        self.unmount()
        self.mount()

    def found(self):
        """{step: seed, or why it is damaged}"""
        lines = must(TOOL, "check", self.checkpoints).stdout.splitlines()
        return {int(step): int(rest) if rest.isdigit() else rest for step, rest in (line.split(" ", 1) for line in lines)}


def save_command(disk, kind, engine, mode="direct", words=()):
    disk.prepare(kind)
    step, seed = KINDS[kind]["save"]
    return [TOOL, "save", str(disk.checkpoints), str(step), str(seed), engine, mode, *words]


def kill_points(disk, kind, command):
    """(call, n) from the first call that concerns checkpoints on; strace counts each call of each thread apart."""
    disk.fresh(kind)
    lines = must(*STRACE, *command).stderr.splitlines()
    disk.unmount()
    count, points, begun = {}, {}, False
    for line in lines:
        if not (found := re.match(r"(?:\[pid +(\d+)\] )?(\w+)\(", line)):
            continue  # the second half of a call that another thread interrupted
        thread, call = found.groups()
        count[thread, call] = count.get((thread, call), 0) + 1
        begun = begun or str(disk.mount_point) in line
        if begun:
            points[call, count[thread, call]] = None
    return list(points) + [("close", 9999)], lines  # and a try that is not killed


def try_once(disk, kind, command, call, nth, cut, skip=None):
    """What is wrong afterwards, in a list."""
    disk.fresh(kind)
    inject = ["-e", f"inject={call}:signal=KILL:when={nth}"]
    if skip:
        inject += ["-e", "inject=" + skip]
    run = sh(*STRACE, *inject, *command)
    if run.returncode not in (0, -9):
        raise RuntimeError(f"save: exit {run.returncode}: {run.stderr[-2000:]}")
    disk.cut_power(cut)
    step, seed = KINDS[kind]["save"]
    found, wrong = disk.found(), []
    committed = "COMMITTED" in run.stdout
    if any(isinstance(state, str) for state in found.values()):
        wrong.append("visible but corrupt")
    if committed and found.get(step) != seed:
        wrong.append("committed then lost")
    allowed = {*KINDS[kind]["before"], (step, seed)}
    if KINDS[kind]["before"] and not any((s, state) in allowed for s, state in found.items()):
        wrong.append("nothing loadable")
    if not wrong:
        must(TOOL, "save", disk.checkpoints, 3, 30, "uring", "direct")
        if disk.found() != {3: 30} or sorted(os.listdir(disk.checkpoints)) != ["step_00000003"]:
            wrong.append(f"the next save leaves {sorted(os.listdir(disk.checkpoints))}")
    disk.unmount()
    return wrong, run.returncode != 0, committed


def judged(disk, kind, engine):
    """The points at which its save may be killed, and what is wrong with the order of its calls."""
    points, lines = kill_points(disk, kind, save_command(disk, kind, engine))
    calls = list(completed_calls(lines))
    top = str(disk.mount_point)
    needless, syncs = needless_syncs(calls, str(disk.checkpoints), top)
    failures = [f"{disk.system}, {kind}, {engine}: {breach}" for breach in broken_promises(calls, str(disk.checkpoints), top)]
    failures += [f"{disk.system}, {kind}, {engine}: not judged: {call}" for call in needless] if syncs >= 4 else ["too few syncs are seen"]
    return points, failures


def explore(row, disk, kind, engine):
    command = save_command(disk, kind, engine)
    points, failures = judged(disk, kind, engine)
    for cut in CUTS:
        for call, nth in points:
            wrong, killed, committed = try_once(disk, kind, command, call, nth, cut)
            row.row["tries"] += 1
            row.count("killed" if killed else "not killed")
            row.count("committed" if committed else "not committed")
            for what in wrong:
                row.count(what)
                failures.append(f"{what}: {disk.system}, {cut}, {kind}, {engine}, killed at {call} #{nth}")
    return len(points), failures


def caught(disk, mistake):
    """Where a mistake shows first, or None. Calls that strace answers are not killed at."""
    engine = "threads"
    command = save_command(disk, "next", engine, mistake.get("mode", "direct"), mistake.get("words", ()))
    skipped = mistake.get("skip", "").split(":")[0]
    points, _ = kill_points(disk, "next", save_command(disk, "next", engine, mistake.get("mode", "direct")))
    for call, nth in reversed(points):
        for cut in CUTS:
            if call != skipped and (wrong := try_once(disk, "next", command, call, nth, cut, mistake.get("skip"))[0]):
                return f"{wrong[0]}: {disk.system}, {cut}, killed at {call} #{nth}"
    return None


def completed_calls(lines):
    """Calls in the order in which they ended: of one that another thread interrupted strace writes two halves."""
    begun = {}
    for line in lines:
        thread, call = re.match(r"(?:\[pid +(\d+)\] )?(.*)", line).groups()
        if call.endswith(" <unfinished ...>"):
            begun[thread] = call.removesuffix(" <unfinished ...>")
        elif resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", call):
            yield begun.pop(thread, "") + resumed[1]
        else:
            yield call


def broken_promises(calls, directory, top):
    """What POSIX does not promise of these calls: a file's bytes last from its sync on, a name from the sync of its directory on.
    Below `top` the directory's own name and those above it count, too."""
    bytes_unsynced, names_unsynced, named, out = set(), set(), False, []
    for call in calls:
        verb = call.split("(")[0]
        descriptor = re.match(r"\w+\(\d+<([^>]*)>", call)
        file = descriptor[1] if descriptor else ""
        paths = [path for path in re.findall(r'"([^"]*)"', call) if path.startswith(directory)]
        if verb in ("write", "pwrite64", "fallocate", "ftruncate") and file.startswith(directory):
            bytes_unsynced.add(file)
        elif verb in ("fsync", "fdatasync"):
            bytes_unsynced.discard(file)
            names_unsynced = {name for name in names_unsynced if os.path.dirname(name) != file}
        elif verb == "mkdir" and (new := re.findall(rf'"({re.escape(top)}/[^"]*)"', call)):
            names_unsynced.add(new[0])
        elif verb == "openat" and paths and "O_CREAT" in call:
            names_unsynced.add(paths[0])
            bytes_unsynced.add(paths[0])  # a ring writes unseen
        elif verb.startswith("rename") and len(paths) == 2:
            source, target = paths
            if os.path.dirname(target) == directory and ".tmp-" not in target:
                named = True
                out += [f"{path} gets its name before it lasts" for path in bytes_unsynced | names_unsynced if path.startswith(source + "/")]
            bytes_unsynced = {target + path[len(source):] if path.startswith(source) else path for path in bytes_unsynced}
            names_unsynced = {name for name in names_unsynced if name != source} | {target}
        elif call.startswith("write(1") and "COMMITTED" in call:
            out += [f"COMMITTED before the name of {name} lasts" for name in names_unsynced if ".tmp-" not in name]
            out += [] if named else ["COMMITTED without a name"]
        elif verb in ("unlink", "unlinkat", "rmdir") and not named:
            out.append(f"deleted before the new checkpoint has its name: {call}")
    return out


def needless_syncs(calls, directory, top):
    """Syncs without which no promise would be broken: there are none, or the judge is blind."""
    syncs = [i for i, call in enumerate(calls) if re.match(r"f(data)?sync\(", call) and top in call]
    return [calls[i] for i in syncs if not broken_promises(calls[:i] + calls[i + 1:], directory, top)], len(syncs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    row = Row("power_cut", "a kill or a power cut during a save",
              "SIGKILL at every (system call, n), then a shutdown of the file system (loop), with its journal and without")
    if os.geteuid() != 0:
        row.skip("loop devices need root")
    if missing := [tool for tool in ["strace", "mkfs.ext4", "mkfs.xfs"] if sh("sh", "-c", f"command -v {tool}").returncode]:
        row.skip("not installed: " + ", ".join(missing))
    failures, killed = [], []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory) / "memory"
        work.mkdir()
        if (mounted := sh("mount", "-t", "tmpfs", "-o", "size=900m", "tmpfs", work)).returncode:
            row.skip(f"no tmpfs: {mounted.stderr.strip()}")
        (work / "mount").mkdir()
        disks = [Disk(work, system) for system in IMAGES]
        try:
            for disk in disks:
                try:
                    disk.base("next")
                except RuntimeError as refused:
                    row.skip(str(refused))
                for kind in ["next"] if short else KINDS:
                    for engine in ["uring"] if short else ["uring", "threads"]:
                        points, wrong = explore(row, disk, kind, engine)
                        failures += wrong
                        row.row["figures"][f"points: {disk.system}, {kind}, {engine}"] = points
                if short:
                    failures += judged(disk, "first", "uring")[1]
            for name, mistake in MISTAKES.items():
                for disk in disks[:1] if short else disks:
                    where = caught(disk, mistake)
                    killed.append(where is not None)
                    print(f"{name}: {where or 'NOT CAUGHT'}")
        finally:
            for disk in disks:
                if disk.mounted:
                    disk.unmount()
            must("umount", work)
    for what in ["visible but corrupt", "committed then lost", "nothing loadable"]:
        row.count(what, 0)
    row.row["figures"]["mistakes caught"] = f"{sum(killed)} of {len(killed)}"
    row.write()
    print("\n".join(failures))
    return 1 if failures or not all(killed) else 0


if __name__ == "__main__":
    sys.exit(main())
