"""What does each method take, beside what PEFT's pages print?

Planned: PEFT's guide to memory counts 1.863 GiB for the weights of 1 billion parameters in 16 bits and three times as much, 5.59 GiB, for
their gradients and Adam's state; 12 bytes a parameter for those in fp32 are 84 GB for 7 billion parameters, and 2.4 GB for the 200 million
of large adapters. Those are compared with models of nearly these sizes, scaled to their parameters. PEFT's comparison of methods trains
Llama-3.2-3B on an L40S, 4 sequences of at most 768 tokens: all weights 36.2 GiB, LoRA (r = 32, q and v) 20.8 GiB.
Measured: LoRA and QLoRA against all weights, 2 sequences of 512 tokens of SmolLM2-135M's shape, random weights.

Usage: peft_methods.py BIN_DIR [--smoke] [--rounds 7] [--threads 2]
"""

from published import (GB, GIB, LLAMA_1B, LLAMA_3B, MISTRAL_7B, MOMENTS, PARAMETERS, Plan, Way, allocated, batch, classes, run)

BILLIONS = {model: parameters / 1e9 for model, parameters in PARAMETERS.items()}
BATCH = batch(4, 768)
BF16 = ["optimizer.master=none", "train.gradients=bf16", "optimizer.name=adamw_bf16", "optimizer.clip=none", "train.update=after"]
ADAPTERS = ["train.method=lora", "lora.r=76", "lora.dropout=0", "train.recompute=block"]  # of 199.2 million parameters
STATE = classes("gradients", *MOMENTS)
PLANS = [
    Plan("1B, weights", 1.863 * GIB * BILLIONS[LLAMA_1B], LLAMA_1B, [*BATCH, *BF16], classes("weights"), most=1.01),
    Plan("1B, gradients and state", 5.59 * GIB * BILLIONS[LLAMA_1B], LLAMA_1B, [*BATCH, *BF16], STATE, most=1.01),
    Plan("7B, gradients and state", 84 * GB * BILLIONS[MISTRAL_7B] / 7, MISTRAL_7B, [*BATCH, "train.update=after", "train.recompute=block"], STATE,
         "H200", 1.01),
    Plan("7B, adapters' gradients and state", 2.4 * GB, MISTRAL_7B, [*BATCH, *ADAPTERS], STATE, most=1.01),
    Plan("3B, all weights", 36.2 * GIB, LLAMA_3B, [*BATCH, *BF16], allocated, "L40S"),
    Plan("3B, LoRA", 20.8 * GIB, LLAMA_3B, [*BATCH, "train.method=lora", "lora.r=32", 'lora.targets=["q_proj", "v_proj"]', "lora.dtype=fp32"],
         allocated, "L40S"),
]
NONE = ["train.recompute=none", "train.update=after"]
BASE = Way("all weights", "full", "bf16", NONE, 1, 1)
WAYS = [
    Way("LoRA", "lora", "bf16", ["train.recompute=none"], 0.35, 0.9),
    Way("QLoRA", "qlora", "bf16", ["train.recompute=none"], 0.28, 1.0),
]


if __name__ == "__main__":
    run(__doc__, PLANS, BASE, WAYS, 2, 512)
