"""How much of the disk's speed does the transfer queue reach? fio is the ceiling: the same block size, depth, O_DIRECT,
registered buffers and memory footprint, on a file of the same size in the same directory.

Both take turns, so that a change of the disk's speed hits both; medians of the rounds, and the median of each round's
ratio. Kernel CPU is what the process spent in the kernel per GB. Prints a table, the checksum's speed and one JSON line.
Usage: io.py BIN_DIR [--directory .] [--rounds 9] [--mib 512] [--block-kib 1024] [--depth 16] [--engine auto|threads]
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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


def fio(path, mode, args):
    """One run of fio over the file: GB/s, kernel ms per GB."""
    out = subprocess.run(
        ["fio", "--name=x", f"--filename={path}", f"--rw={MODES[mode]}", f"--size={args.mib}M", f"--bs={args.block_kib}k",
         f"--iodepth={args.depth}", "--direct=1", "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1",
         "--overwrite=1", "--thread=1", "--output-format=json"], capture_output=True, text=True)
    if out.returncode != 0:
        sys.exit(f"fio failed: {out.stderr or out.stdout}")
    job = json.loads(out.stdout[out.stdout.index("{"):])["jobs"][0]
    gb = (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 1e9
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    return {"gbps": gb / seconds, "kernel_ms_per_gb": job["sys_cpu"] / 100 * job["job_runtime"] / gb}


def measure(binary, directory, args):
    path = Path(directory) / "fio.bin"
    ours = Ours(binary, directory, args)
    rows = {mode: [] for mode in MODES}
    have_fio = shutil.which("fio") is not None
    if not have_fio:
        print("fio is missing (apt-get install fio): our figures without the ceiling")
    for mode in ("write", "write", "read", "both"):  # the first write makes reserved space into written space
        ours.run(mode)
        if have_fio:
            fio(path, mode, args)
    for round_number in range(args.rounds):
        for mode in MODES:
            order = [("ours", lambda: ours.run(mode))]
            if have_fio:
                order.append(("fio", lambda: fio(path, mode, args)))
            if round_number % 2:  # who comes second may find the disk's cache in another state
                order.reverse()
            rows[mode].append({name: work() for name, work in order})
    ours.finish()
    return ours.engine, rows, have_fio


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("--directory", default=".")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--engine", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench_io_") as directory:
        engine, rows, have_fio = measure(args.bin_dir / "bench_io", directory, args)

    print(f"Transfers of {args.block_kib} KiB, {args.depth} under way, over {args.mib} MiB, medians of {args.rounds} rounds")
    print(f"ours: {engine}")
    print(f"{'':6} {'ours GB/s':>10} {'fio GB/s':>10} {'achieved':>9} {'ours kernel ms/GB':>18} {'fio kernel ms/GB':>17} "
          f"{'ours user ms/GB':>16}")
    result = {"benchmark": "io", "engine": engine, "block_kib": args.block_kib, "depth": args.depth, "mib": args.mib,
              "rounds": args.rounds}
    for mode, row in rows.items():
        def median(side, key):
            return statistics.median(r[side][key] for r in row) if side in row[0] else float("nan")
        ratio = statistics.median(r["ours"]["gbps"] / r["fio"]["gbps"] for r in row) if have_fio else None
        print(f"{mode:6} {median('ours', 'gbps'):10.2f} {median('fio', 'gbps'):10.2f} "
              f"{f'{ratio:.1%}' if have_fio else '-':>9} {median('ours', 'kernel_ms_per_gb'):18.1f} "
              f"{median('fio', 'kernel_ms_per_gb'):17.1f} {median('ours', 'user_ms_per_gb'):16.1f}")
        result[mode] = {"gbps": round(median("ours", "gbps"), 3), "achieved": ratio and round(ratio, 3),
                        "kernel_ms_per_gb": round(median("ours", "kernel_ms_per_gb"), 1)}
        if have_fio:
            result[mode]["fio_gbps"] = round(median("fio", "gbps"), 3)
    subprocess.run([str(args.bin_dir / "bench_io"), "checksum"], check=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
