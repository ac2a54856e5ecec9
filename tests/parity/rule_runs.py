"""Runs of the optimizer's rules, a tensor at a time, by build/bin/rule_tool, for tests against other implementations."""

import functools
import os
import subprocess
from pathlib import Path

import numpy as np

TOOL = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin")) / "rule_tool"
STEPS = 20


def data(elements, seed=0):
    """Weights, and gradients whose scales differ by block and by step, as a model's do."""
    random = np.random.default_rng(seed)
    weights = random.normal(0, 0.02, elements).astype(np.float32)
    scale = np.exp(random.normal(0, 2, elements // 300 + 1)).repeat(300)[:elements]
    gradients = [(random.normal(0, 1, elements) * scale * np.exp(random.normal())).astype(np.float32) for _ in range(STEPS)]
    return weights, gradients


@functools.cache
def tool():
    """Started once; it ends with its input, when this process ends."""
    return subprocess.Popen([TOOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(*command):
    print(*command, sep="\t", file=tool().stdin, flush=True)
    assert (answer := tool().stdout.readline()) == "done\n", answer or f"exit {tool().wait()}"


def ours(work, rule, weights, gradients, lr, weight_decay, states, coded, done=0, before=(), block=256, per_byte=1):
    """`before`: the states after `done` steps, each (codes, scales) or (values,); a scale is of `block` elements."""
    source, target = work / "input", work / "output"
    source.write_bytes(b"".join(a.tobytes() for a in (weights, *(part for state in before for part in state), *gradients)))
    n = len(weights)
    run(rule, n, done, len(gradients), lr, weight_decay, source, target)
    rest = target.read_bytes()

    def take(count, dtype):
        nonlocal rest
        size = count * np.dtype(dtype).itemsize
        part, rest = np.frombuffer(rest[:size], dtype), rest[size:]
        return part

    result = take(n, np.float32), [(take(n // per_byte, np.uint8), take(-(-n // 256) * 256 // block, np.float32)) if coded else (take(n, np.float32),)
                                   for _ in range(states)]
    assert not rest
    return result


def apart(a, b):
    return np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64))


def check_state(mine, their, coded, equal=0.999):
    """The share of equal codes; how far the rest are off."""
    assert (their[0].dtype == np.uint8) == coded  # what is small is kept in fp32 by both
    assert apart(mine[-1], their[-1]) <= (1e-5 if coded else 1e-6)  # scales, or values
    if not coded:
        return 0
    steps = np.abs(mine[0].astype(int) - their[0].astype(int))
    assert (steps == 0).mean() >= equal, np.bincount(steps)
    return steps.max()
