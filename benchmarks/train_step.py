"""How fast is a whole training step against transformers + torch's fused AdamW (and peft for LoRA)?

Both sides run as processes of their own and take turns, one step each, so that a change of the machine's speed
hits both; medians are compared (on a processor without bf16 instructions one step of the peer, which takes minutes there).
Same model (SmolLM2-135M's shape, random weights), same tokens, bf16, 2 x 512 tokens.
peft keeps adapters in fp32 unless it is told not to; ours are bf16, with fp32 masters. So LoRA is compared twice: with bf16
adapters on both sides, and with peft as it comes. Usage: train_step.py BIN_DIR [--smoke] [--rounds 9] [--only CASE]
"""

import json
import sys
from dataclasses import dataclass

from figures import Figure, Figures, common_options
from processes import Side

SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
         "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
         "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True, "max_position_embeddings": 8192,
         "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
SMOKE_SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
               "vocab_size": 2048}
SEQUENCES, LENGTH = 2, 512
# A step of the peer that takes longer is measured once: without bf16 instructions (AVX-512 or AMX) its libraries take minutes for one,
# and neither what its first step prepares nor other work on the machine matters beside that.
SLOW_MS = 30e3

PEER = r'''
import json, sys, time, resource
import torch
from transformers import LlamaConfig, LlamaForCausalLM
shape, method, fp32_adapters, threads, sequences, length = json.loads(sys.argv[1])
torch.set_num_threads(threads)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
if method == "lora":
    from peft import LoraConfig, get_peft_model
    config = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config, autocast_adapter_dtype=fp32_adapters)
    wanted = torch.float32 if fp32_adapters else torch.bfloat16
    assert all(p.dtype == wanted for p in model.parameters() if p.requires_grad)
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


@dataclass(frozen=True)
class Case:
    name: str
    method: str
    gradients: str
    fp32_adapters: bool  # of peft
    peer: str
    speed: float  # at least, of the peer's tokens/s
    memory: float  # at most, of the peer's peak RSS


CASES = [
    Case("full, bf16 gradients", "full", "bf16", False, "transformers + torch's fused AdamW", 1.6, 0.8),
    Case("full, fp32 gradients", "full", "fp32", False, "transformers + torch's fused AdamW", 1.6, 0.8),
    Case("LoRA, bf16 adapters", "lora", "bf16", False, "peft, autocast_adapter_dtype=False", 1.8, 0.4),
    Case("LoRA, peft's default", "lora", "bf16", True, "peft, fp32 adapters", 1.8, 0.4),
]


def shape_of(options):
    """SmolLM2-135M's; with --smoke one that takes milliseconds where the processor has no bf16 instructions."""
    return SHAPE | SMOKE_SHAPE if options.smoke else SHAPE


def compare(options, case, rounds):
    peer = Side([sys.executable, "-c", PEER,
                 json.dumps([shape_of(options), case.method, case.fp32_adapters, options.threads, SEQUENCES, LENGTH])])
    ours = Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape_of(options)), case.method, case.gradients, str(options.threads),
                 str(SEQUENCES), str(LENGTH)])
    warm = 1 if options.smoke else 2
    for _ in range(rounds + warm):
        peer.step()
        ours.step()
        if peer.rows[0]["ms"] > SLOW_MS:
            ours.step()
            break
    peer.finish()
    ours.finish()
    return ours, peer, warm


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in (None, case.name)]
    figures = Figures(options, [figure for case in cases for figure in (
        Figure(f"{case.name}: tokens/s", "x", case.peer, at_least=case.speed),
        Figure(f"{case.name}: peak RSS", "x", case.peer, at_most=case.memory))])
    for case in cases:
        ours, peer, warm = compare(options, case, options.rounds or (1 if options.smoke else 9))
        speed = [SEQUENCES * LENGTH / side.median("ms", warm) * 1e3 for side in (ours, peer)]
        print(f"{case.name}: {speed[0]:.0f} against {speed[1]:.0f} tokens/s, peak RSS {ours.peak() / 2**30:.2f} against "
              f"{peer.peak() / 2**30:.2f} GiB", flush=True)
        figures.set(f"{case.name}: tokens/s", speed[0] / speed[1], f"{case.peer}, {speed[1]:.0f} tokens/s")
        figures.set(f"{case.name}: peak RSS", ours.peak() / peer.peak(), f"{case.peer}, {peer.peak() / 2**30:.2f} GiB")
    figures.finish()


if __name__ == "__main__":
    main()
