"""Do models train in the memory that low-memory training promises, and does the plan know it?

Random weights of published shapes, made in place: Llama-3.2-1B and 3.1-8B, two steps each on the CPU. Resident memory without
what the libraries take (as the plan has it), and all of it against the plan; a step's time is printed beside the plan's. Takes half an
hour and 50 GB of disk; --smoke does the same with four layers of SmolLM2-135M's shape, in which the plan's margins are a larger share.

Usage: large_models.py BIN_DIR [--smoke] [--path DIR] [--threads 2] [--only N]
"""

import json
import tempfile
from dataclasses import dataclass, field

from figures import Figure, Figures, common_options
from processes import Side

LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
         "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA3 = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
SHAPES = {"1B": LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True,
                         "rope_scaling": LLAMA3 | {"factor": 32.0}},
          "8B": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False,
                         "rope_scaling": LLAMA3 | {"factor": 8.0}},
          "135M": LLAMA | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                           "num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0, "tie_word_embeddings": True,
                           "max_position_embeddings": 8192}}
GIB = 1 << 30
STEPS = 2


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    method: str
    sequences: int
    length: int
    most: float  # GiB over the libraries
    settings: list = field(default_factory=list)
    layers: int | None = None  # of the model's; None: all


SMALL = ["train.recompute=block", "train.micro_batch=1"]
NO_MASTER = [*SMALL, "optimizer.master=none", "optimizer.clip=block"]
# Told of a little less memory than it would take otherwise, the plan makes the gradient of the tied table last.
INSIDE = [*NO_MASTER, "train.update=in_backward"]
ON_DISK = [f"offload.{part}=nvme" for part in ("optimizer", "gradients", "weights")]
CASES = [
    Case("1B, full, adafactor_lowmem", "1B", "full", 8, 160, 3.0,
         [*INSIDE, "optimizer.name=adafactor_lowmem", "offload.host_memory=3.1GiB"]),
    Case("1B, full, adamw_8bit", "1B", "full", 8, 160, 5.2,
         [*INSIDE, "optimizer.name=adamw_8bit", "offload.host_memory=5.4GiB"]),
    Case("8B, QLoRA", "8B", "qlora", 1, 512, 6.5, SMALL),
    Case("8B, QLoRA, base on disk", "8B", "qlora", 1, 512, 3.0, [*SMALL, "offload.weights=nvme"]),
    Case("8B, full, adamw_8bit, all on disk", "8B", "full", 1, 512, 8.0,
         [*NO_MASTER, *ON_DISK, "optimizer.name=adamw_8bit", "offload.host_memory=8GiB"]),
]
SMOKE = [
    Case("4 layers, full, adafactor_lowmem", "135M", "full", 2, 160, 0.18, [*INSIDE, "optimizer.name=adafactor_lowmem"], 4),
    Case("4 layers, QLoRA, base on disk", "135M", "qlora", 1, 256, 0.12, [*SMALL, "offload.weights=nvme"], 4),
]


def train(options, case):
    """The row of the last step."""
    shape = dict(SHAPES[case.model])
    shape["num_hidden_layers"] = case.layers or shape["num_hidden_layers"]
    settings = [*case.settings, "rates=each", *([f"offload.paths={options.path}"] if "nvme" in " ".join(case.settings) else [])]
    side = Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape), case.method, "bf16", str(options.threads), str(case.sequences),
                 str(case.length), *settings])
    for _ in range(STEPS):
        side.step()
    side.finish()
    return side.rows[-1]


def main():
    parser = common_options(__doc__)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", type=int, help="the n-th model alone")
    options = parser.parse_args()
    cases = SMOKE if options.smoke else CASES
    cases = cases if options.only is None else [cases[options.only]]
    wanted = []
    for case in cases:
        wanted += [Figure(case.name, "GiB", "", at_most=case.most), Figure(f"{case.name}: plan", "% off", "the plan", at_most=5)]
    figures = Figures(options, wanted)
    for case in cases:
        row = train(options, case)
        planned, libraries = row["planned"]["rss"], row["planned"]["libraries"]
        print(f"{case.name:34} RSS {row['peak_rss'] / GIB:5.2f} GiB (planned {planned / GIB:.2f}, libraries {libraries / GIB:.2f} of it), "
              f"step {row['ms'] / 1e3:.0f} s (planned {row['planned']['ms'] / 1e3:.0f})", flush=True)
        figures.set(case.name, (row["peak_rss"] - libraries) / GIB)
        figures.set(f"{case.name}: plan", abs(100 * (planned - row["peak_rss"]) / row["peak_rss"]), f"the plan, {planned / GIB:.2f} GiB")
    figures.finish()


if __name__ == "__main__":
    main()
