"""How fast is AdamW against torch's fused one? Parameters, gradients and state in fp32, one tensor, 1 and 2 threads.

Both sides have their arrays in huge pages (ours always, torch's when told to by THP_MEM_ALLOC_ENABLE), so that where
pages happen to lie does not decide. Both run as processes of their own and take turns, one step each; the ratio is the median over the rounds of
neighbours' ratios. Prints a table and one JSON line. Usage: adamw_torch.py BIN_DIR [--rounds 15] [--million 16]
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from train_step import Side

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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--million", type=int, default=16)
    options = parser.parse_args()
    rows = []
    for threads in (1, 2):
        ours = Side([str(options.bin_dir / "bench_adamw"), "serve", str(threads), str(options.million)])
        peer = Side([sys.executable, "-c", PEER, str(threads), str(options.million)])
        warm = 2
        for _ in range(options.rounds + warm):
            peer.step()
            ours.step()
        speedup = statistics.median(p["ms"] / o["ms"] for p, o in zip(peer.rows[warm:], ours.rows[warm:]))
        rows.append({"threads": threads, "ours_ms": ours.median_ms(warm), "peer_ms": peer.median_ms(warm), "speedup": speedup})
        peer.finish()
        ours.finish()
        print(f"{threads} threads: {speedup:.2f}x torch's fused AdamW ({ours.median_ms(warm):.1f} against {peer.median_ms(warm):.1f} ms "
              f"for {options.million} Mi elements)")
    print(json.dumps({"benchmark": "adamw_torch", "rows": rows}))


if __name__ == "__main__":
    main()
