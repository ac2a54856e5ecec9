"""Is the plan right? Twenty fixed configurations and some drawn ones: planned against measured.

Peak resident memory, bytes on disk (what the process's nameless files occupy), bytes read and written per step, and the
step's time (the cores' rate measured in the same process before every step, since others use the machine, too; for --seconds at
least, as a virtual machine's cores have two speeds, each for seconds, and a case has to meet both). Random weights;
the fixed cases have SmolLM2-135M's shape. The drawn ones differ in everything that a plan depends on, so that its constants cannot
be fitted to the cases that judge them; --seed draws the same ones again. A figure is the worst deviation of all cases.

Usage: plan_honest.py BIN_DIR [--smoke] [--path DIR] [--steps 7] [--seconds 30] [--seed N] [--drawn 6] [--only N]
"""

import json
import os
import random
import statistics
import tempfile
import time

from figures import Figure, Figures, common_options
from processes import Side
from train_step import SHAPE, shape_of

NVME = {name: f"offload.{name}=nvme" for name in ("optimizer", "gradients", "weights", "activations")}
BLOCK = "train.recompute=block"
INSIDE = "train.update=in_backward"
UNTIED = "untied"  # a head of its own, which goes off the device by vocabulary segments
SMOKE = 7  # of the fixed cases
MOST_PARAMETERS, MOST_PARAMETERS_SMOKE = 150e6, 12e6  # of a drawn model
# The most by which plan and measurement may differ, in per cent.
TARGETS = {"rss": 5, "disk": 1, "read": 1, "written": 1, "ms": 15}
NAMES = {"rss": "peak RSS", "disk": "bytes on disk", "read": "bytes read", "written": "bytes written", "ms": "step time"}
# method, gradients, sequences, length, micro_batch, settings
CASES = [
    ("full", "fp32", 2, 512, 2, []),
    ("full", "bf16", 2, 512, 2, [BLOCK]),
    ("full", "fp32", 4, 256, 2, []),
    ("full", "fp32", 2, 512, 2, [NVME["optimizer"]]),
    ("full", "bf16", 4, 512, 4, [NVME["optimizer"], BLOCK]),
    ("full", "fp32", 2, 512, 1, [NVME["optimizer"], NVME["gradients"], BLOCK]),
    ("full", "fp32", 4, 256, 1, [NVME["optimizer"], NVME["weights"], BLOCK]),
    ("full", "fp32", 4, 512, 2, [*NVME.values(), BLOCK]),
    ("full", "fp32", 2, 512, 2, [NVME["activations"], BLOCK]),
    ("full", "fp32", 2, 512, 2, [NVME["optimizer"], "offload.host_memory=1800MiB", "optimizer.clip=block"]),
    ("full", "fp32", 2, 512, 2, ["offload.host_memory=1400MiB", BLOCK]),
    ("lora", "fp32", 2, 512, 2, []),
    ("lora", "fp32", 4, 512, 2, [NVME["weights"], BLOCK]),
    ("lora", "fp32", 4, 256, 4, [NVME["weights"], NVME["activations"], BLOCK]),
    ("full", "fp32", 4, 256, 1, [UNTIED, *NVME.values(), BLOCK]),
    ("qlora", "fp32", 2, 512, 2, []),
    ("qlora", "fp32", 4, 256, 2, [NVME["weights"], BLOCK]),
    ("full", "fp32", 2, 512, 2, [INSIDE, "optimizer.clip=block"]),
    ("full", "bf16", 4, 256, 1, [INSIDE, BLOCK]),
    ("full", "fp32", 4, 256, 2, [INSIDE, UNTIED, "optimizer.clip=none", NVME["optimizer"], NVME["weights"], BLOCK]),
]


def parameters(shape):
    hidden, head_dim = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    attention = hidden * (2 * hidden + 2 * shape["num_key_value_heads"] * head_dim)
    blocks = shape["num_hidden_layers"] * (attention + 3 * hidden * shape["intermediate_size"])
    return blocks + shape["vocab_size"] * hidden * (1 if shape["tie_word_embeddings"] else 2)


def draw_shape(draw, tied, most):
    while True:
        kv_heads = draw.choice((1, 2, 3, 4))
        heads = kv_heads * draw.choice((1, 2, 3, 4))
        hidden = heads * draw.choice((32, 64, 128))
        shape = {**SHAPE, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
                 "intermediate_size": 64 * draw.randint(hidden // 32, hidden // 16), "num_hidden_layers": draw.randint(4, 32),
                 "vocab_size": 128 * draw.randint(64, 512), "tie_word_embeddings": tied}
        if 256 <= hidden <= 1024 and most / 4 <= parameters(shape) <= most:
            return shape


def draw_case(draw, most):
    """A shape and a case as those of CASES."""
    method = draw.choice(("full", "full", "lora", "qlora"))
    micro = draw.choice((1, 2, 4))
    sequences = micro * draw.choice((1, 2, 3))
    length = draw.choice((128, 192, 256, 384, 512))
    # LoRA has little optimizer state and few gradients: the plan refuses to move those.
    homes = [name for name in NVME if draw.random() < 0.5 and (method == "full" or name in ("weights", "activations"))]
    tied = draw.random() < 0.5
    settings = [NVME[name] for name in homes] + ([] if tied else [UNTIED])
    if "gradients" not in homes and draw.random() < 0.5:
        settings += [INSIDE, f"optimizer.clip={draw.choice(('global', 'block', 'none'))}"]
    # What lives off the device by block needs the block's input alone.
    if {"weights", "activations", "gradients"} & set(homes) or draw.random() < 0.5:
        settings.append(BLOCK)
    return draw_shape(draw, tied, most), (method, draw.choice(("fp32", "bf16")), sequences, length, micro, settings)


def swap_bytes(pid):
    """What the nameless files of a process occupy on disk."""
    total = 0
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{descriptor}"
        if os.path.exists(link) and os.readlink(link).endswith("(deleted)") and not os.readlink(link).startswith("/mem"):
            total += os.stat(link).st_blocks * 512
    return total


def middle(values):
    """The interquartile mean: of a mixture of two speeds the median is one or the other."""
    quarter = min(-(-len(values) // 4), (len(values) - 1) // 2)  # of three the median
    return statistics.mean(sorted(values)[quarter:len(values) - quarter])


def measure(binary, shape, case, path, steps, seconds):
    method, gradients, sequences, length, micro, settings = case
    name = f"{method} {gradients} {sequences}x{length}/{micro} " + " ".join(settings)
    settings = ["rates=each", f"offload.paths={path}", f"train.micro_batch={micro}", *[s for s in settings if s != UNTIED]]
    side = Side([str(binary), json.dumps(shape), method, gradients, "2", str(sequences), str(length), *settings])
    end = time.monotonic() + seconds
    while len(side.rows) < steps or time.monotonic() < end:
        side.step()
    disk = swap_bytes(side.process.pid)
    last, planned = side.rows[-1], side.rows[-1]["planned"]
    side.finish()
    # Each step against the plan with the rates just before it.
    ms = side.median("ms", 2)
    planned_ms = ms * middle([row["planned"]["ms"] / row["ms"] for row in side.rows[2:]])
    # The median, as slots fill during the first steps. A step's transfers have ended when they are counted.
    moved = {way: side.median(way, 2) for way in ("read_bytes", "written_bytes")}
    return {"case": name,
            "rss": (planned["rss"], last["peak_rss"]), "disk": (planned["disk"], disk),
            "read": (planned["read_bytes"], moved["read_bytes"]),
            "written": (planned["written_bytes"], moved["written_bytes"]), "ms": (planned_ms, ms)}


def deviation(pair):
    planned, measured = pair
    return 100 * (planned - measured) / measured if measured else (0.0 if planned == 0 else 100.0)


def describe(shape):
    return (f"{shape['num_hidden_layers']} layers of {shape['hidden_size']}, ffn {shape['intermediate_size']}, "
            f"{shape['num_attention_heads']}/{shape['num_key_value_heads']} heads, vocabulary {shape['vocab_size']}")


def main():
    parser = common_options(__doc__)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--steps", type=int, help="the least of a configuration")
    parser.add_argument("--seconds", type=float, help="the least of its steps")
    parser.add_argument("--seed", type=int, help="of what is drawn; with --smoke always the same, else from the clock")
    parser.add_argument("--drawn", type=int)
    parser.add_argument("--only", type=int, help="the n-th configuration alone, drawn ones behind the fixed ones")
    options = parser.parse_args()
    steps = options.steps or (3 if options.smoke else 7)
    seconds = options.seconds if options.seconds is not None else 0 if options.smoke else 30
    if options.seed is None:
        options.seed = 481506 if options.smoke else time.time_ns() % 1000000
    draw = random.Random(options.seed)
    cases = {"fixed": [({**shape_of(options), "tie_word_embeddings": UNTIED not in case[5]}, case) for case in CASES], "drawn": []}
    if options.smoke:
        cases["fixed"] = [cases["fixed"][SMOKE]]
    drawn = options.drawn if options.drawn is not None else 1 if options.smoke else 6
    most = MOST_PARAMETERS_SMOKE if options.smoke else MOST_PARAMETERS
    cases["drawn"] = [draw_case(draw, most) for _ in range(drawn)]
    if options.only is not None:
        cases = {kind: [case for case in some if case is (cases["fixed"] + cases["drawn"])[options.only]]
                 for kind, some in cases.items()}
    kinds = [kind for kind in cases if cases[kind]]
    figures = Figures(options, [Figure(f"{kind}: {NAMES[key]}", "% off", "the plan", at_most=target)
                                for kind in kinds for key, target in TARGETS.items()])
    print(f"drawn with --seed {options.seed}", flush=True)
    # The machine's rates are measured in this run: those that are kept may be of an hour in which others worked on it.
    with tempfile.TemporaryDirectory() as kept:
        os.environ["XDG_CACHE_HOME"] = kept
        measure_all(options, steps, seconds, cases, figures)
    figures.finish()


def measure_all(options, steps, seconds, cases, figures):
    for kind in cases:
        if not cases[kind]:
            continue
        worst = dict.fromkeys(TARGETS, 0.0)
        for shape, case in cases[kind]:
            if kind == "drawn":
                print(describe(shape), flush=True)
            row = measure(options.bin_dir / "train_step_bench", shape, case, options.path, steps, seconds)
            off = {key: deviation(row[key]) for key in TARGETS}
            worst = {key: max(worst[key], abs(off[key])) for key in TARGETS}
            print(f"{row['case'].replace('offload.', ''):92} RSS {row['rss'][1] / 2**20:6.0f} MiB {off['rss']:+5.1f} %  "
                  f"disk {row['disk'][1] / 2**20:6.0f} MiB {off['disk']:+5.1f} %  "
                  f"read {off['read']:+4.1f} %  written {off['written']:+4.1f} %  "
                  f"step {row['ms'][1]:6.0f} ms {off['ms']:+5.1f} %", flush=True)
        for key, value in worst.items():
            figures.set(f"{kind}: {NAMES[key]}", value, f"the plan, {len(cases[kind])} cases")


if __name__ == "__main__":
    main()
