"""What does a quantized base cost: a QLoRA step (nf4, double scales) against a LoRA step, ours both, in turns?

SmolLM2-135M's shape, random weights, bf16, 2 x 512 tokens; and the streamed base from a slow disk (simulated, 0.4 GB/s), where a
quarter of the bytes have to come. What DoRA costs beside LoRA; and how fast matrices are quantized while they are loaded.

Usage: qlora_step.py BIN_DIR [--smoke] [--rounds 15] [--threads 2]
"""

import json
import tempfile

from figures import Figure, Figures, common_options
from processes import Side, json_rows
from train_step import LENGTH, SEQUENCES, shape_of

STREAMED = ["offload.weights=nvme", "offload.paths=/tmp", "train.recompute=block"]
DISK = 0.4  # GB/s


PLAIN_AND_QUANTIZED = (["lora"], ["qlora"])
PLAIN_AND_DORA = (["lora"], ["lora", "lora.dora=true"])


def compare(options, sequences, length, rounds, settings, pair=PLAIN_AND_QUANTIZED):
    """Milliseconds of a step of the first and of the second of a pair of methods with settings."""
    sides = [Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape_of(options)), method, "fp32", str(options.threads),
                   str(sequences), str(length), *settings, *more]) for method, *more in pair]
    for _ in range(rounds + 2):
        for side in sides:
            side.step()
    for side in sides:
        side.finish()
    return [side.median("ms", 2) for side in sides]


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.smoke else 15)
    figures = Figures(options, [Figure("quantizing nf4", "GB/s", "", at_least=1),
                                Figure("QLoRA step: tokens/s", "x", "LoRA", at_least=0.9),
                                Figure("DoRA step: time", "x", "LoRA's", at_most=1.25),
                                Figure("base from a slow disk: step time", "x", "the bf16 base's", at_most=0.4)])
    with tempfile.TemporaryDirectory() as directory:
        for row in json_rows([str(options.bin_dir / "bench_quantize"), directory, str(options.threads), str(1 if options.smoke else 5)]):
            print(f"{row['encoding']}: {row['gbps']:.2f} GB/s of bf16 become codes", flush=True)
            if row["encoding"].startswith("nf4"):
                figures.set("quantizing nf4", row["gbps"], "bf16 out of the page cache")
    lora, qlora = compare(options, SEQUENCES, LENGTH, rounds, [])
    print(f"{SEQUENCES * LENGTH} tokens: LoRA {lora:.0f} ms, QLoRA {qlora:.0f} ms", flush=True)
    figures.set("QLoRA step: tokens/s", lora / qlora, f"LoRA, {lora:.0f} ms")
    lora, dora = compare(options, SEQUENCES, LENGTH, rounds, [], PLAIN_AND_DORA)
    print(f"{SEQUENCES * LENGTH} tokens: LoRA {lora:.0f} ms, DoRA {dora:.0f} ms", flush=True)
    figures.set("DoRA step: time", dora / lora, f"LoRA's, {lora:.0f} ms")
    lora, qlora = compare(options, 1, 64, rounds, [*STREAMED, f"disk_gb_per_s={DISK}"])
    print(f"64 tokens, base on a disk of {DISK} GB/s: LoRA {lora:.0f} ms, QLoRA {qlora:.0f} ms", flush=True)
    figures.set("base from a slow disk: step time", qlora / lora, f"the bf16 base's, {lora:.0f} ms, at {DISK} GB/s")
    figures.finish()


if __name__ == "__main__":
    main()
