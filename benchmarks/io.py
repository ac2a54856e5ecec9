"""How much of the disk's speed does the transfer queue reach? fio is the ceiling: the same block size, depth, O_DIRECT,
registered buffers and memory footprint, on a file of the same size in the same directory. Huge pages are faster by
themselves (a request is then one segment for the disk's driver, not 256), so "fio" is given them too, through glibc;
"fio, 4 KiB pages" is fio as it comes.

All take turns, so that a change of the disk's speed hits all; medians of the rounds, and the median of each round's
ratio. Kernel CPU is what the process spent in the kernel per GB. Prints the checksum's speed, too.
Usage: io.py BIN_DIR [--smoke] [--directory .] [--rounds 9] [--mib 512] [--block-kib 1024] [--depth 16] [--engine auto|threads]
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure, Figures, common_options

MODES = {"read": "read", "write": "write", "both": "rw"}  # ours: fio's


class Ours:
    """The benchmark's process: one line in, one line out."""

    def __init__(self, binary, directory, args):
        self.process = subprocess.Popen(
            [str(binary), "serve", directory, str(args.mib), str(args.block_kib), str(args.depth), args.engine],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.engine = self.answer()["engine"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"bench_io ended with {self.process.wait()}")
        return json.loads(line)

    def run(self, mode):
        self.process.stdin.write(mode + "\n")
        self.process.stdin.flush()
        return self.answer()

    def finish(self):
        self.process.stdin.close()
        self.process.wait()


def fio(path, mode, args, huge_pages):
    """One run of fio over the file: GB/s, kernel ms per GB."""
    environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {})
    out = subprocess.run(
        ["fio", "--name=x", f"--filename={path}", f"--rw={MODES[mode]}", f"--size={args.mib}M", f"--bs={args.block_kib}k",
         f"--iodepth={args.depth}", "--direct=1", "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1",
         "--overwrite=1", "--scramble_buffers=0", "--thread=1", "--output-format=json"], capture_output=True, text=True, env=environment)
    if out.returncode != 0:
        sys.exit(f"fio failed: {out.stderr or out.stdout}")
    job = json.loads(out.stdout[out.stdout.index("{"):])["jobs"][0]
    gb = (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 1e9
    seconds = max(job["read"]["runtime"], job["write"]["runtime"], 1) / 1e3
    return {"gbps": gb / seconds, "kernel_ms_per_gb": job["sys_cpu"] / 100 * job["job_runtime"] / gb}


def measure(binary, directory, args):
    """The engine's description, and per mode the rounds' results by side."""
    path = Path(directory) / "fio.bin"
    ours = Ours(binary, directory, args)
    sides = {"ours": ours.run, "fio": lambda mode: fio(path, mode, args, True)}
    if not args.smoke:
        sides["fio, 4 KiB pages"] = lambda mode: fio(path, mode, args, False)
    for mode in ("write", "write", "read", "both"):  # the first write makes reserved space into written space
        for run in sides.values():
            run(mode)
    rows = {mode: [] for mode in MODES}
    names = list(sides)
    for _ in range(args.rounds):
        for mode in MODES:
            rows[mode].append({name: sides[name](mode) for name in names})
            names = names[1:] + names[:1]  # who comes second may find the disk in another state
    ours.finish()
    return ours.engine, rows


def main():
    parser = common_options(__doc__)
    parser.add_argument("--directory", default=".")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--mib", type=int)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--engine", default="auto")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.smoke else 9)
    args.mib = args.mib or (64 if args.smoke else 512)
    figures = Figures(args, [figure for mode in MODES for figure in (
        Figure(f"{mode}: GB/s", "x", "fio", at_least=0.95),
        Figure(f"{mode}: kernel CPU", "ms/GB", "fio", at_most=25))])
    if shutil.which("fio") is None:
        figures.fail("no fio here, so there is nothing to compare with: ./dev build installs it")
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench_io_") as directory:
        engine, rows = measure(args.bin_dir / "bench_io", directory, args)

    print(f"Transfers of {args.block_kib} KiB, {args.depth} under way, over {args.mib} MiB, medians of {args.rounds} rounds")
    print(f"ours: {engine}")
    print(f"{'':6} {'':16} {'GB/s':>8} {'of fio':>8} {'kernel ms/GB':>13}")
    for mode, row in rows.items():
        gbps, kernel, of_fio = {}, {}, {}
        for side in row[0]:
            gbps[side], kernel[side] = (statistics.median(r[side][key] for r in row) for key in ("gbps", "kernel_ms_per_gb"))
            of_fio[side] = statistics.median(r[side]["gbps"] / r["fio"]["gbps"] for r in row)
            print(f"{mode:6} {side:16} {gbps[side]:8.2f} {of_fio[side]:8.1%} {kernel[side]:13.1f}")
        figures.set(f"{mode}: GB/s", of_fio["ours"], f"fio, {gbps['fio']:.2f} GB/s")
        figures.set(f"{mode}: kernel CPU", kernel["ours"], f"fio, {kernel['fio']:.1f} ms/GB")
    if not args.smoke:
        subprocess.run([str(args.bin_dir / "bench_io"), "checksum"], check=True)
    figures.finish()


if __name__ == "__main__":
    main()
