"""What does the offload engine cost a run that does not use it?

Instructions of one training step with everything in memory, tiny model, one thread, counted by valgrind's callgrind;
against those of another build (the commit before the offload engine was 8a129ca). Counted inside TrainStep::run alone, as
the difference of runs of N and 2N steps, so that neither start nor first step are in it. Most instructions are torch's
matrix products, which are the same for both: what is outside libtorch is told apart. valgrind knows no AVX-512, so both
sides run what they have for AVX2. Prints a table and one JSON line.

Usage: resident_instructions.py BIN_DIR [BASE_BIN_DIR] [--steps 2] [--method full|lora]
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 192,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 512,
         "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
SEQUENCES, LENGTH = 2, 64


def self_costs(profile):
    """Instructions in all functions, and in those outside libtorch, of a callgrind file."""
    names, total, outside, inside, call = {}, 0, 0, False, False
    for line in profile.read_text().splitlines():
        if match := re.match(r"ob=\((\d+)\)(?: (.*))?$", line):
            names.setdefault(match[1], match[2])
            inside = "libtorch" in names[match[1]]
        elif match := re.match(r"cob=\((\d+)\) (.*)$", line):
            names[match[1]] = match[2]
        elif line.startswith("calls="):
            call = True  # the next line is what the callee cost
        elif match := re.match(r"[+*\-\d]\S* (\d+)$", line):
            if not call:
                total += int(match[1])
                outside += 0 if inside else int(match[1])
            call = False
    return total, outside


def count(binary, method, steps, settings):
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory) / "callgrind"
        done = subprocess.run(["valgrind", "--tool=callgrind", "--toggle-collect=lm::TrainStep::run*",
                               f"--callgrind-out-file={profile}", binary, json.dumps(SHAPE), method, "bf16", "1", str(SEQUENCES),
                               str(LENGTH), *settings], input="step\n" * steps, capture_output=True, text=True)
        if done.returncode != 0 or done.stdout.count("loss") != steps:
            sys.exit(f"{binary}: status {done.returncode}\n{done.stdout}{done.stderr}")
        total, outside = self_costs(profile)
        told = int(re.search(r"^totals: (\d+)", profile.read_text(), re.M)[1])
        if total != told:
            sys.exit(f"{profile}: functions sum to {total}, callgrind says {told}")
        return total, outside


def per_step(binary, method, steps, settings):
    few, many = (count(binary, method, n, settings) for n in (steps, 2 * steps))
    return [(b - a) / steps for a, b in zip(few, many)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("base_bin_dir", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--method", choices=["full", "lora"], default="full")
    options = parser.parse_args()
    if not shutil.which("valgrind"):
        sys.exit(print("no valgrind here: not counted"))
    # A base that old measures no product at its start and takes no settings.
    sides = {"this build": (options.bin_dir, ["gemm_tflops=1"])}
    if options.base_bin_dir:
        sides["base"] = (options.base_bin_dir, [])
    row = {"benchmark": "resident_instructions", "method": options.method}
    for name, (directory, settings) in sides.items():
        total, outside = per_step(directory / "train_step_bench", options.method, options.steps, settings)
        row[name] = {"per_step": total, "outside_torch": outside}
        print(f"{name:12} {total / 1e6:9.3f} M instructions a step, {outside / 1e6:8.3f} M of them outside libtorch")
    if options.base_bin_dir:
        row["ratio"] = row["this build"]["per_step"] / row["base"]["per_step"]
        row["ratio_outside_torch"] = row["this build"]["outside_torch"] / row["base"]["outside_torch"]
        print(f"this build / base: {row['ratio']:.4f}, outside libtorch {row['ratio_outside_torch']:.4f}")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
