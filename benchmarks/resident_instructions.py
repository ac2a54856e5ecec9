"""What do the offload engine and shards of ranks cost a run that does not use them?

Instructions outside libtorch of one training step with everything in memory, tiny model, one thread, counted by valgrind's
callgrind inside TrainStep::start and finish, as the difference of runs of N and 2N steps, so that neither the program's start nor
its first step are in them. A run of one rank with zero.stage = 3 is compared with one of stage 0. Most instructions of a step are matrix products, which are not counted: torch's and, where the processor has no
AVX-512, ours (src/kernels/gemm_cpu.cpp). valgrind knows no AVX-512, so here they are always ours, and the kernels those for AVX2. The counts hardly differ between runs, so they are held to the RECORDED ones.

A change that makes a step do more has to say why: then run this with --record, which prints the new numbers, put them into
RECORDED, and give the reason in the commit's message. So has another compiler: they are those of gcc 12. A second BASE_BIN_DIR is
another build, whose counts are printed beside.

Usage: resident_instructions.py BIN_DIR [BASE_BIN_DIR] [--smoke] [--record]
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from figures import Figure, Figures, common_options

SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 192,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 512,
         "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
SEQUENCES, LENGTH = 2, 64
STEPS = 2
ONE_RANK = "one rank at stage 3: instructions per step"
RECORDED = {"full": 8045192, "lora": 7420556}  # instructions per step outside libtorch and products


def self_costs(profile):
    """Instructions in all functions, and in those outside libtorch and our own matrix products, of a callgrind file."""
    objects, functions, total, outside, inside, callee, call = {}, {}, 0, 0, False, "", False
    for line in profile.read_text().splitlines():
        if match := re.match(r"(c?)(ob|fn)=\((\d+)\)(?: (.*))?$", line):
            names = objects if match[2] == "ob" else functions
            if match[4]:
                names[match[3]] = match[4]
            if match[2] == "fn" and match[1]:
                callee = names[match[3]]
            elif match[2] == "ob" and not match[1]:
                inside = "libtorch" in names[match[3]]
        elif line.startswith("calls="):
            call = True  # the next line is what the callee cost, with all that it called
        elif match := re.match(r"[+*\-\d]\S* (\d+)$", line):
            if not call:
                total += int(match[1])
                outside += 0 if inside else int(match[1])
            elif re.fullmatch(r"lm::\w+::gemm\([^()]*\)", callee):  # not what is inside it
                outside -= int(match[1])
            call = False
    return total, outside


def count(binary, method, steps, settings):
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory) / "callgrind"
        done = subprocess.run(["valgrind", "--tool=callgrind", "--toggle-collect=lm::TrainStep::start*",
                               "--toggle-collect=lm::TrainStep::finish*",
                               f"--callgrind-out-file={profile}", binary, json.dumps(SHAPE), method, "bf16", "1", str(SEQUENCES),
                               str(LENGTH), *settings], input="step\n" * steps, capture_output=True, text=True)
        if done.returncode != 0 or done.stdout.count("loss") != steps:
            sys.exit(f"{binary}: status {done.returncode}\n{done.stdout}{done.stderr}")
        total, outside = self_costs(profile)
        if not 0 < outside < total:
            sys.exit(f"{profile}: {outside} of {total} instructions are said to be ours")
        told = int(re.search(r"^totals: (\d+)", profile.read_text(), re.M)[1])
        if total != told:
            sys.exit(f"{profile}: functions sum to {total}, callgrind says {told}")
        return total, outside


def per_step(binary, method, stage, smoke):
    """Two runs side by side: what is counted does not depend on what else the machine does. (--smoke: a single run, of one step.)"""
    settings = ["gemm_tflops=1", f"zero.stage={stage}"]
    if smoke:
        return count(binary, method, 1, settings)
    with ThreadPoolExecutor() as pool:
        few, many = pool.map(lambda n: count(binary, method, n, settings), (STEPS, 2 * STEPS))
    return [(b - a) / STEPS for a, b in zip(few, many)]


def main():
    parser = common_options(__doc__)
    parser.add_argument("base_bin_dir", type=Path, nargs="?")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    figures = Figures(options, [Figure(f"{method}: instructions per step", "x", f"recorded, {count / 1e6:.3f} M", at_most=1.02)
                                for method, count in RECORDED.items()]
                      + [Figure(ONE_RANK, "x", "stage 0", at_most=1.01)])
    if not shutil.which("valgrind"):
        figures.fail("no valgrind here, so nothing is counted: ./dev build installs it")
    stages = [*((method, 0) for method in RECORDED), ("full", 3)]
    with ThreadPoolExecutor(2 if options.smoke else 1) as pool:  # a run that is no smoke run has two processes already
        counted = pool.map(lambda one: per_step(options.bin_dir / "train_step_bench", *one, options.smoke), stages)
        counts = dict(zip(stages, counted))
    found = {method: counts[method, 0] for method in RECORDED}
    for method, recorded in RECORDED.items():
        total, outside = found[method]
        print(f"{method}: {total / 1e6:.3f} M instructions a step, {outside / 1e6:.3f} M of them outside libtorch", flush=True)
        if options.base_bin_dir:
            base, base_outside = per_step(options.base_bin_dir / "train_step_bench", method, 0, options.smoke)
            print(f"{method}: of the base {total / base:.4f}, outside libtorch {outside / base_outside:.4f}", flush=True)
        figures.set(f"{method}: instructions per step", outside / recorded)
    total, outside = found["full"]
    third, third_outside = counts["full", 3]
    figures.set(ONE_RANK, third_outside / outside, f"stage 0, {outside / 1e6:.3f} M; with libtorch {third / total:.4f}")
    if options.record:
        print("RECORDED = " + json.dumps({method: round(outside) for method, (_, outside) in found.items()}))
    figures.finish()


if __name__ == "__main__":
    main()
