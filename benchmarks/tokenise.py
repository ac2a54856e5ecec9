"""Does text become tokens as fast as the tokenizers library makes them, in little memory, and does a killed run go on?

1 GB of JSONL, rows of 200 to 4000 characters out of the source text of Python's own library, and a BPE of 8192 words trained on it.
Ours: prepare.py from file to token file, on all cores. Against it: encode_batch_fast on the same texts, already in memory, with the
library's own threads. Memory is that of prepare.py and its processes: the rank that has started it, and waits, is not counted. Then
the same is killed at half and started again. --smoke: 12 MB.

Usage: tokenise.py BIN_DIR [--megabytes 1000] [--smoke] [--impossible]
"""

import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from figures import Figure, Figures, common_options

MIB = 1 << 20


def corpus():
    """About 30 MB of text, in a fixed order."""
    out = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            out.append(path.read_text(encoding="utf-8", errors="ignore"))
    return "".join(out)


def make(work, megabytes):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = corpus()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([text[:4_000_000]], trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.save(str(work / "tokenizer.json"))
    (work / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    drawn, size = random.Random(1), 0
    with open(work / "data.jsonl", "w") as file:
        while size < megabytes * 1_000_000:
            start, length = drawn.randrange(len(text) - 4000), drawn.randint(200, 4000)
            size += file.write(json.dumps({"text": text[start:start + length]}) + "\n")


LIBRARY = """
import json, os, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
texts = []
with open(sys.argv[1] + "/data.jsonl") as file:
    for line in file:
        texts.append(json.loads(line)["text"])
        if len(texts) == int(sys.argv[2]):
            break
tokenizer.encode_batch_fast(texts[:64])
count, start = 0, time.perf_counter()
for first in range(0, len(texts), 1000):
    count += sum(len(e.ids) for e in tokenizer.encode_batch_fast(texts[first:first + 1000], add_special_tokens=True))
print(count / (time.perf_counter() - start))
"""


def library_rate(work, rows):
    """Tokens per second of the library, with its threads."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(cores())}
    return float(subprocess.run([sys.executable, "-c", LIBRARY, work, str(rows)], env=environment, check=True, capture_output=True, text=True).stdout)


def cores():
    return len(os.sched_getaffinity(0))


def memory_of(process):
    """Of it and its children, shared pages once, in bytes."""
    def below(pid):
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return [pid]
        return [pid] + [p for child in children for p in below(child)]

    total = 0
    for pid in below(process):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            pass
    return total


def prepare(program, work, name, kill_at=None, save_seconds=10):
    """(seconds, peak memory, what it says on stdout); killed when that share of its tokens is written."""
    request = {"files": [str(work / "data.jsonl")], "format": "auto", "model_dir": str(work), "loss_on": "completion", "workers": cores(),
               "out": str(work / name), "key": "00" * 16, "save_seconds": save_seconds}
    (work / "request").write_text(json.dumps(request))
    start, peak = time.perf_counter(), 0
    with subprocess.Popen([sys.executable, "-I", "-B", program, work / "request"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            if kill_at is not None and (work / name).exists() and (work / name).stat().st_size >= kill_at:
                process.kill()
                return time.perf_counter() - start, peak, ""
            time.sleep(0.25)
        return time.perf_counter() - start, peak, process.stdout.read()


def main():
    parser = common_options(__doc__)
    parser.add_argument("--megabytes", type=int, default=None)
    options = parser.parse_args()
    megabytes = options.megabytes or (12 if options.smoke else 1000)
    figures = Figures(options, [
        Figure("tokens per second", "x", "encode_batch_fast of texts in memory, with its own threads", at_least=0.8),
        Figure("peak memory", "MiB", "all processes of prepare.py, shared pages once; not the rank that waits", at_most=300),
        Figure("killed at half and started again", "x", "the time of a run that nobody kills", at_most=1.3),
        Figure("the file after a kill", "x", "1: the bytes of a run that nobody kills", at_least=1)])
    program = options.bin_dir.resolve().parent / "share" / "lmlaunch" / "prepare" / "prepare.py"
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make(work, megabytes)
        rows = 4_000 if options.smoke else 20_000
        before = library_rate(work, rows)
        seconds, peak, told = prepare(program, work, "whole")
        library = (before + library_rate(work, rows)) / 2
        ours = json.loads(told)["tokens"] / seconds
        print(f"{megabytes} MB, {cores()} cores: {ours / 1e6:.2f} M tokens/s of ours, {library / 1e6:.2f} of the library; {seconds:.1f} s")
        figures.set("tokens per second", ours / library)
        figures.set("peak memory", peak / MIB)
        whole = (work / "whole").read_bytes()
        save = 1 if options.smoke else 10
        first, _, _ = prepare(program, work, "again", kill_at=0.8 * len(whole) / 2, save_seconds=save)
        second, _, _ = prepare(program, work, "again", save_seconds=save)
        figures.set("killed at half and started again", (first + second) / seconds)
        figures.set("the file after a kill", float((work / "again").read_bytes() == whole))
    figures.finish()


if __name__ == "__main__":
    main()
