"""How fast is AdamW, against memory and against torch's fused one?

State in 8 bits: adamw_8bit's update is to take no longer than adamw's. Memory: bench_adamw compares it with a loop of the same traffic that computes next to nothing, in one process. Torch:
parameters, gradients and state in fp32, one tensor; both sides have their arrays in huge pages (ours always, torch's when told to
by THP_MEM_ALLOC_ENABLE), so that where pages happen to lie does not decide; processes of their own take turns, one step each, and
the ratio is the median of neighbours' ratios. Usage: adamw.py BIN_DIR [--smoke] [--rounds 15] [--million 16]
"""

import statistics
import sys

from figures import Figure, Figures, common_options
from processes import Side, json_rows

THREADS = (1, 2)
CODED = "adamw_8bit, bf16 gradient, split master, 2 threads"
FORMS = ("fp32 gradient, fp32 weight", "bf16 gradient, split master")
PEER = r'''
import json, os, sys, time
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
import torch
threads, elements = int(sys.argv[1]), int(sys.argv[2]) << 20
torch.set_num_threads(threads)
weight = torch.nn.Parameter(torch.ones(elements))
weight.grad = torch.full((elements,), 0.01)
optimizer = torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.01, fused=True)
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    optimizer.step()
    print(json.dumps({"ms": (time.perf_counter() - start) * 1e3}), flush=True)
'''


def of_memory(form, threads):
    return f"{form}, {threads} threads"


def of_torch(threads):
    return f"against torch, {threads} threads"


def compare_with_torch(options, threads, rounds):
    ours = Side([str(options.bin_dir / "bench_adamw"), "serve", str(threads), str(options.million)])
    peer = Side([sys.executable, "-c", PEER, str(threads), str(options.million)])
    warm = 2
    for _ in range(rounds + warm):
        peer.step()
        ours.step()
    peer.finish()
    ours.finish()
    speedup = statistics.median(p["ms"] / o["ms"] for p, o in zip(peer.rows[warm:], ours.rows[warm:]))
    print(f"{threads} threads: {ours.median('ms', warm):.1f} against torch's {peer.median('ms', warm):.1f} ms "
          f"for {options.million} Mi elements", flush=True)
    return speedup, peer.median("ms", warm)


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--million", type=int)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.smoke else 15)
    options.million = options.million or (1 if options.smoke else 16)
    figures = Figures(options, [
        Figure(CODED, "x", "the same update with fp32 state", at_least=1.0),
        *[Figure(of_memory(form, threads), "x", "a loop of the same traffic", at_least=0.90) for form in FORMS for threads in THREADS],
        *[Figure(of_torch(threads), "x", "torch's fused AdamW", at_least=1.0) for threads in THREADS]])
    for row in json_rows([str(options.bin_dir / "bench_adamw"), str(options.million), str(rounds)]):
        if "rule" in row:
            if row["threads"] == 2:
                figures.set(CODED, row["speedup"], f"the same update with fp32 state, {row['plain_ms']:.1f} ms")
            continue
        figures.set(of_memory(row["form"], row["threads"]), row["achieved"],
                    f"a loop of the same traffic, {row['ceiling_gbps']:.1f} GB/s")
    for threads in THREADS:
        speedup, ms = compare_with_torch(options, threads, rounds)
        figures.set(of_torch(threads), speedup, f"torch's fused AdamW, {ms:.1f} ms")
    figures.finish()


if __name__ == "__main__":
    main()
