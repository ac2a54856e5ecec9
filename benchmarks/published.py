"""Figures that guides print of memory, beside the plan of the same run and beside what the same techniques do here.

A Plan is a row of a guide's table: what it prints, and the settings of lmlaunch that name the same run. `lmlaunch plan` gives the memory
for a named card, from the shapes that are built in: no card is needed and nothing is measured. Guides differ in what they count:
`part` picks it. Compared is a ratio: 1 is the published figure.

A Way is a technique that is measured: peak resident memory over the libraries' and the time of a step, each as a share of a base run's.
The two take turns, one step each. Times alone say nothing here.
"""

import json
import subprocess
from dataclasses import dataclass
from typing import Callable

from figures import Figure, Figures, common_options
from processes import Side
from train_step import shape_of

GIB = 1 << 30
GB = 10**9
LLAMA_1B, LLAMA_3B, LLAMA_8B = (f"meta-llama/Llama-{name}-Instruct" for name in ("3.2-1B", "3.2-3B", "3.1-8B"))
MISTRAL_7B = "mistralai/Mistral-7B-Instruct-v0.3"
PARAMETERS = {LLAMA_1B: 1_235_814_400, LLAMA_3B: 3_212_749_824, LLAMA_8B: 8_030_261_248, MISTRAL_7B: 7_248_023_552}
MOMENTS = ("first moment", "second moment", "sums")


def device(plan):
    """All of the card's memory, as a driver counts it."""
    return plan["peak"]["device_bytes"]


def allocated(plan):
    """Without what CUDA itself takes, as torch counts what it has allocated."""
    return device(plan) - classes("context")(plan)


def classes(*names):
    """Of some rows of the plan alone."""
    def sum_of(plan):
        return sum(row["bytes"] for row in plan["tiers"][0]["classes"] if row["name"] in names)
    return sum_of


def batch(sequences, length):
    return [f"data.max_length={length}", f"train.global_batch={sequences}", f"train.micro_batch={sequences}"]


@dataclass(frozen=True)
class Plan:
    name: str
    published: float  # bytes
    model: str
    settings: list
    part: Callable = device
    card: str = "A100"
    most: float = 1.0  # planned by published

    @property
    def figure(self):
        size = f"{self.published / GIB:.2f} GiB" if self.published >= GIB / 2 else f"{self.published:.0f} B"
        return Figure(f"{self.name}: plan", "x", f"published, {size}", at_most=self.most)


def plan(options, row):
    command = [options.bin_dir / "lmlaunch", "plan", "smollm2-135m-full", f"model.path={row.model}", "run.device=cuda", "offload.paths=[]",
               *row.settings, "--gpu", row.card, "--host-memory", "512GiB", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def compare_plans(options, figures, rows):
    for row in rows:
        if found := plan(options, row):
            bytes_ = row.part(found)
            print(f"{row.name:44} published {row.published / GIB:6.2f} GiB, planned {bytes_ / GIB:6.2f} GiB for {row.card}", flush=True)
            figures.set(row.figure.name, bytes_ / row.published)
        else:
            print(f"{row.name:44} published {row.published / GIB:6.2f} GiB, no plan fits {row.card}", flush=True)


@dataclass(frozen=True)
class Way:
    name: str
    method: str  # full, lora or qlora
    gradients: str
    settings: list
    memory: float  # at most, of the base's
    time: float  # at most, of the base's

    def figures(self, base):
        return [Figure(f"{self.name}: memory", "x", base, at_most=self.memory), Figure(f"{self.name}: step time", "x", base, at_most=self.time)]


def start(options, way, sequences, length):
    return Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape_of(options)), way.method, way.gradients, str(options.threads),
                 str(sequences), str(length), "gemm_tflops=1", *way.settings])  # no planned time is read: nothing to measure the cores for


def memory(side):
    return side.peak() - side.rows[-1]["planned"]["libraries"]


def measure_ways(options, figures, base, ways, sequences, length):
    """`base` is a Way too: with the techniques of none."""
    rounds = options.rounds or (1 if options.smoke else 7)
    for way in ways:
        sides = [start(options, one, sequences, length) for one in (base, way)]
        for _ in range(rounds + 1):
            for side in sides:
                side.step()
        for side in sides:
            side.finish()
        (most, least), (slow, quick) = [memory(side) for side in sides], [side.median("ms", 1) for side in sides]
        print(f"{way.name:32} {least / GIB:.2f} of {most / GIB:.2f} GiB, {quick:.0f} of {slow:.0f} ms", flush=True)
        figures.set(f"{way.name}: memory", least / most, f"{base.name}, {most / GIB:.2f} GiB")
        figures.set(f"{way.name}: step time", quick / slow, f"{base.name}, {slow:.0f} ms")


def run(doc, plans, base, ways, sequences, length):
    """A benchmark of these two tables."""
    parser = common_options(doc)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    figures = Figures(options, [*(row.figure for row in plans), *(figure for way in ways for figure in way.figures(base.name))])
    compare_plans(options, figures, plans)
    measure_ways(options, figures, base, ways, sequences, length)
    figures.finish()
