"""What a step on a GPU should take, by arithmetic: the operations that a step asks for, counted for the true shapes, at the rates
of benchmarks/gpu_rates.json, each of which names its source. The sums explain the rows that were measured on an H200
(benchmarks/results/nvidia-h200.jsonl) within 4 %; with the counts of the program as it is now they say what has not been
measured yet. A figure of this program is "by arithmetic" until a card has shown it.

Run: python benchmarks/gpu_arithmetic.py

A unit of elementwise work is one pass over a bf16 array [T, H]. Letters: T tokens of a micro-batch, S of a sequence, H hidden,
F of the MLP, L layers, V vocabulary, r rank of the adapters.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RATES = json.loads((ROOT / "benchmarks/gpu_rates.json").read_text())
BF16 = 2
CAPABILITY = 9  # major compute capability of the cards in RATES["cards"]
PROCESSORS = 132


def flash_passes(head_dim):
    """(share of the peak, length of half of that) forward and backward: the plan's own lines, src/plan/flash_rates.inc."""
    lines = re.findall(r"^LM_FLASH\(([^)]*)\)", (ROOT / "src/plan/flash_rates.inc").read_text(), re.M)
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    row = next(r for r in rows if int(r[0]) == CAPABILITY and head_dim <= int(r[2]))
    numbers = [float(cell) for cell in row[3:]]
    return numbers[:2], numbers[2:]


def flash_fill(pairs, length, deterministic_backward):
    """As src/plan/flash_rate.cpp: the share of the multiprocessors that have a block."""
    whole = math.ceil(length / 128)
    of_pair = min(math.ceil(PROCESSORS / pairs), whole) if deterministic_backward else whole
    turns = math.ceil(of_pair * pairs / PROCESSORS)
    return 1 if turns > 1 and not deterministic_backward else of_pair * pairs / turns / PROCESSORS


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    @property
    def q(self):
        return self.heads * self.head_dim

    @property
    def qkv(self):
        return self.q + 2 * self.kv_heads * self.head_dim

    @property
    def matrices(self):
        """Of a layer: name, rows of the output, of the input, and the modules that have adapters of their own."""
        kv = self.kv_heads * self.head_dim
        return (("qkv", self.qkv, self.hidden, (self.q, kv, kv)), ("o", self.hidden, self.q, (self.hidden,)),
                ("gate_up", 2 * self.ffn, self.hidden, (self.ffn, self.ffn)), ("down", self.hidden, self.ffn, (self.hidden,)))

    @property
    def parameters(self):
        layer = sum(out * into for _, out, into, _ in self.matrices)
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)


LLAMA_1B = Shape("1b", 16, 2048, 8192, 32, 8, 64, 128256, tied=True)
LLAMA_7B = Shape("7b", 32, 4096, 11008, 32, 32, 128, 32000)
LLAMA_8B = Shape("8b", 32, 4096, 14336, 32, 8, 128, 128256)


@dataclass(frozen=True)
class Row:
    name: str
    shape: Shape
    lora: bool = False
    rank: int = 16
    sequences: int = 8  # of a micro-batch
    length: int = 2048
    micro_batches: int = 1
    recompute: bool = False  # "block"
    card: str = "H200"
    attention: str = "aten"  # or "hopper"
    measured_program: bool = False  # the program of the measurements: before products_first and device_decision

    @property
    def tokens(self):
        return self.sequences * self.length


def _slice(shape, layers):
    return replace(shape, layers=layers)


MEASURED = [Row(name, shape, lora, recompute=block, measured_program=True) for name, shape, lora, block in (
    ("1b", LLAMA_1B, False, False), ("1b-slice", _slice(LLAMA_1B, 4), False, False), ("1b-slice-lora", _slice(LLAMA_1B, 4), True, False),
    ("7b-slice", _slice(LLAMA_7B, 3), False, False), ("7b-slice-lora", _slice(LLAMA_7B, 3), True, False),
    ("8b-slice", _slice(LLAMA_8B, 3), False, True), ("8b-slice-lora", _slice(LLAMA_8B, 3), True, False),
    ("8b-lora", LLAMA_8B, True, False), ("7b-lora", LLAMA_7B, True, False), ("8b", LLAMA_8B, False, True))]


def lora_passes(row):
    """Bytes that LoRA's narrow products of a layer read and write, their base's products apart; and how many products, the base's
    included, and passes that only scale. tests/emulator/counters_test.cpp counts the same on the emulated GPU."""
    s, t, r = row.shape, row.tokens, row.rank
    total = products = scales = 0
    for name, out, into, modules in s.matrices:
        residual = name == "o"
        for rows in modules:
            if row.measured_program:
                total += t * (into + 2 * rows)  # A reads x; B adds to y
                total += t * (2 * rows + into + 2 * into)  # dB and dreduced read dy, dA reads x, dx is added to
                products, scales = products + 6, scales + 2
            else:
                total += t * rows * (2 if residual else 1)  # B writes y, or adds to the residual
                total += t * 2 * rows
                products += 3
        if not row.measured_program:
            total += t * (into + into + into)  # A's of the matrix together, dA's, and dx is written
            products += 3
        products += 2
    return total * BF16, products, scales


def elementwise_units(row):
    """Of a layer: forward, backward, and what recomputing a block repeats of the forward pass."""
    s = row.shape
    f, q, qkv = s.ffn / s.hidden, s.q / s.hidden, s.qkv / s.hidden
    qk = qkv - (qkv - q) / 2
    copies = 0 if row.attention == "hopper" else 1  # of out, dq, dk and dv
    attention = 2 * q * copies
    forward = 8 + 2 * qk + attention + 3 * f  # norms with their residuals, rope, output, activation
    forward += 2 if row.measured_program else 0  # a copy of the residual, to which the product was added
    # The program that was measured normed twice once more. Norms, rope, activation; the attention's own passes: out . dout, dq in
    # fp32 zeroed, added to and rounded, and with grouped heads dk and dv of every head, which are then summed.
    own = 11 * q + (5 * q if s.kv_heads < s.heads else 0)
    # A norm reads dy, x and the residual's gradient and writes dx; without a weight's gradient it read the first two twice.
    norms = 2 * (6 if row.lora and row.measured_program else 4)
    backward = (4 if row.measured_program else 0) + norms + 2 * qk + 6 * f + (own if copies else own / 2) + 2 * qkv * copies
    if row.lora:
        backward += 3 * f if row.measured_program else 0  # the activation once more, for A of down
    else:
        backward += 4  # the norms' weights
    again = 8 + 2 * qk + attention if row.recompute else 0
    return forward, backward, again


def gemm_rates():
    rates = {}
    for line in (ROOT / RATES["gemm_results"]).read_text().splitlines():
        row = json.loads(line)
        if row.get("benchmark") != "gpu_gemm":
            continue
        for one in row["rows"]:
            if one["dtype"] == "bf16":
                rates[one["model"], one["layer"], one["rows"]] = one["tflops"]
    return rates


def attention_tflops(row):
    """Forward and deterministic backward."""
    if row.attention == "hopper":
        return RATES["hopper_attention"][f"{row.shape.head_dim} {row.length}"]["tflops"]
    pairs = row.sequences * row.shape.heads
    peak = RATES["cards"][row.card]["peak_tflops"]
    return [peak * share * row.length / (row.length + half) * flash_fill(pairs, row.length, backward)
            for backward, (share, half) in enumerate(flash_passes(row.shape.head_dim))]


def seconds_of(row):
    """The step's parts, in seconds."""
    s, t, layers = row.shape, row.tokens, row.shape.layers
    bandwidth = RATES["cards"][row.card]["memory_gbps"] / RATES["cards"]["H200"]["memory_gbps"]
    rate = lambda name: RATES[name]["value"] * 1e9 * bandwidth  # noqa: E731
    measured = gemm_rates()
    near = min((2048, 4096, 8192, 16384), key=lambda rows: abs(rows - t))
    slower = 1 if row.lora else RATES["sustained"]["value"][s.name]
    parts = dict.fromkeys(("products", "recomputed", "head", "attention", "elementwise", "adapters", "update", "decision"), 0.0)
    for name, out, into, _ in s.matrices:
        tflops = measured[s.name, name, near]
        flops = 2 * out * into * t * layers
        for which in (0, 1) if row.lora else (0, 1, 2):
            parts["products"] += flops / tflops[which] / 1e12 / slower
        if row.recompute and name != "down":
            parts["recomputed"] += flops / tflops[0] / 1e12 / slower
    parts["head"] = (4 if row.lora else 6) * s.vocab * s.hidden * t / RATES["head_tflops"]["value"] / 1e12
    # Logits are written by the product; statistics read them, the gradient takes their place. dX is summed in fp32, segment by
    # segment of the vocabulary, and rounded: by a pass over each one's part, now by the product, which then reads and writes fp32
    # where it wrote the part.
    segments = math.ceil(s.vocab / 8192)
    sums = (10 if row.measured_program else 6) * segments - 4 + 6
    parts["head"] += (3 * s.vocab * BF16 + sums * s.hidden) * t / rate("elementwise_gbps")
    flops = 4 * s.q * row.length / 2 * t * layers
    forward, backward = attention_tflops(row)
    parts["attention"] = (flops * (2 if row.recompute else 1) / forward + 2.5 * flops / backward) / 1e12
    parts["elementwise"] = sum(elementwise_units(row)) * t * s.hidden * BF16 * layers / rate("elementwise_gbps")
    if row.lora:
        parts["adapters"] = lora_passes(row)[0] * layers / rate("narrow_gbps")
    trained = s.parameters if not row.lora else row.rank * layers * sum(
        rows + into for _, _, into, modules in s.matrices for rows in modules)
    parts = {name: value * row.micro_batches for name, value in parts.items()}
    parts["update"] = 26 * trained / rate("update_gbps") + 2 * trained / rate("norm_gbps")
    # Norms of granules are added one after another: on the host of all, on the device of the longest block.
    longest = 0 if row.lora else s.vocab * s.hidden
    parts["decision"] = (trained / 4096 * RATES["host_sum_ns"]["value"] if row.measured_program
                         else longest / 4096 * RATES["device_sum_ns"]["value"]) * 1e-9
    return parts


def step_seconds(row):
    return sum(seconds_of(row).values())


def tokens_per_second(row):
    return row.tokens * row.micro_batches / step_seconds(row)


def necessary_flops(row):
    """As plan/cost_model.cpp: 6N (LoRA: 4N) of the matrices, and causal attention."""
    s, t = row.shape, row.tokens * row.micro_batches
    matrices = s.layers * sum(out * into for _, out, into, _ in s.matrices) + s.vocab * s.hidden
    return (4 if row.lora else 6) * matrices * t + 12 * row.length / 2 * s.q * s.layers * t


def share_of_peak(row):
    return necessary_flops(row) / step_seconds(row) / RATES["cards"][row.card]["peak_tflops"] / 1e12


def balanced_share(row):
    """As src/plan/placement.cpp: the CPU's share of updates at which it, behind the step's check, and the link, which carries state all
    step long, need as long. Of bf16 gradients."""
    gpu = 10 / (RATES["link_gbps"]["value"] / 2)
    cpu = 1 / RATES["host_update_gparams"]["value"]
    late = step_seconds(row) / (gpu * row.shape.parameters / 1e9)
    return gpu * (1 - min(late, 1)) / (gpu + cpu)


def offloaded_seconds(row):
    """With low halves and moments in host memory: the longer of the step with the CPU's updates behind it, and the link (10 B of state each
    way, 4 of gradient or weight for the share that the CPU updates). 8b-slice-host was measured 9 % above its link's time."""
    p, share = row.shape.parameters, balanced_share(row)
    link = 2 * (10 - 6 * share) * p / (RATES["link_gbps"]["value"] * 1e9)
    return max(step_seconds(row) + share * p / (RATES["host_update_gparams"]["value"] * 1e9), link)


def measured_seconds():
    """Of each row by name: gpu_steps', or the mean of those beside a peer where one was measured."""
    seconds = {}
    lines = [json.loads(line) for line in (ROOT / RATES["gemm_results"]).read_text().splitlines()]
    for row in lines:
        if row.get("benchmark") == "gpu_steps":
            seconds[row["row"]] = row["step_s"]
    for row in lines:
        if row.get("benchmark") == "gpu_peers":
            ours = row["ours_tokens_per_s"]
            seconds[row["row"]] = 16384 * len(ours) / sum(ours)
    return seconds


LORA_H100 = Row("8B LoRA, 2 x 4096, H100", LLAMA_8B, lora=True, sequences=2, length=4096, card="H100")
FULL_8B = Row("8B full, 2 x 2048, 4 micro-batches, H200", LLAMA_8B, sequences=2, micro_batches=4)
FULL_7B = Row("7B full, 16 x 1024, 8 micro-batches, H100", LLAMA_7B, sequences=16, length=1024, micro_batches=8, card="H100")
# The micro-batches that the plan takes of these models (tests/plan/nominal_time_test.cpp), in steps of 65,536 and of 131,072 tokens.
PLANNED_8B = replace(FULL_8B, name="8B full, 2 x 2048, 16 micro-batches, H200", micro_batches=16)
PLANNED_7B = replace(FULL_7B, name="7B full, 8 x 1024, 16 micro-batches, H100", sequences=8, micro_batches=16)


@dataclass(frozen=True)
class Target:
    row: Row
    what: str
    value: float  # to be reached
    needs: str = ""  # what the program does not have yet

    def figure(self):
        if self.what == "tokens/s":
            return tokens_per_second(self.row)
        if self.what == "% of peak":
            return 100 * share_of_peak(self.row)
        return offloaded_seconds(self.row)

    def text(self):
        figure = self.figure()
        return f"{figure:.2f} s" if self.what == "s" else f"{figure:,.0f} {self.what}" if self.what == "tokens/s" else f"{figure:.1f} %"

    def verdict(self):
        reached = self.figure() <= self.value if self.what == "s" else self.figure() >= self.value
        return ("reached" if reached else "not reached") + (f", and needs {self.needs}" if self.needs else "")


HOPPER = "a Hopper attention kernel"
TARGETS = [
    Target(LORA_H100, "tokens/s", 13300),
    Target(replace(LORA_H100, attention="hopper"), "tokens/s", 15000, needs=HOPPER),
    Target(FULL_8B, "tokens/s", 12000),
    Target(PLANNED_8B, "tokens/s", 12000),
    Target(Row("8B full, 3 layers, state on the host, H200", _slice(LLAMA_8B, 3)), "s", 0.26),
    Target(FULL_7B, "% of peak", 59.5),
    Target(replace(FULL_7B, attention="hopper"), "% of peak", 61, needs=HOPPER),
    Target(PLANNED_7B, "% of peak", 59.5),
    Target(replace(PLANNED_7B, attention="hopper"), "% of peak", 61, needs=HOPPER),
]


def target_rows():
    """As docs/performance.md has them."""
    return [f"| {t.row.name} | {t.text()} | {t.value:,g} | {t.verdict()} |" for t in TARGETS]


def parts_text(row):
    return ", ".join(f"{name} {1e3 * value:.0f}" for name, value in seconds_of(row).items() if value > 5e-4)


def table():
    seconds = measured_seconds()
    lines = ["measured on an H200:"]
    for row in MEASURED:
        total = step_seconds(row)
        lines.append(f"  {row.name:<16}{1e3 * total:7.0f} ms by arithmetic, {1e3 * seconds[row.name]:6.0f} measured, "
                     f"{100 * (total / seconds[row.name] - 1):+5.1f} %   {parts_text(row)}")
    lines.append("by arithmetic, measured by nobody yet (ms of a step's parts behind each):")
    lines += [f"  {line}  {parts_text(target.row)}" for line, target in zip(target_rows(), TARGETS)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
