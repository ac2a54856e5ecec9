"""What do the techniques of Transformers' guide for a single GPU save here, and at which price?

Planned: the state of optimizers as the guide counts it for 3 billion parameters, 24 GB of AdamW's, 12 GB of Adafactor's and 6 GB of 8-bit
AdamW's, for Llama-3.2-3B and scaled to its parameters. The guide's Adafactor is the older count, of one state in fp32.
Measured: 4 sequences of 256 tokens of SmolLM2-135M's shape, random weights, against a run with none of the techniques. The guide says that
gradient checkpointing takes about 20 % more time.

Usage: transformers_memory.py BIN_DIR [--smoke] [--rounds 7] [--threads 2]
"""

from published import GB, LLAMA_3B, MOMENTS, PARAMETERS, Plan, Way, batch, classes, run

SCALE = PARAMETERS[LLAMA_3B] / 3e9
BATCH = batch(4, 512)
PLANS = [
    Plan("3B, state of AdamW", 24 * GB * SCALE, LLAMA_3B, [*BATCH, "optimizer.name=adamw"], classes(*MOMENTS), most=1.01),
    Plan("3B, state of Adafactor", 12 * GB * SCALE, LLAMA_3B, [*BATCH, "optimizer.name=adafactor"], classes(*MOMENTS), most=0.01),
    # Each 256 values have a factor, too: 1/64 more.
    Plan("3B, state of 8-bit AdamW", 6 * GB * SCALE, LLAMA_3B, [*BATCH, "optimizer.name=adamw_8bit"], classes(*MOMENTS), most=1.03),
]
NONE = ["train.recompute=none", "train.update=after"]
BASE = Way("none of them", "full", "fp32", NONE, 1, 1)
WAYS = [
    Way("micro-batches of 1", "full", "fp32", [*NONE, "train.micro_batch=1"], 0.94, 1.5),
    Way("gradient checkpointing", "full", "fp32", ["train.recompute=block", "train.update=after"], 0.93, 1.45),
    Way("Adafactor", "full", "fp32", [*NONE, "optimizer.name=adafactor"], 0.63, 1.25),
    Way("8-bit AdamW", "full", "fp32", [*NONE, "optimizer.name=adamw_8bit"], 0.74, 1.25),
    Way("all of them", "full", "bf16", ["train.recompute=block", "train.micro_batch=1", "optimizer.name=adamw_8bit"], 0.48, 1.9),
]


if __name__ == "__main__":
    run(__doc__, PLANS, BASE, WAYS, 4, 256)
