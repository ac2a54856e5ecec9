"""Do mixtures of experts train in the memory that they are promised, with their experts on a disk, and does the plan know it?

Random weights of published shapes: Qwen3-30B-A3B and gpt-oss-20b, quantized as they are written (random_checkpoint.py), and 12 of
30B-A3B's layers in bf16, drawn by the run itself. `lmlaunch` trains each for two steps on the CPU, and is stopped there: nothing is saved.
Memory is the peak of the process that trains, without what the libraries take (as the plan has it); all of it is compared with the plan,
but for the buffers of a save. A case takes up to 36 GB of disk, one at a time; --plan-only plans all of them in seconds; --smoke trains
small mixtures of both families, in which the plan's margins are a larger share.

Usage: experts_memory.py BIN_DIR [--smoke] [--plan-only] [--path DIR] [--threads 2] [--steps 2] [--only N]
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, Figures, common_options
from random_checkpoint import QUANTIZED, checkpoint_bytes, write_checkpoint

QWEN3 = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
         "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
         "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
         "max_position_embeddings": 40960, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
           "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
           "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0,
           "rms_norm_eps": 1e-5, "rope_theta": 150000, "max_position_embeddings": 131072, "tie_word_embeddings": False, "hidden_act": "silu",
           "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                            "original_max_position_embeddings": 4096}, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048}
GIB = 1 << 30
PLANNED_WITHIN = 3  # % of the measured peak
FREE = 10 * GIB     # stays on the disk
WAIT = 0.2          # seconds between two looks at a run


@dataclass(frozen=True)
class Case:
    name: str
    shape: dict
    length: int
    most: float  # GiB over the libraries
    settings: list

    @property
    def drawn(self):
        """By the run itself."""
        return "model.init=random" in self.settings

    @property
    def config(self):
        return self.shape if self.drawn else self.shape | {"quantization_config": QUANTIZED[self.shape["model_type"]]}


BASE_ON_DISK = ["offload.weights=nvme", "train.recompute=block"]
ATTENTION = 'lora.targets=["q_proj","k_proj","v_proj","o_proj"]'
QLORA = ["train.method=qlora", *BASE_ON_DISK]
ON_ATTENTION = [*QLORA, ATTENTION, "lora.r=16", "lora.alpha=32"]
ON_EXPERTS = [*QLORA, "lora.experts=true", "lora.r=4", "lora.alpha=8", "offload.optimizer=nvme"]
# The experts' codes are the files' own: there is nothing to quantize.
OSS = ["train.method=lora", *BASE_ON_DISK, ATTENTION, "lora.r=16", "lora.alpha=32"]
FULL = ["model.init=random", "train.method=full", "train.gradients=bf16", "train.update=in_backward", "train.recompute=block",
        "optimizer.name=adamw_8bit", "optimizer.master=none", "optimizer.clip=block", "offload.weights=nvme", "offload.optimizer=nvme"]
CASES = [
    Case("30B-A3B, QLoRA r 16 on attention, base on disk", QWEN3, 256, 4.0, ON_ATTENTION),
    Case("30B-A3B, QLoRA r 4 on experts too, optimizer on disk", QWEN3, 256, 6.0, ON_EXPERTS),
    Case("gpt-oss-20b, LoRA on attention, base on disk", GPT_OSS, 256, 4.5, OSS),
    Case("12 layers of 30B-A3B, full, adamw_8bit, all on disk", QWEN3 | {"num_hidden_layers": 12}, 64, 8.0,
         [*FULL, "offload.host_memory=8GiB"]),
]
SMOKE = [
    Case("Qwen3-MoE, QLoRA r 4 on experts too, optimizer on disk", QWEN3 | SMALL | {"num_experts": 16}, 64, 0.1, ON_EXPERTS),
    Case("gpt-oss, LoRA on attention, base on disk", GPT_OSS | SMALL | {"num_local_experts": 8}, 64, 0.1, OSS),
    Case("Qwen3-MoE, full, adamw_8bit, all on disk", QWEN3 | SMALL | {"num_experts": 16}, 64, 0.1, FULL),
]


def prepare(work, case):
    """config.json, the configuration, and one sequence that fills its row."""
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps(case.config))
    (work / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    draw = random.Random(1)
    ids = [draw.randrange(case.shape["vocab_size"]) for _ in range(case.length)]
    (work / "data.jsonl").write_text((json.dumps({"input_ids": ids, "labels": ids}) + "\n") * 4)
    (work / "memory.toml").write_text(f"""
[run]
dir = "run"
device = "cpu"
[model]
path = "model"
[data]
train = ["data.jsonl"]
max_length = {case.length}
cache_dir = "cache"
[train]
steps = 1000
global_batch = 1
micro_batch = 1
[optimizer]
schedule = "constant"
warmup = 0
[checkpoint]
every = 0
[offload]
paths = ["."]
""")


def command(options, case, *words):
    return [options.bin_dir.resolve() / "lmlaunch", *words, "memory.toml", f"run.threads={options.threads}", *case.settings]


def rows_of(plan):
    """The host's classes, in bytes."""
    host = next(tier for tier in plan["tiers"] if tier["name"] == "host")
    return {row["name"]: row["bytes"] for row in host["classes"]}


def over_libraries(plan):
    return plan["peak"]["host_bytes"] - rows_of(plan)["libraries"]


def plan_of(options, work, case):
    """Exit code 12: a disk that is fuller now does not change what is planned for memory."""
    done = subprocess.run(command(options, case, "plan") + ["--json"], cwd=work, capture_output=True, text=True)
    if done.returncode not in (0, 12):
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def trainer_of(process):
    """The process that trains: a child of the one that was started. None: there is none."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        try:
            if Path(f"/proc/{pid}/comm").read_text().startswith("lmlaunch-c"):
                return int(pid)
        except OSError:  # it has just ended
            pass
    return None


def peak_of(pid):
    """Its largest resident memory so far, in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def stop(process):
    """Nothing is saved. The program that was started sees that what trains has ended, and ends."""
    if process.poll() is None:
        os.kill(trainer_of(process) or process.pid, signal.SIGKILL)
    process.wait()


def steps_of(work):
    path = work / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    return [row for row in rows if "loss" in row]


def train(options, work, case):
    """The rows of the first steps, the peak then, and the run's plan."""
    with open(work / "log", "w+") as log:
        # Beside other work threads would spin for each other without end; no time is judged here.
        environment = os.environ | {"GOMP_SPINCOUNT": "20000", "LMLAUNCH_PYTHON": sys.executable}
        process = subprocess.Popen(command(options, case), cwd=work, stdout=log, stderr=log, env=environment)
        try:
            while len(steps_of(work)) < options.steps:
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"{case.name}: ended with {process.returncode}\n{log.read()}")
                time.sleep(WAIT)
            peak = peak_of(trainer_of(process))
        finally:
            stop(process)
    return steps_of(work)[:options.steps], peak, json.loads((work / "run" / "plan.json").read_text())


def measure(options, figures, work, case, planned_disk):
    files = 0 if case.drawn else checkpoint_bytes(case.config)
    needed, free = files + planned_disk + (0 if options.smoke else FREE), shutil.disk_usage(work).free
    if free < needed:
        figures.fail(f"{case.name} needs {needed / GIB:.0f} GiB of disk, of which {FREE / GIB:.0f} stay free, and has {free / GIB:.0f}: --path")
    if not case.drawn:
        write_checkpoint(work / "model", case.config)
    steps, peak, plan = train(options, work, case)
    rows = rows_of(plan)
    planned = plan["peak"]["host_bytes"] - rows["save buffers"]
    print(f"{case.name}: peak {peak / GIB:.3f} GiB (planned {planned / GIB:.3f}, libraries {rows['libraries'] / GIB:.3f} of it), files "
          f"{files / GIB:.1f} GiB, steps {', '.join(format(row['step_ms'] / 1e3, '.0f') for row in steps)} s (planned "
          f"{plan['step_seconds']:.0f}), reads {steps[-1]['read_bytes'] / 1e9:.2f} GB (planned {plan['disk_read_bytes'] / 1e9:.2f})", flush=True)
    figures.set(case.name, (peak - rows["libraries"]) / GIB)
    figures.set(f"{case.name}: plan", abs(100 * (planned - peak) / peak), f"the plan, {planned / GIB:.2f} GiB")


def main():
    parser = common_options(__doc__)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", type=int, help="the n-th case alone")
    parser.add_argument("--plan-only", action="store_true", help="nothing is trained")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no files
    cases = SMOKE if options.smoke else CASES
    cases = cases if options.only is None else [cases[options.only]]
    wanted = []
    for case in cases:
        wanted.append(Figure(f"{case.name}: planned", "GiB", "", at_most=case.most))
        if not options.plan_only:
            wanted += [Figure(case.name, "GiB", "", at_most=case.most),
                       Figure(f"{case.name}: plan", "% off", "the plan", at_most=PLANNED_WITHIN)]
    figures = Figures(options, wanted)
    for case in cases:
        with tempfile.TemporaryDirectory(dir=options.path, prefix="lmlaunch-experts-") as directory:
            work = Path(directory)
            prepare(work, case)
            plan = plan_of(options, work, case)
            figures.set(f"{case.name}: planned", over_libraries(plan) / GIB)
            if not options.plan_only:
                measure(options, figures, work, case, plan["peak"]["disk_bytes"])
    figures.finish()


if __name__ == "__main__":
    main()
