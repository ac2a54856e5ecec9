"""What do the rows of torchtune's memory optimization overview take here?

Planned: its list for Llama-3.2-3B (2 sequences of 4096 tokens, packed, one A100; each row adds a technique to those before) and its table
for Llama-3.1-8B (2 x 2048, packed, one RTX 4090). What its list does before, packing, compiling and the loss in chunks, is always on here,
so that the list begins where they are on. torchtune trains bf16 weights with bf16 state and no master weights; so do these rows. It
prints what torch has allocated: CUDA's own context is left out of ours.
Measured: the same list for 2 sequences of 512 tokens of SmolLM2-135M's shape, random weights, each row against the first.

Usage: torchtune_memory.py BIN_DIR [--smoke] [--rounds 7] [--threads 2]
"""

from published import GIB, LLAMA_3B, LLAMA_8B, Plan, Way, allocated, batch, run

PACKED = [*batch(2, 4096), "data.packing=true"]
BF16 = ["optimizer.master=none", "train.gradients=bf16", "optimizer.clip=none"]  # torchtune clips no gradients by default
ADAMW, ADAMW_8BIT = "optimizer.name=adamw_bf16", "optimizer.name=adamw_8bit"
KEPT, BLOCK = "train.recompute=none", "train.recompute=block"
AFTER, INSIDE = "train.update=after", "train.update=in_backward"
OFFLOADED = "offload.activations=host"
# torchtune's adapters for 3B: queries, values, attention's output and the MLP.
ADAPTERS = ["lora.r=64", "lora.alpha=128", "lora.dropout=0", "optimizer.master=none", "train.gradients=bf16", ADAMW,
            'lora.targets=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]', BLOCK, OFFLOADED]
SHORT = [*batch(2, 2048), "data.packing=true", BLOCK]
ADAPTERS_8B = [*SHORT, "lora.r=8", "lora.alpha=16", "lora.dropout=0", "optimizer.master=none", "train.gradients=bf16", ADAMW]
CARD = "RTX-4090"
# The plan adds up what torch's peak may not see at one time, and GEMM's and attention's workspaces: some rows are over torchtune's.
OVER = 1.1
PLANS = [
    Plan("3B, packed, loss in chunks", 42.9 * GIB, LLAMA_3B, [*PACKED, *BF16, ADAMW, KEPT, AFTER], allocated),
    Plan("3B, + activation checkpointing", 24.9 * GIB, LLAMA_3B, [*PACKED, *BF16, ADAMW, BLOCK, AFTER], allocated, most=OVER),
    Plan("3B, + step in backward", 23.1 * GIB, LLAMA_3B, [*PACKED, *BF16, ADAMW, BLOCK, INSIDE], allocated),
    Plan("3B, + activation offloading", 21.8 * GIB, LLAMA_3B, [*PACKED, *BF16, ADAMW, BLOCK, INSIDE, OFFLOADED], allocated),
    Plan("3B, + 8-bit AdamW", 17.6 * GIB, LLAMA_3B, [*PACKED, *BF16, ADAMW_8BIT, BLOCK, INSIDE, OFFLOADED], allocated),
    Plan("3B, LoRA", 8.5 * GIB, LLAMA_3B, [*PACKED, "train.method=lora", *ADAPTERS], allocated, most=OVER),
    Plan("3B, QLoRA", 4.6 * GIB, LLAMA_3B, [*PACKED, "train.method=qlora", *ADAPTERS], allocated, most=OVER),
    Plan("8B, full, 8-bit AdamW", 18.9 * GIB, LLAMA_8B, [*SHORT, *BF16, ADAMW_8BIT, INSIDE, OFFLOADED, "offload.device_memory=18.9GiB"],
         allocated, CARD),
    Plan("8B, LoRA", 16.2 * GIB, LLAMA_8B, ["train.method=lora", *ADAPTERS_8B], allocated, CARD, OVER),
    Plan("8B, QLoRA", 7.4 * GIB, LLAMA_8B, ["train.method=qlora", *ADAPTERS_8B], allocated, CARD, OVER),
]
BASE = Way("none of them", "full", "bf16", [*BF16, ADAMW, KEPT, AFTER], 1, 1)
ON_DISK = ["offload.activations=nvme", "offload.paths=/tmp"]  # on the CPU host memory is no other place
WAYS = [
    Way("+ activation checkpointing", "full", "bf16", [*BF16, ADAMW, BLOCK, AFTER], 0.84, 1.45),
    Way("+ step in backward", "full", "bf16", [*BF16, ADAMW, BLOCK, INSIDE], 0.71, 1.5),
    Way("+ activation offloading", "full", "bf16", [*BF16, ADAMW, BLOCK, INSIDE, *ON_DISK], 0.69, 1.6),
    Way("+ 8-bit AdamW", "full", "bf16", [*BF16, ADAMW_8BIT, BLOCK, INSIDE, *ON_DISK], 0.5, 1.7),
    Way("LoRA", "lora", "bf16", [BLOCK], 0.3, 1.2),
    Way("QLoRA", "qlora", "bf16", [BLOCK], 0.2, 1.3),
]


if __name__ == "__main__":
    run(__doc__, PLANS, BASE, WAYS, 2, 512)
