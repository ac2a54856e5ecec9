"""What do updates inside backward cost, and what do they save? Steps against the same steps with updates after backward, in turns.

SmolLM2-135M's shape, random weights, bf16 with fp32 gradients, 2 x 512 tokens. With block clipping both do the same work; with global
clipping the norm has a backward of its own, and what that costs is printed. Saved memory is compared with the gradients of all blocks but
the tied embedding's and one. Usage: in_backward_step.py BIN_DIR [--smoke] [--rounds 15] [--threads 2]
"""

import json

from figures import Figure, Figures, common_options
from processes import Side
from train_step import LENGTH, SEQUENCES, shape_of


def block_elements(shape):
    hidden, kv_rows = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return hidden * (2 * hidden + 2 * kv_rows + 3 * shape["intermediate_size"])


def compare(options, clip, rounds):
    """Milliseconds of a step and peak memory, with updates after backward and inside it."""
    sides = [Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape_of(options)), "full", "fp32", str(options.threads),
                   str(SEQUENCES), str(LENGTH), f"optimizer.clip={clip}", f"train.update={update}"]) for update in ("after", "in_backward")]
    for _ in range(rounds + 2):
        for side in sides:
            side.step()
    for side in sides:
        side.finish()
    return [side.median("ms", 2) for side in sides], [side.peak() for side in sides]


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.smoke else 15)
    figures = Figures(options, [Figure("in backward, block clipping: step time", "x", "updates after", at_most=1.02),
                                Figure("memory saved", "x", "gradients of all blocks but one", at_least=0.95)])
    (after, inside), (most, least) = compare(options, "block", rounds)
    print(f"block clipping: after {after:.0f} ms, in backward {inside:.0f} ms; peaks {most / 2**20:.0f} and {least / 2**20:.0f} MiB", flush=True)
    figures.set("in backward, block clipping: step time", inside / after, f"updates after, {after:.0f} ms")
    shape = shape_of(options)
    saved = 4 * block_elements(shape) * (shape["num_hidden_layers"] - 1)
    figures.set("memory saved", (most - least) / saved, f"{saved / 2**20:.0f} MiB")
    (after, inside), _ = compare(options, "global", max(rounds // 3, 1 if options.smoke else 2))
    print(f"global clipping: after {after:.0f} ms, in backward {inside:.0f} ms, {inside / after:.2f} x", flush=True)
    figures.finish()


if __name__ == "__main__":
    main()
