"""What do transformers and peft reach on this card, on rows of benchmarks/gpu_steps.cpp? The same shapes, tokens, loss, clipping
and update, random weights, 8 sequences of 2048 tokens; bench_gpu_steps takes turns with them, one row each.

  python peers.py BIN [--seconds N] [--tiny] [ROW...]      --tiny: the peers alone, in a tiny shape, on the CPU

The peers get what makes them fast: sdpa (flash) attention, fused AdamW, cuBLAS's own workspace, and no recomputation where they
fit without it (where they do not, or where their allocator has to start again, gradient checkpointing too; the faster counts).
"""

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

WARM, TIMED = 2, 5  # steps, as bench_gpu_steps has them
CASE_S = 40  # of one case, and of a row of ours
START_S = 25  # in which a peer's modules are loaded; hidden behind the row of ours before it
LEAST_S = 15  # with less time left nothing more begins
SKIPPED = 77
LEAST_SPEED = 1.1  # times the peer's tokens/s: the least of six rows was 1.22 on an H200

NOTES = """\
What these numbers compare:
- bf16: the peer has no master weights, and moments in bf16, as torch's AdamW makes them for bf16 parameters (8 bytes a
  parameter with its gradient). Ours keeps 16 more bits of each weight and moments in fp32 (14 bytes): more work and memory.
- fp32 master: the peer's weights, gradients and moments are fp32 under torch.autocast to bf16 (16 bytes, and bf16 copies
  while a step runs): weights and moments as exact as ours, gradients more so.
- bf16 adapters: the peer's without a master, ours with one. fp32 adapters: peft's default.
- Memory: all that ours takes of the card beside its context, against the most that the peer's tensors held at one time; what
  the peer's allocator had taken of the card is the larger number reserved."""

LLAMA = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_key_value_heads": 8, "vocab_size": 128256,
         "num_attention_heads": 32}
SHAPES = {
    "1b": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8b": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128, "num_hidden_layers": 32, "tie_word_embeddings": False},
    "tiny": {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2, "tie_word_embeddings": False,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320},
}


@dataclass(frozen=True)
class Case:
    row: str  # of bench_gpu_steps
    setting: str
    shape: str
    fp32: bool  # full: of everything, under autocast; LoRA: of the adapters
    lora: bool = False
    layers: int = 0  # 0: all of the shape
    sequences: int = 8
    length: int = 2048

    @property
    def name(self):
        return f"{self.row} {self.setting}"


def pair(row, shape, lora=False, **more):
    settings = ("bf16 adapters", "fp32 adapters") if lora else ("bf16", "fp32 master")
    return [Case(row, setting, shape, setting.startswith("fp32"), lora, **more) for setting in settings]


# Those first that matter most: time may run out.
CASES = [*pair("1b", "1b"), *pair("8b-lora", "8b", lora=True), *pair("1b-slice", "1b", layers=4)]
TINY = [*pair("tiny", "tiny", sequences=2, length=32), *pair("tiny-lora", "tiny", lora=True, sequences=2, length=32)]


# ---- the peer, in a process of its own


def make_model(case, device):
    """(the model, the transformers model in it); weights are drawn on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPES[case.shape], **({"num_hidden_layers": case.layers} if case.layers else {})}
    config = LlamaConfig(**shape, use_cache=False, attn_implementation="sdpa")
    base_dtype = torch.float32 if case.fp32 and not case.lora else torch.bfloat16
    with torch.device(device):
        # The one way to choose a type that every version knows: dtype= was torch_dtype= once.
        torch.set_default_dtype(base_dtype)
        try:
            base = model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        if case.lora:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(base, adapter, autocast_adapter_dtype=case.fp32)
    model.to(device).train()
    wanted = torch.float32 if case.fp32 else torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {wanted}, "trained parameters of another type"
    assert {p.dtype for p in model.parameters() if not p.requires_grad} <= {base_dtype}, "frozen parameters of another type"
    assert getattr(base.config, "_attn_implementation", "sdpa") == "sdpa", base.config._attn_implementation
    return model, base


def attempt(model, case, device, recompute):
    """Seconds of a step and memory, of so many steps."""
    import torch

    on_gpu = device != "cpu"
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    tokens = torch.randint(0, SHAPES[case.shape]["vocab_size"], (case.sequences, case.length), device=device)
    retries = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    seconds = []
    for _ in range(WARM + TIMED):
        wait()
        start = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=case.fp32 and not case.lora):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        seconds.append(time.perf_counter() - start)
    return {"step_s": statistics.median(seconds[WARM:]), "recompute": recompute, "loss": loss.item(),
            "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "peak_reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries if on_gpu else 0}


def free_all(model, device):
    import torch

    model.zero_grad(set_to_none=True)
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def is_out_of_memory(error):
    """Torch's own, or what a library under it says that found nothing left."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in ("out of memory", "ALLOC_FAILED"))


def recompute_blocks(base):
    """By the name that this version of transformers has for it."""
    newer = getattr(base, "activation_checkpointing_enable", None)
    (newer or base.gradient_checkpointing_enable)({"use_reentrant": False})


def measure(case, device):
    """The faster of both ways that fit: recomputation is tried where it may gain something."""
    import torch
    import transformers

    torch.manual_seed(0)
    model, base = make_model(case, device)
    done, full = [], []
    for recompute in (False, True):
        if recompute:
            recompute_blocks(base)
        try:
            done.append(attempt(model, case, device, recompute))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            full.append(str(error).partition(".")[0])
        free_all(model, device)
        if done and done[0]["retries"] == 0:
            break
    if not done:
        raise MemoryError("; ".join(full))
    best = min(done, key=lambda result: result["step_s"])
    return best | {"tokens_per_s": case.sequences * case.length / best["step_s"], "torch": torch.__version__,
                   "transformers": transformers.__version__, "out_of_memory": len(full),
                   "gpu": torch.cuda.get_device_name() if device != "cpu" else ""}


def work(case, device):
    """Loads what it needs, touches the card when told to, and answers with a JSON line."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    if case.lora:
        import peft  # noqa: F401
    if sys.stdin.readline().strip() == "go":
        print(json.dumps({"peer": case.name, **measure(case, device)}), flush=True)


# ---- both sides


def json_line(text, start):
    """The last JSON line that begins so; None if there is none."""
    lines = [line for line in text.splitlines() if line.startswith(start)]
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


def reason(text, status):
    """Why a program that did not measure did not: the last line it printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"exit status {status}: {lines[-1][:300] if lines else 'it printed nothing'}"


def worker_command(case, device):
    return [sys.executable, "-B", str(Path(__file__).resolve()), "--worker", json.dumps(asdict(case)), device]


def environment(device):
    """The peer's: without what gpu_checks.sh sets for ours, and without a look at the network."""
    out = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    # The bits that this one fixes for ours cost speed: a smaller workspace than cuBLAS would have.
    for name in ("CUBLAS_WORKSPACE_CONFIG", *(("LD_PRELOAD", "LD_LIBRARY_PATH") if device == "cpu" else ())):
        out.pop(name, None)
    return out


class Peer:
    """Starts at once, measures when asked."""

    def __init__(self, case, device):
        self.begun = time.monotonic()
        self.process = subprocess.Popen(worker_command(case, device), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, errors="replace", env=environment(device))

    def end(self):
        self.process.kill()
        self.process.communicate()

    def ask(self, left):
        """(result or None, why not)"""
        limit = min(left, CASE_S + max(0.0, START_S - (time.monotonic() - self.begun)))
        try:
            text, _ = self.process.communicate("go\n", timeout=limit)
        except subprocess.TimeoutExpired:
            self.end()
            return None, f"stopped after {limit:.0f} s"
        result = json_line(text, '{"peer"')
        return result, "" if result else reason(text, self.process.returncode)


def run_ours(bin_directory, row, left):
    """(result or None, why not) of bench_gpu_steps."""
    limit = min(left, CASE_S)
    try:
        done = subprocess.run([bin_directory / "bench_gpu_steps", row], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=limit)
    except subprocess.TimeoutExpired:
        return None, f"stopped after {limit:.0f} s"
    except OSError as error:
        return None, str(error)
    result = json_line(done.stdout, '{"benchmark":"gpu_steps"')
    return result, "" if result else reason(done.stdout, done.returncode)


def gib(count):
    return f"{count / 2**30:.1f} GiB"


def report(case, theirs, ours):
    """Prints the row of a case; its part of the figure."""
    rate = theirs["tokens_per_s"]
    line = (f"{case.name:24} {rate:8.0f} tokens/s {theirs['step_s']:8.3f} s a step {gib(theirs['peak_allocated']):>9} of GPU "
            f"({gib(theirs['peak_reserved'])} reserved), recompute: {'block' if theirs['recompute'] else 'none'}")
    row = {"benchmark": "gpu_peers", "row": case.row, "setting": case.setting, **{k: v for k, v in theirs.items() if k != "peer"}}
    if not ours:
        print(f"{line}\n{json.dumps(row)}", flush=True)
        return f"{case.name} {rate:.0f} tokens/s"
    rates = [result["tokens_per_s"] for result in ours]
    speed = statistics.mean(rates) / rate
    memory = max(result["device_bytes"] for result in ours) / max(theirs["peak_allocated"], 1)
    print(f"{line}; ours {' and '.join(f'{r:.0f}' for r in rates)}: {speed:.2f}x tokens/s, {memory:.2f}x memory")
    print(json.dumps(row | {"ours_tokens_per_s": rates, "ours_device_bytes": [result["device_bytes"] for result in ours],
                            "speed": speed, "memory": memory}), flush=True)
    return f"{case.name} {speed:.2f}x"


def run(cases, bin_directory, device, seconds):
    """`bin_directory`: None for the peers alone. 0 if everything was measured."""
    deadline = time.monotonic() + seconds
    left = lambda: deadline - time.monotonic()
    figures, failed = [], []

    def fail(name, why):
        failed.append(name)
        print(f"{name:24} failed: {why}", flush=True)

    for row in dict.fromkeys(case.row for case in cases):
        ours, theirs = [], []
        for case in (case for case in cases if case.row == row):
            if left() < LEAST_S:
                fail(case.name, "not run, no time left")
                continue
            peer = Peer(case, device)
            if bin_directory:
                result, why = run_ours(bin_directory, row, left())
                if result:
                    ours.append(result)
                else:
                    fail(f"ours {row}", why)
            if left() < LEAST_S:
                peer.end()
                fail(case.name, "not run, no time left")
                continue
            result, why = peer.ask(left())
            if result:
                theirs.append((case, result))
            else:
                fail(case.name, why)
        figures += [report(case, result, ours) for case, result in theirs]
        for case, result in theirs if ours else ():
            speed = statistics.mean(row["tokens_per_s"] for row in ours) / result["tokens_per_s"]
            if speed < LEAST_SPEED:
                fail(case.name, f"{speed:.2f}x of its tokens/s, wanted {LEAST_SPEED}x")
    if figures:
        print(f"figure: {', '.join(figures)}", flush=True)
    return 1 if failed or not figures else 0


def main():
    if sys.argv[1:2] == ["--worker"]:
        work(Case(**json.loads(sys.argv[2])), sys.argv[3])
        return 0
    parser = argparse.ArgumentParser(prog="peers.py")
    parser.add_argument("bin", type=Path)
    parser.add_argument("--seconds", type=float, default=145)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("rows", nargs="*", metavar="ROW")
    options = parser.parse_intermixed_args()
    if importlib.util.find_spec("transformers") is None:
        print("peers: this Python has no transformers")
        return SKIPPED
    known = TINY if options.tiny else CASES
    if unknown := set(options.rows) - {case.row for case in known}:
        sys.exit(f"peers.py: no row {', '.join(sorted(unknown))}: there are {', '.join(dict.fromkeys(case.row for case in known))}")
    cases = [case for case in known if not options.rows or case.row in options.rows]
    print(NOTES, flush=True)
    if options.tiny:
        return run(cases, None, "cpu", options.seconds)
    return run(cases, options.bin.resolve(), "cuda", options.seconds)


if __name__ == "__main__":
    sys.exit(main())
