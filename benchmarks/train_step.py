"""How fast is a whole training step against transformers + torch's fused AdamW (and peft for LoRA)?

Both sides run as processes of their own and take turns, one step each, so that a change of the machine's speed
hits both; medians are compared. Same model (SmolLM2-135M's shape, random weights), same tokens, bf16, 2 x 512 tokens.
Prints a table and one JSON line per method. Usage: train_step.py BIN_DIR [--rounds 9] [--method full|lora]
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
         "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
         "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True, "max_position_embeddings": 8192,
         "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
SEQUENCES, LENGTH = 2, 512

PEER = r'''
import json, sys, time, resource
import torch
from transformers import LlamaConfig, LlamaForCausalLM
shape, method, threads, sequences, length = json.loads(sys.argv[1])
torch.set_num_threads(threads)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
if method == "lora":
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
tokens = torch.randint(0, shape["vocab_size"], (sequences, length))
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - start
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ms": seconds * 1e3, "loss": loss.item(), "peak_rss": rss}), flush=True)
'''


class Side:
    """A process that makes one training step per line of input."""

    def __init__(self, command, **more):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)
        ready = self.process.stdout.readline()
        if ready.strip() != "ready":
            sys.exit(f"{command[0]} did not start: {ready!r}")
        self.rows = []

    def step(self):
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.rows.append(json.loads(self.process.stdout.readline()))

    def finish(self):
        self.process.stdin.close()
        self.process.wait()

    def median_ms(self, warm):
        return statistics.median(row["ms"] for row in self.rows[warm:])

    def peak(self):
        return self.rows[-1]["peak_rss"]


def compare(ours_binary, method, gradients, rounds, threads):
    peer = Side([sys.executable, "-c", PEER, json.dumps([SHAPE, method, threads, SEQUENCES, LENGTH])])
    ours = Side([str(ours_binary), json.dumps(SHAPE), method, gradients, str(threads), str(SEQUENCES), str(LENGTH)])
    warm = 2
    for _ in range(rounds + warm):
        peer.step()
        ours.step()
    tokens = SEQUENCES * LENGTH
    row = {"benchmark": "train_step", "method": method, "gradients": gradients,
           "ours_tokens_per_s": tokens / ours.median_ms(warm) * 1e3,
           "peer_tokens_per_s": tokens / peer.median_ms(warm) * 1e3,
           "speedup": peer.median_ms(warm) / ours.median_ms(warm),
           "ours_peak_rss": ours.peak(), "peer_peak_rss": peer.peak(), "rss_ratio": ours.peak() / peer.peak()}
    peer.finish()
    ours.finish()
    print(f"{method:5} gradients {gradients}: {row['speedup']:.2f}x the peer's tokens/s "
          f"({row['ours_tokens_per_s']:.0f} against {row['peer_tokens_per_s']:.0f}), peak RSS {row['rss_ratio']:.2f}x "
          f"({row['ours_peak_rss'] / 2**30:.2f} against {row['peer_peak_rss'] / 2**30:.2f} GiB)")
    print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--method", choices=["full", "lora"])
    options = parser.parse_args()
    for method, gradients in [("full", "bf16"), ("full", "fp32"), ("lora", "bf16")]:
        if options.method in (None, method):
            compare(options.bin_dir / "train_step_bench", method, gradients, options.rounds, options.threads)


if __name__ == "__main__":
    main()
