"""What do mixtures of experts cost on a CPU: their products, a step, and a step of transformers?

Products: 16 experts' matrices [1536, 1024] with 32 and 128 rows each, bf16, against one product of as many rows; of a step's three
products (forward, gradient of the input, gradient of the weight) the times are added. A step: a Qwen3-MoE of 16 experts, of which a token
meets 4, against a Qwen3 whose MLP is as wide as these 4, with LoRA on the attention of both: all weights would make the optimizer's
work, which is that of all experts, the larger part. Against transformers: a step of all weights with torch's fused AdamW, whose experts
are a loop (eager) or torch's grouped products (grouped_mm). Both sides are processes of their own that take turns, one step each; medians
are compared. Usage: experts.py BIN_DIR [--smoke] [--rounds 9] [--threads 2] [--only products|dense|transformers]
"""

import json
import sys
from collections import defaultdict

from figures import Figure, Figures, common_options
from processes import Side, json_rows

EXPERTS, CHOSEN, EXPERT_FFN, ROWS = 16, 4, 512, (32, 128)
SHAPE = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 16384,
         "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 4096, "hidden_act": "silu",
         "bos_token_id": 1, "eos_token_id": 2}
SMOKE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512}
SEQUENCES, LENGTH = 2, 512
PRODUCTS, DENSE, TRANSFORMERS = 0.85, 0.8, 2.0  # targets: at least
PEERS = ("eager", "grouped_mm")
SLOW_MS = 30e3  # train_step.py has it

PEER = r'''
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
shape, implementation, threads, sequences, length = json.loads(sys.argv[1])
torch.set_num_threads(threads)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape), dtype=torch.bfloat16, experts_implementation=implementation)
assert model.config._experts_implementation == implementation
for parameter in model.parameters():
    if parameter.ndim > 1:
        parameter.data.normal_(std=0.02)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
tokens = torch.randint(0, shape["vocab_size"], (sequences, length))
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(json.dumps({"ms": (time.perf_counter() - start) * 1e3, "loss": loss.item()}), flush=True)
'''


def mixture(options):
    ffn = 64 if options.smoke else EXPERT_FFN
    return {**SHAPE, **(SMOKE if options.smoke else {}), "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
            "intermediate_size": CHOSEN * ffn, "moe_intermediate_size": ffn, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
            "norm_topk_prob": True}


def dense(options):
    """As many parameters as a token meets, but for the routers'."""
    shape = {key: value for key, value in mixture(options).items() if "expert" not in key and key not in ("moe_intermediate_size", "norm_topk_prob")}
    return {**shape, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def ours(options, shape, method):
    return Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape), method, "bf16", str(options.threads), str(SEQUENCES), str(LENGTH),
                 "gemm_tflops=1"])


def peer(options, implementation):
    return Side([sys.executable, "-c", PEER, json.dumps([mixture(options), implementation, options.threads, SEQUENCES, LENGTH])])


def in_turns(options, sides):
    """The medians, in milliseconds."""
    rounds, warm = options.rounds or (1 if options.smoke else 9), 1 if options.smoke else 2
    for i in range(rounds + warm):
        for side in sides if i % 2 == 0 else reversed(sides):
            side.step()
        if max(side.rows[0]["ms"] for side in sides) > SLOW_MS:
            break
    for side in sides:
        side.finish()
    return [side.median("ms", warm) for side in sides]


def name_of(rows):
    return f"products, {rows} rows an expert: rate"


def measure_products(options, figures):
    rounds = 2 if options.smoke else 5 * (options.rounds or 9)
    width, out = (128, 128) if options.smoke else (SHAPE["hidden_size"], 1536)
    seconds = defaultdict(lambda: [0.0, 0.0])
    for row in json_rows([str(options.bin_dir / "bench_experts"), str(options.threads), str(rounds), str(EXPERTS), str(width), str(out), *map(str, ROWS)]):
        print(f"{row['rows']} rows, {row['product']}: {row['grouped_gflops']:.0f} against {row['dense_gflops']:.0f} GFLOP/s", flush=True)
        for i, rate in enumerate((row["grouped_gflops"], row["dense_gflops"])):
            seconds[row["rows"]][i] += 1 / rate
    for rows in ROWS:
        grouped, one = seconds[rows]
        figures.set(name_of(rows), one / grouped)


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["products", "dense", "transformers"])
    options = parser.parse_args()
    wanted = lambda part: options.only in (None, part)
    step = "step of a mixture: tokens/s"
    figures = Figures(options, [
        *(Figure(name_of(rows), "x", "one product of as many rows", at_least=PRODUCTS) for rows in ROWS if wanted("products")),
        *([Figure(step, "x", "a dense model of as many active parameters", at_least=DENSE)] if wanted("dense") else []),
        *(Figure(f"against transformers, {name}: tokens/s", "x", f"transformers, experts_implementation = {name}", at_least=TRANSFORMERS)
          for name in PEERS if wanted("transformers"))])
    if wanted("products"):
        measure_products(options, figures)
    if wanted("dense"):
        mixed, plain = in_turns(options, [ours(options, mixture(options), "lora"), ours(options, dense(options), "lora")])
        print(f"a mixture's step {mixed:.1f} against {plain:.1f} ms of a dense model", flush=True)
        figures.set(step, plain / mixed)
    for name in PEERS if wanted("transformers") else ():
        mine, theirs = in_turns(options, [ours(options, mixture(options), "full"), peer(options, name)])
        print(f"{mine:.1f} against {theirs:.1f} ms of transformers, {name}", flush=True)
        figures.set(f"against transformers, {name}: tokens/s", theirs / mine, f"transformers, {name}: {theirs:.0f} ms a step")
    figures.finish()


if __name__ == "__main__":
    main()
