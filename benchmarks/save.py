"""What does a save cost its step, and how fast is a checkpoint loaded?

A step with a save against its bound: the longest of the same step without a save, its reads, its writes with the save's
among them, and both together, at the rates that the disk has in the same round. Everything resident, and everything
(optimizer, gradients, weights) on disk; all take turns, medians of the rounds. The step's end is when training goes on, the commit comes beside the next one.
A load, of a resident run, against fio's read of the same file, past the page cache both. SmolLM2-135M's shape, full
fine-tuning, bf16, 2k tokens per step; the disk must be a real one.

Usage: save.py BIN_DIR [--smoke] [--path DIR] [--rounds 7] [--sequences 4]
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure, Figures, common_options
from processes import Side
from train_step import LENGTH, shape_of

PLACES = {"resident": [], "on disk": [f"offload.{part}=nvme" for part in ("optimizer", "gradients", "weights")]}


def fio_read(path):
    """GB/s."""
    command = ["fio", "--name=x", f"--filename={path}", "--rw=read", f"--size={Path(path).stat().st_size}", "--bs=1024k", "--iodepth=16",
               "--direct=1", "--ioengine=io_uring", "--readonly", "--thread=1", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"fio failed: {done.stderr or done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]["read"]
    return job["io_bytes"] / 1e9 / (max(job["runtime"], 1) / 1e3)


def bound_ms(plain, save, disk):
    """Of a round's step with a save."""
    written = save["written_bytes"] + save["saved_bytes"]
    moves = (save["read_bytes"] / disk["read"], written / disk["write"], (save["read_bytes"] + written) / disk["both"])
    return max(plain["ms"], *(seconds * 1e3 for seconds in moves))


def main():
    parser = common_options(__doc__)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=4)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.smoke else 7)
    figures = Figures(options, [Figure(f"step with a save, {place}", "x", "the longest of compute, reads and writes", at_most=1.05)
                                for place in PLACES] + [Figure("load", "x", "fio's read", at_least=0.8)])
    if shutil.which("fio") is None:
        figures.fail("no fio here, so there is nothing to compare with: ./dev build installs it")
    with tempfile.TemporaryDirectory(dir=options.path, prefix="bench_save_") as directory:
        rows, loads = measure(options, rounds, directory)
    for place, row in rows.items():
        figure = f"step with a save, {place}"
        save, plain, bound = (statistics.median(one[key] for one in row) for key in ("save", "plain", "bound"))
        ratio = statistics.median(one["save"] / one["bound"] for one in row)
        last = row[-1]["row"]
        print(f"{place:9} step {plain:6.0f} ms, with a save {save:6.0f} ms, bound {bound:6.0f} ms ({ratio:.3f}x); "
              f"compute thread {last['compute_ms']:.0f} ms, commit {last['commit_ms']:.0f} ms later; saves {last['saved_bytes'] / 1e9:.2f} GB, "
              f"reads {last['read_bytes'] / 1e9:.2f} GB, writes {last['written_bytes'] / 1e9:.2f} GB a step")
        figures.set(figure, ratio, f"the longest of compute, reads and writes, {bound:.0f} ms")
    ours, fio = (statistics.median(load[side] for load in loads) for side in ("ours", "fio"))
    print(f"load {ours:.2f} GB/s, fio {fio:.2f} GB/s")
    figures.set("load", statistics.median(load["ours"] / load["fio"] for load in loads), f"fio's read, {fio:.2f} GB/s")
    figures.finish()


def measure(options, rounds, directory):
    running = {}
    for place, settings in PLACES.items():
        home = Path(directory) / place.replace(" ", "_")
        home.mkdir()
        running[place] = Side([str(options.bin_dir / "bench_save"), json.dumps(shape_of(options)), str(options.threads), str(options.sequences),
                               str(LENGTH), str(home), *(settings and [*settings, f"offload.paths={home}"])])
    for side in running.values():  # warm: the first save makes the disk's space
        for command in ("step", "step", "save", "step"):
            side.ask(command)
    rows, loads = {place: [] for place in PLACES}, []
    for _ in range(rounds):
        for place, side in running.items():
            plain, disk, save = side.ask("step"), side.ask("probe"), side.ask("save")
            side.ask("step")  # fills what the save has left
            rows[place].append({"plain": plain["ms"], "save": save["ms"], "bound": bound_ms(plain, save, disk), "row": save})
        file = rows["resident"][-1]["row"]["file"]
        fio = [fio_read(file)]
        load = running["resident"].ask("load")
        fio.append(fio_read(file))
        loads.append({"ours": load["bytes"] / 1e6 / load["ms"], "fio": statistics.mean(fio)})
    for side in running.values():
        side.finish()
    return rows, loads


if __name__ == "__main__":
    main()
